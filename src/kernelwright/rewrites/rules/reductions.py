"""Rewrites sums, means, extrema and pools: over nothing, over one another, and through products and increasing functions."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from kernelwright.rewrites.graph import (
    TABLES,
    Editor,
    Operator,
    argument,
    aten,
    dims_of,
    dtype,
    is_call,
    is_float,
    is_tensor,
    named,
    numbers,
    numel,
    operand_nodes,
    operands,
    packet_of,
    padded_shape,
    read_once,
    scalar,
    shape,
)
from kernelwright.rewrites.rules.affine import AVERAGE_POOLS, CONVOLUTIONS, affine, place_affine, pools_plainly
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
    is_scaled = is_call(inner, aten.addmm) and argument(inner, "beta") == argument(inner, "alpha")
    if is_call(inner, aten.linear) or (is_scaled and len(shape(argument(inner, "self"))) == 1):
        return _reduced_linear(editor, node, inner, dims)
    return _reduced_product(editor, node, inner, dims) if is_call(inner, aten.matmul, aten.mm, aten.bmm) else None


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
    pooled: list[fx.Node | None] = []
    for item in (argument(linear, "bias"), argument(linear, "weight")):
        if not isinstance(item, fx.Node):
            pooled.append(None)
            continue
        if windows * size < features:
            item = editor.call(node, aten.slice.Tensor, item, 0, 0, windows * size)
        windowed = editor.reshape(node, item, [windows, size, *shape(item)[1:]])
        pooled.append(editor.call(node, aten.mean.dim, windowed, [1]))
    return editor.reshape(node, editor.call(node, aten.linear.default, linear.args[0], *reversed(pooled)), shape(node))


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
    """True where a convolution looks at one pixel only and keeps the grid."""
    kernel = shape(argument(convolution, "weight"))[2:]
    padding = argument(convolution, "padding")
    if isinstance(padding, str):
        return False
    strides = argument(convolution, "stride")
    return all(size == 1 for size in kernel) and all(step == 1 for step in strides) and not any(padding)


MAX_POOLS = (aten.max_pool1d, aten.max_pool2d, aten.max_pool3d)
ALWAYS_INCREASING = named(TABLES["facts"]["increasing"])


def _is_increasing(node: fx.Node) -> bool:
    """True where an operator never decreases when its first argument grows, whatever the input.

    GELU, SiLU, Mish and hardswish dip below zero and are not among them.
    """
    if is_call(node, *ALWAYS_INCREASING):
        return len(node.all_input_nodes) == 1
    if is_call(node, aten.leaky_relu):
        return float(argument(node, "negative_slope")) >= 0
    if is_call(node, aten.elu):
        return all(float(argument(node, name)) > 0 for name in ("alpha", "scale", "input_scale"))
    line = affine(node)
    return line is not None and line.scale > 0


@each(*MAX_POOLS, aten.amax, aten.amin)
def pool_first(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Take a maximum or minimum before an increasing function instead of after it: fewer evaluations, same values.

    Conditions: the function is increasing for every input (sign of a constant factor known and positive);
    only values are read, not indices; the pool is not dilated, so that no window consists of padding only; no
    other reader; the result is at most half as large. NaN passes through both.
    """
    function = read_once(node.args[0])
    if node.kwargs or function is None:
        return None
    if function.op != "call_function" or not is_float(function) or not _is_increasing(function):
        return None
    source = function.args[0]
    if not isinstance(source, fx.Node) or dtype(source) != dtype(function):
        return None
    if is_call(node, *MAX_POOLS) and any(step != 1 for step in numbers(argument(node, "dilation"), 1)):
        return None
    if 2 * numel(node) > numel(function) or shape(source) != shape(function):
        return None
    pooled = editor.again(node, node, source, *node.args[1:])
    return editor.again(node, function, pooled, *function.args[1:], **function.kwargs)


@each(*MAX_POOLS, *AVERAGE_POOLS, aten.amax, aten.amin, aten.mean)
def add_after_pool(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Add a bias of one number per channel after a pool or reduction instead of before it.

    Conditions: the bias is constant along every pooled dimension; the pool does not pad with zeros; no other
    reader; the result is at most half as large.
    """
    total = read_once(node.args[0])
    pair = operand_nodes(total, aten.add)
    if node.kwargs or total is None or pair is None or not is_float(total):
        return None
    source, bias = pair if shape(pair[0]) == shape(total) else pair[::-1]
    rank = len(shape(total))
    pooled, padded = _pooled_dims(node, rank), padded_shape(bias, rank)
    if pooled is None or shape(source) != shape(total) or not dtype(source) == dtype(bias) == dtype(total):
        return None
    if any(padded[dim] != 1 for dim in pooled) or 2 * numel(node) > numel(total):
        return None
    result = editor.again(node, node, source, *node.args[1:])
    kept = tuple(size for dim, size in enumerate(padded) if dim not in pooled or len(shape(node)) == rank)
    small = editor.reshape(node, bias, kept) if kept != shape(bias) else bias
    return editor.call(node, aten.add.Tensor, result, small)


def _pooled_dims(node: fx.Node, rank: int) -> tuple[int, ...] | None:
    if is_call(node, aten.amax, aten.amin, aten.mean):
        return dims_of(argument(node, "dim"), rank)
    if is_call(node, *AVERAGE_POOLS) and not pools_plainly(node):
        return None
    return tuple(range(rank - _spatial(node), rank))


def _spatial(pool: fx.Node) -> int:
    """The number of dimensions that a pool's windows have."""
    return next(rank for rank, pools in enumerate(zip(MAX_POOLS, AVERAGE_POOLS, strict=True), 1) if is_call(pool, *pools))


@each(*MAX_POOLS, *AVERAGE_POOLS)
def merge_pools(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Two pools of the same kind in a row are one with a larger window.

    Conditions: no padding, dilation or ceil mode; for averages the first pool's windows do not overlap, for
    maxima they leave no gap; the sizes come out the same; no other reader.
    """
    inner = read_once(node.args[0], node.target)
    if inner is None or not (_is_plain(node) and _is_plain(inner)):
        return None
    outer_size, outer_step = _window(node)
    inner_size, inner_step = _window(inner)
    if is_call(node, *AVERAGE_POOLS) and inner_size != inner_step:
        return None
    if any(step > size for step, size in zip(inner_step, inner_size, strict=True)):
        return None
    size = [one + (two - 1) * step for one, two, step in zip(inner_size, outer_size, inner_step, strict=True)]
    step = [one * two for one, two in zip(inner_step, outer_step, strict=True)]
    merged = editor.again(node, node, inner.args[0], size, step)
    return merged if shape(merged) == shape(node) else None


def _is_plain(node: fx.Node) -> bool:
    if is_call(node, *AVERAGE_POOLS):
        return pools_plainly(node)
    undilated = all(step == 1 for step in numbers(argument(node, "dilation"), 1))
    return undilated and not any(numbers(argument(node, "padding"), 1)) and not argument(node, "ceil_mode")


def _window(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and step of a pool's windows along each of their dimensions."""
    spatial = _spatial(node)
    size = numbers(argument(node, "kernel_size"), spatial)
    return size, numbers(argument(node, "stride"), spatial) or size


@each()
def range_analysis(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Drop activations and bounds that cannot bind, and join bounds in a row, by the range each value can have.

    `clamp(tanh(x), -1, 1)`, `relu(sigmoid(x))`, `leaky_relu(relu(x))`, `clamp(clamp(x, 0, 1) * 2, 0, 1)`.
    Conditions: the range holds for every input, so no test data are trusted; NaN passes through every form,
    except that a value pinned to one number is left as it is, because the reference would still pass NaN.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not all(is_tensor(item) and is_float(item) for item in (node, source)):
        return None
    bounds = (0.0, math.inf) if is_call(node, aten.leaky_relu, aten.elu, aten.abs) else _bounds(node)
    if bounds is None:
        return None
    low, high = bounds
    least, most = value_range(source)
    if least >= low and most <= high:
        return source
    return _join(editor, node, source, low, high) if _bounds(node) else None


_BOUNDS: dict[Operator, tuple[str | float, str | float]] = {
    aten.relu: (0.0, math.inf),
    aten.relu6: (0.0, 6.0),
    aten.hardtanh: ("min_val", "max_val"),
    aten.clamp: ("min", "max"),
    aten.clamp_min: ("min", math.inf),
    aten.clamp_max: (-math.inf, "max"),
}
"""Ends of the interval that a clamp-like operator clips to, or the names of the arguments that hold them."""


def _bounds(node: fx.Node) -> tuple[float, float] | None:
    """The interval a clamp-like operator clips to."""
    if (packet := packet_of(node)) not in _BOUNDS or len(node.all_input_nodes) != 1:
        return None
    low, high = (scalar(argument(node, end) if isinstance(end, str) else end) for end in _BOUNDS[packet])
    return (-math.inf if low is None else low), (math.inf if high is None else high)


def _join(editor: Editor, node: fx.Node, source: fx.Node, low: float, high: float) -> fx.Node | None:
    """Join a clip with the clip before it, through one positive factor in between."""
    if read_once(source) is None:
        return None
    line = affine(source)
    if line is not None and line.scale > 0 and read_once(line.source) and _bounds(line.source):
        clipped = line.source
        low, high = (low - line.shift) / line.scale, (high - line.shift) / line.scale
    else:
        line, clipped = None, source
    inner = _bounds(clipped)
    if inner is None:
        return None
    new_low, new_high = min(max(low, inner[0]), inner[1]), max(min(high, inner[1]), inner[0])
    if new_low >= new_high:
        return None
    ends = [end if math.isfinite(end) else None for end in (new_low, new_high)]
    result = editor.call(node, aten.clamp.default, clipped.args[0], *ends)
    return place_affine(editor, node, result, line.scale, line.shift) if line else result


RANGES: dict[Operator, tuple[float, float]] = {
    getattr(aten, name): (least, most) for name, (least, most) in TABLES["facts"]["ranges"].items()
}
KEEPS_RANGE = named(TABLES["facts"]["keep_range"])


def value_range(node: fx.Node, depth: int = 6) -> tuple[float, float]:
    """An interval that holds every value of a tensor that is not NaN, whatever the inputs are."""
    packet = packet_of(node)
    if node.op != "call_function" or not depth:
        return -math.inf, math.inf
    if packet in RANGES:
        return RANGES[packet]
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return -math.inf, math.inf
    if packet in KEEPS_RANGE:
        return value_range(source, depth - 1)
    if (bounds := _bounds(node)) is not None:
        least, most = value_range(source, depth - 1)
        return min(max(least, bounds[0]), bounds[1]), max(min(most, bounds[1]), bounds[0])
    if (pair := operands(node, aten.mul)) and pair[0] is pair[1]:
        return 0.0, math.inf
    if (line := affine(node)) is not None and line.scale:
        ends = [end * line.scale + line.shift for end in value_range(line.source, depth - 1)]
        return min(ends), max(ends)
    return -math.inf, math.inf
