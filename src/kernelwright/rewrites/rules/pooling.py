"""Moves pools and extrema before increasing functions, and merges two in a row."""

from __future__ import annotations

import math

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    Operator,
    argument,
    aten,
    dims_of,
    dtype,
    is_call,
    is_float,
    is_tensor,
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
from kernelwright.rewrites.rules.affine import AVERAGE_POOLS, affine, place_affine, pools_plainly
from kernelwright.rewrites.rules.base import each

MAX_POOLS = (aten.max_pool1d, aten.max_pool2d, aten.max_pool3d)
ALWAYS_INCREASING = (
    aten.relu,
    aten.sigmoid,
    aten.tanh,
    aten.hardtanh,
    aten.relu6,
    aten.exp,
    aten.selu,
    aten.hardsigmoid,
    aten.softplus,
    aten.log_sigmoid,
    aten.clamp,
    aten.clamp_min,
    aten.clamp_max,
)


def _is_increasing(node: fx.Node) -> bool:
    """Whether an operator never decreases when its first argument grows, whatever the input.

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


RANGES = {
    aten.sigmoid: (0.0, 1.0),
    aten.hardsigmoid: (0.0, 1.0),
    aten.tanh: (-1.0, 1.0),
    aten.softmax: (0.0, 1.0),
    aten._softmax: (0.0, 1.0),
    aten.softplus: (0.0, math.inf),
    aten.exp: (0.0, math.inf),
    aten.abs: (0.0, math.inf),
    aten.sqrt: (0.0, math.inf),
    aten.square: (0.0, math.inf),
    aten.sin: (-1.0, 1.0),
    aten.cos: (-1.0, 1.0),
    aten.erf: (-1.0, 1.0),
}
KEEPS_RANGE = (
    *MAX_POOLS,
    aten.amax,
    aten.amin,
    aten.mean,
    aten.view,
    aten.reshape,
    aten.transpose,
    aten.permute,
    aten.unsqueeze,
    aten.squeeze,
    aten.flatten,
    aten.slice,
    aten.select,
    aten.contiguous,
    aten.clone,
)


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
