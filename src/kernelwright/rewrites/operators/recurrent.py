"""Lets the template of recurrent layers compute the LSTMs and GRUs of an operator graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from kernelwright.rewrites.graph import Editor, argument, arguments, aten, is_call, overload, shape, value
from kernelwright.rewrites.products import shared_names
from kernelwright.rewrites.templates import recurrent
from kernelwright.rewrites.templates.recurrent import Layers, RecurrentKnobs
from kernelwright.rewrites.tracing import OperatorGraph

PERSISTENT = "persistent-recurrent"
"""The technique's name."""
_OPTIONS = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")


class PersistentLayers:
    """A function that computes the layers of one call, with a knob of choices for its sizes.

    Args:
        name: Of the Python function.
        layers: Sizes of the call.
        options: The call's arguments from `has_biases` to `batch_first`.
    """

    device_test = "is_cuda"

    def __init__(self, name: str, layers: Layers, options: tuple[bool | int | float, ...]) -> None:
        self.__name__ = name
        self.layers = layers
        self.options = options
        self.choices: tuple[RecurrentKnobs, ...] = recurrent.alternatives(layers)

    def __call__(self, x: torch.Tensor, states: Any, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs and the last states, of fake tensors."""
        sizes = self.layers
        outputs = x.new_empty((sizes.steps, sizes.batch, sizes.directions * sizes.hidden))
        given = (states,) if isinstance(states, torch.Tensor) else tuple(states)
        return (outputs.transpose(0, 1) if self.options[-1] else outputs, *map(torch.empty_like, given))

    def definition(self) -> str:
        """The function and its knobs, which the template's text comes before."""
        name, constant = self.__name__, f"KNOBS_{self.__name__.upper()}"
        sizes = self.layers
        every = ((recurrent.cuda_head(sizes, one), one.blocks(sizes)) for one in self.choices)
        return (
            f'{constant} = {{"blocks": {tuple(every)!r}}}\n'
            f'{name} = Recurrent(torch.{sizes.kind}, *{constant}["blocks"][0], {sizes.hidden}, {self.options!r})\n'
        )

    @staticmethod
    def prologue(kernels: Sequence[PersistentLayers]) -> str:
        """The template's text without its docstring."""
        return recurrent.emit().split('"""', 2)[2]


def clash(source: str) -> set[str]:
    """Names at the module level of a task's text that the template's text also has."""
    return shared_names(source, [recurrent.emit()])


def replace_recurrent(graph: OperatorGraph) -> int:
    """Let the template compute each LSTM and GRU that it takes, in place; how many there were."""
    editor = Editor(graph.graph, graph.mode)
    count = 0
    for node in editor.nodes(aten.lstm, aten.gru):
        sizes = layers_of(node)
        if sizes is None or recurrent.refusal(sizes) is not None:
            continue
        # Without dropout both modes compute the same, so that one function serves both graphs.
        options = tuple(name != "train" and argument(node, name) for name in _OPTIONS)
        kernel = PersistentLayers(f"recurrent_{count}", sizes, options)
        given = arguments(node)
        made = editor.call(node, kernel, given["input"], given["hx"], given["params"])
        for user in list(node.users):
            editor.replace(user, editor.pick(user, made, cast(int, user.args[1])))
        count += 1
    editor.sweep()
    graph.graph.lint()
    return count


def layers_of(node: fx.Node) -> Layers | None:
    """Sizes of a call on batched float32 tensors, without dropout or projections; None of another."""
    if overload(node) != "input":
        return None
    x, parameters = cast(fx.Node, node.args[0]), list(argument(node, "params"))
    draws = argument(node, "train") and float(argument(node, "dropout")) > 0
    layers, directions = int(argument(node, "num_layers")), 1 + bool(argument(node, "bidirectional"))
    each = 4 if argument(node, "has_biases") else 2
    # Projections are further weights.
    plain = len(shape(x)) == 3 and len(parameters) == layers * directions * each
    if draws or not plain or any(value(one).dtype != torch.float32 for one in (x, *parameters)):
        return None
    batch, steps = shape(x)[:2] if argument(node, "batch_first") else shape(x)[1::-1]
    return Layers(
        kind="lstm" if is_call(node, aten.lstm) else "gru",
        batch=batch,
        steps=steps,
        inputs=shape(x)[2],
        hidden=shape(parameters[1])[1],
        layers=layers,
        directions=directions,
    )
