"""Multiplies a convolution's operands as float16 that has as many bits as TF32, which each call lays out first.

A float32 convolution for which PyTorch allows TF32 multiplies numbers of eleven significant bits. So many does float16 have,
which tensor cores multiply twice as fast and memory moves twice as fast; its range is what it lacks. So each image of the
inputs and each output channel of the weights is multiplied by a power of two, which the sums are divided by again. A value
that is less than 2^-24 of the largest next to it may lose bits. Inf and NaN stay what they are.

The inputs are laid out with channels side by side and with edges of zeros, so that each step of the convolution's kernel
reads whole lines of memory, without a test, straight to where tensor cores read. They are multiplied by 2^12 as they are
laid out, while their largest magnitude is found; images that this does not suit are laid out once more. No step waits for
the host.

The operands stay float32 if PyTorch does not allow TF32. Those of a task of 16 bits stay what they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from kernelwright.rewrites.graph import contiguous_strides, value
from kernelwright.rewrites.templates.base import block, kernel_text
from kernelwright.rewrites.templates.convolution import (
    ConvolutionOperands,
    ConvolutionSizes,
    ConvolutionTemplate,
    for_both,
)

FP16_CONVOLUTION = "fp16-convolution"
"""Technique: a convolution's kernel multiplies float16 with as many bits as TF32 has, which each call lays out first."""
VECTOR = 8
"""Float16 that one load takes at most."""
LONGEST = 64
"""Length of the longest step over the channels of one position."""
MOST = 128
"""Values of a sum that are loaded before they are multiplied, where few channels make a position's values no whole step."""
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


class Fp16Convolution(ConvolutionTemplate):
    """Convolutions of operands that a pass before the kernel lays out."""

    technique = FP16_CONVOLUTION
    helpers = kernel_text("fp16_convolution.triton.txt")
    prepared: ClassVar = ("pixels", "pixel_largest", "filters", "filter_largest")

    def alternatives(self, sizes: ConvolutionSizes) -> dict[str, tuple[Any, ...]]:
        """Choices of tiles (positions, channels, length of a step), warps and stages, the default first.

        By the times of 33 convolutions on H200s (results/2026-11-28-fp16-convolutions-h200). Of the 28 that take 180 us or
        more the default took 1.03 of the time of the best of 20 to 40 choices in the geometric mean. Loads `at_once` came
        after that: with them all 12 of few channels are faster, in 0.6 to 0.98 of the time. Two programs on a multiprocessor
        are faster than one with more stages. Why a transposed convolution to 64 channels wants another tile is not known.
        """
        channels, each, taps = sizes.widest_tile, filled(sizes.channels), math.prod(sizes.most_taps)
        if at_once(each, taps):
            length = step_at_once(each, taps)
            points = (256, 128, 64) if length <= LONGEST // 2 else (64, 128, 256)
            return {"tile": tuple((count, channels, length) for count in points), "warps": (4, 8), "stages": (1,)}
        length = 1 << (taps * each - 1).bit_length()
        if each <= VECTOR:
            tiles, warps, stages = ((128, LONGEST // 2), (128, LONGEST), (64, LONGEST // 2)), (4, 8), (3, 2, 4)
        elif channels >= 128 or (channels == 64 and sizes.geometry.transposed):
            tiles, warps, stages = ((128, LONGEST), (128, LONGEST // 2), (64, LONGEST)), (4, 8), (3, 2, 4)
        elif channels == 64:
            tiles, warps, stages = ((256, LONGEST // 2), (128, LONGEST), (128, LONGEST // 2)), (8, 4), (3, 4, 2)
        else:
            tiles, warps, stages = ((128, LONGEST // 2), (256, LONGEST // 2), (128, LONGEST)), (4, 8), (4, 3, 2)
        shaped = [(points, channels, max(32, min(step, length))) for points, step in tiles]
        most = max(2, -(-taps * each // shaped[0][2]))  # stages beyond the steps would load nothing
        return {
            "tile": tuple(dict.fromkeys(shaped)),
            "warps": warps,
            "stages": tuple(dict.fromkeys(min(depth, most) for depth in stages)),
        }

    def weight_strides(self, sizes: ConvolutionSizes, strides: tuple[int, ...]) -> tuple[int, ...]:
        """The strides as they are: weights are laid out before the kernel."""
        return strides

    def is_far(self, sizes: ConvolutionSizes) -> bool:
        """True where positions need 64 bits, also those of inputs as they are laid out."""
        laid_out = sizes.source[0] * math.prod(_edges(sizes)[1]) * filled(sizes.channels) * sizes.groups
        return laid_out >= 1 << 31 or super().is_far(sizes)

    def within(self, sizes: ConvolutionSizes) -> list[str]:
        """A statement by which positions beyond the last one read what it reads."""
        return [f"point = tl.minimum(point, {sizes.positions - 1})"]

    def stages(self, wanted: str) -> str:
        """Depth of the software pipeline: float32 operands take twice the shared memory."""
        return f"{wanted} if tf32 else 2"

    def allowed(self, sizes: ConvolutionSizes) -> str:
        """Text of whether a call takes the kernel with operands of 16 bits."""
        return "True" if sizes.is_short else super().allowed(sizes)

    def preparation(self, name: str, sizes: ConvolutionSizes, operands: ConvolutionOperands) -> list[str]:
        """Lines of the module that make what lays operands out before the kernel."""
        images, _, *places = sizes.source
        lows, padded = _edges(sizes)
        missing, strides = 3 - sizes.rank, operands.source_strides
        ones, zeros = (1,) * missing, (0,) * missing
        given = [images, sizes.channels, filled(sizes.channels), sizes.groups, (*ones, *places), (*zeros, *lows)]
        given += [(*ones, *padded), (*strides[:2], *zeros, *strides[2:]), sizes.outputs, math.prod(sizes.kernel)]
        prepared, text = f"_{name}_prepared", ", ".join(map(repr, [*given, sizes.geometry.transposed]))
        if sizes.is_short:  # laid out as they are
            dtype = value(sizes.geometry.source).dtype
            return [f"{prepared} = {{True: _Prepared(False, {text})}}", f"{prepared}[True].dtype = {dtype}"]
        return [f"{prepared} = {for_both(f'_Prepared(tf32, {text})')}"]

    def prepare(self, name: str, sizes: ConvolutionSizes, source: str, weight: str) -> list[str]:
        """A statement of a call that leaves the further arguments in `prepared`."""
        return [f"prepared = _{name}_prepared[{self.allowed(sizes)}]({source}, {weight}.contiguous())"]

    def sums(self, sizes: ConvolutionSizes, operands: ConvolutionOperands) -> list[str]:
        """Statements that leave a tile's sums in `acc`, by how many channels there are."""
        each, (lows, padded) = filled(sizes.channels), _edges(sizes)
        strides = contiguous_strides((sizes.source[0], *padded, each * sizes.groups))
        place = [f"(at{dim} + {low}) * {strides[dim + 1]}" for dim, low in enumerate(lows)]
        apart = [phases[0].move * stride for phases, stride in zip(sizes.phases, strides[1:-1], strict=True)]
        if at_once(each, math.prod(sizes.most_taps)):
            products = _at_once(sizes, each, apart)
        else:
            products = _over_values(sizes, each, apart) if each % LONGEST else _over_taps(sizes, each, apart)
        return [
            *sizes.phase_lines(),
            f"begin = pixels + ({' + '.join([f'i0 * {strides[0]}', f'group * {each}', *place])})",
            f"column = filters + i1 * {math.prod(sizes.kernel) * each}",
            "acc = tl.zeros([POINTS, CHANNELS], tl.float32)",
            *products,
            *(() if sizes.is_short else _SCALED_BACK),
        ]


def filled(channels: int) -> int:
    """Channels of a group with zeros after them, so that each position begins where a load may, of 4 bytes or more.

    Three become four. Filled up to eight they were estimated behind the kernel in TF32 on 34 of 49 tasks, and more channels
    on 5 of 22 (results/kernelbench-h200/cuda-l1-fp16-1-h200 to -4-h200).
    """
    return channels + -channels % VECTOR if channels > VECTOR // 2 else max(2, 1 << (channels - 1).bit_length())


def at_once(each: int, taps: int) -> bool:
    """True where a thread loads all that a position's sum reads, at places that are constants relative to the position.

    Else a loop works out for each position and step where what the step reads is. For three channels that is half of all
    instructions.
    """
    return each <= VECTOR and taps * each <= 2 * MOST


def step_at_once(each: int, taps: int) -> int:
    """Values of a sum that are multiplied together: a power of two, of which tensor cores take 16 at least."""
    return max(16, min(MOST, 1 << (taps * each - 1).bit_length()))


def _edges(sizes: ConvolutionSizes) -> tuple[list[int], list[int]]:
    """Zeros before the inputs along each dimension, and its size with those before and after."""
    lows = [max(0, -least) for least, _ in sizes.ends]
    ends = zip(lows, sizes.source[2:], sizes.ends, strict=True)
    return lows, [low + max(size, most + 1) for low, size, (_, most) in ends]


def _of_inputs(tap: str, apart: Sequence[int]) -> str:
    """Place of a tap's values relative to a position's first value."""
    return " + ".join(f"{tap}{dim} * {far}" for dim, far in enumerate(apart))


def _of_weights(sizes: ConvolutionSizes, tap: str, each: int) -> str:
    """Place of a tap's values in an output channel's filter."""
    return " + ".join(sizes.weight_terms(tap, [stride * each for stride in contiguous_strides(sizes.kernel)]))


def _over_taps(sizes: ConvolutionSizes, each: int, apart: Sequence[int]) -> list[str]:
    """A loop whose steps have some channels of one tap each."""
    weights = _of_weights(sizes, "tap", each)
    body = [
        *sizes.tap_lines("tap", f"step // ({each} // LENGTH)"),
        f"channels = (step % ({each} // LENGTH)) * LENGTH + tl.arange(0, LENGTH)",
        f"inputs = tl.load(begin + (channels[None, :] + {_of_inputs('tap', apart)}))",
        f"weights = tl.load(column + (channels[:, None] + {weights}), mask=in_channels, other=0.0)",
        *_MULTIPLIED,
    ]
    return block(f"for step in range(0, taps * ({each} // LENGTH)):", body)


def _over_values(sizes: ConvolutionSizes, each: int, apart: Sequence[int]) -> list[str]:
    """A loop whose steps have channels of several taps."""
    inputs, weights = _of_inputs("r_tap", apart), _of_weights(sizes, "c_tap", each)
    body = [
        "r = start + tl.arange(0, LENGTH)[None, :]",
        *sizes.tap_lines("r_tap", f"r // {each}"),
        "c = start + tl.arange(0, LENGTH)[:, None]",
        *sizes.tap_lines("c_tap", f"c // {each}"),
        f"inputs = tl.load(begin + (r % {each} + {inputs}), mask=r < taps * {each}, other=0.0)",
        f"weights = tl.load(column + (c % {each} + {weights}), mask=(c < taps * {each}) & in_channels, other=0.0)",
        *_MULTIPLIED,
    ]
    return block(f"for start in range(0, taps * {each}, LENGTH):", body)


def _at_once(sizes: ConvolutionSizes, each: int, apart: Sequence[int]) -> list[str]:
    """No loop: what a position's sum reads is loaded at constant distances from one address."""
    counts = sizes.most_taps
    places = list(itertools.product(*map(range, counts)))
    step = step_at_once(each, len(places))
    varying = [dim for dim, phases in enumerate(sizes.phases) if len({phase.taps for phase in phases}) > 1]
    tests = [f"(c < {len(places) * each})", "in_channels", *(f"(c_tap{dim} < taps{dim})" for dim in varying)]
    place = f"c % {each} + {_of_weights(sizes, 'c_tap', each)}"
    lines = [
        *(f"each{dim} = {count}" for dim, count in enumerate(counts)),
        f"begin += tl.arange(0, {each})[None, :]",
    ]
    for first in range(0, len(places), step // each):
        lines += [
            *_inputs_at_once(places[first : first + step // each], apart, varying, each, step),
            f"c = {first * each} + tl.arange(0, {step})[:, None]",
            *sizes.tap_lines("c_tap", f"c // {each}"),
            f"weights = tl.load(column + ({place}), mask={' & '.join(tests)}, other=0.0)",
            *_MULTIPLIED,
        ]
    return lines


def _inputs_at_once(
    places: Sequence[tuple[int, ...]], apart: Sequence[int], varying: Sequence[int], each: int, step: int
) -> list[str]:
    """Statements that load what positions read at these taps and join it to rows of `step` values, zeros at their ends.

    Neighbouring threads have neighbouring positions. Each load is at a constant distance from a position's first value: taps
    are `apart` values from each other along each dimension. Phases may have fewer taps along the `varying` ones.
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


FP16 = Fp16Convolution()
