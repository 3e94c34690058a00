"""Removes shifts that a normalisation takes out anyway."""

from __future__ import annotations

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dims_of,
    dtype,
    is_call,
    is_tensor,
    number,
    operand_nodes,
    operands,
    padded_shape,
    read_once,
    shape,
)
from kernelwright.rewrites.rules.affine import CONVOLUTIONS, TRANSPOSED


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
