"""Runs layers of an LSTM or a GRU in one kernel for all time steps: a template that emits CUDA C++ and its caller.

cuDNN launches some kernels for each step, and each reads the weights again. Here every thread block keeps its part of the
weights in registers for the whole sequence, and blocks exchange hidden states through memory. The layers of a stack follow
one another by a step; those of a bidirectional one come one after another, with both directions at once. Sums are float32's,
where cuDNN may take TF32. Known as persistent recurrent networks (Diamos et al., 2016).

The emitted module imports torch and defines `Recurrent`. It needs nvcc, and a GPU of compute capability 8.0 or more with as
many multiprocessors as the kernel has blocks. PyTorch's own layers run if one of these conditions,
or a tensor's layout, does not hold.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from kernelwright.rewrites.graph import Editor, argument, arguments, aten, is_call, overload, shape, value
from kernelwright.rewrites.templates.base import (
    MULTIPROCESSORS,
    SHARED_BYTES,
    CallTemplate,
    TemplateKernel,
    kernel_text,
    raw_literal,
)

GATES = {"lstm": 4, "gru": 3}
MOST_CELLS = 24
"""Directions of layers in one launch, as many as `recurrent.cu` has."""
LEAST_STEPS = 16
"""Time steps below which reading the weights once saves little. Our choice."""
_THREADS = 256
"""Threads of a block. In smaller blocks each thread asks for more of the others' states: on an H100 a bidirectional GRU
takes 7.7 ms in blocks of 256 threads, and 23.8 in blocks of 64 (results/2026-11-26-recurrent-h100)."""
_OTHER_REGISTERS = 60
"""Registers that a thread needs besides weights and sums, as ptxas has it for sm_90."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Sizes of a call of `torch.lstm` or `torch.gru`."""

    kind: str
    batch: int
    steps: int
    inputs: int
    hidden: int
    layers: int
    directions: int

    @property
    def at_once(self) -> int:
        """Cells that one launch runs."""
        return self.layers if self.directions == 1 else 2

    @property
    def widest(self) -> int:
        """Columns of the widest input of a cell."""
        return max(self.inputs, self.directions * self.hidden if self.layers > 1 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentKnobs:
    """Knobs of the kernel; every choice computes the same layers.

    Attributes:
        units: hidden units of a thread block.
        slices: threads that share a unit's sums.
    """

    units: int
    slices: int

    def blocks(self, layers: Layers) -> int:
        """Thread blocks of one launch, all of which have to run at once."""
        return layers.at_once * layers.hidden // self.units

    def quads(self, columns: int) -> int:
        """Groups of four columns of an input or a state that a thread multiplies."""
        return -(-columns // (4 * self.slices))

    def preference(self) -> tuple[float, int]:
        """Rank among choices that fit, the least one first."""
        return abs(math.log2(self.units * self.slices / _THREADS)), self.units

    def fits(self, layers: Layers) -> bool:
        """True where all blocks run at once, and a thread's weights fit in its registers."""
        threads = self.units * self.slices
        quads = self.quads(layers.widest), self.quads(layers.hidden)
        registers = 4 * GATES[layers.kind] * sum(quads) + 4 * layers.batch + _OTHER_REGISTERS
        return (
            layers.hidden % self.units == 0
            and threads % 32 == 0
            and layers.batch <= self.slices
            and self.blocks(layers) <= MULTIPROCESSORS
            and registers <= min(255, 65536 // threads // 8 * 8)
            and layers.batch * (2 * quads[0] + quads[1]) * self.slices * 16 <= SHARED_BYTES
        )


_OPTIONS = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
"""Arguments that a kernel's function hands on to PyTorch's layers."""


class PersistentLayers(CallTemplate[Layers, RecurrentKnobs]):
    """Layers whose weights stay in registers for all time steps.

    The options of a kernel are the sizes of its layers, and the call's arguments from `has_biases` to `batch_first`.
    """

    technique = "persistent-recurrent"
    function: ClassVar = "recurrent"
    operators: ClassVar = (aten.lstm, aten.gru)
    needs_nvcc = True
    caller = "recurrent.caller.txt"
    default = RecurrentKnobs(units=4, slices=16)

    def sizes_of(self, node: fx.Node) -> Layers | None:
        """Sizes of a call on batched float32 tensors, without dropout or projections; None of another."""
        if overload(node) != "input":
            return None
        x, parameters = cast(fx.Node, node.args[0]), list(argument(node, "params"))
        draws = argument(node, "train") and float(argument(node, "dropout")) > 0
        layers, directions = int(argument(node, "num_layers")), 1 + bool(argument(node, "bidirectional"))
        each = 4 if argument(node, "has_biases") else 2
        # Projections are further weights.
        plain = len(shape(x)) == 3 and len(parameters) == layers * directions * each
        if draws or not plain or any(value(tensor).dtype != torch.float32 for tensor in (x, *parameters)):
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

    def refusal(self, sizes: Layers) -> str | None:
        """The reason why the kernel does not take these layers; None if it does."""
        if sizes.steps < LEAST_STEPS:
            return f"wanted at least {LEAST_STEPS} steps, found {sizes.steps}"
        if sizes.inputs % 4 or sizes.hidden % 4:
            return f"wanted multiples of 4, found {sizes.inputs} inputs and {sizes.hidden} hidden units"
        if sizes.at_once > MOST_CELLS:
            return f"wanted at most {MOST_CELLS} layers, found {sizes.layers}"
        if not self.alternatives(sizes):
            return "the weights do not fit in the registers of one GPU's blocks, or there are too many sequences"
        return None

    def alternatives(self, sizes: Layers) -> tuple[RecurrentKnobs, ...]:
        """Knobs worth a look for these layers: first those with blocks nearest to `_THREADS`, of these the smallest."""
        choices = itertools.product((2, 4, 8, 16, 32), (32, 16))
        every = (RecurrentKnobs(units=units, slices=slices) for units, slices in choices)
        fitting = [knobs for knobs in every if knobs.fits(sizes)]
        return tuple(sorted(fitting, key=RecurrentKnobs.preference)[:4])

    def options(self, node: fx.Node, sizes: Layers) -> tuple[Any, ...]:
        """Sizes and the call's arguments. Without dropout both modes compute the same, so that they share a function."""
        return sizes, tuple(name != "train" and argument(node, name) for name in _OPTIONS)

    def module(self, knobs: RecurrentKnobs) -> str:
        """Text of a module that defines `Recurrent`; it is the same for all knobs."""
        cuda = raw_literal(kernel_text("recurrent_device.cu", "recurrent.cu", "recurrent_launch.cu"))
        library = kernel_text("cuda_library.txt")
        return kernel_text("recurrent.cuda.txt", most_cells=MOST_CELLS, cuda=cuda, library=library)

    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text."""
        layers, options = kernel.options
        blocks = tuple((cuda_head(layers, knobs), knobs.blocks(layers)) for knobs in kernel.choices)
        return {"kind": layers.kind, "blocks": blocks, "hidden": layers.hidden, "options": options}

    def outputs(self, kernel: TemplateKernel, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The outputs and the last states, of fake tensors."""
        (x, states, _), (layers, options) = inputs, kernel.options
        outputs = x.new_empty((layers.steps, layers.batch, layers.directions * layers.hidden))
        given = (states,) if isinstance(states, torch.Tensor) else tuple(states)
        return (outputs.transpose(0, 1) if options[-1] else outputs, *map(torch.empty_like, given))

    def insert(self, editor: Editor, node: fx.Node, sizes: Layers, kernel: TemplateKernel) -> None:
        """Put a call of the kernel, and picks of its outputs, in the place of a node and its own picks."""
        given = arguments(node)
        call = editor.call(node, kernel, given["input"], given["hx"], given["params"])
        for user in list(node.users):
            editor.replace(user, editor.pick(user, call, cast(int, user.args[1])))


def cuda_head(layers: Layers, knobs: RecurrentKnobs) -> str:
    """Definitions that come before the kernel for these layers."""
    narrow = layers.inputs if layers.directions == 2 else layers.widest
    defined = {
        "GATES": GATES[layers.kind],
        "HIDDEN": layers.hidden,
        "BATCH": layers.batch,
        "UNITS": knobs.units,
        "SLICES": knobs.slices,
        "NARROW_QUADS": knobs.quads(narrow),
        "WIDE_QUADS": knobs.quads(layers.widest),
    }
    return f"constexpr int {', '.join(f'{name} = {value}' for name, value in defined.items())};\n"


RECURRENT = PersistentLayers()
