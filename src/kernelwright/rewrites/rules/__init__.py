"""Exact rewrite rules on operator graphs, each with its side conditions in its description."""

from __future__ import annotations

from kernelwright.rewrites.rules import (
    affine,
    attention,
    canonical,
    convolution,
    matmul,
    noops,
    norms,
    pooling,
    recurrence,
    reductions,
    slices,
)
from kernelwright.rewrites.rules.base import Rule, RuleError, rewrite

RULES: tuple[Rule, ...] = (
    Rule(name="remove-unused", apply=noops.remove_unused),
    Rule(name="remove-noops", apply=noops.remove_noops),
    Rule(name="share-common-subexpressions", apply=noops.share_common),
    Rule(name="drop-indices", apply=canonical.drop_indices),
    Rule(name="canonical-activation", apply=canonical.activations),
    Rule(name="canonical-softmax", apply=canonical.softmaxes),
    Rule(name="canonical-layer-norm", apply=canonical.layer_norms),
    Rule(name="polynomial", apply=noops.polynomials),
    Rule(name="merge-constants", apply=affine.merge_constants),
    Rule(name="range-analysis", apply=pooling.clamp_chains),
    Rule(name="reduce-size-one", apply=reductions.skip_size_one),
    Rule(name="subtract-itself", apply=reductions.subtract_itself),
    Rule(name="diagonal-operand", apply=matmul.diagonal_operand),
    Rule(name="diagonal-result", apply=matmul.diagonal_result),
    Rule(name="sum-of-products", apply=matmul.sum_of_products),
    Rule(name="add-weights", apply=matmul.add_weights),
    Rule(name="reorder-product-chain", apply=matmul.reorder_chain),
    Rule(name="triangle-of-product", apply=matmul.triangle_of_product),
    Rule(name="attention", apply=attention.attention),
    Rule(name="sink-constants", apply=affine.sink_constants),
    Rule(name="add-after-pool", apply=pooling.add_after_pool),
    Rule(name="merge-reductions", apply=reductions.merge_reductions),
    Rule(name="push-reduction-through-product", apply=reductions.push_through_products),
    Rule(name="pool-weights", apply=reductions.pool_weights),
    Rule(name="pool-before-1x1-convolution", apply=reductions.pool_before_pointwise_convolution),
    Rule(name="reduce-before-convolution", apply=convolution.reduce_before_convolution),
    Rule(name="pool-into-stride", apply=convolution.pool_into_stride),
    Rule(name="pool-first", apply=pooling.pool_first),
    Rule(name="merge-pools", apply=pooling.merge_pools),
    Rule(name="drop-shift-before-norm", apply=norms.drop_shift_before_norm),
    Rule(name="fold-into-linear", apply=affine.fold_into_linear),
    Rule(name="slice-first", apply=slices.slice_first),
    Rule(name="batch-steps", apply=slices.batch_steps),
    Rule(name="last-step-of-reverse", apply=recurrence.last_step_of_reverse),
    Rule(name="compose-views", apply=noops.compose_views),
    Rule(name="strength-reduction", apply=noops.strength),
    Rule(name="drop-bias-before-norm", apply=norms.drop_bias_before_norm, always=False),
    Rule(name="flip-transposed-convolution", apply=convolution.flip_transposed, always=False),
    Rule(name="flat-to-planar-convolution", apply=convolution.flat_to_planar, always=False),
    Rule(name="pointwise-convolution-to-product", apply=convolution.pointwise_to_product, always=False),
    Rule(name="patches-to-product", apply=convolution.patches_to_product, always=False),
    Rule(name="patches-from-product", apply=convolution.patches_from_product, always=False),
    Rule(name="split-concatenation", apply=slices.split_concatenation, always=False),
)
"""All rules, in the order in which they are tried: what simplifies first, what depends on it later."""

__all__ = ["RULES", "Rule", "RuleError", "rewrite"]
