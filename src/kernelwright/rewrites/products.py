"""Lets the templates of products compute the float32 matrix products of an operator graph."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from kernelwright.errors import CompilerMissingError
from kernelwright.gpu.nvcc import find_torch_nvcc
from kernelwright.rewrites.graph import (
    Editor,
    arguments,
    aten,
    is_call,
    is_tensor,
    number,
    operands,
    packet_of,
    shape,
    value,
)
from kernelwright.rewrites.templates import one_pass_product, split_product
from kernelwright.rewrites.templates.split_product import Fragment, Knobs
from kernelwright.rewrites.tracing import OperatorGraph

FORMS = {"split-product-cuda": "wgmma", "split-product-triton": "tma"}
"""Form of the template `split_product` by the name of the technique, the quicker first."""
ONE_PASS = "one-pass-product"
TECHNIQUES = (*FORMS, ONE_PASS)
PRODUCTS = (aten.mm, aten.bmm, aten.matmul, aten.linear, aten.addmm, aten.baddbmm)


def builds_cuda(device: str) -> bool:
    """Whether a machine can build CUDA C++ for a device."""
    if not device.startswith("cuda"):
        return False
    try:
        find_torch_nvcc()
    except CompilerMissingError:
        return False
    return True


def techniques_on(device: str) -> tuple[str, ...]:
    """The techniques that a machine can build for a device: none without a GPU, and CUDA C++ only where nvcc is found."""
    if not device.startswith("cuda"):
        return ()
    return TECHNIQUES if builds_cuda(device) else ("split-product-triton", ONE_PASS)


class SplitProduct:
    """A function that computes one product by the template, with a knob of choices for its sizes.

    Args:
        name: Of the Python function.
        choices: Knobs of the template, the default first; the source declares them (`records.knobs`).
        epilogue: What follows the product in its kernel, in the form `wgmma` alone; each tensor that it reads is a further
        argument.
    """

    device_test = "is_cuda"

    def __init__(self, name: str, choices: tuple[Knobs, ...], epilogue: tuple[Fragment, ...] = ()) -> None:
        self.__name__ = name
        self.choices = choices
        self.knobs = choices[0]
        self.epilogue = epilogue

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The product of fake tensors."""
        left, right = inputs[:2]
        return left.new_empty((*left.shape[:-1], right.shape[-2]))

    def definition(self) -> str:
        """The function and its knobs, which the template's text comes before."""
        name, constant, default = self.__name__, self.__name__.upper(), asdict(self.knobs)
        if self.knobs.form == "wgmma":
            eager = f"{name}_eager"
            shapes = tuple(fragment.shape for fragment in self.epilogue if fragment.tensor)
            tiles: list[Any] = [(one.split_k, split_product.cuda_head(one, self.epilogue)) for one in self.choices]
            made = f"{split_product.eager_text(self.epilogue, eager)}\n\n"
            made += f"{name} = Product({eager}, TILE[0], {shapes!r}, TILE[1])\n"
        else:
            every = [asdict(one) for one in self.choices]
            differing = [key for key in default if any(one[key] != default[key] for one in every)]
            tiles = [{key: one[key] for key in differing} for one in every]
            made = f"{constant} = {default!r} | TILE\n\n\ndef {name}(a, b):\n    return product(a, b, knobs={constant})\n"
        return f'KNOBS_{constant} = {{"tile": {tuple(tiles)!r}}}\n' + made.replace("TILE", f'KNOBS_{constant}["tile"][0]')

    @staticmethod
    def prologue(kernels: Sequence[SplitProduct]) -> str:
        """The template's text without its docstring, and without the function at its end where each kernel has its own."""
        text = split_product.emit(kernels[0].knobs).split('"""', 2)[2]
        return text.partition("\n\ndef eager(")[0] if kernels[0].knobs.form == "wgmma" else text


class OnePassProduct:
    """A function that computes one product by the template `one_pass_product`, with a knob of choices for its sizes.

    Args:
        name: Of the Python function.
        choices: Knobs of the template, the default first; the source declares them (`records.knobs`).
    """

    device_test = "is_cuda"

    def __init__(self, name: str, choices: tuple[one_pass_product.OnePassKnobs, ...]) -> None:
        self.__name__ = name
        self.choices = choices

    @property
    def parts(self) -> int:
        """Parts of the product, all choices alike."""
        return self.choices[0].split_k

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The product of fake tensors, or its parts along a first dimension."""
        parts = [self.parts] if self.parts > 1 else []
        return left.new_empty((*parts, *left.shape[:-1], right.shape[-2]))

    def definition(self) -> str:
        """The function and its knobs, which the template's text comes before."""
        name = self.__name__
        knobs = f"KNOBS_{name.upper()}"
        tiles = tuple(asdict(one) for one in self.choices)
        return (
            f'{knobs} = {{"tile": {tiles!r}}}\n\n\n'
            f'def {name}(a, b):\n    return one_pass_product(a, b, {knobs}["tile"][0])\n'
        )

    @staticmethod
    def prologue(kernels: Sequence[OnePassProduct]) -> str:
        """The template's text without its docstring."""
        return one_pass_product.emit(kernels[0].choices[0]).split('"""', 2)[2]


class Products:
    """Replaces products in the graphs of one module; those of equal knobs share a function.

    Args:
        technique: One of `TECHNIQUES`.
    """

    def __init__(self, technique: str) -> None:
        self.technique = technique
        self._made: dict[tuple[Knobs, tuple[Fragment, ...]], SplitProduct] = {}
        self._one_pass: dict[tuple[one_pass_product.OnePassKnobs, ...], OnePassProduct] = {}

    def _for_sizes(self, batch: int, m: int, n: int, k: int) -> SplitProduct | OnePassProduct | None:
        """The function for a product of these sizes; None where the template does not take it."""
        if self.technique == ONE_PASS:
            if one_pass_product.refusal(m, n, k, batch) is not None:
                return None
            choices = one_pass_product.alternatives(batch, m, n, k)
            made = OnePassProduct(f"one_pass_product_{len(self._one_pass)}", choices)
            return self._one_pass.setdefault(choices, made)
        if split_product.refusal(m, n, k, batch=batch, dtype="float32") is not None:
            return None
        return self._kernel(split_product.alternatives(FORMS[self.technique], batch, m, n, k))

    def _kernel(self, choices: tuple[Knobs, ...], epilogue: tuple[Fragment, ...] = ()) -> SplitProduct:
        made = SplitProduct(f"split_product_{len(self._made)}", choices, epilogue)
        return self._made.setdefault((choices[0], epilogue), made)

    def replace(self, graph: OperatorGraph) -> int:
        """Replace each product that the template takes, in place; how many there were."""
        editor = Editor(graph.graph, graph.mode)
        count = sum(self._replace(editor, node) for node in editor.nodes(*PRODUCTS))
        if FORMS.get(self.technique) == "wgmma":
            for node in editor.nodes():
                if isinstance(node.target, SplitProduct):
                    self._absorb(editor, node, node.target)
        editor.sweep()
        graph.graph.lint()
        return count

    def _replace(self, editor: Editor, node: fx.Node) -> bool:
        given = operands_of(node)
        if given is None:
            return False
        left, right = given.left, given.right
        sizes = sizes_of(left, right, transposed=given.transposed)
        kernel = self._for_sizes(*sizes) if sizes else None
        if sizes is None or kernel is None:
            return False
        batch, m, n, k = sizes
        columns = right if given.transposed else editor.call(node, aten.transpose.int, right, -2, -1)
        many = len(shape(right)) > 3
        if many:
            left = editor.call(node, aten.reshape.default, left, [batch, m, k])
            columns = editor.call(node, aten.reshape.default, columns, [batch, n, k])
        result = editor.call(node, kernel, left, columns)
        if isinstance(kernel, OnePassProduct) and kernel.parts > 1:
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
        return True

    def _absorb(self, editor: Editor, node: fx.Node, kernel: SplitProduct) -> None:
        """Let a product's kernel compute what follows it, as far as each result has one reader."""
        epilogue: tuple[Fragment, ...] = ()
        tensors: tuple[fx.Node, ...] = ()
        last = node
        while len(last.users) == 1 and len(tensors) < split_product.MOST_TENSORS:
            found = fragment_of(next(iter(last.users)), last, f"t{len(tensors)}")
            if found is None:
                break
            fragment, tensor = found
            epilogue += (fragment,)
            tensors += (tensor,) if tensor is not None else ()
            last = next(iter(last.users))
        if epilogue:
            made = self._kernel(kernel.choices, epilogue)
            editor.replace(last, editor.call(last, made, *node.args, *tensors))


def fragment_of(node: fx.Node, source: fx.Node, name: str) -> tuple[Fragment, fx.Node | None] | None:
    """How a kernel computes `node` of its own result `source`, and the tensor that it reads; None if it cannot.

    Args:
        node: The reader of the result.
        source: The result.
        name: Of the tensor, in the epilogue.
    """
    if node.op != "call_function" or not is_tensor(node) or packet_of(node) is None:
        return None
    if shape(node) != shape(source) or value(node).dtype != torch.float32 or node.all_input_nodes.count(source) != 1:
        return None
    given = arguments(node)
    if is_call(node, aten.relu):
        return split_product.RELU, None
    if is_call(node, aten.sigmoid):
        return split_product.SIGMOID, None
    if is_call(node, aten.silu):
        return split_product.SWISH, None
    if is_call(node, aten.gelu) and given["approximate"] == "none":
        return split_product.GELU, None
    if is_call(node, aten.leaky_relu):
        return split_product.leaky_relu(float(given["negative_slope"])), None
    other = operands(node, aten.add, aten.mul)
    if other is None or sum(item is source for item in other) != 1:
        return None
    rest = other[1] if other[0] is source else other[0]
    factor = number(rest)
    if is_call(node, aten.mul):
        return (split_product.scale(factor), None) if factor is not None and math.isfinite(factor) else None
    if not is_tensor(rest) or value(rest).dtype != torch.float32 or not value(rest).is_contiguous():
        return None
    if shape(rest) == shape(source)[-1:]:
        return split_product.bias(name), rest
    return (split_product.residual(name), rest) if shape(rest) == shape(source) else None


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
    """Names at the module level of a task's text that the templates' texts also have."""
    texts = [split_product.emit(split_product.chosen(form, 1, 1024, 1024, 1024)) for form in FORMS.values()]
    texts.append(one_pass_product.emit(one_pass_product.OnePassKnobs()))
    return shared_names(source, texts)


def shared_names(source: str, texts: Iterable[str]) -> set[str]:
    """Names at the module level of a task's text that templates' texts also have, imports aside."""
    return {*names_in(source)} & set().union(*(names_in(text, imports=False) for text in texts))


@functools.lru_cache(maxsize=256)
def names_in(source: str, *, imports: bool = True) -> frozenset[str]:
    """Names that a module's own statements bind. Every task asks for those of the same templates."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names} if imports else set()
        else:
            names: list[Any] = [item for item in ast.walk(node) if isinstance(item, ast.Name)]
            found |= {item.id for item in names if isinstance(item.ctx, ast.Store)}
    return frozenset(found)
