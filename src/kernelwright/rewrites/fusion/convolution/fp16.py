"""Prints convolutions as products of float16 that has as many bits as TF32, and what follows in the same kernel.

A pass before the kernel lays operands out, with channels side by side (`templates.fp16_convolution`). Those of a task of 16
bits stay what they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from kernelwright.rewrites.fusion.convolution.kernel import ALLOWED, ConvolutionKernel, for_both, indices, phase_lines, wide
from kernelwright.rewrites.fusion.groups import Signature
from kernelwright.rewrites.fusion.program import ROUNDED
from kernelwright.rewrites.fusion.windows import FP16_CONVOLUTION, TILED, Phase, phases_of
from kernelwright.rewrites.graph import contiguous_strides, shape, value
from kernelwright.rewrites.rules.convolution import Geometry
from kernelwright.rewrites.templates import fp16_convolution


class Fp16ConvolutionKernel(ConvolutionKernel):
    """The same with float16 operands, which lie side by side for tensor cores; float32 ones where TF32 is not allowed."""

    helpers: ClassVar[str] = fp16_convolution.emit()
    named: ClassVar = (TILED, FP16_CONVOLUTION)
    prepared: ClassVar = ("pixels", "pixel_largest", "filters", "filter_largest")

    def _laid_out(
        self, found: Geometry, signature: Signature, strides: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[int, ...], ...]:
        self.source_strides = strides[self.given[0]]
        return strides

    def _index_type(self) -> str:
        found = cast(Geometry, self.program.convolution)
        laid_out = shape(found.source)[0] * math.prod(self._edges(found)[1]) * self._each(found) * found.groups
        return "tl.int64" if laid_out >= 1 << 31 else super()._index_type()

    def _within(self, positions: int) -> list[str]:
        return [f"point = tl.minimum(point, {positions - 1})"]

    def _choices(self, outputs: int, *, whole: bool, long_steps: bool) -> dict[str, tuple[Any, ...]]:
        found = cast(Geometry, self.program.convolution)
        taps = math.prod(_most_taps([phases_of(found, dim) for dim in range(len(found.kernel))]))
        return fp16_convolution.choices(wide(outputs), self._each(found), taps, transposed=found.transposed)

    def _stages(self, wanted: str) -> str:
        return f"{wanted} if tf32 else 2"  # float32 operands take twice the shared memory

    def _preparation(self, found: Geometry) -> list[str]:
        rank, (images, channels, *sizes) = len(found.kernel), shape(found.source)
        lows, padded = self._edges(found)
        ones, strides = (1,) * (3 - rank), self.source_strides
        spatial = ((0,) * (3 - rank) + tuple(lows), (*ones, *padded), (*strides[:2], *(0 for _ in ones), *strides[2:]))
        outputs = shape(found.weight)[1] if found.transposed else shape(found.weight)[0] // found.groups
        given = [images, channels // found.groups, self._each(found), found.groups, (*ones, *sizes), *spatial]
        given += [outputs, math.prod(found.kernel), found.transposed]
        name, text = f"_{self.__name__}_prepared", ", ".join(map(repr, given))
        if self.is_short:  # laid out as they are
            return [f"{name} = {{True: _Prepared(False, {text})}}", f"{name}[True].dtype = {value(found.source).dtype}"]
        return [f"{name} = {for_both(f'_Prepared(tf32, {text})')}"]

    def _call(self, names: list[str], outs: list[str]) -> list[str]:
        source, weight = (names[number] for number in self.given)
        name, allowed = self.__name__, "True" if self.is_short else ALLOWED
        return [
            f"prepared = _{name}_prepared[{allowed}]({source}, {weight}.contiguous())",
            f"_{name}_launch[{allowed}]({', '.join([*names, '*prepared', *outs])})",
        ]

    @property
    def is_short(self) -> bool:
        """Whether the task's own numbers have 16 bits."""
        return value(cast(Geometry, self.program.convolution).source).dtype in ROUNDED

    @staticmethod
    def _each(found: Geometry) -> int:
        """Channels of a group, filled up so that each position begins where a load may."""
        return fp16_convolution.filled(shape(found.source)[1] // found.groups)

    def _edges(self, found: Geometry) -> tuple[list[int], list[int]]:
        """Zeros before the inputs along each dimension, and its size with those before and after."""
        ends = self._ends(found)
        lows = [max(0, -least) for least, _ in ends]
        sizes = zip(lows, shape(found.source)[2:], ends, strict=True)
        return lows, [low + max(size, most + 1) for low, size, (_, most) in sizes]

    def _products(self, found: Geometry, positions: int) -> list[str]:
        rank, each = len(found.kernel), self._each(found)
        lows, padded = self._edges(found)
        strides = contiguous_strides((shape(found.source)[0], *padded, each * found.groups))
        phases = [phases_of(found, dim) for dim in range(rank)]
        place = [f"(at{dim} + {lows[dim]}) * {strides[dim + 1]}" for dim in range(rank)]
        return [
            *phase_lines(phases),
            f"begin = pixels + ({' + '.join([f'i0 * {strides[0]}', f'group * {each}', *place])})",
            f"column = filters + i1 * {math.prod(found.kernel) * each}",
            "acc = tl.zeros([POINTS, CHANNELS], tl.float32)",
            *_Sums(found.kernel, each, phases, strides[1:-1]).lines(),
            *(() if self.is_short else _SCALED_BACK),
        ]


_SCALED_BACK = (
    "if TF32:",
    "    acc *= _power_of_two(-_shift_of(tl.load(filter_largest + i1, mask=in_channels, other=0)))",
    "    acc *= _power_of_two(-_shift_of(tl.load(pixel_largest + i0)))",
)
_MULTIPLIED = (
    "if TF32:",
    "    acc = tl.dot(inputs, weights, acc)",
    "else:",
    '    acc += tl.dot(inputs, weights, input_precision="tf32x3")',
)


@dataclass(frozen=True)
class _Sums:
    """Statements that add up a tile's products in `acc`."""

    kernel: tuple[int, ...]
    each: int
    """Values of a position's channels."""
    phases: Sequence[Sequence[Phase]]
    """Those along each dimension."""
    strides: Sequence[int]
    """How far positions are from each other along each dimension, in values."""

    def lines(self) -> list[str]:
        """The statements, by how many channels there are."""
        if fp16_convolution.at_once(self.each, math.prod(self.counts)):
            return self._at_once()
        loop = self._loop_over_taps() if self.each % fp16_convolution.LONGEST == 0 else self._loop_over_values()
        return [loop[0], *(f"    {line}" for line in (*loop[1:], *_MULTIPLIED))]

    @property
    def counts(self) -> list[int]:
        """The most taps of a phase along each dimension."""
        return _most_taps(self.phases)

    @property
    def apart(self) -> list[int]:
        """How far taps are from each other along each dimension, in values."""
        return [phases[0].move * stride for phases, stride in zip(self.phases, self.strides, strict=True)]

    def _of_inputs(self, tap: str) -> str:
        """Place of a tap's values relative to a position's first value."""
        return " + ".join(f"{tap}{dim} * {apart}" for dim, apart in enumerate(self.apart))

    def _of_weights(self, tap: str) -> str:
        """Place of a tap's values in an output channel's filter."""
        taps = contiguous_strides(self.kernel)
        return " + ".join(
            f"(first{dim} + {tap}{dim} * {phases[0].step}) * {taps[dim] * self.each}"
            for dim, phases in enumerate(self.phases)
        )

    def _loop_over_taps(self) -> list[str]:
        """Each step has some channels of one tap."""
        each = self.each
        return [
            f"for step in range(0, taps * ({each} // LENGTH)):",
            *indices("tap", f"step // ({each} // LENGTH)", self.kernel),
            f"channels = (step % ({each} // LENGTH)) * LENGTH + tl.arange(0, LENGTH)",
            f"inputs = tl.load(begin + (channels[None, :] + {self._of_inputs('tap')}))",
            f"weights = tl.load(column + (channels[:, None] + {self._of_weights('tap')}), mask=in_channels, other=0.0)",
        ]

    def _loop_over_values(self) -> list[str]:
        """Each step has channels of several taps."""
        each = self.each
        loop = [f"for start in range(0, taps * {each}, LENGTH):"]
        for letter, index in (("r", "[None, :]"), ("c", "[:, None]")):
            loop += [f"{letter} = start + tl.arange(0, LENGTH){index}"]
            loop += [*indices(f"{letter}_tap", f"{letter} // {each}", self.kernel)]
        r, c = self._of_inputs("r_tap"), self._of_weights("c_tap")
        return [
            *loop,
            f"inputs = tl.load(begin + (r % {each} + {r}), mask=r < taps * {each}, other=0.0)",
            f"weights = tl.load(column + (c % {each} + {c}), mask=(c < taps * {each}) & in_channels, other=0.0)",
        ]

    def _at_once(self) -> list[str]:
        """No loop: what a position's sum reads is loaded at constant distances from one address."""
        each, places = self.each, list(itertools.product(*map(range, self.counts)))
        step = fp16_convolution.step_at_once(each, len(places))
        varying = [dim for dim, phases in enumerate(self.phases) if len({one.taps for one in phases}) > 1]
        lines = [
            *(f"each{dim} = {count}" for dim, count in enumerate(self.counts)),
            f"begin += tl.arange(0, {each})[None, :]",
        ]
        tests = [f"(c < {len(places) * each})", "in_channels", *(f"(c_tap{dim} < taps{dim})" for dim in varying)]
        place = f"c % {each} + {self._of_weights('c_tap')}"
        for first in range(0, len(places), step // each):
            lines += [
                *_inputs_at_once(places[first : first + step // each], self.apart, varying, each, step),
                f"c = {first * each} + tl.arange(0, {step})[:, None]",
                *indices("c_tap", f"c // {each}", self.kernel),
                f"weights = tl.load(column + ({place}), mask={' & '.join(tests)}, other=0.0)",
                *_MULTIPLIED,
            ]
        return lines


def _most_taps(phases: Sequence[Sequence[Phase]]) -> list[int]:
    """The most taps of a phase along each dimension."""
    return [max(one.taps for one in along) for along in phases]


def _inputs_at_once(
    places: Sequence[tuple[int, ...]], apart: Sequence[int], varying: Sequence[int], each: int, step: int
) -> list[str]:
    """Statements that load what positions read at these taps and join it to rows of `step` values, zeros at their ends.

    Neighbouring threads have neighbouring positions. Each load is at a constant distance from a position's first value.

    Args:
        places: Index of each tap along each dimension.
        apart: How far taps are from each other along each dimension, in values.
        varying: Dimensions along which a phase may have fewer taps.
        each: Values at a tap.
        step: Values in a row, a power of two.
    """
    lines, count = [], step // each
    for number, place in enumerate(places):
        distance = sum(tap * far for tap, far in zip(place, apart, strict=True))
        tests = " & ".join(f"({place[dim]} < taps{dim})" for dim in varying)
        masked = f", mask={tests}, other=0.0" if tests else ""
        lines.append(f"x{number} = tl.load(begin + {distance}{masked})")
    lines += [f"x{number} = tl.zeros_like(x0)" for number in range(len(places), count)]
    near = 1
    while near < count:
        lines += [f"x{number} = tl.join(x{number}, x{number + near})" for number in range(0, count, 2 * near)]
        near *= 2
    # Each join adds a dimension after the others; the first one is between neighbouring taps.
    order = ", ".join(map(str, (0, *range(count.bit_length(), 0, -1))))
    return [*lines, f"inputs = tl.reshape(tl.permute(x0, ({order})), [POINTS, {step}])"]
