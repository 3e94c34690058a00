"""Collects exact rewrite rules on operator graphs, each with its side conditions in its description.

To add a rule, write a function in one of these files and name it in `_ALWAYS` or `_ALTERNATIVES`: `merge_pools` is the rule
`merge-pools`. A new file needs its import too.
"""

from __future__ import annotations

from kernelwright.rewrites.rules import (
    affine,
    attention,
    canonical,
    convolution,
    losses,
    matmul,
    noops,
    norms,
    pooling,
    reductions,
    slices,
)
from kernelwright.rewrites.rules.base import Rule, RuleError, rewrite

_ALWAYS = (
    noops.remove_unused,
    noops.remove_noops,
    noops.share_common_subexpressions,
    canonical.drop_indices,
    losses.write_out_row_losses,
    canonical.canonical_activation,
    canonical.canonical_softmax,
    canonical.canonical_layer_norm,
    noops.polynomial,
    affine.merge_constants,
    pooling.range_analysis,
    reductions.reduce_size_one,
    reductions.subtract_itself,
    matmul.einsum_to_product,
    matmul.diagonal_operand,
    matmul.diagonal_result,
    matmul.sum_of_products,
    matmul.add_weights,
    matmul.reorder_product_chain,
    matmul.triangle_of_product,
    attention.attention,
    attention.wide_attention,
    attention.rotate_before_transpose,
    affine.sink_constants,
    pooling.add_after_pool,
    reductions.merge_reductions,
    reductions.push_reduction_through_product,
    reductions.pool_weights,
    reductions.pool_before_1x1_convolution,
    convolution.reduce_before_convolution,
    convolution.pool_into_stride,
    convolution.pool_into_transposed_convolution,
    pooling.pool_first,
    pooling.merge_pools,
    norms.drop_shift_before_norm,
    affine.fold_into_linear,
    slices.slice_first,
    slices.batch_steps,
    slices.last_step_of_reverse,
    noops.compose_views,
    noops.strength_reduction,
)
_ALTERNATIVES = (
    norms.drop_bias_before_norm,
    convolution.flip_transposed_convolution,
    convolution.flat_to_planar_convolution,
    convolution.pointwise_convolution_to_product,
    convolution.patches_to_product,
    convolution.patches_from_product,
    slices.split_concatenation,
)
"""Rules that may be slower than what they replace: each is a candidate of its own, for the clock to judge."""

RULES: tuple[Rule, ...] = (
    *(Rule.of(function) for function in _ALWAYS),
    *(Rule.of(function, always=False) for function in _ALTERNATIVES),
)
"""All rules, in the order in which they are tried: what simplifies first, what depends on it later."""

__all__ = ["RULES", "Rule", "RuleError", "rewrite"]
