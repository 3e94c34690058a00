"""Prints programs as Triton kernels for a GPU: one tile per row, column block or stretch of elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from kernelwright.rewrites.fusion.kernel import FusedKernel
from kernelwright.rewrites.fusion.program import (
    COLUMNS,
    DTYPE,
    POINTWISE,
    REDUCERS,
    ROUNDED,
    ROWS,
    WHOLE,
    Dim,
    LoopProgram,
    Nest,
    Pass,
    Position,
    Signature,
    dense_nest,
    evaluated_again,
    pairs_of,
    points,
    schedule,
    stores_everything,
)
from kernelwright.rewrites.templates.base import block, kernel_text
from kernelwright.rewrites.templates.convolution import MOST_CHANNELS

STRETCH = 1024
"""Elements of one program of a pointwise kernel."""
SHORT_ROWS = 2048
"""Elements of the tile of several rows that one program takes where rows are short and many."""
LONG_COLUMN_BLOCK = 64
"""Columns of the tile of a loop down columns too long for one tile."""
LOOP_TILE = 4096
"""Elements of one step of a loop along something too long for one tile."""
FEW_PROGRAMS = 4 * 132
"""Rows below which a program for each keeps an H100 or H200 from its full rate, so that chunks of rows are programs."""
MOST_CHUNKS = 2048
"""Chunks of a row: each program of the next pass combines this many partial results."""
SHORTEST_SCAN = 512
"""Elements of the shortest rows that are scanned."""
SPLIT_ROWS = "split-rows"
"""Technique: chunks of few long rows are programs of their own."""
LARGEST_TILE = 16384
"""Elements of a tile that still fit the registers of one block of threads."""

ONE_READ = "one-read-rows"
"""Technique: chunks of long rows stay in registers until the whole row's reductions are known."""
READ_CHUNK = 8192
"""Elements of a chunk: 32 for each of 256 threads."""
MOST_READ_CHUNKS = 64
"""Chunks of a row: two such kernels at once fit on an H100 or H200 with one program on each of 132 multiprocessors."""
LEAST_READ_POINTS = 1 << 25
"""Points below which the L2 cache of 50 MB saves the second read as well."""

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


def power_of_two(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(size - 1, 0).bit_length()


def _column_block(rows: int) -> int:
    """Columns of a tile: enough for whole memory transactions, few enough for the registers."""
    return max(16, min(128, LARGEST_TILE // 2 // power_of_two(rows)))


def few_long_rows(nest: Nest) -> bool:
    """True where chunks of rows are computed by programs of their own: rows are too long for a tile, and too few."""
    too_long = bool(nest.reduced) and power_of_two(points(nest.reduced)) > LARGEST_TILE
    return too_long and nest.kind in (ROWS, WHOLE) and points(nest.outer) < FEW_PROGRAMS


def long_columns(nest: Nest) -> bool:
    """True where columns are too long for a tile."""
    return nest.kind == COLUMNS and power_of_two(nest.reduced[-1].size) * 16 > LARGEST_TILE


def _walks_down(program: LoopProgram, nest: Nest) -> bool:
    """True where programs may walk down long columns: once, and enough of them."""
    programs = points(nest.outer) * points(nest.inner[:-1]) * -(-nest.inner[-1].size // LONG_COLUMN_BLOCK)
    once = not stores_everything(program) and len(schedule(program, ()).passes) == 1
    return once and programs >= FEW_PROGRAMS // 4


def split_knobs(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Choices of the kernels of chunks of rows, the default first: at least twice `FEW_PROGRAMS` where rows are long."""
    most = min(MOST_CHUNKS, power_of_two(columns // LOOP_TILE))
    chunks = min(most, power_of_two(-(-2 * FEW_PROGRAMS // rows)))
    further = [count for count in (2 * chunks, chunks // 2, 4 * chunks) if 1 < count <= most]
    return {"chunks": (chunks, *further), "tile": (LOOP_TILE, LOOP_TILE // 2, 2 * LOOP_TILE), "warps": (8, 4, 16)}


def accepts(program: LoopProgram) -> bool:
    """True where this printer can print a program."""
    nest, _ = dense_nest(program)
    if program.multiplied is not None:  # a tile has no whole rows
        return not (program.reduced or program.scans or program.windows or program.convolution)
    if program.finds_indices and (program.convolution is not None or program.count() >= 1 << 31):
        return False
    if program.scans and not program.is_of_float32:
        return False
    if program.convolution is not None:
        # Reduced are channels alone, of which a tile has all.
        whole = nest.kind == COLUMNS and program.convolution.groups == 1 and program.logical[1] <= MOST_CHANNELS
        return not (program.scans or program.windows) and (not program.reduced or (program.reduced == (1,) and whole))
    if program.scans:
        rows, columns = math.prod(program.logical[:-1]), program.logical[-1]
        # A program for each row has too little to do in short ones, and leaves multiprocessors idle in few long ones.
        return not program.reduced and columns >= SHORTEST_SCAN and (rows >= FEW_PROGRAMS // 4 or columns <= LARGEST_TILE)
    if program.windows:
        return not program.reduced and len(program.logical) > 1
    if nest.kind == COLUMNS:
        return len(nest.reduced) == 1 and (not long_columns(nest) or _walks_down(program, nest))
    return True


class TritonKernel(FusedKernel):
    """A Triton kernel and the Python function that launches it."""

    device_test = "is_cuda"
    neutral: ClassVar = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")', "argmax": "-0x7FFFFFFFFFFFFFFF"}

    def __init__(self, name: str, program: LoopProgram, signature: Signature, strides: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(name, program, signature, strides)
        self.splits_rows = few_long_rows(self.nest)
        self.pairs = pairs_of(program)
        self.plan = schedule(program, tuple(step for _, step in self.full_stores), self.pairs)

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what it does beyond fusing operators."""
        return (SPLIT_ROWS,) if self.splits_rows else ()

    def _printed(self) -> str:
        # Where everything is reduced, everything is one row.
        kinds = {POINTWISE: self._pointwise, ROWS: self._rows, COLUMNS: self._columns, WHOLE: self._rows}
        return kinds[self.nest.kind]()

    @staticmethod
    def prologue(kernels: Sequence[TritonKernel]) -> str:
        """Imports and functions that all kernels of a module share, and what some of them need besides."""
        further = dict.fromkeys(kernel.helpers for kernel in kernels if kernel.helpers)
        return "\n\n".join([kernel_text("fused.triton.txt"), *further])

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
        if name in ROUNDED.values():
            return f"{operands[0]}.to(tl.{name}).to(tl.float32)"
        return f"-{operands[0]}" if name == "neg" else f"{FUNCTIONS[name]}({operands[0]})"

    def _reduced(self, index: int) -> str:
        """Also the position, where that is wanted: an index is the largest of keys of both."""
        given, position = super()._reduced(index), "row" if self.nest.kind == COLUMNS else "column"
        return f"_key({given}, {position})" if self._name_of(index) == "argmax" else given

    def _step(self, index: int) -> str:
        """The statement that evaluates a pointwise step; it rounds a mean that is subtracted later.

        Triton's `/` by a constant is a product with the rounded inverse. ptxas makes one multiply-add of that product and
        the difference after it. A row of 768 equal numbers is then 2e-8 away from its mean, which a layer norm makes 7e-6.
        """
        if not self.program.is_subtracted_mean(index):
            return super()._step(index)
        return self._assign(index, f"tl.div_rn({', '.join(map(self._operand, self.program.steps[index].operands))})")

    def _refined(self, index: int, axis: str) -> list[str]:
        """A mean over rows once more, by the mean of what it leaves, unless that overflows.

        On constant inputs all rows of a batch are equal. Their sum is rounded, and a batch norm divides what that leaves by
        the root of `eps`: 9e-6 after a softmax, where a reference by Welford's sums has nothing (`docs/log.md`).
        """
        total, count = self.program.steps[index].operands
        summed = self._operand(self.program.steps[int(total)].operands[0])
        left = f"left = tl.sum(tl.where(inside, {summed} - v{index}, 0.0), {axis}) / {self._operand(count)}"
        return [left, f'v{index} = tl.where(tl.abs(left) < float("inf"), v{index} + left, v{index})']

    def _assign(self, index: int, text: str) -> str:
        return f"v{index} = {text}"

    def _index_type(self) -> str:
        """Type of positions. Dividing those of 64 bits for each element takes longer than reading it."""
        dims = (*self.nest.outer, *self.nest.reduced, *self.nest.inner)
        strides = zip(*(dim.strides for dim in dims), strict=True)
        last = max(sum((dim.size - 1) * stride for dim, stride in zip(dims, along, strict=True)) for along in strides)
        # Masked positions may lie a few tiles beyond the last one.
        return "tl.int32" if max(last, points(dims)) < (1 << 31) - (1 << 25) else "tl.int64"

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
    def _offset(at: Position, number: int) -> str:
        """Offset of a tensor's element; empty where that is always its first."""
        return " + ".join(
            name if dim.strides[number] == 1 else f"{name} * {dim.strides[number]}"
            for dim, name in zip(at.dims, at.names, strict=True)
            if dim.strides[number]
        )

    def _load(self, index: int, at: Position) -> str:
        number = self.load_steps.index(index)
        offset = self._offset(at, number)
        mask = " & ".join(name for name, along in at.masks.items() if any(dim.strides[number] for dim in along))
        place = self._tensor(number) + (f" + {offset}" if offset else "") + (f", mask={mask}, other=0.0" if mask else "")
        return f"v{index} = {self._read(index, place)}"

    def _read(self, index: int, what: str) -> str:
        """A load, as float32 also where the tensor holds booleans or numbers of 16 bits."""
        return f"tl.load({what}){'.to(tl.float32)' if self.program.loads[index].dtype != DTYPE else ''}"

    def _store(self, number: int, at: Position, mask: str, otherwise: str = "0") -> str:
        """An output is written at a position of a loop."""
        offset = self._offset(at, len(self.load_steps) + number) or otherwise
        step = f"v{self.signature.stores[number][0]}"
        stored = f"_index_of({step})" if self.signature.is_index(number) else step
        return f"tl.store(out{number} + {offset}, {stored}{', mask=' + mask if mask else ''})"

    def _stored_at(self, pointer: str) -> str:
        """Pointers of a tile that is stored, with what a kernel knows of them."""
        return pointer

    def _definition(self, suffix: str, arguments: Sequence[str], body: Sequence[str]) -> list[str]:
        """A kernel's text."""
        return ["@triton.jit", *block(f"def _{self.__name__}_{suffix}({', '.join(arguments)}):", body), "", ""]

    def _kernel(self, body: Sequence[str], grid: int, warps: int = 4) -> str:
        """Kernel and launcher around a body."""
        launch = f"_{self.__name__}_launch"
        lines = self._definition("kernel", [*self.inputs, *self.outputs], body)
        lines += [f"{launch} = _Launch(_{self.__name__}_kernel, {grid}, {warps})", "", ""]
        lines += self._launcher([f"{launch}({', '.join([*self.given_names, *self.written])})"])
        return "\n".join(lines)

    def _pointwise(self) -> str:
        total, at = points(self.nest.outer), self._at_rows("inside")
        body = [
            f"index = tl.program_id(0).to({self._index_type()}) * {STRETCH} + tl.arange(0, {STRETCH})",
            f"inside = index < {total}",
            *self._split(at.dims, at.names, "index"),
        ]
        body += self._steps(range(len(self.program.steps)), at)
        body += [self._store(number, at, "inside", "index") for number in range(len(self.signature.stores))]
        return self._kernel(body, -(-total // STRETCH))

    def _rows(self) -> str:
        """One program per row, the whole row in one tile."""
        columns = points(self.nest.reduced)
        if self.splits_rows:
            return self._split_rows()
        if power_of_two(columns) > LARGEST_TILE:
            return self._long_rows()
        tile, rows = power_of_two(columns), points(self.nest.outer)
        # A program for each short row has too little to do; with several, a tile has an axis for them.
        height = max(1, min(SHORT_ROWS // tile, power_of_two(rows // FEW_PROGRAMS + 1) // 2))
        several = height > 1
        at = self._at_rows()
        body = [
            f"row = tl.program_id(0).to({self._index_type()})",
            *([f"row = row * {height} + tl.arange(0, {height})[:, None]", f"in_rows = row < {rows}"] if several else []),
            *self._split(at.dims, at.names, "row"),
            f"column = tl.arange(0, {tile}){'[None, :]' if several else ''}",
            f"in_columns = column < {columns}",
            f"inside = {'in_rows & ' if several else ''}in_columns",
            *self._split(self.nest.reduced, self._numbered("r", self.nest.reduced), "column"),
        ]
        masks = {"in_rows": self.nest.outer if several else (), "in_columns": self.nest.reduced}
        inside = replace(self._at_points(), masks=masks)
        body += self._tile_steps(inside, "axis=1, keep_dims=True" if several else "axis=0")
        for number, (_, full, _) in enumerate(self.signature.stores):
            mask = "inside" if full else "in_rows" if several else ""
            body.append(self._store(number, inside if full else at, mask))
        warps = 4 if tile <= 2048 else 8 if tile <= 8192 else 16
        return self._kernel(body, -(-rows // height), warps)

    def _at_rows(self, mask: str = "") -> Position:
        """The place of a row."""
        dims = self.nest.outer
        return Position(dims, tuple(self._numbered("i", dims)), {mask: dims} if mask else {})

    def _at_points(self) -> Position:
        """The place of a point inside a row."""
        outer, reduced = self.nest.outer, self.nest.reduced
        names = (*self._numbered("i", outer), *self._numbered("r", reduced))
        return Position((*outer, *reduced), names, {"inside": (*outer, *reduced)})

    def _tile_steps(self, at: Position, axis: str) -> list[str]:
        """All steps of a program whose tile holds whole rows or columns."""
        lines = []
        for index, step in enumerate(self.program.steps):
            if step.name == "load":
                lines.append(self._load(index, at))
            elif step.name in REDUCERS:
                operand = f"tl.where(inside, {self._reduced(index)}, {self._neutral(index)})"
                lines.append(self._whole_tile(index, operand, axis))
            else:
                lines.append(self._step(index))
                if self.nest.kind == COLUMNS and self.program.is_subtracted_mean(index):
                    lines += self._refined(index, axis)
        return lines

    def _whole_tile(self, index: int, operand: str, axis: str = "axis=0") -> str:
        """A tile reduced along an axis. `tl.max` would drop NaN."""
        if (name := self._name_of(index).removeprefix("arg")) == "sum":
            return f"v{index} = tl.sum({operand}, {axis})"
        return f"v{index} = tl.reduce({operand}, combine_fn=_{name}_or_nan, {axis})"

    def _columns(self) -> str:
        """One program per block of columns: all reduced rows of it are one tile, or the program walks down them."""
        down, lanes, walks = self.nest.reduced[-1], self.nest.inner[-1], long_columns(self.nest)
        rows, width = power_of_two(down.size), _column_block(down.size)
        if walks:
            rows, width = LOOP_TILE // LONG_COLUMN_BLOCK, LONG_COLUMN_BLOCK
        dims = (*self.nest.outer, *self.nest.inner[:-1])
        names = self._numbered("i", dims)
        blocks = -(-lanes.size // width)
        masks, axis = {"in_rows": (down,), "in_columns": (lanes,)}, "axis=0, keep_dims=True"
        at = Position((*dims, down, lanes), (*names, "row", "column"), masks)
        lane = f"tl.arange(0, {rows})[:, None].to({self._index_type()})"
        inside = [f"in_rows = row < {down.size}", "inside = in_rows & in_columns"]
        body = [
            "task = tl.program_id(0).to(tl.int64)",
            f"column = (task % {blocks}) * {width} + tl.arange(0, {width})[None, :]",
            f"outer = task // {blocks}",
            *self._split(dims, names, "outer"),
            f"in_columns = column < {lanes.size}",
        ]
        if walks:
            (item,) = self.plan.passes
            body += [*self._steps(self.plan.rows_before, at), f"lane = {lane}"]
            body += [self._start(index, f"{rows}, {width}") for index in item.reduces]
            body.append(f"for step in range(0, {-(-down.size // rows)}):")
            loop = [f"row = step * {rows} + lane", *inside, *self._steps(item.computes, at)]
            body += [f"    {line}" for line in (*loop, *(self._accumulate(index) for index in item.reduces))]
            body += [self._whole_tile(index, f"a{index}", axis) for index in item.reduces]
            body += self._steps(item.rows_after, at)
        else:
            body += [f"row = {lane}", *inside, *self._tile_steps(at, axis)]
        for number, (_, full, _) in enumerate(self.signature.stores):
            body.append(self._store(number, at, "inside" if full else "in_columns"))
        return self._kernel(body, points(dims) * blocks, 8 if walks or rows * width > 4096 else 4)

    def _running(self, tile: int | str, steps: int | str, body: Sequence[str], item: Pass) -> list[str]:
        """A loop over the tiles of a row from column `begin`, and what its reductions come to."""
        dims = self.nest.reduced
        lines = [f"lane = tl.arange(0, {tile})"]
        lines += [self._start(index, tile) for index in item.reduces]
        lines.append(f"for step in range(0, {steps}):")
        loop = [f"column = begin + step * {tile} + lane", f"inside = column < {points(dims)}"]
        loop += [*self._split(dims, self._numbered("r", dims), "column"), *body]
        # The maximum so far is wanted before this tile is in it, the sum so far after.
        first = [index for index in item.reduces if index in self.pairs and self._name_of(self.pairs[index]) == "max"]
        loop += [
            self._accumulate(index)
            for index in (*first, *(reduction for reduction in item.reduces if reduction not in first))
        ]
        lines += [f"    {line}" for line in loop]
        held = f"tl.minimum(tl.maximum(({points(dims)} - begin - lane + {tile} - 1) // {tile}, 0), {steps})"
        return lines + self._combined(item, held)

    def _start(self, index: int, tile: int | str) -> str:
        """A running result before the first tile."""
        return f"a{index} = tl.full([{tile}], {self._neutral(index)}, tl.{str(self._type_of(index)).partition('.')[2]})"

    def _accumulate(self, index: int) -> str:
        """One more tile into the running result of a reduction, lane by lane."""
        source = self.pairs.get(index, index)
        item = f"tl.where(inside, {self._reduced(source)}, {self._neutral(source)})"
        if source != index and self._name_of(source) == "max":
            return f"a{index} = _more_exponentials(a{index}, a{source}, {item})"
        if source != index:
            return f"a{index} += tl.where(inside, _more_squares(a{source}, {item}, step), 0.0)"
        if (name := self._name_of(index).removeprefix("arg")) == "sum":
            return f"a{index} += {item}"
        return f"a{index} = tl.{name}imum(a{index}, {item}, propagate_nan=tl.PropagateNan.ALL)"

    def _combined(self, item: Pass, held: str) -> list[str]:
        """Reductions of a pass out of partial ones, of which each stands for `held` columns."""
        squares = any(self._name_of(self.pairs[index]) == "sum" for index in item.reduces if index in self.pairs)
        lines = [f"held = {held}.to(tl.float32)"] if squares else []
        for index in item.reduces:
            if index not in self.pairs:
                lines.append(self._whole_tile(index, f"a{index}"))
            elif self._name_of(self.pairs[index]) == "max":
                lines.append(f"v{index} = _all_exponentials(a{index}, a{self.pairs[index]})")
            else:
                lines.append(f"v{index} = _all_squares(a{index}, a{self.pairs[index]}, held)")
        return lines

    def _long_rows(self) -> str:
        """One program per row, which it walks along once for every pass."""
        plan, dims, outer = self.plan, self.nest.reduced, self._numbered("i", self.nest.outer)
        body = ["row = tl.program_id(0).to(tl.int64)", *self._split(self.nest.outer, outer, "row"), "begin = 0"]
        body += self._row_steps(plan.rows_before)
        for number, item in enumerate(plan.passes):
            body += self._running(LOOP_TILE, -(-points(dims) // LOOP_TILE), self._pass_steps(number), item)
            body += self._row_steps(item.rows_after)
        body += [self._store(place, self._at_rows(), "") for place, _ in self.row_stores]
        return self._kernel(body, points(self.nest.outer), 8)

    def _row_steps(self, indices: Sequence[int]) -> list[str]:
        return self._steps(indices, self._at_rows())

    def _pass_steps(self, number: int) -> list[str]:
        """Statements of a pass at each tile, with its stores."""
        at = self._at_points()
        computes = evaluated_again(self.program, self.plan.passes, number)
        lines = self._steps(computes, at)
        if not self.plan.passes[number].reduces:
            lines += [self._store(place, at, "inside") for place, _ in self.full_stores]
        return lines

    def _parts(self, size: str) -> list[str]:
        """Statements that make the tensors of all partial results."""
        every = (index for item in self.plan.passes for index in item.reduces)
        return [f"part{index} = {self._empty(f'[{size}]', self._type_of(index))}" for index in every]

    def _split_rows(self) -> str:
        """A kernel for each pass, one program per chunk of a row; partial results of chunks go from one to the next."""
        passes, outer, rows = self.plan.passes, self._numbered("i", self.nest.outer), points(self.nest.outer)
        columns, options = points(self.nest.reduced), [f"{name}: tl.constexpr" for name in ("CHUNKS", "TILE", "STEPS")]
        # Rows are read side by side, so that what they share, such as weights, is read once. Each pass begins with what the
        # one before it read last, which the cache may still hold.
        start = ["task = tl.program_id(0).to(tl.int64)", f"row = task % {rows}", f"chunk = task // {rows}"]
        back = [f"task = {rows} * CHUNKS - 1 - tl.program_id(0).to(tl.int64)", *start[1:]]
        begin = f"begin = (chunk * (STEPS * TILE)).to({self._index_type()})"
        known = [*self._split(self.nest.outer, outer, "row"), *self._row_steps(self.plan.rows_before)]
        parts: list[str] = []
        lines: list[str] = []
        launches: list[tuple[str, list[str], bool]] = []
        for number, item in enumerate(passes):
            if not item.reduces:
                break
            own = [f"part{index}" for index in item.reduces]
            body = [*(back if number % 2 else start), *known, begin]
            body += self._running("TILE", "STEPS", self._pass_steps(number), item)
            body += [f"tl.store(part{index} + row * CHUNKS + chunk, v{index})" for index in item.reduces]
            lines += self._definition(f"pass_{number}", [*self.inputs, *parts, *own, *options], body)
            launches.append((f"pass_{number}", [*parts, *own], True))
            parts += own
            known.append("part = row * CHUNKS + tl.arange(0, CHUNKS)")
            known += [f"a{index} = tl.load(part{index} + part)" for index in item.reduces]
            held = f"tl.minimum(tl.maximum({columns} - tl.arange(0, CHUNKS).to(tl.int64) * (STEPS * TILE), 0), STEPS * TILE)"
            known += [*self._combined(item, held), *self._row_steps(item.rows_after)]
        if self.full_stores:
            body = [*(back if len(launches) % 2 else start), *known, begin]
            body += self._running("TILE", "STEPS", self._pass_steps(len(passes) - 1), passes[-1])
        else:
            body = ["row = tl.program_id(0).to(tl.int64)", *known]
        mask = "chunk == 0" if self.full_stores else ""
        body += [self._store(place, self._at_rows(), mask) for place, _ in self.row_stores]
        lines += self._definition("apply", [*self.inputs, *parts, *self.outputs, *options], body)
        launches.append(("apply", parts, bool(self.full_stores)))
        name = self.__name__
        knobs, constants = (
            f"KNOBS_{name.upper()}",
            ", ".join(f"{name.upper()}_{part}" for part in ("CHUNKS", "TILE", "STEPS")),
        )
        chunks, tile, steps = constants.split(", ")
        declared = [
            f"{knobs} = {split_knobs(rows, columns)!r}",
            f'{chunks}, {tile} = {knobs}["chunks"][0], {knobs}["tile"][0]',
            f"{steps} = -(-{columns} // ({chunks} * {tile}))",
            "",
            "",
        ]
        for suffix, _, split in launches:
            grid = f"{rows} * {chunks}" if split else f"{rows}"
            lines.append(f'_{name}_{suffix}_launch = _Launch(_{name}_{suffix}, {grid}, {knobs}["warps"][0], {constants})')

        calls = self._parts(f"{rows} * {chunks}")
        for suffix, given, _ in launches:
            written = self.written if suffix == "apply" else []
            calls.append(f"_{name}_{suffix}_launch({', '.join([*self.given_names, *given, *written])})")
        return "\n".join([*declared, *lines, "", "", *self._launcher(calls)])


def reads_once(nest: Nest) -> bool:
    """True where rows are too long for a tile, are many, and come from memory again where a kernel reads them twice."""
    rows, columns = points(nest.outer), points(nest.reduced)
    chunks = -(-columns // READ_CHUNK)
    return columns > LARGEST_TILE and chunks <= MOST_READ_CHUNKS and rows * columns >= LEAST_READ_POINTS


class OneReadKernel(TritonKernel):
    """A Triton kernel of norms or softmax of long rows, with a program for each chunk of a row, which waits for the others.

    Chunks are given out in the order in which programs start. So those of the first unfinished row all run, or have run,
    where a device takes as many programs at a time as a row has chunks.
    """

    requires: ClassVar = (f"torch.cuda.get_device_properties(None).multi_processor_count >= {2 * MOST_READ_CHUNKS}",)

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what it does beyond fusing operators."""
        return (ONE_READ,)

    def _printed(self) -> str:
        at, rows = self._at_points(), points(self.nest.outer)
        columns, passes = points(self.nest.reduced), self.plan.passes
        parts = [f"part{index}" for item in passes for index in item.reduces]
        chunks, padded = -(-columns // READ_CHUNK), power_of_two(-(-columns // READ_CHUNK))
        body = [
            "ticket = tl.atomic_add(state, 1)",
            f"row = (ticket // {chunks}).to({self._index_type()})",
            f"chunk = ticket % {chunks}",
            *self._split(self.nest.outer, self._numbered("i", self.nest.outer), "row"),
            f"column = chunk * {READ_CHUNK} + tl.arange(0, {READ_CHUNK})",
            f"inside = column < {columns}",
            f"here = tl.minimum({columns} - chunk * {READ_CHUNK}, {READ_CHUNK}).to(tl.float32)",
            f"others = tl.arange(0, {padded})",
            *self._split(self.nest.reduced, self._numbered("r", self.nest.reduced), "column"),
            *self._row_steps(self.plan.rows_before),
        ]
        held = f"tl.minimum(tl.maximum({columns} - others * {READ_CHUNK}, 0), {READ_CHUNK})"
        done: set[int] = set()
        for number, item in enumerate(passes):
            needed = [index for index in evaluated_again(self.program, passes, number) if index not in done]
            body += self._steps(needed, at)
            done |= set(needed)
            if item.reduces:
                body += self._exchanged(number, item, rows, chunks)
                body += [*self._combined(item, held), *self._row_steps(item.rows_after)]
        body += [self._store(place, at, "inside") for place, _ in self.full_stores]
        body += [self._store(place, self._at_rows(), "chunk == 0") for place, _ in self.row_stores]
        launch, passed = f"_{self.__name__}_launch", sum(bool(item.reduces) for item in passes)
        lines = [f'KNOBS_{self.__name__.upper()} = {{"warps": (8, 16)}}', "", ""]
        lines += self._definition("kernel", [*self.inputs, *parts, "state", *self.outputs], body)
        warps = f'KNOBS_{self.__name__.upper()}["warps"][0]'
        lines += [f"{launch} = _Launch(_{self.__name__}_kernel, {rows * chunks}, {warps})", "", ""]

        given = ", ".join([*self.given_names, *parts, "state", *self.written])
        state = f"state = x0.new_zeros([{1 + passed * rows}], dtype=torch.int32)"
        return "\n".join([*lines, *self._launcher([*self._parts(str(rows * chunks)), state, f"{launch}({given})"])])

    def _exchanged(self, number: int, item: Pass, rows: int, chunks: int) -> list[str]:
        """This chunk's partial results of a pass are stored; once all chunks' are, they are read as `a{index}`."""
        lines = []
        for index in sorted(item.reduces, key=lambda reduction: reduction in self.pairs):
            source = self.pairs.get(index, index)
            given = self._reduced(source)
            if source == index:
                operand = f"tl.where(inside, {given}, {self._neutral(index)})"
                lines.append(self._whole_tile(index, operand))
            elif self._name_of(source) == "max":
                lines.append(f"centre = tl.where(v{source} == float('-inf'), 0.0, v{source})")
                lines.append(f"v{index} = tl.sum(tl.where(inside, tl.exp({given} - centre), 0.0), axis=0)")
            else:
                lines.append(f"distance = tl.where(inside, {given} - v{source} / here, 0.0)")
                lines.append(f"v{index} = tl.sum(distance * distance, axis=0)")
        lines += [f"tl.store(part{index} + row * {chunks} + chunk, v{index})" for index in item.reduces]
        lines += [
            f"arrived = tl.atomic_add(state + {1 + number * rows} + row, 1) + 1",
            f"while arrived < {chunks}:",
            f"    arrived = tl.atomic_add(state + {1 + number * rows} + row, 0)",
        ]
        for index in item.reduces:
            # What other programs have stored is not in this multiprocessor's cache.
            neutral = "0.0" if index in self.pairs else self._neutral(index)
            place = f"part{index} + row * {chunks} + others, mask=others < {chunks}, other={neutral}, cache_modifier='.cg'"
            lines.append(f"a{index} = tl.load({place})")
        return lines
