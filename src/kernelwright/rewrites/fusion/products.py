"""Lowers and prints products of 16-bit matrices, with what follows them point by point, as Triton kernels.

A tile has some rows and columns of the output. Products of one left operand share its loads: both halves of a gated layer
are two sums of one kernel. Products that nothing follows, such as queries, keys and values, lie side by side in one output,
of which each tile belongs to one (`join`). Sums are float32, and what eager rounds between operators is not rounded.

A single row is multiplied without tensor cores. Memory limits it, and two programs for each multiprocessor read its weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import fx

from kernelwright.rewrites.fusion.program import (
    FULL,
    ROUNDED,
    KernelMaker,
    LoopProgram,
    Multiplied,
    Operand,
    Position,
    Signature,
    UnsupportedError,
    points,
)
from kernelwright.rewrites.fusion.triton import TritonKernel, power_of_two
from kernelwright.rewrites.graph import Editor, argument, aten, dtype, shape, value
from kernelwright.rewrites.templates.base import MULTIPROCESSORS, SHARED_BYTES, block
from kernelwright.rewrites.templates.products import Operands, ProductTemplate

PRODUCT_16 = "product-16"
"""Technique: a product of 16-bit matrices is computed by a Triton kernel, with what follows."""
GATED = "gated-product"
"""Technique: two products of one left operand are sums of one kernel, which combines them."""
JOINED = "joined-products"
"""Technique: several products of one left operand are one kernel."""
FEW_ROWS = "few-rows"
"""Technique: products of one to sixteen rows, limited by memory, are computed by many small programs."""
TECHNIQUES = (PRODUCT_16, GATED, JOINED, FEW_ROWS)

FEW = 16
"""Rows that memory limits: a tile has them all."""
GROUP = 8
"""Tiles of rows that neighbouring programs walk through before the next tile of columns."""
RATES = {(128, 256): 1.0, (128, 128): 0.92, (64, 256): 0.9, (64, 128): 0.75, (128, 64): 0.75, (64, 64): 0.55}
"""Rate of tensor cores by tile, relative to the largest tile. Our choice."""
Tile = tuple[int, int, int, int, int]
"""Rows, columns, length of a step, warps and stages."""


def tiles_of(rows: int, widths: tuple[int, ...], length: int, sums: int, batch: int = 1) -> tuple[Tile, ...]:
    """Tiles worth a look, the default first.

    Args:
        rows: Of each product.
        widths: Columns of the products side by side, each of which has tiles of its own.
        sums: Products that a tile computes at once.
    """
    columns, common = sum(widths), math.gcd(*widths) if len(widths) > 1 else 0
    longest = max(16, power_of_two(length))
    if rows == 1:
        # Two programs on each multiprocessor, and 64 sums of each thread at most.
        first = max(1, min(16, power_of_two(batch * columns // (2 * MULTIPROCESSORS) + 1) // 2))
        choices = ((first, 1024), (first, 512), (max(1, first // 2), 1024), (2 * first, 512))
        found = [(1, wide, min(most, 8192 // (sums * wide)), 4, 1) for wide, most in choices]
    elif rows <= FEW:
        found = [(FEW, *tile) for tile in ((16, 256, 4, 4), (32, 128, 4, 4), (16, 128, 4, 6), (32, 256, 4, 3))]
    else:
        costs = dict[tuple[int, int], float]()
        for (high, wide), rate in RATES.items():
            if sums * high * wide <= 128 * 256:
                tiles = batch * -(-rows // high) * sum(-(-width // wide) for width in widths)
                costs[high, wide] = -(-tiles // MULTIPROCESSORS) * high * wide / rate
        found = []
        for high, wide in sorted(costs, key=costs.__getitem__)[:4]:
            warps = 8 if sums * high * wide > 64 * 128 else 4
            found += [(high, wide, 64, warps, 3 if warps == 8 else 4)]
        found += [(*found[0][:4], found[0][4] + 1)]
    fitting = [(high, wide, min(step, longest), *rest) for high, wide, step, *rest in found if not common % wide]
    return tuple(dict.fromkeys(tile for tile in fitting if _shared_bytes(tile, sums) <= SHARED_BYTES))  # type: ignore[misc, arg-type]


def _shared_bytes(tile: Tile, sums: int) -> int:
    """Shared memory of a pipeline, in bytes."""
    rows, columns, length, _, stages = tile
    return stages * (rows + sums * columns) * length * 2


LEAST_COLUMNS = 16
"""Columns of a product, and terms of its sums, below which tiles are mostly empty."""


def product(program: LoopProgram, node: fx.Node, level: str) -> int:
    """Lowering of a product of 16-bit matrices from outside the program, with its bias."""
    found = Operands.of(node)
    if found is None or (found.alpha, found.beta) != (1, 1):
        raise UnsupportedError("no plain product of tensors")
    result = _multiply(program, node, [found])
    return result if found.bias is None else program.add("add", result, program.operand(found.bias, FULL))


def _multiply(program: LoopProgram, node: fx.Node, products: list[Operands]) -> int:
    """The step of products of one left operand that lie side by side, of which `node` is the first."""
    left, (first, *others) = products[0].left, [one.right for one in products]
    sizes = shape(first)
    if len(sizes) < 2:
        raise UnsupportedError("a vector")
    across, along = value(first).stride()[-2:]
    columns, length = sizes[-2:]
    if not products[0].transposed:
        across, along, columns, length = along, across, length, columns
    batched = len(sizes) == 3
    widths = tuple(shape(right)[-2 if products[0].transposed else -1] for right in (first, *others))
    if dtype(left) != dtype(first) or dtype(left) not in ROUNDED or dtype(node) != dtype(left):
        raise UnsupportedError("operands that are not of one type of 16 bits")
    if len(sizes) - batched != 2 or (batched and (len(shape(left)) != 3 or sizes[0] != shape(left)[0])):
        raise UnsupportedError("a right operand that is broadcast")
    if len(shape(left)) < 2 or any(item in program.values for item in (left, first)) or program.reduced or program.windows:
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
    multiplied = Multiplied(left, length, along, batched, widths)
    if (program.multiplied or multiplied) != multiplied or sum(step.name == "product" for step in program.steps) > 1:
        raise UnsupportedError("another product")
    program.multiplied = multiplied
    none = (0,) * (len(program.logical) - 1)
    by_batch = (value(first).stride()[0], *none[1:]) if batched else none
    rights = [program.load(right, (*by_batch, across)) for right in (first, *others)]
    return program.add("product", program.load(left, (*strides[:-1], 0)), *rights)


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
        self.sums = [index for index, step in enumerate(program.steps) if step.name == "product"]

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what it does beyond fusing operators."""
        gated = (GATED,) if len(self.sums) > 1 else ()
        joined = (JOINED,) if len(self.multiplied.widths) > 1 else ()
        return (PRODUCT_16, *gated, *joined, *((FEW_ROWS,) if self.rows <= FEW else ()))

    def _printed(self) -> str:
        widths = self.multiplied.widths
        tiles = tiles_of(self.rows, widths, self.multiplied.length, len(self.sums), self.batch)
        upper = self.__name__.upper()
        names = [f"{upper}_{part}" for part in ("ROWS", "COLUMNS", "LENGTH")]
        launch = f"_{self.__name__}_launch"
        constants = [f"{part}: tl.constexpr" for part in ("ROWS", "COLUMNS", "LENGTH")]
        grid = f"{self.batch} * -(-{self.rows} // {names[0]}) * -(-{sum(widths)} // {names[1]})"
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
        outer, columns = self.nest.outer, sum(self.multiplied.widths)
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
            *self._parts_of_columns(),
            *self._products(at),
        ]
        lines += ["inside = in_rows & in_columns", *self._tile_steps(at, "axis=1, keep_dims=True")]
        return lines + [self._store(number, at, "inside") for number in range(len(self.signature.stores))]

    def _parts_of_columns(self) -> list[str]:
        """Statements of the product that a tile belongs to, and of its columns in that product."""
        widths = self.multiplied.widths
        if len(widths) == 1:
            return ["own = column"]
        ends = [sum(widths[: place + 1]) for place in range(len(widths) - 1)]
        begins = " + ".join(f"tl.where(first >= {end}, {width}, 0)" for end, width in zip(ends, widths, strict=False))
        return [f"own = column - ({begins})"]

    def _one_of(self, loads: Sequence[Operand]) -> str:
        """Text of the pointer to the tensor that belongs to a tile's columns."""
        (*others, text), end = (
            (self._tensor(self.load_steps.index(int(step))) for step in loads),
            sum(self.multiplied.widths),
        )
        for tensor, width in zip(reversed(others), self.multiplied.widths[:0:-1], strict=False):
            end -= width
            text = f"tl.where(first < {end}, {tensor}, {text})"
        return text

    def _products(self, at: Position) -> list[str]:
        """Statements that leave the sums of products in the names of their steps."""
        length, along, single = self.multiplied.length, self.multiplied.along, self.rows == 1
        columns = sum(self.multiplied.widths)
        lines, loop = ["lane = tl.arange(0, LENGTH)"], []
        (left,) = {self.program.steps[index].operands[0] for index in self.sums}
        number = self.load_steps.index(int(left))
        rows = self._offset(Position(at.dims[:-1], at.names[:-1]), number)
        lane, tests = ("lane[:, None]", "[:, None]") if single else ("lane[None, :]", "[None, :]")
        lines.append(f"left = {self._tensor(number)}{' + ' + rows if rows else ''} + {lane}")
        whole = f"{length} % LENGTH == 0"
        beyond = f"(start + lane < {length})"
        loop += _loaded("given", "left", whole, f"{beyond}{tests}")
        for index in self.sums:
            _, *rights = self.program.steps[index].operands
            strides = self.program.loads[int(rights[0])].strides
            place = f"{f'i0 * {strides[0]} + ' if self.batch > 1 else ''}own * {strides[-1]} + lane[:, None] * {along}"
            lines.append(f"right{index} = {self._one_of(rights)} + {place}")
            lines.append(f"v{index} = tl.zeros([{'LENGTH' if single else 'ROWS'}, COLUMNS], tl.float32)")
            inside = f"{beyond}[:, None] & in_columns"
            loop += _loaded(f"weights{index}", f"right{index}", f"{whole} and {columns} % COLUMNS == 0", inside)
            if single:
                loop.append(f"v{index} += given.to(tl.float32) * weights{index}.to(tl.float32)")
            else:
                loop.append(f"v{index} = tl.dot(given, weights{index}, v{index})")
            loop.append(f"right{index} += LENGTH * {along}")
        lines += block(f"for start in range(0, {length}, LENGTH):", [*loop, "left += LENGTH"])
        return lines + ([f"v{index} = tl.sum(v{index}, axis=0, keep_dims=True)" for index in self.sums] if single else [])

    def _tile_steps(self, at: Position, axis: str) -> list[str]:
        """What follows the products."""
        done = {int(item) for index in self.sums for item in self.program.steps[index].operands} | {*self.sums}
        lines = []
        for index, step in enumerate(self.program.steps):
            if step.name == "chosen":
                place = f"{self._one_of(step.operands)} + own, mask=in_columns, other=0.0"
                lines.append(f"v{index} = tl.load({place}).to(tl.float32)")
                done |= {int(item) for item in step.operands}
        kept = [index for index, step in enumerate(self.program.steps) if index not in done and step.name != "chosen"]
        return [*lines, *self._steps(kept, at)]


def _loaded(name: str, pointer: str, whole: str, mask: str) -> list[str]:
    """Statements that load a tile of an operand, masked where tiles do not divide it."""
    masked = f"{name} = tl.load({pointer}, mask={mask}, other=0.0)"
    return [f"if {whole}:", f"    {name} = tl.load({pointer})", "else:", f"    {masked}"]


def join(editor: Editor, taken: set[fx.Node], maker: KernelMaker) -> bool:
    """Compute linear operators of one tensor by one kernel, whose result they are slices of; True where some were.

    Conditions: numbers of 16 bits; all have a bias, or none has; no kernel computes them with what follows (`taken`). Their
    widths are multiples of 64.
    """
    found: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in editor.nodes(aten.linear):
        weight, bias = argument(node, "weight"), argument(node, "bias")
        if node not in taken and value(weight).is_contiguous() and not shape(node)[-1] % 64:
            found.setdefault((node.args[0], bias is None), []).append(node)
    made = [_joined(editor, members, maker) for members in found.values() if len(members) > 1]
    return any(made)


def _joined(editor: Editor, members: list[fx.Node], maker: KernelMaker) -> bool:
    """Put one kernel in the place of some linear operators; False where it cannot compute them."""
    first, operands = members[0], [one for one in map(Operands.of, members) if one is not None]
    widths = [shape(node)[-1] for node in members]
    program = LoopProgram((*shape(first)[:-1], sum(widths)))
    try:
        step = _multiply(program, first, operands)
    except UnsupportedError:
        return False
    biases = [one.bias for one in operands if one.bias is not None]
    along = (*(0,) * (len(program.logical) - 1), 1)
    if biases:
        step = program.add("add", step, program.add("chosen", *(program.load(bias, along) for bias in biases)))
    inputs = list(dict.fromkeys(load.node for load in program.loads.values()))
    loads = tuple((inputs.index(load.node), load.strides) for load in program.loads.values())
    kernel = maker.kernel(program, Signature(loads, ((step, True, program.logical),), (), (dtype(first),)), inputs)
    # Weights and biases are state, which stands before everything.
    whole = editor.call(first, kernel, *inputs)
    ends = zip(itertools.accumulate(widths), widths, strict=True)
    parts = [editor.call(first, aten.slice.Tensor, whole, len(program.logical) - 1, end - width, end) for end, width in ends]
    for node, part in zip(members, parts, strict=True):
        editor.replace(node, part)
    return True
