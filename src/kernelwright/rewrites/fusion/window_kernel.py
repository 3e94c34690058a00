"""Prints programs that read windows as Triton kernels, whose tiles are a few rows of the output: their taps share loads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from kernelwright.rewrites.fusion.program import Load
from kernelwright.rewrites.fusion.triton import TritonKernel
from kernelwright.rewrites.graph import contiguous_strides

POINTS = 256
"""Points of a row of the tile: where rows are short, several tiles lie side by side."""
MOST_LOADS = 160
"""Loads in the text of a kernel, which its compilation takes longer for."""
PROGRAMS = 8 * 132
"""Programs below which an H100 or H200 is not filled, so that each takes fewer rows."""


class _Rows:
    """Statements for the rows of a tile. What a row computes that an earlier one has is shared."""

    def __init__(self, kernel: TritonKernel) -> None:
        self.kernel = kernel
        self.known: dict[str, str] = {}
        self.lines: list[str] = []

    def name(self, text: str, prefix: str) -> str:
        """The name of an expression, stated when it is new."""
        if text not in self.known:
            self.known[text] = f"{prefix}{len(self.known)}"
            self.lines.append(f"{self.known[text]} = {text}")
        return self.known[text]

    def position(self, tensor: str, strides: Sequence[int], offset: int) -> str:
        """Pointers of a tensor for the first row of the tile, and a constant."""
        terms = [f"i{dim}" if one == 1 else f"i{dim} * {one}" for dim, one in enumerate(strides) if one]
        base = self.name(" + ".join([tensor, *terms]), "p") if terms else tensor
        return f"{base} + {offset}" if offset > 0 else f"{base} - {-offset}" if offset else base

    def row(self, number: int) -> list[str]:
        """The statements of one row."""
        self.lines = []
        kernel, program = self.kernel, self.kernel.program
        sizes, last = program.logical, len(program.logical) - 1
        inside = self.name(f"i{last - 1} < {sizes[last - 1] - number}", "m") + " & in_tile"
        names: dict[int, str] = {}
        for index, step in enumerate(program.steps):
            if step.name == "load":
                text = self._load(kernel.load_steps.index(index), program.loads[index], number, inside)
            else:
                text = re.sub(r"\bv(\d+)\b", lambda found: names[int(found[1])], kernel._step(index).partition(" = ")[2])
            names[index] = self.name(text, "v")
        dense = contiguous_strides(sizes)
        for place, (step_index, _, _) in enumerate(kernel.signature.stores):
            pointer = self.position(f"out{place}", dense, number * dense[last - 1])
            self.lines.append(f"tl.store({pointer}, {names[step_index]}, mask={inside})")
        return self.lines

    def _load(self, place: int, load: Load, number: int, inside: str) -> str:
        pointer = self.position(self.kernel._tensor(place), load.strides, load.offset + number * load.strides[-2])
        window, last = load.window, len(load.strides) - 1
        if window is None:
            # A tile that lies beyond the last one is at the place of another one in all but its rows and columns.
            return f"tl.load({pointer}, mask={inside}, other=0.0)" if any(load.strides[-2:]) else f"tl.load({pointer})"
        tests = ["in_tile"]
        for dim, (shift, step, size) in enumerate(zip(window.shifts, window.steps, window.sizes, strict=True)):
            if dim == last - 1:
                shift += number * step
            at = f"i{dim} * {step}" if step != 1 else f"i{dim}"
            # Tiles may hold more rows and columns than the output; other dimensions are known.
            beyond = dim >= last - 1 or (self.kernel.program.logical[dim] - 1) * step + shift >= size
            bounds = [f"({at} >= {-shift})"] * (shift < 0) + [f"({at} < {size - shift})"] * beyond
            tests += [self.name(" & ".join(bounds), "m")] if bounds else []
        outside = self.kernel._literal(window.outside)
        return f"tl.load({pointer}, mask={self.name(' & '.join(tests), 'm')}, other={outside})"


def _knobs(sizes: tuple[int, ...], loads: list[Load]) -> dict[str, tuple[int, ...]]:
    """Choices of rows and columns of a tile and of warps, the default first."""
    columns = sizes[-1]
    # Columns beyond the output are computed for nothing, and short rows of a tile are read in parts of cache lines.
    cost = {width: -(-columns // width) * (width + 8) for width in (256, 128, 64, 32, 16, 8)}
    widths = sorted(cost, key=cost.__getitem__)[:3]
    shared = any(load.window is not None and load.window.steps[-2] == 1 for load in loads)
    rows = [
        one for one in ((4, 2, 8, 1) if shared else (2, 1, 4)) if one * len(loads) <= MOST_LOADS and one < 2 * sizes[-2]
    ] or [1]
    if math.prod(sizes) < PROGRAMS * POINTS * rows[0]:
        rows.sort()
    return {"rows": tuple(rows), "width": tuple(widths), "warps": (4, 8, 2)}


class WindowKernel(TritonKernel):
    """A Triton kernel whose loads are taps of windows, and its launcher."""

    def _pointwise(self) -> str:
        return _printed(self)


def _printed(kernel: TritonKernel) -> str:
    sizes, name = kernel.program.logical, kernel.__name__
    last = len(sizes) - 1
    options = _knobs(sizes, list(kernel.program.loads.values()))
    knobs = f"KNOBS_{name.upper()}"
    rows, width, many = (f"{name.upper()}_{one}" for one in ("ROWS", "WIDTH", "MANY"))
    tiles = math.prod(sizes[: last - 1])
    number_type = kernel._index_type()
    body = [
        f"across, down = ({sizes[last]} + WIDTH - 1) // WIDTH, ({sizes[last - 1]} + ROWS - 1) // ROWS",
        f"task = tl.program_id(0).to({number_type})",
        "if MANY > 1:",
        "    task = task * MANY + tl.arange(0, MANY)[:, None]",
        # Most taps are unaligned. Without vectors all of them have one layout, and none is exchanged between threads.
        f"i{last} = tl.max_contiguous((task % across) * WIDTH + tl.arange(0, WIDTH)[None, :], [1, 1])",
        "task = task // across",
        f"i{last - 1} = (task % down) * ROWS",
        "task = task // down",
        f"in_tile = (i{last} < {sizes[last]}) & (task < {tiles})",
        f"task = tl.minimum(task, {tiles - 1})",
    ]
    for dim in range(last - 2, -1, -1):
        body += [f"i{dim} = task % {sizes[dim]}", f"task = task // {sizes[dim]}"] if dim else ["i0 = task"]
    printer = _Rows(kernel)
    for number in range(max(options["rows"])):
        lines = printer.row(number)
        body += [f"if ROWS > {number}:", *(f"    {line}" for line in lines)] if number else lines
    constants = [f"{one}: tl.constexpr" for one in ("ROWS", "WIDTH", "MANY")]
    declared = [
        f"{knobs} = {options!r}",
        f'{rows}, {width} = {knobs}["rows"][0], {knobs}["width"][0]',
        f"{many} = max(1, {POINTS} // {width})",
        "",
        "",
    ]
    grid = f"-(-(-(-{sizes[last]} // {width}) * -(-{sizes[last - 1]} // {rows}) * {tiles}) // {many})"
    launch = f"_{name}_launch"
    lines = [*declared, *kernel._definition("kernel", [*kernel.inputs, *kernel.outputs, *constants], body)]
    lines += [f'{launch} = _Launch(_{name}_kernel, {grid}, {knobs}["warps"][0], {rows}, {width}, {many})', "", ""]
    lines += kernel._launcher(lambda names, outs: [f"{launch}({', '.join([*names, *outs])})"])
    return "\n".join(lines)
