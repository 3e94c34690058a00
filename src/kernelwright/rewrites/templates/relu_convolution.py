"""Lets cuDNN compute convolutions of 16 bits with the batch norm, the residual and the ReLU that follow.

A batch norm in eval mode is a factor and a shift of each channel. A Triton kernel folds them into filters and bias in each
call, from the live parameters. cuDNN then adds bias and residual and applies ReLU where it computes the convolution, in
channels-last layout, in which its tensor cores work. PyTorch never calls it so by itself, and torch.compile has kernels of
its own for what follows. Folded filters are rounded to 16 bits, as eager rounds the convolution's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    arguments,
    aten,
    dtype,
    numbers,
    operand_nodes,
    read_once,
    shape,
    value,
)
from kernelwright.rewrites.templates.base import CallTemplate, Kernels, TemplateKernel, kernel_text

MOST_NUMBERS = 1 << 14
"""Numbers of a filter, which one program folds."""
STATE = ("weight", "bias", "running_mean", "running_var")
"""Operands of a batch norm besides its input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedConvolution:
    """A batch norm of a convolution, both without another reader."""

    convolution: fx.Node
    norm: fx.Node

    @classmethod
    def of(cls, item: Any) -> NormedConvolution | None:
        """The one that a node is; None where it is something else, or cuDNN does not take it."""
        norm = read_once(item, aten.batch_norm)
        convolution = read_once(norm.args[0], aten.conv2d) if norm is not None else None
        if norm is None or convolution is None:
            return None
        given, given_norm = arguments(convolution), arguments(norm)
        weight = value(given["weight"])
        of_16_bits = dtype(convolution) in (torch.float16, torch.bfloat16) and weight.dtype == dtype(convolution)
        has_all = None not in (given_norm[name] for name in STATE) and not given_norm["training"]
        dense = weight.is_contiguous() or weight.stride(1) == 1
        plain = given["groups"] == 1 and not isinstance(given["padding"], str)
        if of_16_bits and has_all and dense and plain and weight[0].numel() <= MOST_NUMBERS:
            return cls(convolution=convolution, norm=norm)
        return None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Input, weight and bias of the convolution, and the norm's state."""
        given, norm = arguments(self.convolution), arguments(self.norm)
        return given["input"], given["weight"], given["bias"], *(norm[name] for name in STATE)

    @property
    def options(self) -> tuple[Any, ...]:
        """Epsilon, strides, padding and dilation."""
        given = arguments(self.convolution)
        geometry = (numbers(given[name], 2) for name in ("stride", "padding", "dilation"))
        return (float(arguments(self.norm)["eps"]), *geometry)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedConvolution:
    """Operands of a ReLU: a normed convolution, pooled or not, and a residual or None."""

    main: NormedConvolution
    pool: fx.Node | None
    residual: fx.Node | None

    @classmethod
    def of(cls, node: fx.Node) -> FoldedConvolution | None:
        """Operand of a ReLU; None for another call."""
        inner = read_once(node.args[0])
        pool = read_once(inner, aten.max_pool2d)
        pair = operand_nodes(inner, aten.add, aten.add_)
        for item, residual in (pair, pair[::-1]) if pair else ((pool.args[0] if pool else inner, None),):
            main = NormedConvolution.of(item)
            if main is not None and (residual is None or shape(residual) == shape(main.norm)):
                return cls(main=main, pool=pool, residual=residual)
        return None


class ReluConvolution(CallTemplate[FoldedConvolution, None]):
    """cuDNN's convolution with bias, residual and ReLU. Options: function, norm's epsilon and geometry."""

    technique = "relu-convolution"
    function: ClassVar = "relu_convolution"
    operators: ClassVar = (aten.relu, aten.relu_)
    task_operators: ClassVar = frozenset({"conv2d"})
    fallback: ClassVar = "torch.relu"
    caller = "relu_convolution.caller.txt"
    default = None

    def sizes_of(self, node: fx.Node) -> FoldedConvolution | None:
        """The convolution that a ReLU is of; None where what lies between has another reader, or cuDNN does not take it."""
        return FoldedConvolution.of(node)

    def refusal(self, sizes: FoldedConvolution) -> None:
        """None: each that is found is taken."""

    def alternatives(self, sizes: FoldedConvolution) -> tuple[None, ...]:
        """There are no knobs."""
        return (None,)

    def options(self, node: fx.Node, sizes: FoldedConvolution) -> tuple[Any, ...]:
        """Function, epsilon, strides, padding and dilation."""
        return ("relu_convolution", *sizes.main.options)

    def module(self, knobs: None) -> str:
        """Text of a module that defines `relu_convolution` and `branch_convolution`."""
        return kernel_text("relu_convolution.triton.txt")

    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text."""
        kind, *others = kernel.options
        return {"kind": kind, "options": ", ".join(map(repr, others))}

    def outputs(self, kernel: TemplateKernel, *inputs: Any) -> Any:
        """The result for fake tensors, with the shift of a branch."""
        kind, _, *geometry = kernel.options
        x, weight, *_ = inputs
        result = torch.ops.aten.conv2d.default(x, weight, None, *geometry).contiguous(memory_format=torch.channels_last)
        return result if kind == "relu_convolution" else (result, weight.new_empty(len(weight), dtype=torch.float32))

    def insert(self, editor: Editor, node: fx.Node, sizes: FoldedConvolution, kernel: TemplateKernel) -> None:
        """Put a call of the kernel in the place of a ReLU."""
        result = editor.call(node, kernel, *sizes.main.tensors, sizes.residual, None)
        if sizes.pool is not None:
            result = editor.again(node, sizes.pool, result, *sizes.pool.args[1:], **sizes.pool.kwargs)
        editor.replace(node, result)

    def finish(self, editor: Editor, kernels: Kernels) -> None:
        """Let the kernel add the shift of a residual that is a normed convolution itself."""
        for node in editor.nodes():
            branch = NormedConvolution.of(node.args[-2]) if getattr(node.target, "template", None) is self else None
            if branch is not None:
                both = editor.call(node, kernels.kernel((None,), ("branch_convolution", *branch.options)), *branch.tensors)
                node.args = (*node.args[:-2], editor.pick(node, both, 0), editor.pick(node, both, 1))


RELU_CONVOLUTION = ReluConvolution()
