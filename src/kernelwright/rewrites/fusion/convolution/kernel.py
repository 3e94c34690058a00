"""Prints convolutions as products of tiles on tensor cores, in cuDNN's precision, and what follows in the same kernel.

A tile is a stretch of output positions by some of the output's channels. A transposed convolution is computed by phases: the
outputs at one residue of the stride are an ordinary convolution with some of the taps.

Where PyTorch lets cuDNN use TF32, which is its default, so does the kernel. Where PyTorch does not, each operand is split
into two TF32 numbers, three products of which are added (3xTF32, known from CUTLASS), each step to a float32 accumulator.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from kernelwright.rewrites.fusion.groups import Signature
from kernelwright.rewrites.fusion.nest import Dim
from kernelwright.rewrites.fusion.program import POOLERS, ROW, LoopProgram, Pooled
from kernelwright.rewrites.fusion.triton import TritonKernel
from kernelwright.rewrites.fusion.window_kernel import Statements
from kernelwright.rewrites.fusion.windows import (
    LEAST_SUM,
    MOST_CHANNELS,
    POOLED_TILES,
    TILED,
    WHOLE_CHANNELS,
    Phase,
    phases_of,
)
from kernelwright.rewrites.graph import contiguous_strides, numel, shape
from kernelwright.rewrites.rules.convolution import Geometry


class ConvolutionKernel(TritonKernel):
    """A Triton kernel that computes a convolution and what follows it, point by point or over all channels, and its
    launcher."""

    names: ClassVar = ("POINTS", "CHANNELS", "LENGTH")
    named: ClassVar[tuple[str, ...]] = (TILED,)
    """Techniques of all of its kernels."""
    prepared: ClassVar[tuple[str, ...]] = ()
    """Further arguments of the kernel, which are made in each call."""

    def __init__(
        self,
        name: str,
        program: LoopProgram,
        signature: Signature,
        strides: tuple[tuple[int, ...], ...],
    ) -> None:
        found, (tiled,) = cast(Geometry, program.convolution), [step for step in program.steps if step.name == "convolution"]
        self.given = [signature.loads[list(program.loads).index(int(item))][0] for item in tiled.operands]
        """Arguments that hold the inputs and the weights."""
        super().__init__(name, program, signature, self._laid_out(found, signature, strides))

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what it does beyond fusing operators."""
        reduces = (WHOLE_CHANNELS,) if self.program.reduced else ()
        return (*self.named, *reduces, *((POOLED_TILES,) if self.program.pooled else ()))

    def _laid_out(
        self, found: Geometry, signature: Signature, strides: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[int, ...], ...]:
        """Strides that the kernel wants its arguments to have."""
        self.by_taps = shape(found.source)[1] // found.groups % LEAST_SUM == 0
        """Whether a step of the sums has one tap, whose place is one number for all of them."""
        (first, number), laid_out = self.given, list(strides)
        arguments = [argument for argument, _ in signature.loads]
        if self.by_taps and arguments.count(number) == 1 and 1 not in strides[number][:2]:
            # A step reads one tap of many channels and outputs, and in weights with several taps none of these are adjacent:
            # each call first lays outputs side by side.
            size, outputs = shape(found.weight), 1 if found.transposed else 0
            laid_out[number] = _dense_strides(size, (outputs, 1 - outputs, *range(2, len(size))))
        self.source_strides, self.weight_strides = laid_out[first], laid_out[number]
        return tuple(laid_out)

    def _stored_at(self, pointer: str) -> str:
        found = cast(Geometry, self.program.convolution)
        phased = found.transposed and found.stride[-1] > 1 and self.program.pooled is None
        return _side_by_side(pointer, apart=phased)

    def _index_type(self) -> str:
        large = numel(cast(Geometry, self.program.convolution).source) >= (1 << 31) - (1 << 25)
        return "tl.int64" if large else super()._index_type()

    def _units(self, found: Geometry) -> list[int]:
        """Positions along each spatial dimension that a phase has at most."""
        sizes = self.program.pooled.before if self.program.pooled else self.program.logical
        strides = found.stride if found.transposed else (1,) * len(found.kernel)
        return [-(-size // stride) for size, stride in zip(sizes[2:], strides, strict=True)]

    def _ends(self, found: Geometry) -> list[tuple[int, int]]:
        """First and last place of the inputs that is read along each dimension; beyond their edges there are zeros."""
        ends = []
        for dim, units in enumerate(self._units(found)):
            places = [
                one.place + tap * one.move + unit
                for one in phases_of(found, dim)
                for tap, unit in itertools.product((0, one.taps - 1), (0, (units - 1) * one.scale))
            ]
            ends.append((min(places), max(places)))
        return ends

    def _columns(self) -> str:
        """Print a kernel whose tiles have all channels, which it also reduces."""
        return self._pointwise()

    def _pointwise(self) -> str:
        found = cast(Geometry, self.program.convolution)
        pooled, name, rank = self.program.pooled, self.__name__, len(found.kernel)
        sizes = pooled.before if pooled else self.program.logical
        strides = found.stride if found.transposed else (1,) * rank
        across = self.program.logical[2:] if pooled else self._units(found)
        positions, outputs = sizes[0] * math.prod(across), sizes[1] // found.groups
        phased = [dim for dim in range(rank) if strides[dim] > 1]
        apart = [] if pooled else phased  # whose phases are tasks of their own; a tile of windows has them all
        body = [
            f"task = tl.program_id(0).to({self._index_type()})",
            f"blocks = ({outputs} + CHANNELS - 1) // CHANNELS",
            "channel = (task % blocks) * CHANNELS + tl.arange(0, CHANNELS)[None, :]",
            "task = task // blocks",
            *([f"group = task % {found.groups}", f"task = task // {found.groups}"] if found.groups > 1 else ["group = 0"]),
            f"i1 = group * {outputs} + channel",
        ]
        for dim in reversed(apart):
            body += [f"phase{dim} = task % {strides[dim]}", f"task = task // {strides[dim]}"]
        letter = "q" if pooled else "u"
        body += [
            "point = task * POINTS + tl.arange(0, POINTS)[:, None]",
            f"in_points, in_channels = point < {positions}, channel < {outputs}",
            *self._within(positions),
            *self._split(
                [Dim(size, ()) for size in (sizes[0], *across)], ["i0", *(f"{letter}{dim}" for dim in range(rank))], "point"
            ),
        ]
        masks = {dim: "in_channels" if dim == 1 else "in_points" for dim in range(rank + 2)}
        statements = Statements(self, 0, "in_tile", masks)
        after = statements.steps()
        if pooled:
            body += self._places(pooled, strides, [*self._products(found, positions), *statements.inner])
            body += [f"i{dim + 2} = q{dim}" for dim in range(rank)]
        else:
            body += self._products(found, positions)
            for dim, (size, stride) in enumerate(zip(sizes[2:], strides, strict=True)):
                body.append(f"i{dim + 2} = u{dim}" + (f" * {stride} + phase{dim}" if stride > 1 else ""))
                body += [f"in_points = in_points & (i{dim + 2} < {size})"] if size % stride else []
        body += ["in_tile = in_points & in_channels", *after]
        inputs = shape(found.source)[1] // found.groups
        long_steps = rank == 2 and (inputs % 32 == 0 or inputs % LEAST_SUM > 0)
        knobs, declared = f"KNOBS_{name.upper()}", [f"{name.upper()}_{one}" for one in self.names]
        choices = self._choices(outputs, whole=not phased and sizes[-1] % 4 == 0, long_steps=long_steps)
        if pooled:  # places of a window take as many registers again as those of a tap
            tiles = ((max(64, points // 2), *rest) for points, *rest in choices["tile"])
            choices |= {"tile": (*dict.fromkeys(tiles), choices["tile"][0])}
        lines = [
            f"{knobs} = {choices!r}",
            f'{", ".join(declared)} = {knobs}["tile"][0]',
            "",
            "",
        ]
        constants = [f"{one}: tl.constexpr" for one in (*self.names, "TF32")]
        lines += self._definition("kernel", [*self.inputs, *self.prepared, *self.outputs, *constants], body)
        others = found.groups * math.prod(strides[dim] for dim in apart)
        grid = f"-(-{positions} // {declared[0]}) * -(-{outputs} // {declared[1]}) * {others}"
        stages = self._stages(f'{knobs}["stages"][0]')
        given = f'{grid}, {knobs}["warps"][0], {", ".join(declared)}, tf32, num_stages={stages}'
        lines += [
            *self._preparation(found),
            f"_{name}_launch = {for_both(f'_Launch(_{name}_kernel, {given})')}",
            "",
            "",
        ]
        return "\n".join([*lines, *self._launcher(self._call)])

    def _within(self, positions: int) -> list[str]:
        """Statements that keep positions beyond the last one from being read."""
        return []

    def _stages(self, wanted: str) -> str:
        """Depth of the software pipeline, by whether TF32 is allowed."""
        return wanted

    def _preparation(self, found: Geometry) -> list[str]:
        """Lines of the module that make what lays operands out before the kernel."""
        return []

    def _call(self, names: list[str], outs: list[str]) -> list[str]:
        return [f"_{self.__name__}_launch[{ALLOWED}]({', '.join([*names, *outs])})"]

    def _choices(self, outputs: int, *, whole: bool, long_steps: bool) -> dict[str, tuple[Any, ...]]:
        """Choices of tiles (positions, channels, length of a step), warps and stages, the default first."""
        channels = wide(outputs)
        # Outputs that are not stored four at a time need an address each, for which a large tile leaves no registers.
        points = 256 if channels <= 32 else 128 if channels <= 64 or whole else 64
        tiles = ((points, channels, 16), (points, channels, 32), (points // 2, channels, 32), (points // 2, channels, 16))
        if not long_steps or channels < 64:
            # For 16 channels eight warps leave a thread 16 sums. By a fit to the looks of 63 searches four warps take about
            # 0.87 of their time, which is weak evidence (t = -1.7).
            return {"tile": tiles, "warps": (4, 8) if channels == 16 else (8, 4), "stages": (3, 2, 4)}
        # On an H200 images want long steps, which volumes do not: 1.80 and 2.12 times eager, 1.09 and 0.99 with short ones.
        tiles = ((max(64, points // 2), channels, 32), tiles[1], tiles[0], tiles[3])
        return {"tile": tuple(dict.fromkeys(tiles)), "warps": (4, 8), "stages": (2, 3, 4)}

    def _places(self, pooled: Pooled, strides: Sequence[int], body: Sequence[str]) -> list[str]:
        """A loop over the places of each point's window around what is computed at one; `best` is what comes of them."""
        (index,) = (index for index, step in enumerate(self.program.steps) if step.name in POOLERS)
        operand = self.program.steps[index].operands[0]
        is_row = isinstance(operand, int) and self.program.levels()[operand] == ROW
        neutral = self.neutral[POOLERS[self._name_of(index)]]
        lines = [
            f"best = tl.full([POINTS, {1 if is_row else 'CHANNELS'}], {neutral}, tl.float32)",
            f"for spot in range(0, {math.prod(pooled.window)}):",
        ]
        inner, rest = [], "spot"
        for dim in range(len(pooled.window) - 1, -1, -1):
            width, stride = pooled.window[dim], strides[dim]
            inner += [f"spot{dim} = {rest} % {width}", f"left{dim} = {rest} // {width}"]
            rest = f"left{dim}"
            if stride > 1:
                inner += [f"phase{dim} = spot{dim} % {stride}"]
                inner += [f"u{dim} = q{dim} * {width // stride} + spot{dim} // {stride}"]
            else:
                inner += [f"u{dim} = q{dim} * {width} + spot{dim}"]
        return [*lines, *(f"    {line}" for line in (*inner, *body))]

    def _products(self, found: Geometry, positions: int) -> list[str]:
        """The tile's sums of products of inputs and weights, in `acc`, at one of so many positions."""
        rank, (tiled,) = len(found.kernel), [step for step in self.program.steps if step.name == "convolution"]
        source, weight = (self._tensor(self.load_steps.index(int(item))) for item in tiled.operands)
        every, ends = [phases_of(found, dim) for dim in range(rank)], self._ends(found)
        strides, sizes, weights = self.source_strides, shape(found.source), self.weight_strides
        lines = phase_lines(every)
        channels = sizes[1] // found.groups
        apart = every[-1][0].scale > 1 or self.program.pooled is not None
        lines += [
            f"begin = {source} + i0 * {strides[0]} + group * {channels * strides[1]}"
            + "".join(f" + at{dim} * {strides[dim + 2]}" for dim in range(rank)),
            *([f"begin = {_side_by_side('begin', apart=apart)}"] if strides[-1] == 1 else []),
            "acc = tl.zeros([POINTS, CHANNELS], tl.float32)",
        ]
        # Most shapes have whole tiles: fewer tests leave registers for loads in flight.
        tests = ["in_points"] * (positions % 512 > 0)
        if self.by_taps:
            lines += [f"blocks = ({channels} + LENGTH - 1) // LENGTH", "for step in range(0, taps * blocks):"]
            loop = indices("tap", "step // blocks", found.kernel)
            for letter, index in (("r", "[None, :]"), ("c", "[:, None]")):
                loop.append(f"{letter}_channel = (step % blocks) * LENGTH + tl.arange(0, LENGTH){index}")
            row_tap, column_tap, inside = "tap", "tap", f"(c_channel < {channels})"
            tests += [f"(r_channel < {channels})"] * (channels % 32 > 0)
        else:
            lines.append(f"for start in range(0, {channels} * taps, LENGTH):")
            loop = indices("r", "start + tl.arange(0, LENGTH)[None, :]", found.kernel)
            loop += indices("c", "start + tl.arange(0, LENGTH)[:, None]", found.kernel)
            row_tap, column_tap, inside = "r", "c", f"(c < {channels} * taps)"
            tests.append(f"(r < {channels} * taps)")
        moves = []
        for dim, phases in enumerate(every):
            move, (least, most) = phases[0].move, ends[dim]
            moves.append(f"{row_tap}{dim} * {move * strides[dim + 2]}")
            at = f"at{dim} + {row_tap}{dim} * {move}"
            tests += [f"({at} >= 0)"] * (least < 0) + [f"({at} < {sizes[dim + 2]})"] * (most >= sizes[dim + 2])
        place = f"begin + (r_channel * {strides[1]} + {' + '.join(moves)})"
        masked = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
        loop.append(f"inputs = tl.load({place}{masked})")
        if found.transposed:
            row = f"(c_channel + group * {channels}) * {weights[0]} + channel * {weights[1]}"
        else:
            row = f"c_channel * {weights[1]} + i1 * {weights[0]}"
        if not (found.transposed or self.by_taps) and weights == contiguous_strides(shape(found.weight)):
            place = f"i1 * {weights[0]} + c"
        else:
            taps = [
                f"(first{dim} + {column_tap}{dim} * {phases[0].step}) * {weights[dim + 2]}"
                for dim, phases in enumerate(every)
            ]
            place = " + ".join([row, *taps])
        loop.append(f"weights = tl.load({weight} + ({place}), mask={inside} & in_channels, other=0.0)")
        loop += [
            "if TF32:",
            '    acc = tl.dot(_to_tf32(inputs), _to_tf32(weights), acc, input_precision="tf32")',
            "else:",
            # Tensor cores cut off bits where they add to an accumulator of their own.
            '    acc += tl.dot(inputs, weights, input_precision="tf32x3")',
        ]
        return [*lines, *(f"    {line}" for line in loop)]


ALLOWED = "torch.backends.cudnn.allow_tf32"
"""Text of whether TF32 is allowed."""


def for_both(text: str) -> str:
    """A dictionary of what is made by whether TF32 is allowed."""
    return f"{{tf32: {text} for tf32 in (False, True)}}"


def wide(outputs: int) -> int:
    """Channels of a tile."""
    return max(16, min(MOST_CHANNELS, 1 << (outputs - 1).bit_length()))


def phase_lines(every: Sequence[Sequence[Phase]]) -> list[str]:
    """Statements of a tile's phase along each dimension: its taps, and the place of the inputs at which a unit begins."""
    lines = []
    for dim, phases in enumerate(every):
        for label in ("taps", "first", "place"):
            lines.append(f"{label}{dim} = {_choice([getattr(one, label) for one in phases], f'phase{dim}')}")
        # LLVM takes a division by what may be zero as proof that it is not, also where the loop would not run.
        lines.append(f"each{dim} = {_choice([max(1, one.taps) for one in phases], f'phase{dim}')}")
        scale = phases[0].scale
        lines.append(f"at{dim} = u{dim}{f' * {scale}' if scale > 1 else ''} + place{dim}")
    return [*lines, f"taps = {' * '.join(f'taps{dim}' for dim in range(len(every)))}"]


def _dense_strides(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in this order, the one with adjacent values first."""
    apart = itertools.accumulate((sizes[dim] for dim in order), operator.mul, initial=1)
    steps = dict(zip(order, apart, strict=False))
    return tuple(steps[dim] for dim in range(len(sizes)))


def _side_by_side(pointer: str, *, apart: bool) -> str:
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


def indices(name: str, text: str, kernel: Sequence[int]) -> list[str]:
    """Indices of a tap along each dimension out of a running index, of which the channel is what is left."""
    lines, rest = [f"{name} = {text}"], name
    for dim in range(len(kernel) - 1, -1, -1):
        if kernel[dim] > 1:
            lines += [f"{name}{dim} = {rest} % each{dim}", f"{name}_{dim} = {rest} // each{dim}"]
            rest = f"{name}_{dim}"
        else:
            lines.append(f"{name}{dim} = 0")
    return [*lines, f"{name}_channel = {rest}"]


def _choice(values: Sequence[int], name: str) -> str:
    """Text of one of several numbers by an index that is known at run time."""
    text = str(values[-1])
    if len(set(values)) > 1:
        for index in range(len(values) - 2, -1, -1):
            text = f"tl.where({name} == {index}, {values[index]}, {text})"
    return text
