"""Shortens recurrent layers of which only the last step is read."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from kernelwright.rewrites.graph import Editor, argument, aten, is_call, overload, shape


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
        if random or not argument(node, "has_biases") or not all(_reads_last(user, output, steps) for user in output.users):
            continue
        last = _cut(editor, node, layers, steps)
        for user in list(output.users):
            editor.replace(user, last)
        count += 1
    return count


def _reads_last(user: fx.Node, output: fx.Node, steps: int) -> bool:
    if not is_call(user, aten.select) or argument(user, "dim") % len(shape(output)) != steps:
        return False
    return argument(user, "index") in (-1, shape(output)[steps] - 1)


def _cut(editor: Editor, node: fx.Node, layers: int, steps: int) -> fx.Node:
    """Last layer as a forward run over everything and a one-step run over the last element, joined."""
    is_lstm = is_call(node, aten.lstm)
    source, parameters = node.args[0], list(argument(node, "params"))
    states = list(argument(node, "hx")) if is_lstm else [argument(node, "hx")]
    # Each direction of each layer has two weights and two biases, and with projections one more weight.
    each = len(parameters) // (2 * layers)

    def options(count: int, bidirectional: bool) -> tuple[bool | int | float, ...]:
        """Arguments of a run over a number of layers, from `has_biases` to `batch_first`."""
        return True, count, 0.0, bool(argument(node, "train")), bidirectional, bool(argument(node, "batch_first"))

    def state_of(first: int, count: int) -> Any:
        parts = [editor.call(node, aten.slice.Tensor, state, 0, first, first + count) for state in states]
        return parts if is_lstm else parts[0]

    if layers > 1:
        lower = options(layers - 1, True)
        below = editor.again(node, node, source, state_of(0, 2 * (layers - 1)), parameters[: -2 * each], *lower)
        source = editor.pick(node, below, 0)
    assert isinstance(source, fx.Node)
    length = shape(source)[steps]
    ahead, back = parameters[-2 * each : -each], parameters[-each:]
    forward = editor.again(node, node, source, state_of(2 * layers - 2, 1), ahead, *options(1, False))
    tail = editor.call(node, aten.slice.Tensor, source, steps, length - 1, length)
    backward = editor.again(node, node, tail, state_of(2 * layers - 1, 1), back, *options(1, False))
    ends = [editor.call(node, aten.select.int, editor.pick(node, run, 0), steps, -1) for run in (forward, backward)]
    return editor.call(node, aten.cat.default, ends, 1)
