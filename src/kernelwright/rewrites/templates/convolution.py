"""Describes convolutions for the templates that compute them as products of tiles on tensor cores.

A tile is a stretch of output positions by some of the output's channels. A transposed convolution is computed by phases: the
outputs at one residue of the stride are an ordinary convolution with some of the taps. The statements that a template prints
find a tile's indices in `i0`, `group`, `i1`, `channel` and `u0`, `u1`, ..., and leave its sums in `acc`. The same kernel
computes what follows the convolution (`fusion.convolution`).

The first of these multiplies the operands in cuDNN's precision, where they lie. The kernel uses TF32 if PyTorch
lets cuDNN use it, which is the default. Otherwise each operand is split into two TF32 numbers, three products of which
are added (3xTF32, known from CUTLASS), each step to a float32 accumulator.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from kernelwright.rewrites.graph import contiguous_strides, numel, shape, value
from kernelwright.rewrites.rules.convolution import Geometry
from kernelwright.rewrites.templates.base import block

TILED = "tiled-convolution"
"""Technique: convolutions are computed by Triton kernels, together with what follows."""
MOST_CHANNELS = 128
"""Channels of the widest tile."""
LEAST_SUM = 16
"""Least step of the sums: tensor cores multiply zeros beyond shorter ones."""
BYTES_PER_S = 4e12
"""Bytes that an H200's memory moves each second."""
CUDNN_PASSES = 2.5
"""How often cuDNN moves each byte of a convolution in this layout, which its tensor cores want transposed."""
CUDNN_FLOPS = {1: 2.5e14, 2: 2.5e14, 3: 2e13}
"""cuDNN's rate by the number of spatial dimensions. The times that KernelBench publishes for an H100 are 2 to 41 TFLOP/s for
its eleven single convolutions of volumes, 18 in the median."""
READS_PER_S = {True: 1.5e12, False: 6e11}
"""Inputs that these kernels gather each second, with the arithmetic of their places: where channels fill steps, or else."""
LEAST_OUTPUTS, BRIEF_SUM = 1 << 17, 256
"""Points of an output below which a few tiles have all sums to themselves, unless the sums are no longer than this: then the
kernel takes less time than cuDNN takes on the host. Our choice."""
ALLOWED = "torch.backends.cudnn.allow_tf32"
"""Text of the setting that allows TF32 for convolutions."""


class Phase(NamedTuple):
    """Taps of the outputs at one residue along a dimension: tap `j` of output unit `u` is weight `first + j * step`.

    It reads the input at `u * scale + place + j * move`.
    """

    taps: int
    first: int
    step: int
    scale: int
    place: int
    move: int


@dataclass(frozen=True)
class ConvolutionSizes:
    """Sizes of a convolution, and where its outputs read its inputs.

    Attributes:
        geometry: arguments of the call.
        result: shape of the convolution's result.
        pooled: shape of what tiles store, where they pool the result.
    """

    geometry: Geometry
    result: tuple[int, ...]
    pooled: tuple[int, ...] | None = None

    @property
    def kernel(self) -> tuple[int, ...]:
        """Taps along each dimension."""
        return self.geometry.kernel

    @property
    def rank(self) -> int:
        """Number of spatial dimensions."""
        return len(self.kernel)

    @property
    def groups(self) -> int:
        """Groups of channels that are independent of each other."""
        return self.geometry.groups

    @property
    def source(self) -> tuple[int, ...]:
        """Shape of the inputs."""
        return shape(self.geometry.source)

    @property
    def channels(self) -> int:
        """Input channels of a group."""
        return self.source[1] // self.groups

    @property
    def outputs(self) -> int:
        """Output channels of a group."""
        return self.result[1] // self.groups

    @property
    def is_short(self) -> bool:
        """True where the task's own numbers have 16 bits."""
        return value(self.geometry.source).dtype != torch.float32

    @property
    def steps(self) -> tuple[int, ...]:
        """Phases along each dimension."""
        return self.geometry.stride if self.geometry.transposed else (1,) * self.rank

    @functools.cached_property
    def phases(self) -> list[list[Phase]]:
        """The phases along each dimension; an ordinary convolution has one."""
        return [_phases(self.geometry, dim) for dim in range(self.rank)]

    @property
    def units(self) -> list[int]:
        """Positions along each dimension that a phase has at most."""
        return [-(-size // step) for size, step in zip(self.result[2:], self.steps, strict=True)]

    @property
    def across(self) -> Sequence[int]:
        """Positions of tiles along each dimension."""
        return self.pooled[2:] if self.pooled else self.units

    @property
    def positions(self) -> int:
        """Positions of all tiles of one phase and group."""
        return self.result[0] * math.prod(self.across)

    @property
    def most_taps(self) -> list[int]:
        """The most taps of a phase along each dimension."""
        return [max(phase.taps for phase in along) for along in self.phases]

    @functools.cached_property
    def ends(self) -> list[tuple[int, int]]:
        """First and last place of the inputs that is read along each dimension; beyond their edges there are zeros."""
        ends = []
        for phases, units in zip(self.phases, self.units, strict=True):
            places = [
                phase.place + tap * phase.move + unit
                for phase in phases
                for tap, unit in itertools.product((0, phase.taps - 1), (0, (units - 1) * phase.scale))
            ]
            ends.append((min(places), max(places)))
        return ends

    @property
    def widest_tile(self) -> int:
        """Channels of a tile."""
        return max(16, min(MOST_CHANNELS, 1 << (self.outputs - 1).bit_length()))

    def phase_lines(self) -> list[str]:
        """Statements of a tile's phase along each dimension: its taps, and the place of the inputs where a unit begins."""
        lines = []
        for dim, phases in enumerate(self.phases):
            for label in ("taps", "first", "place"):
                lines.append(f"{label}{dim} = {_choice([getattr(phase, label) for phase in phases], f'phase{dim}')}")
            # LLVM takes a division by what may be zero as proof that it is not, also where the loop would not run.
            lines.append(f"each{dim} = {_choice([max(1, phase.taps) for phase in phases], f'phase{dim}')}")
            scale = phases[0].scale
            lines.append(f"at{dim} = u{dim}{f' * {scale}' if scale > 1 else ''} + place{dim}")
        return [*lines, f"taps = {' * '.join(f'taps{dim}' for dim in range(self.rank))}"]

    def tap_lines(self, name: str, text: str) -> list[str]:
        """Indices of a tap along each dimension out of a running index, of which the channel is what is left."""
        lines, rest = [f"{name} = {text}"], name
        for dim in range(self.rank - 1, -1, -1):
            if self.kernel[dim] > 1:
                lines += [f"{name}{dim} = {rest} % each{dim}", f"{name}_{dim} = {rest} // each{dim}"]
                rest = f"{name}_{dim}"
            else:
                lines.append(f"{name}{dim} = 0")
        return [*lines, f"{name}_channel = {rest}"]

    def weight_terms(self, tap: str, strides: Sequence[int]) -> list[str]:
        """Terms of a tap's place in a filter, by the strides of its dimensions."""
        return [
            f"(first{dim} + {tap}{dim} * {phases[0].step}) * {stride}"
            for dim, (phases, stride) in enumerate(zip(self.phases, strides, strict=True))
        ]


def _phases(geometry: Geometry, dim: int) -> list[Phase]:
    kernel, stride, padding, dilation = (
        item[dim] for item in (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    )
    if not geometry.transposed:
        return [Phase(kernel, 0, 1, stride, -padding, dilation)]
    phases = []
    common = math.gcd(stride, dilation)
    for residue in range(stride):
        fitting = (tap for tap in range(stride // common) if (residue + padding - tap * dilation) % stride == 0)
        first = next(fitting, kernel)
        count = len(range(first, kernel, stride // common))
        place = (residue + padding - first * dilation) // stride if count else 0
        phases.append(Phase(count, first, stride // common, 1, place, -dilation // common))
    return phases


def _choice(values: Sequence[int], name: str) -> str:
    """Text of one of several numbers by an index that is known at run time."""
    text = str(values[-1])
    if len(set(values)) > 1:
        for index in range(len(values) - 2, -1, -1):
            text = f"tl.where({name} == {index}, {values[index]}, {text})"
    return text


@dataclass(frozen=True, slots=True)
class ConvolutionOperands:
    """Names of a kernel's inputs and weights, and their strides."""

    source: str
    weight: str
    source_strides: tuple[int, ...]
    weight_strides: tuple[int, ...]


def for_both(text: str) -> str:
    """A dictionary of what is made by whether TF32 is allowed."""
    return f"{{tf32: {text} for tf32 in (False, True)}}"


def side_by_side(pointer: str, *, apart: bool) -> str:
    """Pointers of a tile's positions, by which Triton lets neighbouring threads have neighbouring positions.

    In rows of an odd length it does not see which values are neighbours in memory, and its versions guess differently. How
    many values a thread moves at once still follows from what divides an address, and that divides the length of a row: no
    thread goes beyond a row's end.

    Args:
        pointer: Pointers, one for each position along the first dimension.
        apart: Whether positions are further apart than one value, by strides, phases or windows. A zero that the compiler
            does not know as one leaves nothing that divides an address then, and a thread moves one value at a time.
    """
    return f"tl.max_contiguous({pointer}{' + tl.program_id(1)' if apart else ''}, [POINTS, 1])"


_MULTIPLIED = (
    "if TF32:",
    '    acc = tl.dot(_to_tf32(inputs), _to_tf32(weights), acc, input_precision="tf32")',
    "else:",
    # Tensor cores cut off bits where they add to an accumulator of their own.
    '    acc += tl.dot(inputs, weights, input_precision="tf32x3")',
)


class ConvolutionTemplate:
    """Computes the sums of products of operands that stay where they are, as a part of a fused kernel.

    Attributes:
        helpers: Text of functions that the kernel needs besides those that all kernels share.
        prepared: Further arguments of the kernel, which are made in each call.
    """

    technique = TILED
    helpers: str = ""
    prepared: ClassVar[tuple[str, ...]] = ()

    def refusal(self, sizes: ConvolutionSizes) -> str | None:
        """The reason why the kernel does not take a convolution or could not be faster than cuDNN; None if it might."""
        geometry, result = sizes.geometry, math.prod(sizes.result)
        length = sizes.channels * math.prod(sizes.kernel)
        if result < LEAST_OUTPUTS and length > BRIEF_SUM:
            return f"wanted {LEAST_OUTPUTS} outputs or sums of at most {BRIEF_SUM}, found {result} and {length}"
        moved = 4 * (result + numel(geometry.source)) / BYTES_PER_S
        products = result * length / (math.prod(geometry.stride) if geometry.transposed else 1)
        gathered = products / min(128, sizes.outputs) / READS_PER_S[sizes.channels % LEAST_SUM == 0]
        # cuDNN computes transposed convolutions at half the rate of others.
        computed = 2 * products / CUDNN_FLOPS[sizes.rank] * (1 + geometry.transposed)
        if max(moved, gathered) > CUDNN_PASSES * moved + computed:
            return "cuDNN takes less time than the kernel takes for gathering its inputs"
        return None

    def alternatives(self, sizes: ConvolutionSizes) -> dict[str, tuple[Any, ...]]:
        """Choices of tiles (positions, channels, length of a step), warps and stages, the default first."""
        channels = sizes.widest_tile
        # Outputs that are not stored four at a time need an address each, for which a large tile leaves no registers.
        whole = max(sizes.steps) == 1 and sizes.result[-1] % 4 == 0
        points = 256 if channels <= 32 else 128 if channels <= 64 or whole else 64
        tiles = ((points, channels, 16), (points, channels, 32), (points // 2, channels, 32), (points // 2, channels, 16))
        long_steps = sizes.rank == 2 and (sizes.channels % 32 == 0 or sizes.channels % LEAST_SUM > 0)
        if not long_steps or channels < 64:
            # For 16 channels eight warps leave a thread 16 sums. By a fit to the looks of 63 searches four warps take about
            # 0.87 of their time, which is weak evidence (t = -1.7).
            return {"tile": tiles, "warps": (4, 8) if channels == 16 else (8, 4), "stages": (3, 2, 4)}
        # On an H200 images want long steps, which volumes do not: 1.80 and 2.12 times eager, 1.09 and 0.99 with short ones.
        tiles = ((max(64, points // 2), channels, 32), tiles[1], tiles[0], tiles[3])
        return {"tile": tuple(dict.fromkeys(tiles)), "warps": (4, 8), "stages": (2, 3, 4)}

    def sums(self, sizes: ConvolutionSizes, operands: ConvolutionOperands) -> list[str]:
        """Statements that leave a tile's sums in `acc`: a step has one tap where channels fill it, else several."""
        strides = operands.source_strides
        apart = sizes.phases[-1][0].scale > 1 or sizes.pooled is not None
        terms = [f"{operands.source} + i0 * {strides[0]} + group * {sizes.channels * strides[1]}"]
        terms += [f"at{dim} * {strides[dim + 2]}" for dim in range(sizes.rank)]
        return [
            *sizes.phase_lines(),
            f"begin = {' + '.join(terms)}",
            *([f"begin = {side_by_side('begin', apart=apart)}"] if strides[-1] == 1 else []),
            "acc = tl.zeros([POINTS, CHANNELS], tl.float32)",
            *(_over_values(sizes, operands) if sizes.channels % LEAST_SUM else _over_taps(sizes, operands)),
        ]

    def weight_strides(self, sizes: ConvolutionSizes, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides by which the outputs lie side by side.

        A step reads one tap of many channels and outputs. In weights with several taps none of these are adjacent.
        """
        if sizes.channels % LEAST_SUM or 1 in strides[:2]:
            return strides
        weight, outputs = shape(sizes.geometry.weight), 1 if sizes.geometry.transposed else 0
        return _dense_strides(weight, (outputs, 1 - outputs, *range(2, len(weight))))

    def is_far(self, sizes: ConvolutionSizes) -> bool:
        """True where positions need 64 bits. Masked positions may lie a few tiles beyond the last one."""
        return numel(sizes.geometry.source) >= (1 << 31) - (1 << 25)

    def within(self, sizes: ConvolutionSizes) -> list[str]:
        """Statements that keep positions beyond the last one from being read."""
        return []

    def stages(self, wanted: str) -> str:
        """Depth of the software pipeline, by whether TF32 is allowed."""
        return wanted

    def allowed(self, sizes: ConvolutionSizes) -> str:
        """Text of whether a call takes the kernel with operands of fewer bits than float32."""
        return ALLOWED

    def preparation(self, name: str, sizes: ConvolutionSizes, operands: ConvolutionOperands) -> list[str]:
        """Lines of the module that make what lays operands out before the kernel."""
        return []

    def prepare(self, name: str, sizes: ConvolutionSizes, source: str, weight: str) -> list[str]:
        """Statements of a call that leave the further arguments in `prepared`."""
        return []


def _over_taps(sizes: ConvolutionSizes, operands: ConvolutionOperands) -> list[str]:
    """A loop whose steps have one tap each, whose place is one number for all of them."""
    channels = sizes.channels
    body = [
        *sizes.tap_lines("tap", "step // blocks"),
        "r_channel = (step % blocks) * LENGTH + tl.arange(0, LENGTH)[None, :]",
        "c_channel = (step % blocks) * LENGTH + tl.arange(0, LENGTH)[:, None]",
        _inputs(sizes, operands, "tap", [f"(r_channel < {channels})"] * (channels % 32 > 0)),
        _weights(sizes, operands, "tap", f"(c_channel < {channels})"),
        *_MULTIPLIED,
    ]
    return [f"blocks = ({channels} + LENGTH - 1) // LENGTH", *block("for step in range(0, taps * blocks):", body)]


def _over_values(sizes: ConvolutionSizes, operands: ConvolutionOperands) -> list[str]:
    """A loop whose steps have channels of several taps."""
    total = f"{sizes.channels} * taps"
    body = [
        *sizes.tap_lines("r", "start + tl.arange(0, LENGTH)[None, :]"),
        *sizes.tap_lines("c", "start + tl.arange(0, LENGTH)[:, None]"),
        _inputs(sizes, operands, "r", [f"(r < {total})"]),
        _weights(sizes, operands, "c", f"(c < {total})"),
        *_MULTIPLIED,
    ]
    return block(f"for start in range(0, {total}, LENGTH):", body)


def _inputs(sizes: ConvolutionSizes, operands: ConvolutionOperands, tap: str, further: Sequence[str]) -> str:
    """The statement that loads a step's inputs."""
    strides, moves = operands.source_strides, []
    # Most shapes have whole tiles: fewer tests leave registers for loads in flight.
    tests = [*(["in_points"] * (sizes.positions % 512 > 0)), *further]
    for dim, (phases, (least, most)) in enumerate(zip(sizes.phases, sizes.ends, strict=True)):
        move, size = phases[0].move, sizes.source[dim + 2]
        moves.append(f"{tap}{dim} * {move * strides[dim + 2]}")
        at = f"at{dim} + {tap}{dim} * {move}"
        tests += [f"({at} >= 0)"] * (least < 0) + [f"({at} < {size})"] * (most >= size)
    masked = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
    return f"inputs = tl.load(begin + (r_channel * {strides[1]} + {' + '.join(moves)}){masked})"


def _weights(sizes: ConvolutionSizes, operands: ConvolutionOperands, tap: str, inside: str) -> str:
    """The statement that loads a step's weights."""
    strides, transposed = operands.weight_strides, sizes.geometry.transposed
    if tap == "c" and not transposed and strides == contiguous_strides(shape(sizes.geometry.weight)):
        place = f"i1 * {strides[0]} + c"
    else:
        row = f"c_channel * {strides[1]} + i1 * {strides[0]}"
        if transposed:
            row = f"(c_channel + group * {sizes.channels}) * {strides[0]} + channel * {strides[1]}"
        place = " + ".join([row, *sizes.weight_terms(tap, strides[2:])])
    return f"weights = tl.load({operands.weight} + ({place}), mask={inside} & in_channels, other=0.0)"


def _dense_strides(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in this order, the one with adjacent values first."""
    apart = itertools.accumulate((sizes[dim] for dim in order), operator.mul, initial=1)
    steps = dict(zip(order, apart, strict=False))
    return tuple(steps[dim] for dim in range(len(sizes)))


TF32 = ConvolutionTemplate()
