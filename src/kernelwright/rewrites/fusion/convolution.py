"""Prints kernels that compute a convolution, and what follows it point by point, over all channels or over windows.

A convolution template computes the sums of a tile, which is a stretch of output positions by some of the output's channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

from kernelwright.rewrites.fusion.program import POOLERS, ROW, Dim, LoopProgram, Signature
from kernelwright.rewrites.fusion.tiles import Statements
from kernelwright.rewrites.fusion.triton import TritonKernel
from kernelwright.rewrites.rules.convolution import Geometry
from kernelwright.rewrites.templates.base import block
from kernelwright.rewrites.templates.convolution import (
    TILED,
    ConvolutionOperands,
    ConvolutionSizes,
    ConvolutionTemplate,
    for_both,
    side_by_side,
)

WHOLE_CHANNELS = "channels-in-tile"
"""Technique: a convolution's tile has all channels of its positions, which the same kernel reduces."""
POOLED_TILES = "pool-in-tile"
"""Technique: the kernel of a convolution pools what it computes, place by place of each window."""
NAMES = ("POINTS", "CHANNELS", "LENGTH")
"""Names of the parts of a tile."""


class ConvolutionKernel(TritonKernel):
    """A Triton kernel of a convolution with what follows, and its launcher."""

    def __init__(
        self,
        name: str,
        program: LoopProgram,
        signature: Signature,
        strides: tuple[tuple[int, ...], ...],
        template: ConvolutionTemplate,
    ) -> None:
        (step,) = [step for step in program.steps if step.name == "convolution"]
        places = [list(program.loads).index(int(item)) for item in step.operands]
        self.given = [signature.loads[place][0] for place in places]
        """Arguments that hold the inputs and the weights."""
        self.template = template
        result = program.pooled.before if program.pooled else program.logical
        self.sizes = ConvolutionSizes(
            cast(Geometry, program.convolution), result, program.logical if program.pooled else None
        )
        (source, weight), laid_out = self.given, list(strides)
        if [argument for argument, _ in signature.loads].count(weight) == 1:
            laid_out[weight] = template.weight_strides(self.sizes, strides[weight])
        super().__init__(name, program, signature, tuple(laid_out))
        self.helpers = template.helpers
        inputs, weights = map(self._tensor, places)
        self.operands = ConvolutionOperands(inputs, weights, laid_out[source], laid_out[weight])

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what it does beyond fusing operators."""
        reduces = (WHOLE_CHANNELS,) if self.program.reduced else ()
        return (TILED, self.template.technique, *reduces, *((POOLED_TILES,) if self.program.pooled else ()))

    def _stored_at(self, pointer: str) -> str:
        geometry = self.sizes.geometry
        phased = geometry.transposed and geometry.stride[-1] > 1 and self.program.pooled is None
        return side_by_side(pointer, apart=phased)

    def _index_type(self) -> str:
        return "tl.int64" if self.template.is_far(self.sizes) else super()._index_type()

    def _printed(self) -> str:
        sizes, template, name = self.sizes, self.template, self.__name__
        pooled, steps, rank = self.program.pooled, self.sizes.steps, self.sizes.rank
        # Phases are tasks of their own; a tile of windows has them all.
        apart = [] if pooled else [dim for dim, step in enumerate(steps) if step > 1]
        masks = {dim: "in_channels" if dim == 1 else "in_points" for dim in range(rank + 2)}
        statements = Statements(self, 0, "in_tile", masks)
        after, sums = statements.steps(), template.sums(sizes, self.operands)
        computed = self._at_each_place([*sums, *statements.inner]) if pooled else [*sums, *self._indices()]
        body = [*self._task(apart), *computed, "in_tile = in_points & in_channels", *after]
        knobs, parts = f"KNOBS_{name.upper()}", [f"{name.upper()}_{part}" for part in NAMES]
        choices = template.alternatives(sizes)
        if pooled:  # places of a window take as many registers again as those of a tap
            tiles = ((max(64, points // 2), *rest) for points, *rest in choices["tile"])
            choices |= {"tile": (*dict.fromkeys(tiles), choices["tile"][0])}
        constants = [f"{part}: tl.constexpr" for part in (*NAMES, "TF32")]
        copies = sizes.groups * math.prod(steps[dim] for dim in apart)
        grid = f"-(-{sizes.positions} // {parts[0]}) * -(-{sizes.outputs} // {parts[1]}) * {copies}"
        stages = template.stages(f'{knobs}["stages"][0]')
        launched = f'{grid}, {knobs}["warps"][0], {", ".join(parts)}, tf32, num_stages={stages}'
        further = ["*prepared"] if template.prepared else []
        source, weight = (self.given_names[number] for number in self.given)
        call = ", ".join([*self.given_names, *further, *self.written])
        lines = [
            f"{knobs} = {choices!r}",
            f'{", ".join(parts)} = {knobs}["tile"][0]',
            "",
            "",
            *self._definition("kernel", [*self.inputs, *template.prepared, *self.outputs, *constants], body),
            *template.preparation(name, sizes, self.operands),
            f"_{name}_launch = {for_both(f'_Launch(_{name}_kernel, {launched})')}",
            "",
            "",
            *self._launcher(
                [
                    *template.prepare(name, sizes, source, weight),
                    f"_{name}_launch[{template.allowed(sizes)}]({call})",
                ]
            ),
        ]
        return "\n".join(lines)

    def _task(self, apart: Sequence[int]) -> list[str]:
        """Statements of a tile's channels, group, phases and positions."""
        sizes, steps = self.sizes, self.sizes.steps
        groups, outputs, letter = sizes.groups, sizes.outputs, "q" if self.program.pooled else "u"
        lines = [
            f"task = tl.program_id(0).to({self._index_type()})",
            f"blocks = ({outputs} + CHANNELS - 1) // CHANNELS",
            "channel = (task % blocks) * CHANNELS + tl.arange(0, CHANNELS)[None, :]",
            "task = task // blocks",
            *([f"group = task % {groups}", f"task = task // {groups}"] if groups > 1 else ["group = 0"]),
            f"i1 = group * {outputs} + channel",
        ]
        for dim in reversed(apart):
            lines += [f"phase{dim} = task % {steps[dim]}", f"task = task // {steps[dim]}"]
        dims = [Dim(size, ()) for size in (sizes.result[0], *sizes.across)]
        return [
            *lines,
            "point = task * POINTS + tl.arange(0, POINTS)[:, None]",
            f"in_points, in_channels = point < {sizes.positions}, channel < {outputs}",
            *self.template.within(sizes),
            *self._split(dims, ["i0", *(f"{letter}{dim}" for dim in range(sizes.rank))], "point"),
        ]

    def _indices(self) -> list[str]:
        """Statements of an output's index along each dimension, out of its unit and phase."""
        lines = []
        for dim, (size, step) in enumerate(zip(self.sizes.result[2:], self.sizes.steps, strict=True)):
            lines.append(f"i{dim + 2} = u{dim}" + (f" * {step} + phase{dim}" if step > 1 else ""))
            lines += [f"in_points = in_points & (i{dim + 2} < {size})"] if size % step else []
        return lines

    def _at_each_place(self, body: Sequence[str]) -> list[str]:
        """A loop over the places of each point's window around what is computed at one; `best` is what comes of them."""
        pooled = self.program.pooled
        assert pooled is not None
        (index,) = (index for index, step in enumerate(self.program.steps) if step.name in POOLERS)
        operand = self.program.steps[index].operands[0]
        is_row = isinstance(operand, int) and self.program.levels()[operand] == ROW
        neutral = self.neutral[POOLERS[self._name_of(index)]]
        places, rest = [], "spot"
        for dim, (width, step) in reversed(list(enumerate(zip(pooled.window, self.sizes.steps, strict=True)))):
            places += [f"spot{dim} = {rest} % {width}", f"left{dim} = {rest} // {width}"]
            rest = f"left{dim}"
            if step > 1:
                places += [f"phase{dim} = spot{dim} % {step}"]
                places += [f"u{dim} = q{dim} * {width // step} + spot{dim} // {step}"]
            else:
                places += [f"u{dim} = q{dim} * {width} + spot{dim}"]
        return [
            f"best = tl.full([POINTS, {1 if is_row else 'CHANNELS'}], {neutral}, tl.float32)",
            *block(f"for spot in range(0, {math.prod(pooled.window)}):", itertools.chain(places, body)),
            *(f"i{dim + 2} = q{dim}" for dim in range(self.sizes.rank)),
        ]
