"""Prints programs as Triton kernels for a GPU: one tile per row, column block or stretch of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from kernelwright.rewrites.fusion.kernel import FusedKernel
from kernelwright.rewrites.fusion.nest import (
    COLUMNS,
    WHOLE,
    Dim,
    dense_nest,
    evaluated_again,
    points,
    schedule,
    stores_everything,
)
from kernelwright.rewrites.fusion.program import FULL, REDUCERS, LoopProgram

STRETCH = 1024
"""Elements of one program of a pointwise kernel."""
LOOP_TILE = 4096
"""Elements of one step of a loop along something too long for one tile."""
MOST_PARTS = 4096
"""Programs that reduce everything together; the last one combines this many partial results."""
LARGEST_TILE = 16384
"""Elements of a tile that still fit the registers of one block of threads."""

HELPERS = '''
import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Without cancellation: a series near zero, exponentials elsewhere."""
    size = tl.abs(x)
    square = x * x
    series = -17.0 / 315 + square * (62.0 / 2835)
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * series)))
    small = tl.exp(-2.0 * size)
    large = (1.0 - small) / (1.0 + small)
    return tl.where(size < 0.25, series, tl.where(x < 0, -large, large))


@triton.jit
def _log1p(x):
    """Exact to rounding also near zero: the error of 1 + x cancels in the quotient."""
    above = 1.0 + x
    ratio = tl.where(above == 1.0, 1.0, above - 1.0)
    return tl.where(above == 1.0, x, tl.where(x == float("inf"), x, tl.log(above) * (x / ratio)))


@triton.jit
def _expm1(x):
    """Exact to rounding also near zero, in the same way."""
    above = tl.exp(x)
    logarithm = tl.log(above)
    ratio = tl.where(logarithm == 0.0, 1.0, logarithm)
    close = (above - 1.0) * (x / ratio)
    return tl.where(above == 1.0, x, tl.where(tl.abs(x) > 1.0, above - 1.0, close))


def _laid_out(tensor, strides):
    """The tensor with these strides: itself when it has them already."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
'''

FUNCTIONS = {
    "exp": "tl.exp",
    "log": "tl.log",
    "sqrt": "tl.sqrt",
    "rsqrt": "tl.rsqrt",
    "abs": "tl.abs",
    "erf": "tl.erf",
    "sin": "tl.sin",
    "cos": "tl.cos",
    "tanh": "_tanh",
    "log1p": "_log1p",
    "expm1": "_expm1",
}


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _column_block(rows: int) -> int:
    """Columns of a tile: enough for whole memory transactions, few enough for the registers."""
    return max(16, min(128, LARGEST_TILE // 2 // _power_of_two(rows)))


def accepts(program: LoopProgram) -> bool:
    """Whether this printer can print a program."""
    nest, _ = dense_nest(program)
    reduced = points(nest.reduced) if nest.reduced else 1
    if nest.kind == COLUMNS:
        return len(nest.reduced) == 1 and _power_of_two(reduced) * 16 <= LARGEST_TILE
    if nest.kind == WHOLE:
        return not stores_everything(program) and len(schedule(program, ()).passes) == 1
    return True


class TritonKernel(FusedKernel):
    """A Triton kernel and the Python function that launches it."""

    device_test = "is_cuda"
    neutral: ClassVar = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}

    @staticmethod
    def prologue(kernels: Sequence[TritonKernel]) -> str:
        """Imports and functions that all kernels of a module share."""
        return HELPERS

    def definition(self) -> str:
        """The kernel and the function that launches it."""
        return self._printed()

    def _literal(self, number: float) -> str:
        return f'float("{number}")' if math.isinf(number) else repr(float(number))

    def _function(self, name: str, operands: Sequence[str]) -> str:
        if name in ("maximum", "minimum"):
            return f"tl.{name}({operands[0]}, {operands[1]}, propagate_nan=tl.PropagateNan.ALL)"
        if name == "where":
            return f"tl.where({', '.join(operands)})"
        return f"-{operands[0]}" if name == "neg" else f"{FUNCTIONS[name]}({operands[0]})"

    def _assign(self, index: int, text: str) -> str:
        return f"v{index} = {text}"

    @staticmethod
    def _split(dims: Sequence[Dim], names: Sequence[str], source: str) -> list[str]:
        """Indices of nested loops out of one running index."""
        lines, rest = [], source
        for level, (dim, name) in enumerate(reversed(list(zip(dims, names, strict=True)))):
            last = level == len(dims) - 1
            lines.append(f"{name} = {rest}" if last else f"{name} = {rest} % {dim.size}")
            if not last:
                lines.append(f"{source}_{level} = {rest} // {dim.size}")
                rest = f"{source}_{level}"
        return lines

    @staticmethod
    def _offset(dims: Sequence[Dim], names: Sequence[str], number: int) -> str:
        """Offset of a tensor's element; empty where that is always its first."""
        return " + ".join(
            name if dim.strides[number] == 1 else f"{name} * {dim.strides[number]}"
            for dim, name in zip(dims, names, strict=True)
            if dim.strides[number]
        )

    def _load(self, index: int, offset: str, mask: str) -> str:
        number = self.load_steps.index(index)
        masked = f", mask={mask}, other=0.0" if mask else ""
        return f"v{index} = tl.load({self._tensor(number)}{' + ' + offset if offset else ''}{masked})"

    def _store(self, number: int, dims: Sequence[Dim], names: Sequence[str], mask: str, otherwise: str = "0") -> str:
        """An output is written at a position of a loop."""
        offset = self._offset(dims, names, len(self.load_steps) + number) or otherwise
        step = self.signature.stores[number][0]
        return f"tl.store(out{number} + {offset}, v{step}{', mask=' + mask if mask else ''})"

    def _kernel(self, body: Sequence[str], grid: int, stages: str, warps: int = 4, outputs: Sequence[str] = ()) -> str:
        """Kernel and launcher around a body."""

        def call(names: list[str], outs: list[str]) -> list[str]:
            parts = [f"part{index}" for index in range(len(outputs))]
            made = [f"{part} = x0.new_empty([{grid}])" for part in parts]
            launch = f"_{self.__name__}_kernel[({grid},)]({', '.join([*names, *(parts or outs)])}, num_warps={warps})"
            if not parts:
                return [launch]
            return [*made, launch, f"_{self.__name__}_finish[(1,)]({', '.join([*names, *parts, *outs])}, num_warps=4)"]

        lines = [
            "@triton.jit",
            f"def _{self.__name__}_kernel({', '.join([*self.inputs, *(outputs or self.outputs)])}):",
            *(f"    {line}" for line in body),
            "",
            "",
            *self._launcher(call),
        ]
        return stages + "\n".join(lines)

    def _pointwise(self) -> str:
        dims = self.nest.outer
        total = points(dims)
        names = self._numbered("i", dims)
        body = [
            f"index = tl.program_id(0).to(tl.int64) * {STRETCH} + tl.arange(0, {STRETCH})",
            f"inside = index < {total}",
            *self._split(dims, names, "index"),
        ]
        body += self._steps(range(len(self.program.steps)), lambda index: self._loads(index, dims, names, "inside"))
        body += [self._store(number, dims, names, "inside", "index") for number in range(len(self.signature.stores))]
        return self._kernel(body, -(-total // STRETCH), "")

    def _rows(self) -> str:
        """One program per row, the whole row in one tile."""
        columns = points(self.nest.reduced)
        if _power_of_two(columns) > LARGEST_TILE:
            return self._long_rows()
        tile = _power_of_two(columns)
        outer, inner = self._numbered("i", self.nest.outer), self._numbered("r", self.nest.reduced)
        body = [
            "row = tl.program_id(0).to(tl.int64)",
            *self._split(self.nest.outer, outer, "row"),
            f"column = tl.arange(0, {tile})",
            f"inside = column < {columns}",
            *self._split(self.nest.reduced, inner, "column"),
        ]
        body += self._tile_steps((*self.nest.outer, *self.nest.reduced), (*outer, *inner), "inside", None)
        for number, (_, full, _) in enumerate(self.signature.stores):
            dims, names = ((*self.nest.outer, *self.nest.reduced), (*outer, *inner)) if full else (self.nest.outer, outer)
            body.append(self._store(number, dims, names, "inside" if full else ""))
        warps = 4 if tile <= 2048 else 8 if tile <= 8192 else 16
        return self._kernel(body, points(self.nest.outer), "", warps)

    def _tile_steps(self, dims: Sequence[Dim], names: Sequence[str], mask: str, axis: int | None) -> list[str]:
        """All steps of a program whose tile holds whole rows or columns."""
        lines, levels = [], self.program.levels()
        for index, step in enumerate(self.program.steps):
            if step.name == "load":
                number = self.load_steps.index(index)
                where = mask if levels[index] == FULL else "in_columns" if axis == 0 else ""
                # An address that is the same for the whole tile is one number and takes no mask.
                tiled = dims[-2:] if axis == 0 else self.nest.reduced
                masked = any(dim.strides[number] for dim in tiled)
                lines.append(self._load(index, self._offset(dims, names, number), where if masked else ""))
            elif step.name in REDUCERS:
                operand = f"tl.where({mask}, {self._reduced(index)}, {self._neutral(index)})"
                keep = ", keep_dims=True" if axis == 0 else ""
                lines.append(f"v{index} = tl.{step.name}({operand}, axis=0{keep})")
            else:
                lines.append(self._step(index))
        return lines

    def _columns(self) -> str:
        """One program per block of columns, all reduced rows of it in one tile."""
        down, lanes = self.nest.reduced[-1], self.nest.inner[-1]
        rows, width = _power_of_two(down.size), _column_block(down.size)
        dims = (*self.nest.outer, *self.nest.inner[:-1])
        names = self._numbered("i", dims)
        blocks = -(-lanes.size // width)
        body = [
            "task = tl.program_id(0).to(tl.int64)",
            f"column = (task % {blocks}) * {width} + tl.arange(0, {width})[None, :]",
            f"outer = task // {blocks}",
            *self._split(dims, names, "outer"),
            f"row = tl.arange(0, {rows})[:, None]",
            f"in_columns = column < {lanes.size}",
            f"inside = (row < {down.size}) & in_columns",
        ]
        every, all_names = (*dims, down, lanes), (*names, "row", "column")
        body += self._tile_steps(every, all_names, "inside", 0)
        for number, (_, full, _) in enumerate(self.signature.stores):
            body.append(self._store(number, every, all_names, "inside" if full else "in_columns"))
        return self._kernel(body, points(dims) * blocks, "", 4 if rows * width <= 4096 else 8)

    def _loads(self, index: int, dims: Sequence[Dim], names: Sequence[str], mask: str) -> str:
        """A load at a position of a loop; one that does not vary along it needs no mask."""
        offset = self._offset(dims, names, self.load_steps.index(index))
        return self._load(index, offset, mask if offset else "")

    def _accumulate(self, index: int) -> str:
        """One more tile into the running result of a reduction."""
        item = f"tl.where(inside, {self._reduced(index)}, {self._neutral(index)})"
        if (name := self._name_of(index)) == "sum":
            return f"a{index} += {item}"
        return f"a{index} = tl.{name}imum(a{index}, {item}, propagate_nan=tl.PropagateNan.ALL)"

    def _accumulators(self, indices: Sequence[int]) -> list[str]:
        return [f"a{index} = tl.full([{LOOP_TILE}], {self._neutral(index)}, tl.float32)" for index in indices]

    def _long_rows(self) -> str:
        """One program per row, which it walks along once for every pass."""
        plan = schedule(self.program, tuple(step for step, full, _ in self.signature.stores if full))
        dims, outer = self.nest.reduced, self._numbered("i", self.nest.outer)
        inner = self._numbered("r", dims)
        every, names = (*self.nest.outer, *dims), (*outer, *inner)
        body = ["row = tl.program_id(0).to(tl.int64)", *self._split(self.nest.outer, outer, "row")]

        def row_steps(indices: Sequence[int]) -> list[str]:
            return self._steps(indices, lambda index: self._loads(index, self.nest.outer, outer, ""))

        body += row_steps(plan.rows_before)
        for number, item in enumerate(plan.passes):
            body += self._accumulators(item.reduces)
            body.append(f"for start in range(0, {points(dims)}, {LOOP_TILE}):")
            loop = [f"column = start + tl.arange(0, {LOOP_TILE})", f"inside = column < {points(dims)}"]
            loop += self._split(dims, inner, "column")
            computes = evaluated_again(self.program, plan.passes, number)
            loop += self._steps(computes, lambda index: self._loads(index, every, names, "inside"))
            loop += [self._accumulate(index) for index in item.reduces]
            if not item.reduces:
                loop += [self._store(place, every, names, "inside") for place, _ in self.full_stores]
            body += [f"    {line}" for line in loop]
            body += [f"v{index} = tl.{self._name_of(index)}(a{index}, axis=0)" for index in item.reduces]
            body += row_steps(item.rows_after)
        body += [self._store(place, self.nest.outer, outer, "") for place, _ in self.row_stores]
        return self._kernel(body, points(self.nest.outer), "", 8)

    def _whole(self) -> str:
        """Partial results of many programs, then one program that combines them."""
        plan, dims = schedule(self.program, ()), self.nest.reduced
        total = points(dims)
        grid = min(-(-total // LOOP_TILE), MOST_PARTS)
        steps = -(-total // (LOOP_TILE * grid))
        names = self._numbered("r", dims)
        item = plan.passes[0]
        once = partial(self._load, offset="", mask="")
        body = [*self._steps(plan.rows_before, once), *self._accumulators(item.reduces)]
        body.append(f"for step in range(0, {steps}):")
        loop = [
            f"tile = tl.program_id(0).to(tl.int64) * {steps} + step",
            f"index = tile * {LOOP_TILE} + tl.arange(0, {LOOP_TILE})",
            f"inside = index < {total}",
            *self._split(dims, names, "index"),
        ]
        loop += self._steps(item.computes, lambda index: self._loads(index, dims, names, "inside"))
        loop += [self._accumulate(index) for index in item.reduces]
        body += [f"    {line}" for line in loop]
        for order, index in enumerate(item.reduces):
            body.append(f"tl.store(part{order} + tl.program_id(0), tl.{self._name_of(index)}(a{index}, axis=0))")
        tile = _power_of_two(grid)
        parts = [f"part{order}" for order in range(len(item.reduces))]
        finish = [f"index = tl.arange(0, {tile})", f"inside = index < {grid}"]
        finish += self._steps(plan.rows_before, once)
        for order, index in enumerate(item.reduces):
            part = f"tl.load(part{order} + index, mask=inside, other={self._neutral(index)})"
            finish.append(f"v{index} = tl.{self._name_of(index)}({part}, axis=0)")
        finish += self._steps(item.rows_after, once)
        finish += [f"tl.store(out{number}, v{step})" for number, (step, _, _) in enumerate(self.signature.stores)]
        stages = "\n".join(
            [
                "@triton.jit",
                f"def _{self.__name__}_finish({', '.join([*self.inputs, *parts, *self.outputs])}):",
                *(f"    {line}" for line in finish),
                "",
                "",
                "",
            ]
        )
        return self._kernel(body, grid, stages, 8, parts)
