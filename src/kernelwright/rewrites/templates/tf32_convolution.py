"""Multiplies a convolution's operands in cuDNN's precision, where they lie: the loop that gathers them.

Where PyTorch lets cuDNN use TF32, which is its default, so does the kernel. Where PyTorch does not, each operand is split
into two TF32 numbers, three products of which are added (3xTF32, known from CUTLASS), each step to a float32 accumulator.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from kernelwright.rewrites.graph import contiguous_strides, shape
from kernelwright.rewrites.templates.convolution import (
    LEAST_SUM,
    TILED,
    ConvolutionOperands,
    ConvolutionSizes,
    ConvolutionTemplate,
    side_by_side,
)
from kernelwright.rewrites.templates.text import block

_MULTIPLIED = (
    "if TF32:",
    '    acc = tl.dot(_to_tf32(inputs), _to_tf32(weights), acc, input_precision="tf32")',
    "else:",
    # Tensor cores cut off bits where they add to an accumulator of their own.
    '    acc += tl.dot(inputs, weights, input_precision="tf32x3")',
)


class Tf32Convolution(ConvolutionTemplate):
    """Convolutions of operands that stay where they are."""

    technique = TILED

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

    def weight_strides(self, sizes: ConvolutionSizes, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides by which the outputs lie side by side.

        A step reads one tap of many channels and outputs. In weights with several taps none of these are adjacent.
        """
        if sizes.channels % LEAST_SUM or 1 in strides[:2]:
            return strides
        weight, outputs = shape(sizes.geometry.weight), 1 if sizes.geometry.transposed else 0
        return _dense_strides(weight, (outputs, 1 - outputs, *range(2, len(weight))))

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


TF32 = Tf32Convolution()
