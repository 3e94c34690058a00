"""Computes only the rows that are read, and many small products of the same weight as one."""

from __future__ import annotations

from typing import Any

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    is_call,
    is_tensor,
    numel,
    only_user,
    shape,
    value,
)

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


def slice_first(editor: Editor) -> int:
    """`f(x)[:, -1]` is `f(x[:, -1])`: rows that nobody reads are not computed.

    Conditions: f works row by row: pointwise functions of one tensor, sums and products of tensors of equal
    shape, `linear`, layer norm and softmax over other dimensions; nobody else reads f(x).
    """
    count = 0
    for node in editor.nodes(aten.select, aten.slice):
        made = node.args[0]
        if node._erased or not isinstance(made, fx.Node) or made.op != "call_function" or only_user(made) is None:
            continue
        rank = len(shape(made))
        dim = int(argument(node, "dim")) % rank
        if 2 * numel(node) > numel(made) or not (places := _row_by_row(made, dim)):
            continue
        select: Any = node.target
        target: Any = made.target
        arguments = list(made.args)
        for place in places:
            arguments[place] = editor.call(node, select, arguments[place], dim, *node.args[2:])
        result = editor.call(node, target, *arguments, **made.kwargs)
        if shape(result) != shape(node):
            raise AssertionError(f"slicing {made.format_node()} along {dim} gave {shape(result)}")
        editor.replace(node, result)
        count += 1
    return count


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
    if is_call(node, aten.linear):
        return [0] if dim < rank - 1 else []
    if is_call(node, aten.layer_norm):
        return [0] if dim < rank - len(argument(node, "normalized_shape")) else []
    return []


def split_concatenation(editor: Editor) -> int:
    """`linear(cat([a, b], 1), W)` is `linear(a, W_a) + linear(b, W_b)`: no copy, and the part of an input of
    a loop can be taken out of the loop.

    Conditions: two parts, joined along the features, and the concatenation has no reader but `linear`s.
    """
    count = 0
    for node in editor.nodes(aten.linear):
        joined = node.args[0]
        if node._erased or not isinstance(joined, fx.Node) or not is_call(joined, aten.cat):
            continue
        parts, rank = joined.args[0], len(shape(joined))
        dim = joined.args[1] if len(joined.args) > 1 else 0
        if not isinstance(parts, list | tuple) or len(parts) != 2 or not isinstance(dim, int) or dim % rank != rank - 1:
            continue
        if not all(is_call(user, aten.linear) for user in joined.users):
            continue
        if any(not isinstance(part, fx.Node) or value(part).dtype != value(node).dtype for part in parts):
            continue
        weight, bias = argument(node, "weight"), argument(node, "bias")
        width = shape(parts[0])[-1]  # type: ignore[arg-type]
        first = editor.call(node, aten.slice.Tensor, weight, 1, 0, width)
        second = editor.call(node, aten.slice.Tensor, weight, 1, width, shape(weight)[1])
        one = editor.call(node, aten.linear.default, parts[0], first, bias)
        two = editor.call(node, aten.linear.default, parts[1], second)
        editor.replace(node, editor.call(node, aten.add.Tensor, one, two))
        count += 1
    return count


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
        source = step.args[0]
        if not isinstance(source, fx.Node):
            continue
        rank = len(shape(source))
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
        weight = argument(first, "weight")
        whole = editor.call(first, aten.linear.default, source, weight, bias)
        for node in members:
            index = argument(node.args[0], "index")  # type: ignore[arg-type]
            editor.replace(node, editor.call(node, aten.select.int, whole, dim, index))
            count += 1
    return count


def _origin(weight: fx.Node) -> Any:
    """What makes two weights the same: the node, or the same slice of the same node."""
    if is_call(weight, aten.slice):
        return (weight.args[0], *(argument(weight, name) for name in ("dim", "start", "end", "step")))
    return weight
