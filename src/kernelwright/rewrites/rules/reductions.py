"""Rewrites sums, means and extrema: over nothing, over one another, and through matrix products."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dims_of,
    dtype,
    is_call,
    is_float,
    is_tensor,
    numel,
    operand_nodes,
    packet_of,
    read_once,
    shape,
)
from kernelwright.rewrites.rules.affine import AVERAGE_POOLS, CONVOLUTIONS, place_affine, pools_plainly
from kernelwright.rewrites.rules.base import each

REDUCTIONS = (aten.sum, aten.mean, aten.amax, aten.amin, aten.logsumexp)


def reduced_dims(node: fx.Node) -> tuple[int, ...] | None:
    """The dimensions a reduction runs over; None when it is no plain reduction of floating point."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or not is_tensor(source) or not is_tensor(node):
        return None
    if not is_float(source) or dtype(source) != dtype(node):
        return None
    return dims_of(argument(node, "dim"), len(shape(source)))


@each(*REDUCTIONS, aten.softmax, aten._softmax)
def reduce_size_one(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A sum, mean, extremum or log-sum-exp over dimensions of size 1 is its input; softmax over one is 1.

    Conditions: every reduced dimension has size 1. A softmax of NaN or infinity would be NaN, the ones are not.
    """
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    if is_call(node, *REDUCTIONS):
        dims = reduced_dims(node)
        return editor.reshape(node, source, shape(node)) if dims and all(shape(source)[dim] == 1 for dim in dims) else None
    if dtype(source) == dtype(node) and shape(source) and shape(source)[argument(node, "dim")] == 1:
        return editor.call(node, aten.ones_like.default, source)
    return None


@each(aten.sub)
def subtract_itself(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`x - x` is zero.

    Conditions: floating point, same shape. Where x is NaN or infinite the reference gives NaN and this gives 0.
    """
    pair = operand_nodes(node)
    if pair is None or not shape(node) == shape(pair[0]) == shape(pair[1]):
        return None
    same = _through_reshapes(pair[0]) is _through_reshapes(pair[1])
    return editor.call(node, aten.zeros_like.default, pair[0]) if same else None


def _through_reshapes(item: Any) -> Any:
    while is_call(item, aten.reshape, aten.view) and shape(item) == shape(item.args[0]):
        item = item.args[0]
    return item


@each(aten.sum, aten.mean, aten.amax, aten.amin)
def merge_reductions(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Two sums, means or extrema of the same kind, one after the other, are one over both sets of dimensions.

    Conditions: same operator, no other reader in between, dimensions known.
    """
    packet: Any = packet_of(node)
    inner = read_once(node.args[0], packet)
    if node.kwargs or inner is None or inner.kwargs:
        return None
    outer_dims, inner_dims, source = reduced_dims(node), reduced_dims(inner), inner.args[0]
    if not outer_dims or not inner_dims or not isinstance(source, fx.Node):
        return None
    left = [dim for dim in range(len(shape(source))) if argument(inner, "keepdim") or dim not in inner_dims]
    dims = sorted({*inner_dims, *(left[dim] for dim in outer_dims)})
    target = {aten.sum: aten.sum.dim_IntList, aten.mean: aten.mean.dim}.get(packet, packet.default)
    merged = editor.call(node, target, source, dims)
    return merged if shape(merged) == shape(node) else editor.reshape(node, merged, shape(node))


@each(aten.sum, aten.mean)
def push_reduction_through_product(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A sum or mean of a `linear` or matrix product is a product with the summed operand.

    `sum_j (x W^T + b)_j = x . sum_j W_j + sum_j b_j`: a matrix product becomes a matrix-vector product. Conditions: the
    product has no other reader; the sum runs over its rows or columns, not over batch dimensions alone.
    """
    dims, inner = reduced_dims(node), read_once(node.args[0])
    if node.kwargs or not dims or inner is None:
        return None
    if is_call(inner, aten.linear) or (is_call(inner, aten.addmm) and _beta_alpha(inner)):
        return _reduced_linear(editor, node, inner, dims)
    return _reduced_product(editor, node, inner, dims) if is_call(inner, aten.matmul, aten.mm, aten.bmm) else None


def _beta_alpha(node: fx.Node) -> bool:
    return argument(node, "beta") == argument(node, "alpha") and len(shape(argument(node, "self"))) == 1


def _reduce(editor: Editor, node: fx.Node, source: fx.Node, dims: list[int], keepdim: bool) -> fx.Node:
    """The same kind of reduction of another tensor."""
    target = aten.sum.dim_IntList if is_call(node, aten.sum) else aten.mean.dim
    return editor.call(node, target, source, dims, keepdim)


def _reduced_linear(editor: Editor, node: fx.Node, inner: fx.Node, dims: tuple[int, ...]) -> fx.Node | None:
    rank = len(shape(inner))
    scale = 1.0
    if is_call(inner, aten.addmm):
        bias, source, weight = (argument(inner, name) for name in ("self", "mat1", "mat2"))
        if not is_call(weight, aten.t):
            return None
        weight, scale = weight.args[0], float(argument(inner, "alpha"))
    else:
        source, weight, bias = (argument(inner, name) for name in ("input", "weight", "bias"))
    rest = [dim for dim in dims if dim != rank - 1]
    count = math.prod(shape(inner)[dim] for dim in rest)
    if rest:
        source = _reduce(editor, node, source, rest, True)
    bias_scale = float(count) if is_call(node, aten.sum) else 1.0
    if rank - 1 in dims:
        vector = _reduce(editor, node, weight, [0], False)
        result = editor.call(node, aten.matmul.default, source, vector)
        offset = _reduce(editor, node, bias, [0], False) if isinstance(bias, fx.Node) else None
    else:
        result = editor.call(node, aten.linear.default, source, weight)
        offset = bias if isinstance(bias, fx.Node) else None
    if offset is not None:
        result = editor.call(node, aten.add.Tensor, result, place_affine(editor, node, offset, bias_scale, 0.0))
    return editor.reshape(node, place_affine(editor, node, result, scale, 0.0), shape(node))


def _reduced_product(editor: Editor, node: fx.Node, inner: fx.Node, dims: tuple[int, ...]) -> fx.Node | None:
    pair, rank = operand_nodes(inner), len(shape(inner))
    if pair is None or rank < 2 or any(len(shape(item)) < 2 for item in pair):
        return None
    if rank - 1 not in dims and rank - 2 not in dims:
        return None
    left, right = pair
    if rank - 1 in dims:
        right = _reduce(editor, node, right, [len(shape(right)) - 1], True)
    if rank - 2 in dims:
        left = _reduce(editor, node, left, [len(shape(left)) - 2], True)
    result = editor.call(node, aten.matmul.default, left, right)
    rest = [dim for dim in dims if dim < rank - 2]
    if rest:
        result = _reduce(editor, node, result, rest, False)
    return editor.reshape(node, result, shape(node))


@each(aten.avg_pool1d)
def pool_weights(editor: Editor, node: fx.Node) -> fx.Node | None:
    """An average pool over the features of a `linear` is a `linear` with pooled weights: k times fewer operations.

    Conditions: windows do not overlap and are not padded; the linear operator has no other reader; features
    beyond the last whole window are dropped, as the pool does.
    """
    lifted = read_once(node.args[0], aten.unsqueeze, aten.reshape, aten.view)
    linear = read_once(lifted.args[0], aten.linear) if lifted is not None else None
    if lifted is None or linear is None or not pools_plainly(node):
        return None
    size = argument(node, "kernel_size")[0]
    stride = (argument(node, "stride") or [size])[0]
    if stride != size or len(shape(linear)) != 2 or shape(lifted)[-1] != shape(linear)[-1]:
        return None
    features, windows = shape(linear)[-1], shape(node)[-1]

    def pooled(item: fx.Node) -> fx.Node:
        if windows * size < features:
            item = editor.call(node, aten.slice.Tensor, item, 0, 0, windows * size)
        return editor.call(node, aten.mean.dim, editor.reshape(node, item, [windows, size, *shape(item)[1:]]), [1])

    weight, bias = argument(linear, "weight"), argument(linear, "bias")
    new_bias = pooled(bias) if isinstance(bias, fx.Node) else None
    result = editor.call(node, aten.linear.default, linear.args[0], pooled(weight), new_bias)
    return editor.reshape(node, result, shape(node))


@each(*AVERAGE_POOLS, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d)
def pool_before_1x1_convolution(editor: Editor, node: fx.Node) -> fx.Node | None:
    """An average pool after a 1x1 convolution goes before it: the convolution then has fewer pixels.

    Conditions: kernel 1, stride 1, no padding in the convolution; the pool does not pad; no other reader; the
    input has not many more channels than the output.
    """
    convolution = read_once(node.args[0], *CONVOLUTIONS)
    if convolution is None or not is_pointwise(convolution):
        return None
    if is_call(node, *AVERAGE_POOLS) and not pools_plainly(node):
        return None
    source = argument(convolution, "input")
    if shape(source)[1] > 4 * shape(convolution)[1] or 2 * numel(node) > numel(convolution):
        return None
    pooled = editor.again(node, node, source, *node.args[1:], **node.kwargs)
    return editor.again(node, convolution, pooled, *convolution.args[1:], **convolution.kwargs)


def is_pointwise(convolution: fx.Node) -> bool:
    """Whether a convolution looks at one pixel only and keeps the grid."""
    kernel = shape(argument(convolution, "weight"))[2:]
    padding = argument(convolution, "padding")
    if isinstance(padding, str):
        return False
    strides = argument(convolution, "stride")
    return all(size == 1 for size in kernel) and all(step == 1 for step in strides) and not any(padding)
