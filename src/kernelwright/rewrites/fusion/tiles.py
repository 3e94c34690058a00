"""Prints programs that read windows or scan rows as Triton kernels.

A tile of windows is a few rows of the output, whose taps share loads. A tile of a scan is a stretch of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kernelwright.rewrites.fusion.program import POOLERS, REDUCERS, SCANS, Dim, Load, Window
from kernelwright.rewrites.fusion.triton import TritonKernel
from kernelwright.rewrites.graph import contiguous_strides

POINTS = 256
"""Points of a row of the tile: where rows are short, several tiles lie side by side."""
MOST_LOADS = 160
"""Loads in the text of a kernel, which its compilation takes longer for."""
_VECTOR = 8
"""Numbers of 16 bits that a thread reads at once."""
PROGRAMS = 8 * 132
"""Programs below which an H100 or H200 is not filled, so that each takes fewer rows."""


class Statements:
    """Statements at the points of a tile, whose indices are `i0`, `i1`, ...; what was stated before is not stated again.

    Args:
        kernel: Of which these are statements.
        beyond: The dimension from which on indices may exceed the output's.
        inside: Text of the test of what is left of it.
        masks: Texts of tests that a load needs where it varies along a dimension, if not `inside`.
    """

    def __init__(
        self, kernel: TritonKernel, beyond: int, inside: str, masks: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self.kernel = kernel
        self.beyond = beyond
        self.inside = inside
        self.masks = masks
        self.known: dict[str, str] = {}
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        """Name of each step's value."""
        self.row = 0
        """Row of the tile that is stated now."""
        self.test = inside
        """Test of what is left of that row."""
        self.inner: list[str] = []
        """Statements at each place of a window, before the step that pools it."""

    def name(self, text: str, prefix: str) -> str:
        """The name of an expression, stated when it is new."""
        if text not in self.known:
            self.known[text] = f"{prefix}{len(self.known)}"
            self.lines.append(f"{self.known[text]} = {text}")
        return self.known[text]

    def _position(self, tensor: str, strides: Sequence[int], offset: int) -> str:
        """Pointers of a tensor for the first row of the tile, and a constant."""
        terms = [f"i{dim}" if stride == 1 else f"i{dim} * {stride}" for dim, stride in enumerate(strides) if stride]
        base = self.name(" + ".join([tensor, *terms]), "p") if terms else tensor
        return f"{base} + {offset}" if offset > 0 else f"{base} - {-offset}" if offset else base

    def steps(self, row: int = 0) -> list[str]:
        """Statements of all steps and stores at a row of the tile, counted along the last dimension but one."""
        self.lines = []
        kernel, program = self.kernel, self.kernel.program
        last = len(program.logical) - 1
        inside = self.inside
        if self.beyond < last and not self.masks:
            inside = f"{self.name(f'i{last - 1} < {program.logical[last - 1] - row}', 'm')} & {inside}"
        self.row, self.test, names = row, inside, self.names
        names.clear()
        tiled = next((index for index, step in enumerate(program.steps) if step.name == "convolution"), None)
        for index, step in enumerate(program.steps):
            if tiled is not None and index in (tiled, *program.steps[tiled].operands):
                names[index] = "acc"
                continue
            if step.name == "load":
                text = kernel._read(index, self._place(index))
            elif step.name not in SCANS and step.name not in REDUCERS and step.name not in POOLERS:
                text = self._named(kernel._step(index).partition(" = ")[2])
            if step.name in SCANS:
                self._scan(index)
            elif step.name in POOLERS:
                given = self._named(kernel._reduced(index))
                both = f"_max_or_nan(best, {given})" if POOLERS[step.name] == "max" else f"best + {given}"
                self.inner, self.lines = [*self.lines, f"best = {both}"], []
                self.known.clear()
                names.clear()
                names[index] = "best"
            elif step.name in REDUCERS:
                given = self._named(kernel._reduced(index))
                given = f"tl.where({self.masks[1]}, {given}, {kernel._neutral(index)})"
                names[index] = self.name(kernel._whole_tile(index, given, "axis=1, keep_dims=True").partition(" = ")[2], "v")
            else:
                names[index] = self.name(text, "v")
        dense = contiguous_strides(program.logical)
        kept = contiguous_strides(tuple(1 if dim in program.reduced else size for dim, size in enumerate(program.logical)))
        rows = tuple(0 if dim in program.reduced else stride for dim, stride in enumerate(kept))
        for place, (step_index, full, _) in enumerate(kernel.signature.stores):
            strides, mask = (dense, inside) if full else (rows, self.masks[0])
            pointer = self._position(f"out{place}", strides, row * strides[last - 1] if row else 0)
            pointer = kernel._stored_at(pointer) if full else pointer
            self.lines.append(f"tl.store({pointer}, {names[step_index]}, mask={mask})")
        return self.lines

    def _scan(self, index: int) -> None:
        """A scan of this tile after those before it, whose result is `c{index}`."""
        name = self.kernel._name_of(index)
        neutral, sign = ("0.0", "+") if SCANS[name] == "sum" else ("1.0", "*")
        operand = self.kernel.program.steps[index].operands[0]
        given = self.names[operand] if isinstance(operand, int) else self.kernel._literal(operand)
        source = self.name(f"tl.where({self.inside}, {given}, {neutral})", "x")
        function, _, reverse = name.partition("_")
        scan = f"tl.{function}({source}, axis=0{', reverse=True' if reverse else ''})"
        self.names[index] = self.name(f"{scan} {sign} c{index}", "v")
        whole = f"tl.sum({source}, axis=0)" if sign == "+" else f"tl.reduce({source}, axis=0, combine_fn=_product)"
        self.lines.append(f"c{index} = c{index} {sign} {whole}")

    def _named(self, text: str) -> str:
        """Text in which each step's value has the name that it was stated by."""
        return re.sub(r"\bv(\d+)\b", self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        index = int(match[1])
        if index not in self.names:  # a load that was stated at each place of a window
            self.names[index] = self.name(self.kernel._read(index, self._place(index)), "v")
        return self.names[index]

    def _place(self, index: int) -> str:
        """Pointers of a load at the current row, and its mask."""
        load, row, inside = self.kernel.program.loads[index], self.row, self.test
        moved = row * load.strides[-2] if row else 0
        pointer = self._position(self.kernel._tensor(self.kernel.load_steps.index(index)), load.strides, load.offset + moved)
        window, last = load.window, len(load.strides) - 1
        if window is None:
            # A tile that lies beyond the last one is at the place of another one in all but these dimensions.
            along = [self.masks.get(dim, inside) for dim, stride in enumerate(load.strides) if stride and dim >= self.beyond]
            return f"{pointer}, mask={' & '.join(dict.fromkeys(along))}, other=0.0" if along else pointer
        tests = [self.inside]
        for dim, (shift, step, size) in enumerate(zip(window.shifts, window.steps, window.sizes, strict=True)):
            if dim == last - 1:
                shift += row * step
            at = f"i{dim} * {step}" if step != 1 else f"i{dim}"
            above = dim >= self.beyond or (self.kernel.program.logical[dim] - 1) * step + shift >= size
            bounds = [f"({at} >= {-shift})"] * (shift < 0) + [f"({at} < {size - shift})"] * above
            tests += [self.name(" & ".join(bounds), "m")] if bounds else []
        return f"{pointer}, mask={self.name(' & '.join(tests), 'm')}, other={self.kernel._literal(window.outside)}"


def _knobs(sizes: tuple[int, ...], loads: list[Load]) -> dict[str, tuple[int, ...]]:
    """Choices of rows and columns of a tile and of warps, the default first."""
    columns = sizes[-1]
    # Columns beyond the output are computed for nothing, and short rows of a tile are read in parts of cache lines.
    cost = {width: -(-columns // width) * (width + 8) for width in (256, 128, 64, 32, 16, 8)}
    widths = sorted(cost, key=cost.__getitem__)[:3]
    shared = any(load.window is not None and load.window.steps[-2] == 1 for load in loads)
    rows = [
        count
        for count in ((4, 2, 8, 1) if shared else (2, 1, 4))
        if count * len(loads) <= MOST_LOADS and count < 2 * sizes[-2]
    ] or [1]
    if math.prod(sizes) < PROGRAMS * POINTS * rows[0]:
        rows.sort()
    return {"rows": tuple(rows), "width": tuple(widths), "warps": (4, 8, 2)}


class ScanKernel(TritonKernel):
    """A Triton kernel whose programs go along a row each, tile by tile, and its launcher."""

    def _printed(self) -> str:
        sizes, last = self.program.logical, len(self.program.logical) - 1
        rows, columns = math.prod(sizes[:-1]), sizes[-1]
        tile = min(4096, 1 << (columns - 1).bit_length())
        options = {"tile": (tile, *(size for size in (tile // 2, 2 * tile) if size < 2 * columns)), "warps": (8, 4, 16)}
        knobs, constant = f"KNOBS_{self.__name__.upper()}", f"{self.__name__.upper()}_TILE"
        dims = [Dim(size, ()) for size in sizes[:-1]]
        steps = f"({columns} + TILE - 1) // TILE"
        backwards = any(self._name_of(index).endswith("reversed") for index in self.program.scans)
        body = [
            f"row = tl.program_id(0).to({self._index_type()})",
            *self._split(dims, self._numbered("i", dims), "row"),
            *(
                f"c{index} = tl.full([1], {1.0 if SCANS[self._name_of(index)] == 'product' else 0.0}, tl.float32)"
                for index in self.program.scans
            ),
            f"for step in range(0, {steps}):",
            f"    i{last} = {f'({steps} - 1 - step)' if backwards else 'step'} * TILE + tl.arange(0, TILE)",
            f"    inside = i{last} < {columns}",
            *(f"    {line}" for line in Statements(self, last, "inside").steps()),
        ]
        launch = f"_{self.__name__}_launch"
        lines = [f"{knobs} = {options!r}", f'{constant} = {knobs}["tile"][0]', "", ""]
        lines += self._definition("kernel", [*self.inputs, *self.outputs, "TILE: tl.constexpr"], body)
        lines += [f'{launch} = _Launch(_{self.__name__}_kernel, {rows}, {knobs}["warps"][0], {constant})', "", ""]
        return "\n".join([*lines, *self._launcher([f"{launch}({', '.join([*self.given_names, *self.written])})"])])


def _is_aligned(window: Window | None) -> bool:
    """True where a tap of a row lies where vectors of it begin."""
    return window is None or (window.steps[-1] == 1 and window.shifts[-1] % _VECTOR == 0)


class WindowKernel(TritonKernel):
    """A Triton kernel whose loads are taps of windows, and its launcher."""

    def _printed(self) -> str:
        sizes, name = self.program.logical, self.__name__
        last = len(sizes) - 1
        options = _knobs(sizes, list(self.program.loads.values()))
        knobs = f"KNOBS_{name.upper()}"
        rows, width, many = (f"{name.upper()}_{part}" for part in ("ROWS", "WIDTH", "MANY"))
        tiles = math.prod(sizes[: last - 1])
        number_type = self._index_type()
        column = "(task % across) * WIDTH + tl.arange(0, WIDTH)[None, :]"
        if not all(_is_aligned(load.window) for load in self.program.windows):
            # Without vectors all of the taps have one layout, and none is exchanged between threads.
            column = f"tl.max_contiguous({column}, [1, 1])"
        body = [
            f"across, down = ({sizes[last]} + WIDTH - 1) // WIDTH, ({sizes[last - 1]} + ROWS - 1) // ROWS",
            f"task = tl.program_id(0).to({number_type})",
            "if MANY > 1:",
            "    task = task * MANY + tl.arange(0, MANY)[:, None]",
            f"i{last} = {column}",
            "task = task // across",
            f"i{last - 1} = (task % down) * ROWS",
            "task = task // down",
            f"in_tile = (i{last} < {sizes[last]}) & (task < {tiles})",
            f"task = tl.minimum(task, {tiles - 1})",
        ]
        for dim in range(last - 2, -1, -1):
            body += [f"i{dim} = task % {sizes[dim]}", f"task = task // {sizes[dim]}"] if dim else ["i0 = task"]
        statements = Statements(self, last - 1, "in_tile")
        for number in range(max(options["rows"])):
            lines = statements.steps(number)
            body += [f"if ROWS > {number}:", *(f"    {line}" for line in lines)] if number else lines
        constants = [f"{part}: tl.constexpr" for part in ("ROWS", "WIDTH", "MANY")]
        declared = [
            f"{knobs} = {options!r}",
            f'{rows}, {width} = {knobs}["rows"][0], {knobs}["width"][0]',
            f"{many} = max(1, {POINTS} // {width})",
            "",
            "",
        ]
        grid = f"-(-(-(-{sizes[last]} // {width}) * -(-{sizes[last - 1]} // {rows}) * {tiles}) // {many})"
        launch = f"_{name}_launch"
        lines = [*declared, *self._definition("kernel", [*self.inputs, *self.outputs, *constants], body)]
        lines += [f'{launch} = _Launch(_{name}_kernel, {grid}, {knobs}["warps"][0], {rows}, {width}, {many})', "", ""]
        lines += self._launcher([f"{launch}({', '.join([*self.given_names, *self.written])})"])
        return "\n".join(lines)
