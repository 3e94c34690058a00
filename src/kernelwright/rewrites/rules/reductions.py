"""Sums, means and extrema: over nothing, over one another, and through matrix products."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dims_of,
    is_call,
    is_float,
    is_tensor,
    numel,
    only_user,
    shape,
    value,
)
from kernelwright.rewrites.rules.affine import AVERAGE_POOLS, pools_plainly

REDUCTIONS = (aten.sum, aten.mean, aten.amax, aten.amin, aten.logsumexp)


def reduced_dims(node: fx.Node) -> tuple[int, ...] | None:
    """The dimensions a reduction runs over; None when it is no plain reduction of floating point."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or not is_tensor(source) or not is_tensor(node):
        return None
    if not is_float(source) or value(source).dtype != value(node).dtype:
        return None
    return dims_of(argument(node, "dim"), len(shape(source)))


def reduce_size_one(editor: Editor) -> int:
    """A sum, mean, extremum or log-sum-exp over dimensions of size 1 is its input; softmax over one is 1.

    Conditions: every reduced dimension has size 1. A softmax of NaN or infinity would be NaN, the ones are not.
    """
    count = 0
    for node in editor.nodes(*REDUCTIONS):
        source = node.args[0]
        dims = reduced_dims(node)
        if node._erased or dims is None or not dims or not isinstance(source, fx.Node):
            continue
        if all(shape(source)[dim] == 1 for dim in dims):
            editor.replace(node, editor.call(node, aten.reshape.default, source, list(shape(node))))
            count += 1
    for node in editor.nodes(aten.softmax, aten._softmax):
        source = node.args[0]
        if node._erased or not isinstance(source, fx.Node) or value(source).dtype != value(node).dtype:
            continue
        if shape(source) and shape(source)[argument(node, "dim")] == 1:
            editor.replace(node, editor.call(node, aten.ones_like.default, source))
            count += 1
    return count


def subtract_itself(editor: Editor) -> int:
    """`x - x` is zero.

    Conditions: floating point, same shape. Where x is NaN or infinite the reference gives NaN and this gives 0.
    """
    count = 0
    for node in editor.nodes(aten.sub):
        if node._erased or node.kwargs or len(node.args) != 2 or not all(is_tensor(item) for item in node.args):
            continue
        left, right = (_through_reshapes(item) for item in node.args)
        if left is right and shape(node) == shape(node.args[0]) == shape(node.args[1]):  # type: ignore[arg-type]
            editor.replace(node, editor.call(node, aten.zeros_like.default, node.args[0]))
            count += 1
    return count


def _through_reshapes(item: Any) -> Any:
    while is_call(item, aten.reshape, aten.view) and shape(item) == shape(item.args[0]):
        item = item.args[0]
    return item


def merge_reductions(editor: Editor) -> int:
    """Two sums, means or extrema of the same kind, one after the other, are one over both sets of dimensions.

    Conditions: same operator, no other reader in between, dimensions known.
    """
    count = 0
    for node in editor.nodes(aten.sum, aten.mean, aten.amax, aten.amin):
        inner = node.args[0]
        if node._erased or node.kwargs or not isinstance(inner, fx.Node) or inner.kwargs or only_user(inner) is None:
            continue
        if not is_call(inner, getattr(node.target, "overloadpacket", None)):
            continue
        outer_dims, inner_dims = reduced_dims(node), reduced_dims(inner)
        source = inner.args[0]
        if not outer_dims or not inner_dims or not isinstance(source, fx.Node):
            continue
        rank = len(shape(source))
        left = [dim for dim in range(rank) if argument(inner, "keepdim") or dim not in inner_dims]
        dims = sorted({*inner_dims, *(left[dim] for dim in outer_dims)})
        packet: Any = getattr(node.target, "overloadpacket", None)
        target = {aten.sum: aten.sum.dim_IntList, aten.mean: aten.mean.dim}.get(packet, packet.default)
        merged = editor.call(node, target, source, dims)
        if shape(merged) != shape(node):
            merged = editor.call(node, aten.reshape.default, merged, list(shape(node)))
        editor.replace(node, merged)
        count += 1
    return count


def push_reduction_through_product(editor: Editor) -> int:
    """A sum or mean of a `linear` or matrix product is a product with the summed operand.

    `sum_j (x W^T + b)_j = x . sum_j W_j + sum_j b_j`: a matrix product becomes a matrix-vector product. Conditions: the
    product has no other reader; the sum runs over its rows or columns, not over batch dimensions alone.
    """
    count = 0
    for node in editor.nodes(aten.sum, aten.mean):
        inner = node.args[0]
        dims = reduced_dims(node)
        if node._erased or node.kwargs or not dims or not isinstance(inner, fx.Node) or only_user(inner) is None:
            continue
        if is_call(inner, aten.linear) or (is_call(inner, aten.addmm) and _beta_alpha(inner)):
            result = _reduced_linear(editor, node, inner, dims)
        elif is_call(inner, aten.matmul, aten.mm, aten.bmm):
            result = _reduced_product(editor, node, inner, dims)
        else:
            continue
        if result is not None:
            editor.replace(node, result)
            count += 1
    return count


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
        bias, source, weight = inner.args
        assert isinstance(weight, fx.Node)
        if not is_call(weight, aten.t):
            return None
        weight, scale = weight.args[0], float(argument(inner, "alpha"))
    else:
        source, weight, bias = (argument(inner, name) for name in ("input", "weight", "bias"))
    assert isinstance(source, fx.Node)
    assert isinstance(weight, fx.Node)
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
        if bias_scale != 1.0:
            offset = editor.call(node, aten.mul.Tensor, offset, bias_scale)
        result = editor.call(node, aten.add.Tensor, result, offset)
    if scale != 1.0:
        result = editor.call(node, aten.mul.Tensor, result, scale)
    return editor.call(node, aten.reshape.default, result, list(shape(node)))


def _reduced_product(editor: Editor, node: fx.Node, inner: fx.Node, dims: tuple[int, ...]) -> fx.Node | None:
    left, right = inner.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    rank = len(shape(inner))
    if len(shape(left)) < 2 or len(shape(right)) < 2 or rank < 2:
        return None
    if rank - 1 not in dims and rank - 2 not in dims:
        return None
    if rank - 1 in dims:
        right = _reduce(editor, node, right, [len(shape(right)) - 1], True)
    if rank - 2 in dims:
        left = _reduce(editor, node, left, [len(shape(left)) - 2], True)
    result = editor.call(node, aten.matmul.default, left, right)
    rest = [dim for dim in dims if dim < rank - 2]
    if rest:
        result = _reduce(editor, node, result, rest, False)
    return editor.call(node, aten.reshape.default, result, list(shape(node)))


def pool_weights(editor: Editor) -> int:
    """An average pool over the features of a `linear` is a `linear` with pooled weights: k times fewer operations.

    Conditions: windows do not overlap and are not padded; the linear operator has no other reader; features
    beyond the last whole window are dropped, as the pool does.
    """
    count = 0
    for node in editor.nodes(aten.avg_pool1d):
        lifted = node.args[0]
        if node._erased or not isinstance(lifted, fx.Node) or only_user(lifted) is None or not pools_plainly(node):
            continue
        linear = lifted.args[0] if is_call(lifted, aten.unsqueeze, aten.reshape, aten.view) else None
        size = argument(node, "kernel_size")[0]
        stride = (argument(node, "stride") or [size])[0]
        if not isinstance(linear, fx.Node) or not is_call(linear, aten.linear) or only_user(linear) is None:
            continue
        if stride != size or len(shape(linear)) != 2 or shape(lifted)[-1] != shape(linear)[-1]:
            continue
        features, windows = shape(linear)[-1], shape(node)[-1]
        weight, bias = argument(linear, "weight"), argument(linear, "bias")

        def pooled(
            item: fx.Node, at: fx.Node = node, kept: int = windows, width: int = size, all_: int = features
        ) -> fx.Node:
            if kept * width < all_:
                item = editor.call(at, aten.slice.Tensor, item, 0, 0, kept * width)
            folded = editor.call(at, aten.reshape.default, item, [kept, width, *shape(item)[1:]])
            return editor.call(at, aten.mean.dim, folded, [1])

        new_bias = pooled(bias) if isinstance(bias, fx.Node) else None
        result = editor.call(node, aten.linear.default, linear.args[0], pooled(weight), new_bias)
        editor.replace(node, editor.call(node, aten.reshape.default, result, list(shape(node))))
        count += 1
    return count


def pool_before_1x1_convolution(editor: Editor) -> int:
    """An average pool after a 1x1 convolution goes before it: the convolution then has fewer pixels.

    Conditions: kernel 1, stride 1, no padding in the convolution; the pool does not pad; no other reader; the
    input has not many more channels than the output.
    """
    count = 0
    for node in editor.nodes(*AVERAGE_POOLS, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d):
        convolution = node.args[0]
        if node._erased or not isinstance(convolution, fx.Node) or only_user(convolution) is None:
            continue
        if not is_call(convolution, aten.conv1d, aten.conv2d, aten.conv3d) or not is_pointwise(convolution):
            continue
        if is_call(node, *AVERAGE_POOLS) and not pools_plainly(node):
            continue
        source = convolution.args[0]
        assert isinstance(source, fx.Node)
        if shape(source)[1] > 4 * shape(convolution)[1] or 2 * numel(node) > numel(convolution):
            continue
        pool_target, convolution_target = node.target, convolution.target
        assert callable(pool_target)
        assert callable(convolution_target)
        pooled = editor.call(node, pool_target, source, *node.args[1:], **node.kwargs)
        editor.replace(node, editor.call(node, convolution_target, pooled, *convolution.args[1:], **convolution.kwargs))
        count += 1
    return count


def is_pointwise(convolution: fx.Node) -> bool:
    """Whether a convolution looks at one pixel only and keeps the grid."""
    kernel = shape(argument(convolution, "weight"))[2:]
    padding = argument(convolution, "padding")
    if isinstance(padding, str):
        return False
    strides = argument(convolution, "stride")
    return all(size == 1 for size in kernel) and all(step == 1 for step in strides) and not any(padding)
