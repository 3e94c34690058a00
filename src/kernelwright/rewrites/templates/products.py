"""Reads float32 matrix products out of operator graphs, for the templates that compute them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import fx

from kernelwright.rewrites.graph import Editor, arguments, aten, is_call, is_tensor, shape, value
from kernelwright.rewrites.templates.base import CallTemplate, TemplateKernel

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
    """Whether the right operand's columns lie as rows, as those of a Linear's weight."""
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
    fallback: ClassVar = "torch.matmul"

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
