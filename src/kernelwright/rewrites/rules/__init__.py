"""Collects exact rewrite rules on operator graphs, each with its side conditions in its description.

To add a rule, write a function in one of these files and name it in `_ALWAYS` or `_ALTERNATIVES`: `merge_pools` is the rule
`merge-pools`. A new file needs its import too.
"""

from __future__ import annotations

from kernelwright.rewrites.rules import affine, canonical, convolution, products, reductions, slices
from kernelwright.rewrites.rules.base import Rule, RuleError, rewrite

_ALWAYS = (
    canonical.remove_unused,
    canonical.remove_noops,
    canonical.share_common_subexpressions,
    canonical.drop_indices,
    canonical.write_out_row_losses,
    canonical.canonical_activation,
    canonical.canonical_softmax,
    canonical.canonical_layer_norm,
    canonical.polynomial,
    affine.merge_constants,
    reductions.range_analysis,
    reductions.reduce_size_one,
    reductions.subtract_itself,
    products.einsum_to_product,
    products.diagonal_operand,
    products.add_weights,
    products.reorder_product_chain,
    products.attention,
    products.wide_attention,
    products.share_heads,
    products.rotate_before_transpose,
    affine.sink_constants,
    reductions.add_after_pool,
    reductions.merge_reductions,
    reductions.push_reduction_through_product,
    reductions.pool_weights,
    reductions.pool_before_1x1_convolution,
    convolution.reduce_before_convolution,
    convolution.pool_into_stride,
    convolution.pool_into_transposed_convolution,
    reductions.pool_first,
    reductions.merge_pools,
    affine.drop_shift_before_norm,
    affine.fold_into_linear,
    slices.slice_first,
    slices.batch_steps,
    slices.last_step_of_reverse,
    products.activation_in_product,
    products.join_linears,
    canonical.compose_views,
    canonical.strength_reduction,
)
_ALTERNATIVES = (
    affine.drop_bias_before_norm,
    convolution.flip_transposed_convolution,
)
"""Rules that may be slower than what they replace: each is a candidate of its own, for the clock to judge."""

RULES: tuple[Rule, ...] = (
    *(Rule.of(function) for function in _ALWAYS),
    *(Rule.of(function, always=False) for function in _ALTERNATIVES),
)
"""All rules, in the order in which they are tried: what simplifies first, what depends on it later."""

__all__ = ["RULES", "Rule", "RuleError", "rewrite"]
