"""Computes only the rows and steps that are read, and many small products of the same weight as one."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from kernelwright.rewrites.graph import (
    TABLES,
    Editor,
    argument,
    aten,
    is_call,
    is_tensor,
    named,
    numel,
    overload,
    read_once,
    shape,
)
from kernelwright.rewrites.rules.base import each

POINTWISE = named(TABLES["facts"]["pointwise"])


@each(aten.select, aten.slice)
def slice_first(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`f(x)[:, -1]` is `f(x[:, -1])`: rows that are not read are not computed.

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
    if is_call(node, *POINTWISE):
        return [0] if len(node.all_input_nodes) == 1 else []
    if is_call(node, aten.add, aten.sub, aten.mul, aten.div) and len(node.args) == 2:
        places = [place for place, item in enumerate(node.args) if is_tensor(item)]
        return places if all(shape(node.args[place]) == shape(node) for place in places) else []  # type: ignore[arg-type]
    if is_call(node, aten.linear, aten.layer_norm):
        mixed = 1 if is_call(node, aten.linear) else len(argument(node, "normalized_shape"))
        return [0] if dim < rank - mixed else []
    return []


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


def last_step_of_reverse(editor: Editor) -> int:
    """A bidirectional layer of which only the last output is read needs one step of its backward direction.

    The backward direction starts at the last element, so its output there is its first step. Conditions: a
    batched LSTM or GRU with biases, no dropout in train mode; only `output[last]` is read, not the final
    states. With several layers only the last one is cut.
    """
    count = 0
    for node in editor.nodes(aten.lstm, aten.gru):
        if overload(node) != "input" or not argument(node, "bidirectional"):
            continue
        readers = [user for user in node.users if user.users]
        if len(readers) != 1 or readers[0].target is not operator.getitem or readers[0].args[1] != 0:
            continue
        output = readers[0]
        steps = 1 if argument(node, "batch_first") else 0
        layers = int(argument(node, "num_layers"))
        random = argument(node, "train") and float(argument(node, "dropout")) > 0 and layers > 1
        rank, ends = len(shape(output)), (-1, shape(output)[steps] - 1)
        if (
            random
            or not argument(node, "has_biases")
            or not all(
                is_call(user, aten.select) and argument(user, "dim") % rank == steps and argument(user, "index") in ends
                for user in output.users
            )
        ):
            continue
        last = _cut(editor, node, layers, steps)
        for user in list(output.users):
            editor.replace(user, last)
        count += 1
    return count


def _cut(editor: Editor, node: fx.Node, layers: int, steps: int) -> fx.Node:
    """Last layer as a forward run over everything and a one-step run over the last element, joined."""
    source, parameters = node.args[0], list(argument(node, "params"))
    # Each direction of each layer has two weights and two biases, and with projections one more weight.
    each = len(parameters) // (2 * layers)
    if layers > 1:
        below = _run(editor, node, source, (0, 2 * (layers - 1)), parameters[: -2 * each], layers - 1)
        source = editor.pick(node, below, 0)
    assert isinstance(source, fx.Node)
    length = shape(source)[steps]
    forward = _run(editor, node, source, (2 * layers - 2, 1), parameters[-2 * each : -each])
    tail = editor.call(node, aten.slice.Tensor, source, steps, length - 1, length)
    backward = _run(editor, node, tail, (2 * layers - 1, 1), parameters[-each:])
    ends = [editor.call(node, aten.select.int, editor.pick(node, run, 0), steps, -1) for run in (forward, backward)]
    return editor.call(node, aten.cat.default, ends, 1)


def _run(
    editor: Editor, node: fx.Node, source: Any, state: tuple[int, int], parameters: list[Any], both_ways: int = 0
) -> fx.Node:
    """A run of some layers of a call.

    Args:
        state: First one and number of the initial states of these layers.
        both_ways: Number of layers that run in both directions; 0 for one layer in one direction.
    """
    states = list(argument(node, "hx")) if is_call(node, aten.lstm) else [argument(node, "hx")]
    first, count = state
    parts: list[Any] = [editor.call(node, aten.slice.Tensor, item, 0, first, first + count) for item in states]
    initial = parts if is_call(node, aten.lstm) else parts[0]
    train, batch_first = bool(argument(node, "train")), bool(argument(node, "batch_first"))
    options = (True, both_ways or 1, 0.0, train, both_ways > 0, batch_first)
    return editor.again(node, node, source, initial, parameters, *options)
