"""Lowers and prints products of 16-bit matrices, with what follows them point by point, as Triton kernels.

A tile has some rows and columns of the output. Sums are float32, and what eager rounds between operators is not rounded.

A single row is multiplied without tensor cores. Memory limits it, and two programs for each multiprocessor read its weights.
"""

from __future__ import annotations

import math

from torch import fx

from kernelwright.rewrites.fusion.program import (
    FULL,
    ROUNDED,
    LoopProgram,
    Multiplied,
    Position,
    Signature,
    UnsupportedError,
    points,
)
from kernelwright.rewrites.fusion.triton import TritonKernel, power_of_two
from kernelwright.rewrites.graph import dtype, shape, value
from kernelwright.rewrites.templates.base import MULTIPROCESSORS, SHARED_BYTES, block
from kernelwright.rewrites.templates.products import Operands, ProductTemplate

PRODUCT_16 = "product-16"
"""Technique: a product of 16-bit matrices is computed by a Triton kernel, with what follows."""
FEW_ROWS = "few-rows"
"""Technique: products of one to sixteen rows, limited by memory, are computed by many small programs."""
TECHNIQUES = (PRODUCT_16, FEW_ROWS)

FEW = 16
"""Rows that memory limits: a tile has them all."""
GROUP = 8
"""Tiles of rows that neighbouring programs walk through before the next tile of columns."""
RATES = {(128, 256): 1.0, (128, 128): 0.92, (64, 256): 0.9, (64, 128): 0.75, (128, 64): 0.75, (64, 64): 0.55}
"""Rate of tensor cores by tile, relative to the largest tile. Our choice."""
Tile = tuple[int, int, int, int, int]
"""Rows, columns, length of a step, warps and stages."""


def tiles_of(rows: int, columns: int, length: int, batch: int = 1) -> tuple[Tile, ...]:
    """Tiles worth a look for products of these sizes, the default first."""
    longest = max(16, power_of_two(length))
    if rows == 1:
        # Two programs on each multiprocessor, and 64 sums of each thread at most.
        first = max(1, min(16, power_of_two(batch * columns // (2 * MULTIPROCESSORS) + 1) // 2))
        choices = ((first, 1024), (first, 512), (max(1, first // 2), 1024), (2 * first, 512))
        found = [(1, wide, min(most, 8192 // wide), 4, 1) for wide, most in choices]
    elif rows <= FEW:
        found = [(FEW, *tile) for tile in ((16, 256, 4, 4), (32, 128, 4, 4), (16, 128, 4, 6), (32, 256, 4, 3))]
    else:
        costs = dict[tuple[int, int], float]()
        for (high, wide), rate in RATES.items():
            tiles = batch * -(-rows // high) * -(-columns // wide)
            costs[high, wide] = -(-tiles // MULTIPROCESSORS) * high * wide / rate
        found = []
        for high, wide in sorted(costs, key=costs.__getitem__)[:4]:
            warps = 8 if high * wide > 64 * 128 else 4
            found += [(high, wide, 64, warps, 3 if warps == 8 else 4)]
        found += [(*found[0][:4], found[0][4] + 1)]
    fitting = [(high, wide, min(step, longest), *rest) for high, wide, step, *rest in found]
    return tuple(dict.fromkeys(tile for tile in fitting if _shared_bytes(tile) <= SHARED_BYTES))  # type: ignore[misc, arg-type]


def _shared_bytes(tile: Tile) -> int:
    """Shared memory of a pipeline, in bytes."""
    rows, columns, length, _, stages = tile
    return stages * (rows + columns) * length * 2


LEAST_COLUMNS = 16
"""Columns of a product, and terms of its sums, below which tiles are mostly empty."""


def product(program: LoopProgram, node: fx.Node, level: str) -> int:
    """Lowering of a product of 16-bit matrices from outside the program, with its bias."""
    found = Operands.of(node)
    if found is None or (found.alpha, found.beta) != (1, 1):
        raise UnsupportedError("no plain product of tensors")
    result = _multiply(program, node, found)
    return result if found.bias is None else program.add("add", result, program.operand(found.bias, FULL))


def _multiply(program: LoopProgram, node: fx.Node, operands: Operands) -> int:
    """The step of a product."""
    left, right = operands.left, operands.right
    sizes = shape(right)
    if len(sizes) < 2:
        raise UnsupportedError("a vector")
    across, along = value(right).stride()[-2:]
    columns, length = sizes[-2:]
    if not operands.transposed:
        across, along, columns, length = along, across, length, columns
    batched = len(sizes) == 3
    if dtype(left) != dtype(right) or dtype(left) not in ROUNDED or dtype(node) != dtype(left):
        raise UnsupportedError("operands that are not of one type of 16 bits")
    if len(sizes) - batched != 2 or (batched and (len(shape(left)) != 3 or sizes[0] != shape(left)[0])):
        raise UnsupportedError("a right operand that is broadcast")
    if len(shape(left)) < 2 or any(item in program.values for item in (left, right)) or program.reduced or program.windows:
        raise UnsupportedError("operands that this program computes")
    strides = value(left).stride()
    if (
        strides[-1] != 1
        or min(across, along) != 1
        or any(item % 8 for item in (length, *strides[:-1]))
        or max(across, along) % 8
    ):
        raise UnsupportedError("operands that threads cannot read eight numbers at a time")
    if min(columns, length) < LEAST_COLUMNS or (along != 1 and math.prod(shape(left)[batched:-1]) <= FEW):
        raise UnsupportedError("few columns, or few rows of a matrix that lies the other way")
    if program.multiplied is not None:
        raise UnsupportedError("another product")
    program.multiplied = Multiplied(left, length, along, batched)
    none = (0,) * (len(program.logical) - 1)
    by_batch = (value(right).stride()[0], *none[1:]) if batched else none
    return program.add("product", program.load(left, (*strides[:-1], 0)), program.load(right, (*by_batch, across)))


PRODUCTS = dict.fromkeys(ProductTemplate.operators, product)
"""Lowering of each operator that is a product."""


class ProductKernel(TritonKernel):
    """A Triton kernel of products with what follows, and its launcher."""

    def __init__(self, name: str, program: LoopProgram, signature: Signature, strides: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(name, program, signature, strides)
        assert program.multiplied is not None
        self.multiplied = program.multiplied
        self.batch = self.nest.outer[0].size if self.multiplied.batched and shape(self.multiplied.left)[0] > 1 else 1
        self.rows = points(self.nest.outer) // self.batch
        self.columns = program.logical[-1]
        (self.step,) = (index for index, step in enumerate(program.steps) if step.name == "product")

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what it does beyond fusing operators."""
        return (PRODUCT_16, FEW_ROWS) if self.rows <= FEW else (PRODUCT_16,)

    def _printed(self) -> str:
        tiles = tiles_of(self.rows, self.columns, self.multiplied.length, self.batch)
        upper = self.__name__.upper()
        names = [f"{upper}_{part}" for part in ("ROWS", "COLUMNS", "LENGTH")]
        launch = f"_{self.__name__}_launch"
        constants = [f"{part}: tl.constexpr" for part in ("ROWS", "COLUMNS", "LENGTH")]
        grid = f"{self.batch} * -(-{self.rows} // {names[0]}) * -(-{self.columns} // {names[1]})"
        lines = [
            f'KNOBS_{upper} = {{"tile": {tiles!r}}}',
            f'{", ".join(names)} = KNOBS_{upper}["tile"][0][:3]',
            "",
            "",
            *self._definition("kernel", [*self.inputs, *self.outputs, *constants], self._body()),
            f"{launch} = _Launch(",
            f'    _{self.__name__}_kernel, {grid}, KNOBS_{upper}["tile"][0][3], {", ".join(names)},',
            f'    num_stages=KNOBS_{upper}["tile"][0][4],',
            ")",
            "",
            "",
        ]
        call = f"{launch}({', '.join([*self.given_names, *self.written])})"
        return "\n".join([*lines, *self._launcher([call])])

    def _body(self) -> list[str]:
        """Statements of one tile."""
        outer, columns = self.nest.outer, self.columns
        names = self._numbered("i", outer)
        apart = self.batch > 1
        masks = {"in_rows": outer[apart:], "in_columns": self.nest.reduced}
        at = Position((*outer, *self.nest.reduced), (*names, "column"), masks)
        lines = [
            "task = tl.program_id(0)",
            f"across, down = ({columns} + COLUMNS - 1) // COLUMNS, ({self.rows} + ROWS - 1) // ROWS",
            *(["i0 = task // (across * down)", "task = task % (across * down)"] if apart else []),
            f"group = task // ({GROUP} * across) * {GROUP}",
            f"height = tl.minimum(down - group, {GROUP})",
            f"task = task % ({GROUP} * across)",
            f"row = ((group + task % height) * ROWS + tl.arange(0, ROWS)[:, None]).to({self._index_type()})",
            f"first = (task // height * COLUMNS).to({self._index_type()})",
            "column = first + tl.arange(0, COLUMNS)[None, :]",
            f"in_rows, in_columns = row < {self.rows}, column < {columns}",
            f"row = tl.minimum(row, {self.rows - 1})",
            *self._split(outer[apart:], names[apart:], "row"),
            *self._products(at),
        ]
        done = {self.step, *map(int, self.program.steps[self.step].operands)}
        behind = [index for index in range(len(self.program.steps)) if index not in done]
        lines += ["inside = in_rows & in_columns", *self._steps(behind, at)]
        return lines + [self._store(number, at, "inside") for number in range(len(self.signature.stores))]

    def _products(self, at: Position) -> list[str]:
        """Statements that leave the sums of the product in the name of its step."""
        length, along, single, index = self.multiplied.length, self.multiplied.along, self.rows == 1, self.step
        left, right = (self.load_steps.index(int(item)) for item in self.program.steps[index].operands)
        strides = self.program.loads[self.load_steps[right]].strides
        rows = self._offset(Position(at.dims[:-1], at.names[:-1]), left)
        lane, tests = ("lane[:, None]", "[:, None]") if single else ("lane[None, :]", "[None, :]")
        by_batch = f"i0 * {strides[0]} + " if self.batch > 1 else ""
        whole, beyond = f"{length} % LENGTH == 0", f"(start + lane < {length})"
        given = _loaded("given", "left", whole, f"{beyond}{tests}")
        inside = f"{beyond}[:, None] & in_columns"
        weights = _loaded("weights", "right", f"{whole} and {self.columns} % COLUMNS == 0", inside)
        term = "given.to(tl.float32) * weights.to(tl.float32)"
        added = f"v{index} += {term}" if single else f"v{index} = tl.dot(given, weights, v{index})"
        return [
            "lane = tl.arange(0, LENGTH)",
            f"left = {self._tensor(left)}{' + ' + rows if rows else ''} + {lane}",
            f"right = {self._tensor(right)} + {by_batch}column * {strides[-1]} + lane[:, None] * {along}",
            f"v{index} = tl.zeros([{'LENGTH' if single else 'ROWS'}, COLUMNS], tl.float32)",
            *block(
                f"for start in range(0, {length}, LENGTH):",
                [*given, *weights, added, "left += LENGTH", f"right += LENGTH * {along}"],
            ),
            *([f"v{index} = tl.sum(v{index}, axis=0, keep_dims=True)"] if single else []),
        ]


def _loaded(name: str, pointer: str, whole: str, mask: str) -> list[str]:
    """Statements that load a tile of an operand, masked where tiles do not divide it."""
    masked = f"{name} = tl.load({pointer}, mask={mask}, other=0.0)"
    return [f"if {whole}:", f"    {name} = tl.load({pointer})", "else:", f"    {masked}"]
