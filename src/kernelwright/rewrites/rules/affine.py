"""Multiplication and addition of constants: reading them, merging them, and folding them into linear operators."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    scalar,
    shape,
    value,
)

CONVOLUTIONS = (aten.conv1d, aten.conv2d, aten.conv3d)
TRANSPOSED = (aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)
AVERAGE_POOLS = (aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
ADAPTIVE_POOLS = (aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d)


class Affine(NamedTuple):
    """`source * scale + shift` with constants."""

    source: fx.Node
    scale: float
    shift: float


def affine(node: object) -> Affine | None:
    """Read one operator as an affine map with constants; None when it is something else."""
    if not is_tensor(node) or not isinstance(node, fx.Node) or node.op != "call_function" or not is_float(node):
        return None
    if is_call(node, aten.neg):
        return _same_type(node, node.args[0], -1.0, 0.0)
    if not is_call(node, aten.add, aten.sub, aten.mul, aten.div, aten.rsub) or len(node.args) != 2:
        return None
    if node.kwargs:
        return None
    left, right = node.args
    if is_tensor(left) and scalar(right) is not None and not is_tensor(right):
        number = float(scalar(right) or 0.0)
        if is_call(node, aten.add):
            return _same_type(node, left, 1.0, number)
        if is_call(node, aten.sub):
            return _same_type(node, left, 1.0, -number)
        if is_call(node, aten.rsub):
            return _same_type(node, left, -1.0, number)
        if is_call(node, aten.mul):
            return _same_type(node, left, number, 0.0)
        return _same_type(node, left, 1.0 / number, 0.0) if number else None
    return None


def _same_type(node: fx.Node, source: object, scale: float, shift: float) -> Affine | None:
    if not isinstance(source, fx.Node) or value(source).dtype != value(node).dtype:
        return None
    finite = math.isfinite(scale) and math.isfinite(shift)
    return Affine(source, scale, shift) if finite else None


def place_affine(editor: Editor, before: fx.Node, source: fx.Node, scale: float, shift: float) -> fx.Node:
    """Write `source * scale + shift` with as few operators as it needs."""
    if scale == -1.0 and shift:
        return editor.call(before, aten.rsub.Scalar, source, shift)
    result = source
    if scale != 1.0:
        result = editor.call(before, aten.mul.Tensor, result, scale)
    if shift:
        result = editor.call(before, aten.add.Tensor, result, shift)
    return result


def merge_constants(editor: Editor) -> int:
    """Merge consecutive multiplications and additions of constants into one of each.

    Conditions: floating point, no other reader in between, and the merged constants are finite and not zero
    where the single ones were not, so that no product over- or underflows.
    """
    count = 0
    for node in reversed(editor.nodes()):
        whole = None if node._erased else affine(node)
        if whole is None or (len(node.users) == 1 and affine(next(iter(node.users)))):
            continue
        length, vanished = 1, False
        while (inner := affine(whole.source)) is not None and only_user(whole.source) is not None:
            scale, shift = inner.scale * whole.scale, inner.shift * whole.scale + whole.shift
            vanished |= scale == 0.0 and inner.scale != 0.0 and whole.scale != 0.0
            whole, length = Affine(inner.source, scale, shift), length + 1
        cost = (whole.scale != 1.0) + (whole.shift != 0.0) - (whole.scale == -1.0 and whole.shift != 0.0)
        finite = math.isfinite(whole.shift) and abs(whole.scale) < 1e30
        if cost < length and finite and not vanished:
            editor.replace(node, place_affine(editor, node, whole.source, whole.scale, whole.shift))
            count += 1
    return count


def fold_into_linear(editor: Editor) -> int:
    """Fold a constant factor or addend, or one per output channel, into weight and bias of the operator before it.

    Conditions: the linear operator has no other reader; the factor broadcasts along the output channels only;
    the weight is at most half as large as the output (a 2-d `linear` takes its factor for free as alpha and
    beta). The fold is made in each call from the live parameters.
    """
    return sum(_fold(editor, node) for node in editor.nodes(aten.add, aten.sub, aten.mul, aten.div))


def _fold(editor: Editor, node: fx.Node) -> bool:
    if node._erased or node.kwargs or len(node.args) != 2 or not is_float(node):
        return False
    for index in (0, 1):
        linear, other = node.args[index], node.args[1 - index]
        if index == 1 and not is_call(node, aten.add, aten.mul):
            continue
        if not is_call(linear, aten.linear, *CONVOLUTIONS, *TRANSPOSED) or not isinstance(linear, fx.Node):
            continue
        if linear.target not in _PLAIN or only_user(linear) is None or value(linear).dtype != value(node).dtype:
            continue
        factor = _per_channel(editor, node, linear, other)
        if factor is None:
            continue
        if is_call(node, aten.add, aten.sub):
            return _fold_shift(editor, node, linear, factor)
        return _fold_scale(editor, node, linear, factor)
    return False


_PLAIN = frozenset(
    {
        aten.linear.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
    }
)


def _per_channel(editor: Editor, node: fx.Node, linear: fx.Node, other: object) -> fx.Node | float | None:
    """The other operand as a number or as a vector over the output channels; None when it is neither."""
    number = scalar(other)
    if number is not None:
        return number if math.isfinite(number) and not (number == 0.0 and is_call(node, aten.div)) else None
    if not isinstance(other, fx.Node) or not is_tensor(other) or value(other).dtype != value(linear).dtype:
        return None
    channel_dim = -1 if is_call(linear, aten.linear) else 1
    rank = len(shape(linear))
    padded = (1,) * (rank - len(shape(other))) + shape(other)
    channels = shape(linear)[channel_dim]
    if len(shape(other)) > rank or shape(node) != shape(linear):
        return None
    wanted = [1] * rank
    wanted[channel_dim] = channels
    if padded == tuple(wanted):
        return editor.call(node, aten.reshape.default, other, [channels]) if shape(other) != (channels,) else other
    if numel(other) == 1:
        return editor.call(node, aten.reshape.default, other, [1])
    return None


def _fold_shift(editor: Editor, node: fx.Node, linear: fx.Node, shift: fx.Node | float) -> bool:
    bias = argument(linear, "bias")
    if not is_tensor(bias):
        if not isinstance(shift, fx.Node):
            return False
        channels = shape(linear)[-1 if is_call(linear, aten.linear) else 1]
        if shape(shift) != (channels,) or is_call(node, aten.sub):
            return False
        editor.replace(node, _with(editor, node, linear, None, shift))
        return True
    operator = aten.sub.Tensor if is_call(node, aten.sub) else aten.add.Tensor
    editor.replace(node, _with(editor, node, linear, None, editor.call(node, operator, bias, shift)))
    return True


def _fold_scale(editor: Editor, node: fx.Node, linear: fx.Node, factor: fx.Node | float) -> bool:
    weight, bias = argument(linear, "weight"), argument(linear, "bias")
    operator = aten.div.Tensor if is_call(node, aten.div) else aten.mul.Tensor
    source = linear.args[0]
    if not isinstance(factor, fx.Node) and is_call(linear, aten.linear) and is_tensor(bias) and len(shape(linear)) == 2:
        number = 1.0 / factor if is_call(node, aten.div) else factor
        transposed = editor.call(node, aten.t.default, weight)
        editor.replace(node, editor.call(node, aten.addmm.default, bias, source, transposed, beta=number, alpha=number))
        return True
    if 2 * numel(weight) > numel(linear):
        return False
    along = factor
    if isinstance(factor, fx.Node) and numel(factor) > 1:
        if is_call(linear, *TRANSPOSED) and argument(linear, "groups") != 1:
            return False
        along_dims = [1] * len(shape(weight))
        along_dims[1 if is_call(linear, *TRANSPOSED) else 0] = numel(factor)
        along = editor.call(node, aten.reshape.default, factor, along_dims)
    new_weight = editor.call(node, operator, weight, along)
    new_bias = editor.call(node, operator, bias, factor) if is_tensor(bias) else bias
    editor.replace(node, _with(editor, node, linear, new_weight, new_bias))
    return True


def _with(editor: Editor, before: fx.Node, linear: fx.Node, weight: fx.Node | None, bias: object) -> fx.Node:
    """The same linear operator with another weight or bias."""
    arguments: list[Any] = list(linear.args)
    if weight is not None:
        arguments[1] = weight
    arguments[2:3] = [bias]
    target = linear.target
    assert callable(target)
    return editor.call(before, target, *arguments, **linear.kwargs)


def sink_constants(editor: Editor) -> int:
    """Take a sum, mean or average pool before a constant factor and addend instead of after them.

    Conditions: the constants are numbers; the pool does not pad, so that every window averages real elements;
    nobody else reads the scaled values.
    """
    count = 0
    for node in editor.nodes(aten.sum, aten.mean, *AVERAGE_POOLS, *ADAPTIVE_POOLS):
        if node._erased or node.kwargs or not (inner := affine(node.args[0])):
            continue
        scaled = node.args[0]
        if not isinstance(scaled, fx.Node) or only_user(scaled) is None or 2 * numel(node) > numel(scaled):
            continue
        if is_call(node, *AVERAGE_POOLS) and not pools_plainly(node):
            continue
        shift = inner.shift
        if is_call(node, aten.sum):
            dims = dims_of(argument(node, "dim"), len(shape(scaled)))
            if dims is None:
                continue
            shift *= math.prod(shape(scaled)[dim] for dim in dims)
        target = node.target
        assert callable(target)
        reduced = editor.call(node, target, inner.source, *node.args[1:])
        editor.replace(node, place_affine(editor, node, reduced, inner.scale, shift))
        count += 1
    return count


def pools_plainly(node: fx.Node) -> bool:
    """Whether every window of an average pool lies inside the input and is divided by its size."""
    padding = argument(node, "padding")
    padded = any(padding) if isinstance(padding, list | tuple) else bool(padding)
    return not padded and not argument(node, "ceil_mode") and argument(node, "divisor_override") is None
