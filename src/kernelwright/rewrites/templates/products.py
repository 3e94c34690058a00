"""Reads float32 matrix products out of operator graphs, for the templates that compute them. The first multiplies in one
kernel that reads each operand once.

The kernel splits values in registers and multiplies the pieces on tensor cores: two TF32 and three products (`tf32x3`, known
from CUTLASS as 3xTF32), or three bfloat16 and six products (`bf16x6`). Each step of `block_k` is added to an accumulator in
float32. Inf and NaN come out as in float32: Triton takes the small products of the pieces as 0 where they are NaN. Values
below 1e-34 lose accuracy, since their lower pieces are denormal: 3 % of the result at 1e-40, with `tf32x3`.

`split_product` is quicker where arithmetic limits a product. It writes both operands' halves to memory first, which costs
more than it saves where memory limits the product: short sums, few columns, many small products in a batch.

A product with one column is a sum along each row, in float32.

The emitted module imports torch and triton, and defines `one_pass_product(a, b)`, where `b` holds the *columns* of the right
operand as rows, as in `split_product`. Any strides are taken. If K is split the result has the parts along a first
dimension, so that the kernel that follows can add them on its way.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import fx

from kernelwright.rewrites.graph import Editor, arguments, aten, is_call, is_tensor, shape, value
from kernelwright.rewrites.templates.base import MULTIPROCESSORS, CallTemplate, TemplateKernel, kernel_text, knob_table

Knobs = TypeVar("Knobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSizes:
    """Sizes of a product, or of several side by side.

    Attributes:
        m: rows of an output.
        n: columns of an output.
        k: length of its sums.
        batch: how many products.
    """

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return self.batch * self.m * self.n * self.k

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of these sizes that cover all outputs."""
        return self.batch * -(-self.m // rows) * -(-self.n // columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Operands of a call that computes `alpha * left @ right + beta * bias`."""

    left: fx.Node
    right: fx.Node
    transposed: bool = False
    """True where the right operand's columns lie as rows, as those of a Linear's weight."""
    bias: fx.Node | None = None
    alpha: float = 1
    beta: float = 1

    @classmethod
    def of(cls, node: fx.Node) -> Operands | None:
        """Operands of a product; None where one is no tensor."""
        given = list(arguments(node).values())
        if is_call(node, aten.addmm, aten.baddbmm):
            bias, left, right, beta, alpha = given
            operands = cls(left=left, right=right, bias=bias, alpha=alpha, beta=beta)
        elif is_call(node, aten.linear):
            operands = cls(left=given[0], right=given[1], transposed=True, bias=given[2])
        else:
            operands = cls(left=given[0], right=given[1])
        return operands if is_tensor(operands.left) and is_tensor(operands.right) else None

    @property
    def sizes(self) -> ProductSizes | None:
        """Sizes of the product; None where an operand is not of float32, or they are broadcast."""
        if value(self.left).dtype != torch.float32 or value(self.right).dtype != torch.float32:
            return None
        a, b = shape(self.left), shape(self.right)
        if min(len(a), len(b)) < 2:
            return None
        n, k = b[-2:] if self.transposed else b[:-3:-1]
        if len(b) == 2:
            return ProductSizes(m=math.prod(a[:-1]), n=n, k=k)
        return ProductSizes(batch=math.prod(a[:-2]), m=a[-2], n=n, k=k) if a[:-2] == b[:-2] else None


class ProductTemplate(CallTemplate[ProductSizes, Knobs]):
    """A template of float32 products, whose function takes the left operand and the right operand's columns as rows."""

    operators: ClassVar = (aten.mm, aten.bmm, aten.matmul, aten.linear, aten.addmm, aten.baddbmm)

    def sizes_of(self, node: fx.Node) -> ProductSizes | None:
        """Sizes of a product of float32; None of another."""
        operands = Operands.of(node)
        return operands.sizes if operands else None

    def insert(self, editor: Editor, node: fx.Node, sizes: ProductSizes, kernel: TemplateKernel) -> None:
        """Put a call of the kernel in the place of a product, with what a call computes besides."""
        given = Operands.of(node)
        assert given is not None
        left, right = given.left, given.right
        columns = right if given.transposed else editor.call(node, aten.transpose.int, right, -2, -1)
        many = len(shape(right)) > 3
        if many:
            left = editor.call(node, aten.reshape.default, left, [sizes.batch, sizes.m, sizes.k])
            columns = editor.call(node, aten.reshape.default, columns, [sizes.batch, sizes.n, sizes.k])
        result = editor.call(node, kernel, left, columns)
        if self.parts(kernel) > 1:
            result = editor.call(node, aten.sum.dim_IntList, result, [0])
        if many:
            result = editor.call(node, aten.reshape.default, result, list(shape(node)))
        if given.alpha != 1:
            result = editor.call(node, aten.mul.Tensor, result, given.alpha)
        if given.bias is not None and given.beta != 0:
            bias = given.bias
            scaled = bias if given.beta == 1 else editor.call(node, aten.mul.Tensor, bias, given.beta)
            result = editor.call(node, aten.add.Tensor, result, scaled)
        editor.replace(node, result)

    def parts(self, kernel: TemplateKernel) -> int:
        """Parts of a product that a kernel leaves to be added, along a first dimension."""
        return 1

    def outputs(self, kernel: TemplateKernel, *inputs: torch.Tensor) -> torch.Tensor:
        """The product of fake tensors, or its parts."""
        left, right = inputs[:2]
        parts = [self.parts(kernel)] if self.parts(kernel) > 1 else []
        return left.new_empty((*parts, *left.shape[:-1], right.shape[-2]))


LEAST_SIDE = 16
"""Rows, columns and length of sums below which `tl.dot` takes no tile."""
LEAST_WORK = 1 << 26
"""Multiply-adds of a product below which a launch takes as long. Our choice."""
LEAST_COLUMN = 1 << 22
"""Values of a matrix below which its product with one column takes as long as a launch. Our choice."""
MOST_PARTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePassKnobs:
    """OnePassKnobs of the kernel; every choice computes the same product.

    Attributes:
        block_m: rows of an output tile.
        block_n: columns of an output tile; 1 for the kernel of products with one column.
        block_k: length of K that one step reads.
        num_warps: warps of a thread block.
        num_stages: depth of the software pipeline.
        split_k: slices of K that different programs compute; whoever follows adds them.
        precision: of `tl.dot`: `tf32x3`, `bf16x6`, or `ieee`, which multiplies without tensor cores.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    num_warps: int = 8
    num_stages: int = 3
    split_k: int = 1
    precision: str = "tf32x3"


_LEAST_LARGE = 1 << 30
"""Multiply-adds from which six products of bfloat16 are quicker than three of TF32, as results/2026-11-25-one-pass-h100 has
it."""


class OnePassProduct(ProductTemplate[OnePassKnobs]):
    """Products in one kernel."""

    technique = "one-pass-product"
    function: ClassVar = "one_pass_product"
    caller = "one_pass_product.caller.txt"
    default = OnePassKnobs()

    def refusal(self, sizes: ProductSizes) -> str | None:
        """The reason why the kernel does not take a product of these sizes; None if it does."""
        m, n, k = sizes.m, sizes.n, sizes.k
        if n == 1:
            return None if sizes.work >= LEAST_COLUMN else f"wanted a matrix of at least {LEAST_COLUMN} values"
        if min(m, n, k) < LEAST_SIDE:
            return f"wanted at least {LEAST_SIDE} rows, columns and length, found {m} x {n} x {k}"
        if sizes.work < LEAST_WORK:
            return f"wanted at least {LEAST_WORK} multiply-adds, found {sizes.work}"
        return None

    def alternatives(self, sizes: ProductSizes) -> tuple[OnePassKnobs, ...]:
        """Knobs worth a look for a product of these sizes, the default first."""
        k = sizes.k
        if sizes.n == 1:
            # Some programs on each multiprocessor keep memory busy while others wait for it.
            columns = [OnePassKnobs(**row) for row in knob_table("one_pass_product")["column"]]
            parts = _slices(columns[0], sizes.batch * sizes.m // columns[0].block_m, k, 8 * MULTIPROCESSORS)
            return tuple(replace(tile, split_k=parts) for tile in columns)
        longest = 1 << max(4, (k - 1).bit_length())
        tiles = {name: OnePassKnobs(**row) for name, row in knob_table("one_pass_product")["tiles"].items()}
        large = "large" if sizes.work >= _LEAST_LARGE else "small"
        first = tiles["shortest" if k <= 16 else "short" if k <= 32 else large]
        programs = sizes.tiles(first.block_m, first.block_n)
        parts = _slices(first, programs, k, MULTIPROCESSORS * 8 // first.num_warps)
        # What follows adds as many parts, whatever the tile.
        fitting = (replace(tile, block_k=min(tile.block_k, longest), split_k=parts) for tile in (first, *tiles.values()))
        return tuple(dict.fromkeys(fitting))

    def module(self, knobs: OnePassKnobs) -> str:
        """Text of a module that defines `one_pass_product(a, b, knobs=KNOBS)`."""
        return kernel_text("one_pass_product.triton.txt", knobs=asdict(knobs), least_side=LEAST_SIDE)

    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text."""
        return {"tiles": tuple(map(asdict, kernel.choices))}

    def parts(self, kernel: TemplateKernel) -> int:
        """Slices of K, all choices alike."""
        return int(kernel.choices[0].split_k)


def _slices(knobs: OnePassKnobs, programs: int, k: int, wanted: int) -> int:
    """Slices of K that give all multiprocessors work, each of four steps or more."""
    fitting = [s for s in (2, 4, 8, 16, 32, MOST_PARTS) if programs * s <= wanted and k // s >= 4 * knobs.block_k]
    return max(fitting, default=1)


ONE_PASS = OnePassProduct()
