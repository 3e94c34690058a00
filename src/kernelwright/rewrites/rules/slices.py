"""Computes only the rows that are read, and many small products of the same weight as one."""

from __future__ import annotations

from typing import Any

from torch import fx

from kernelwright.rewrites.graph import Editor, argument, aten, dtype, is_call, is_tensor, numel, read_once, shape
from kernelwright.rewrites.rules.base import each

UNARY = (
    aten.relu,
    aten.gelu,
    aten.silu,
    aten.mish,
    aten.tanh,
    aten.sigmoid,
    aten.leaky_relu,
    aten.elu,
    aten.selu,
    aten.exp,
    aten.log,
    aten.sqrt,
    aten.abs,
    aten.neg,
    aten.softplus,
    aten.hardswish,
    aten.hardsigmoid,
    aten.hardtanh,
    aten.clamp,
    aten.sin,
    aten.cos,
    aten.square,
    aten.relu6,
    aten.erf,
)


@each(aten.select, aten.slice)
def slice_first(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`f(x)[:, -1]` is `f(x[:, -1])`: rows that nobody reads are not computed.

    Conditions: f works row by row: pointwise functions of one tensor, sums and products of tensors of equal
    shape, `linear`, layer norm and softmax over other dimensions; nobody else reads f(x).
    """
    made = read_once(node.args[0])
    if made is None or made.op != "call_function":
        return None
    dim = int(argument(node, "dim")) % len(shape(made))
    if 2 * numel(node) > numel(made) or not (places := _row_by_row(made, dim)):
        return None
    arguments = list(made.args)
    for place in places:
        arguments[place] = editor.again(node, node, arguments[place], dim, *node.args[2:])
    return editor.again(node, made, *arguments, **made.kwargs)


def _row_by_row(node: fx.Node, dim: int) -> list[int]:
    """Positions of the arguments that must be sliced for a slice of the result; empty when that is not enough."""
    rank = len(shape(node))
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_tensor(source) or shape(source)[:1] != shape(node)[:1]:
        return []
    if is_call(node, *UNARY):
        return [0] if len(node.all_input_nodes) == 1 else []
    if is_call(node, aten.add, aten.sub, aten.mul, aten.div) and len(node.args) == 2:
        places = [place for place, item in enumerate(node.args) if is_tensor(item)]
        return places if all(shape(node.args[place]) == shape(node) for place in places) else []  # type: ignore[arg-type]
    if is_call(node, aten.linear, aten.layer_norm):
        mixed = 1 if is_call(node, aten.linear) else len(argument(node, "normalized_shape"))
        return [0] if dim < rank - mixed else []
    return []


@each(aten.linear)
def split_concatenation(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`linear(cat([a, b], 1), W)` is `linear(a, W_a) + linear(b, W_b)`: no copy, and the part of an input of
    a loop can be taken out of the loop.

    Conditions: two parts, joined along the features, and the concatenation has no reader but `linear`s.
    """
    joined = node.args[0]
    if not isinstance(joined, fx.Node) or not is_call(joined, aten.cat):
        return None
    parts, rank, dim = argument(joined, "tensors"), len(shape(joined)), argument(joined, "dim")
    if not isinstance(parts, list | tuple) or len(parts) != 2 or dim % rank != rank - 1:
        return None
    if not all(is_call(user, aten.linear) for user in joined.users) or any(dtype(part) != dtype(node) for part in parts):
        return None
    weight, bias = argument(node, "weight"), argument(node, "bias")
    width = shape(parts[0])[-1]
    first = editor.call(node, aten.slice.Tensor, weight, 1, 0, width)
    second = editor.call(node, aten.slice.Tensor, weight, 1, width, shape(weight)[1])
    one = editor.call(node, aten.linear.default, parts[0], first, bias)
    two = editor.call(node, aten.linear.default, parts[1], second)
    return editor.call(node, aten.add.Tensor, one, two)


def batch_steps(editor: Editor) -> int:
    """Products of one weight with several slices of one tensor, as in an unrolled loop, are one product before it.

    Conditions: same weight and bias, slices `x[:, t]` of the same tensor along one dimension that is not the
    features; at least half of all slices are used.
    """
    groups: dict[Any, list[fx.Node]] = {}
    for node in editor.nodes(aten.linear):
        step = node.args[0]
        if not isinstance(step, fx.Node) or not is_call(step, aten.select):
            continue
        source, rank = argument(step, "self"), len(shape(step)) + 1
        dim = int(argument(step, "dim")) % rank
        if dim == rank - 1:
            continue
        weight, bias = _origin(argument(node, "weight")), argument(node, "bias")
        groups.setdefault((source, dim, weight, bias), []).append(node)
    count = 0
    for (source, dim, _, bias), members in groups.items():
        if len(members) < 2 or 2 * len(members) < shape(source)[dim]:
            continue
        first = members[0]
        whole = editor.call(first, aten.linear.default, source, argument(first, "weight"), bias)
        for node in members:
            index = argument(node.args[0], "index")  # type: ignore[arg-type]
            editor.replace(node, editor.call(node, aten.select.int, whole, dim, index))
            count += 1
    return count


def _origin(weight: fx.Node) -> Any:
    """Identity of a weight: the node, or the slice and the node it is taken from."""
    if is_call(weight, aten.slice):
        return (weight.args[0], *(argument(weight, name) for name in ("dim", "start", "end", "step")))
    return weight
