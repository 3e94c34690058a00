"""Runs layers of an LSTM or a GRU in one kernel for all time steps: a template that emits CUDA C++ and its caller.

cuDNN launches some kernels for each step, and each reads the weights again. Here every thread block keeps its part of the
weights in registers for the whole sequence, and blocks exchange hidden states through memory. The layers of a stack follow
one another by a step; those of a bidirectional one come one after another, with both directions at once. Sums are float32's,
where cuDNN may take TF32. Known as persistent recurrent networks (Diamos et al., 2016).

The emitted module imports torch and defines `Recurrent`. It needs nvcc, and a GPU of compute capability 8.0 or more with as
many multiprocessors as the kernel has blocks. Where one of these conditions, or a tensor's layout, does not hold, PyTorch's
own layers run. This module itself imports the standard library alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from kernelwright.rewrites.templates.text import kernel_text, raw_literal

GATES = {"lstm": 4, "gru": 3}
MULTIPROCESSORS = 132
"""Of an H100 or H200: as many blocks run at once."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a thread block can have on an H100 or H200."""
MOST_CELLS = 24
"""Directions of layers in one launch, as many as `recurrent.cu` has."""
LEAST_STEPS = 16
"""Time steps below which reading the weights once saves little. Our choice."""
_THREADS = 256
"""Of a block. In smaller blocks each thread asks for more of the others' states: on an H100 a bidirectional GRU takes 7.7 ms
in blocks of 256 threads, and 23.8 in blocks of 64 (results/2026-11-26-recurrent-h100)."""
_OTHER_REGISTERS = 60
"""What a thread needs beside weights and sums, as ptxas has it for sm_90."""


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

    def fits(self, layers: Layers) -> bool:
        """Whether all blocks run at once, and a thread's weights fit in its registers."""
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


def refusal(layers: Layers) -> str | None:
    """Why the template does not take these layers; none if it does."""
    if layers.steps < LEAST_STEPS:
        return f"wanted at least {LEAST_STEPS} steps, found {layers.steps}"
    if layers.inputs % 4 or layers.hidden % 4:
        return f"wanted multiples of 4, found {layers.inputs} inputs and {layers.hidden} hidden units"
    if layers.at_once > MOST_CELLS:
        return f"wanted at most {MOST_CELLS} layers, found {layers.layers}"
    if not alternatives(layers):
        return "the weights do not fit in the registers of one GPU's blocks, or there are too many sequences"
    return None


def alternatives(layers: Layers) -> tuple[RecurrentKnobs, ...]:
    """Knobs worth a look for these layers: first those with blocks nearest to `_THREADS`, of these the smallest."""
    every = itertools.product((2, 4, 8, 16, 32), (32, 16))
    fitting = [one for one in (RecurrentKnobs(units=units, slices=slices) for units, slices in every) if one.fits(layers)]
    return tuple(sorted(fitting, key=lambda one: (abs(math.log2(one.units * one.slices / _THREADS)), one.units)))[:4]


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


def emit() -> str:
    """Text of a module that defines `Recurrent`."""
    cuda = raw_literal(kernel_text("recurrent_device.cu", "recurrent.cu", "recurrent_launch.cu"))
    library = kernel_text("cuda_library.txt")
    return kernel_text("recurrent.cuda.txt", most_cells=MOST_CELLS, cuda=cuda, library=library)
