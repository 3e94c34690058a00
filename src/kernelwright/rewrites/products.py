"""Lets the split-product template compute the float32 matrix products of an operator graph."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kernelwright.errors import CompilerMissingError
from kernelwright.gpu.nvcc import find_torch_nvcc
from kernelwright.rewrites.graph import Editor, arguments, aten, is_call, is_tensor, shape, value
from kernelwright.rewrites.templates import split_product
from kernelwright.rewrites.templates.split_product import Knobs
from kernelwright.rewrites.tracing import OperatorGraph

FORMS = {"split-product-cuda": "wgmma", "split-product-triton": "tma"}
"""Form of the template by the name of the technique, the quicker first."""
PRODUCTS = (aten.mm, aten.bmm, aten.matmul, aten.linear, aten.addmm, aten.baddbmm)


def techniques_on(device: str) -> tuple[str, ...]:
    """The techniques that a machine can build for a device: none without a GPU, and CUDA C++ only where nvcc is found."""
    if not device.startswith("cuda"):
        return ()
    try:
        find_torch_nvcc()
    except CompilerMissingError:
        return ("split-product-triton",)
    return tuple(FORMS)


class SplitProduct:
    """A function that computes one product by the template, with knobs for its sizes.

    Args:
        name: Of the Python function.
        knobs: Of the template.
    """

    device_test = "is_cuda"

    def __init__(self, name: str, knobs: Knobs) -> None:
        self.__name__ = name
        self.knobs = knobs

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The product of fake tensors."""
        left, right = inputs
        return left.new_empty((*left.shape[:-1], right.shape[-2]))

    def definition(self) -> str:
        """The function and its knobs, which the template's text comes before."""
        knobs, name = self.__name__.upper(), self.__name__
        spelled = split_product.spelled(self.knobs)
        if self.knobs.form == "wgmma":
            return f"{name} = {spelled}\n"
        return f"{knobs} = {spelled}\n\n\ndef {name}(a, b):\n    return product(a, b, knobs={knobs})\n"

    @staticmethod
    def prologue(kernels: Sequence[SplitProduct]) -> str:
        """The template's text without its docstring."""
        text = split_product.emit(kernels[0].knobs)
        return text.split('"""', 2)[2]


class Products:
    """Replaces products in the graphs of one module; those of equal knobs share a function.

    Args:
        technique: One of `FORMS`.
    """

    def __init__(self, technique: str) -> None:
        self.technique = technique
        self._made: dict[Knobs, SplitProduct] = {}

    def replace(self, graph: OperatorGraph) -> int:
        """Replace each product that the template takes, in place; how many there were."""
        editor = Editor(graph.graph, graph.mode)
        count = sum(self._replace(editor, node) for node in editor.nodes(*PRODUCTS))
        editor.sweep()
        graph.graph.lint()
        return count

    def _replace(self, editor: Editor, node: fx.Node) -> bool:
        operands = operands_of(node)
        if operands is None:
            return False
        left, right = operands.left, operands.right
        sizes = sizes_of(left, right, transposed=operands.transposed)
        if sizes is None or split_product.refusal(*sizes[1:], batch=sizes[0], dtype="float32") is not None:
            return False
        batch, m, n, k = sizes
        columns = right if operands.transposed else editor.call(node, aten.transpose.int, right, -2, -1)
        many = len(shape(right)) > 3
        if many:
            left = editor.call(node, aten.reshape.default, left, [batch, m, k])
            columns = editor.call(node, aten.reshape.default, columns, [batch, n, k])
        knobs = split_product.chosen(FORMS[self.technique], batch, m, n, k)
        kernel = self._made.setdefault(knobs, SplitProduct(f"split_product_{len(self._made)}", knobs))
        result = editor.call(node, kernel, left, columns)
        if many:
            result = editor.call(node, aten.reshape.default, result, list(shape(node)))
        if operands.alpha != 1:
            result = editor.call(node, aten.mul.Tensor, result, operands.alpha)
        if operands.bias is not None and operands.beta != 0:
            bias = operands.bias
            scaled = bias if operands.beta == 1 else editor.call(node, aten.mul.Tensor, bias, operands.beta)
            result = editor.call(node, aten.add.Tensor, result, scaled)
        editor.replace(node, result)
        return True


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


def operands_of(node: fx.Node) -> Operands | None:
    """Operands of a call of `PRODUCTS`; None where one is no tensor."""
    given = list(arguments(node).values())
    if is_call(node, aten.addmm, aten.baddbmm):
        bias, left, right, beta, alpha = given
        found = Operands(left=left, right=right, bias=bias, alpha=alpha, beta=beta)
    elif is_call(node, aten.linear):
        found = Operands(left=given[0], right=given[1], transposed=True, bias=given[2])
    else:
        found = Operands(left=given[0], right=given[1])
    return found if is_tensor(found.left) and is_tensor(found.right) else None


def sizes_of(left: fx.Node, right: fx.Node, *, transposed: bool) -> tuple[int, int, int, int] | None:
    """Batch, M, N and K of a product of float32 that the template can take; none of another."""
    if value(left).dtype != torch.float32 or value(right).dtype != torch.float32:
        return None
    a, b = shape(left), shape(right)
    if min(len(a), len(b)) < 2:
        return None
    n, k = b[-2:] if transposed else b[:-3:-1]
    if len(b) == 2:
        return 1, math.prod(a[:-1]), n, k
    if a[:-2] != b[:-2]:
        return None
    return math.prod(a[:-2]), a[-2], n, k


def clash(source: str) -> set[str]:
    """Names at the module level of a task's text that the template's text also has."""
    texts = (split_product.emit(split_product.chosen(form, 1, 1024, 1024, 1024)) for form in FORMS.values())
    return names_in(source) & set().union(*(names_in(text, imports=False) for text in texts))


def names_in(source: str, *, imports: bool = True) -> set[str]:
    """Names that a module's own statements bind."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names} if imports else set()
        else:
            names: list[Any] = [item for item in ast.walk(node) if isinstance(item, ast.Name)]
            found |= {item.id for item in names if isinstance(item.ctx, ast.Store)}
    return found
