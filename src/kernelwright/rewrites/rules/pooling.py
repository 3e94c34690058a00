"""Pools and extrema: before increasing functions instead of after them, and two in a row as one."""

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
    numbers,
    numel,
    only_user,
    scalar,
    shape,
    value,
)
from kernelwright.rewrites.rules.affine import AVERAGE_POOLS, affine, pools_plainly

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


def pool_first(editor: Editor) -> int:
    """Take a maximum or minimum before an increasing function instead of after it: fewer evaluations, same values.

    Conditions: the function is increasing for every input (sign of a constant factor known and positive);
    only values are read, not indices; the pool is not dilated, so that no window consists of padding only; no
    other reader; the result is at most half as large. NaN passes through both.
    """
    count = 0
    for node in editor.nodes(*MAX_POOLS, aten.amax, aten.amin):
        function = node.args[0]
        if node._erased or node.kwargs or not isinstance(function, fx.Node) or only_user(function) is None:
            continue
        if function.op != "call_function" or not is_float(function) or not _is_increasing(function):
            continue
        source = function.args[0]
        if not isinstance(source, fx.Node) or value(source).dtype != value(function).dtype:
            continue
        if is_call(node, *MAX_POOLS) and any(step != 1 for step in numbers(argument(node, "dilation"), 1)):
            continue
        if 2 * numel(node) > numel(function) or shape(source) != shape(function):
            continue
        pool_target, target = node.target, function.target
        assert callable(pool_target)
        assert callable(target)
        pooled = editor.call(node, pool_target, source, *node.args[1:])
        editor.replace(node, editor.call(node, target, pooled, *function.args[1:], **function.kwargs))
        count += 1
    return count


def add_after_pool(editor: Editor) -> int:
    """Add a bias of one number per channel after a pool or reduction instead of before it.

    Conditions: the bias is constant along every pooled dimension; the pool does not pad with zeros; no other
    reader; the result is at most half as large.
    """
    count = 0
    for node in editor.nodes(*MAX_POOLS, *AVERAGE_POOLS, aten.amax, aten.amin, aten.mean):
        total = node.args[0]
        if node._erased or node.kwargs or not isinstance(total, fx.Node) or only_user(total) is None:
            continue
        if not is_call(total, aten.add) or total.kwargs or len(total.args) != 2 or not is_float(total):
            continue
        source, bias = total.args
        if not isinstance(source, fx.Node) or not isinstance(bias, fx.Node) or not is_tensor(bias):
            continue
        if shape(source) != shape(total):
            source, bias = bias, source
        rank = len(shape(total))
        pooled = _pooled_dims(node, rank)
        padded = (1,) * (rank - len(shape(bias))) + shape(bias)
        if pooled is None or shape(source) != shape(total) or value(source).dtype != value(total).dtype:
            continue
        if (
            any(padded[dim] != 1 for dim in pooled)
            or 2 * numel(node) > numel(total)
            or value(bias).dtype != value(total).dtype
        ):
            continue
        target = node.target
        assert callable(target)
        result = editor.call(node, target, source, *node.args[1:])
        kept = [size for dim, size in enumerate(padded) if dim not in pooled or len(shape(node)) == rank]
        small = editor.call(node, aten.reshape.default, bias, kept) if tuple(kept) != shape(bias) else bias
        editor.replace(node, editor.call(node, aten.add.Tensor, result, small))
        count += 1
    return count


def _pooled_dims(node: fx.Node, rank: int) -> tuple[int, ...] | None:
    if is_call(node, aten.amax, aten.amin, aten.mean):
        return dims_of(argument(node, "dim"), rank)
    if is_call(node, *AVERAGE_POOLS) and not pools_plainly(node):
        return None
    spatial = next(
        index for index, pools in enumerate(zip(MAX_POOLS, AVERAGE_POOLS, strict=True), 1) if is_call(node, *pools)
    )
    return tuple(range(rank - spatial, rank))


def merge_pools(editor: Editor) -> int:
    """Two pools of the same kind in a row are one with a larger window.

    Conditions: no padding, dilation or ceil mode; for averages the first pool's windows do not overlap, for
    maxima they leave no gap; the sizes come out the same; no other reader.
    """
    count = 0
    for node in editor.nodes(*MAX_POOLS, *AVERAGE_POOLS):
        inner = node.args[0]
        if node._erased or not isinstance(inner, fx.Node) or only_user(inner) is None:
            continue
        if inner.target is not node.target or not (_is_plain(node) and _is_plain(inner)):
            continue
        spatial = next(
            rank for rank, pools in enumerate(zip(MAX_POOLS, AVERAGE_POOLS, strict=True), 1) if is_call(node, *pools)
        )
        outer_size, outer_step = _window(node, spatial)
        inner_size, inner_step = _window(inner, spatial)
        if is_call(node, *AVERAGE_POOLS) and inner_size != inner_step:
            continue
        if any(step > size for step, size in zip(inner_step, inner_size, strict=True)):
            continue
        size = [one + (two - 1) * step for one, two, step in zip(inner_size, outer_size, inner_step, strict=True)]
        step = [one * two for one, two in zip(inner_step, outer_step, strict=True)]
        target: Any = node.target
        merged = editor.call(node, target, inner.args[0], size, step)
        if shape(merged) == shape(node):
            editor.replace(node, merged)
            count += 1
    return count


def _is_plain(node: fx.Node) -> bool:
    if is_call(node, *AVERAGE_POOLS):
        return pools_plainly(node)
    padding, dilation = argument(node, "padding"), argument(node, "dilation")
    return (
        not any(numbers(padding, 1)) and all(step == 1 for step in numbers(dilation, 1)) and not argument(node, "ceil_mode")
    )


def _window(node: fx.Node, spatial: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = numbers(argument(node, "kernel_size"), spatial)
    return size, numbers(argument(node, "stride"), spatial) or size


def range_analysis(editor: Editor) -> int:
    """Drop activations and bounds that cannot bind, and join bounds in a row, by the range each value can have.

    `clamp(tanh(x), -1, 1)`, `relu(sigmoid(x))`, `leaky_relu(relu(x))`, `clamp(clamp(x, 0, 1) * 2, 0, 1)`.
    Conditions: the range holds for every input, so no test data are trusted; NaN passes through every form,
    except that a value pinned to one number is left as it is, because the reference would still pass NaN.
    """
    count = 0
    for node in editor.nodes():
        if node._erased or not is_tensor(node) or not is_float(node) or not node.args:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or not is_tensor(source) or not is_float(source):
            continue
        if is_call(node, aten.leaky_relu, aten.elu, aten.abs) and value_range(source)[0] >= 0:
            editor.replace(node, source)
            count += 1
            continue
        bounds = _bounds(node)
        if bounds is None:
            continue
        low, high = bounds
        least, most = value_range(source)
        if least >= low and most <= high:
            editor.replace(node, source)
            count += 1
        elif (joined := _join(editor, node, source, low, high)) is not None:
            editor.replace(node, joined)
            count += 1
    return count


def _bounds(node: fx.Node) -> tuple[float, float] | None:
    """The interval a clamp-like operator clips to."""
    if is_call(node, aten.relu):
        return 0.0, math.inf
    if is_call(node, aten.relu6):
        return 0.0, 6.0
    names = {
        aten.hardtanh: ("min_val", "max_val"),
        aten.clamp: ("min", "max"),
        aten.clamp_min: ("min", ""),
        aten.clamp_max: ("", "max"),
    }
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in names or len(node.all_input_nodes) != 1:
        return None
    low, high = (scalar(argument(node, name)) if name else None for name in names[packet])
    return (-math.inf if low is None else low), (math.inf if high is None else high)


def _join(editor: Editor, node: fx.Node, source: fx.Node, low: float, high: float) -> fx.Node | None:
    """Join a clip with the clip before it, through one positive factor in between."""
    if only_user(source) is None:
        return None
    line = affine(source)
    if line is not None and line.scale > 0 and only_user(line.source) is not None and _bounds(line.source):
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
    origin = clipped.args[0]
    result = editor.call(
        node,
        aten.clamp.default,
        origin,
        None if new_low == -math.inf else new_low,
        None if new_high == math.inf else new_high,
    )
    if line is not None:
        if line.scale != 1.0:
            result = editor.call(node, aten.mul.Tensor, result, line.scale)
        if line.shift:
            result = editor.call(node, aten.add.Tensor, result, line.shift)
    return result


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
    packet = getattr(node.target, "overloadpacket", None)
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
    if is_call(node, aten.mul) and len(node.args) == 2 and node.args[0] is node.args[1]:
        return 0.0, math.inf
    if (line := affine(node)) is not None and line.scale:
        ends = [end * line.scale + line.shift for end in value_range(line.source, depth - 1)]
        return min(ends), max(ends)
    return -math.inf, math.inf
