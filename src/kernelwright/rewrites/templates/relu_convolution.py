"""Lets cuDNN compute convolutions of 16 bits with the batch norm, the residual and the ReLU that follow.

A batch norm in eval mode is a factor and a shift of each channel. A Triton kernel folds them into filters and bias in each
call, from the live parameters. cuDNN then adds bias and residual and applies ReLU where it computes the convolution, in
channels-last layout, in which its tensor cores work. PyTorch never calls it so by itself, and torch.compile has kernels of
its own for what follows. Folded filters are rounded to 16 bits, as eager rounds the convolution's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

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
from kernelwright.rewrites.templates.base import CallTemplate, TemplateKernel, kernel_text

MOST_NUMBERS = 1 << 14
"""Numbers of a filter, which one program folds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedConvolution:
    """A convolution with a batch norm, a residual or None, and ReLU."""

    convolution: fx.Node
    norm: fx.Node
    residual: fx.Node | None

    @classmethod
    def of(cls, node: fx.Node) -> FoldedConvolution | None:
        """What a ReLU is of; None where that is something else."""
        inner = read_once(node.args[0])
        pair = operand_nodes(inner, aten.add, aten.add_)
        for norm, residual in (pair, pair[::-1]) if pair else ((inner, None),):
            norm = read_once(norm, aten.batch_norm)
            convolution = read_once(norm.args[0], aten.conv2d) if norm is not None else None
            if norm is not None and convolution is not None and (residual is None or shape(residual) == shape(norm)):
                return cls(convolution=convolution, norm=norm, residual=residual)
        return None


class ReluConvolution(CallTemplate[FoldedConvolution, None]):
    """cuDNN's convolution with bias, residual and ReLU. Its options are the norm's epsilon and the geometry."""

    technique = "relu-convolution"
    function: ClassVar = "relu_convolution"
    operators: ClassVar = (aten.relu, aten.relu_)
    task_operators: ClassVar = frozenset({"conv2d"})
    fallback: ClassVar = "torch.relu"
    caller = "relu_convolution.caller.txt"
    default = None

    def sizes_of(self, node: fx.Node) -> FoldedConvolution | None:
        """The convolution that a ReLU is of; None where no other reader would do without what lies between."""
        return FoldedConvolution.of(node)

    def refusal(self, sizes: FoldedConvolution) -> str | None:
        """The reason why cuDNN does not take it, or would not be quicker; None if it does."""
        convolution, norm = arguments(sizes.convolution), arguments(sizes.norm)
        weight = value(convolution["weight"])
        if dtype(sizes.convolution) not in (torch.float16, torch.bfloat16) or weight.dtype != dtype(sizes.convolution):
            return f"wanted numbers of 16 bits, found {dtype(sizes.convolution)}"
        if norm["training"] or None in (norm["weight"], norm["bias"], norm["running_mean"], norm["running_var"]):
            return "wanted a batch norm with weights in eval mode"
        if convolution["groups"] != 1 or isinstance(convolution["padding"], str):
            return f"wanted one group and a padding in numbers, found {convolution['groups']} and {convolution['padding']}"
        if weight[0].numel() > MOST_NUMBERS or not (weight.is_contiguous() or weight.stride(1) == 1):
            return f"wanted dense filters of at most {MOST_NUMBERS} numbers, found {tuple(weight.shape)}"
        return None

    def alternatives(self, sizes: FoldedConvolution) -> tuple[None, ...]:
        """There are no knobs."""
        return (None,)

    def options(self, node: fx.Node, sizes: FoldedConvolution) -> tuple[Any, ...]:
        """Epsilon, strides, padding and dilation."""
        given = arguments(sizes.convolution)
        geometry = (numbers(given[name], 2) for name in ("stride", "padding", "dilation"))
        return (float(arguments(sizes.norm)["eps"]), *geometry)

    def module(self, knobs: None) -> str:
        """Text of a module that defines `relu_convolution`."""
        return kernel_text("relu_convolution.triton.txt")

    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text."""
        return {"options": ", ".join(map(repr, kernel.options))}

    def outputs(self, kernel: TemplateKernel, *inputs: Any) -> torch.Tensor:
        """The result for fake tensors."""
        x, weight, *_ = inputs
        result = torch.ops.aten.conv2d.default(x, weight, None, *kernel.options[1:])
        return cast(torch.Tensor, result.contiguous(memory_format=torch.channels_last))

    def insert(self, editor: Editor, node: fx.Node, sizes: FoldedConvolution, kernel: TemplateKernel) -> None:
        """Put a call of the kernel in the place of a ReLU."""
        convolution, norm = arguments(sizes.convolution), arguments(sizes.norm)
        state = [norm[name] for name in ("weight", "bias", "running_mean", "running_var")]
        given = (convolution["input"], convolution["weight"], convolution["bias"], *state, sizes.residual)
        editor.replace(node, editor.call(node, kernel, *given))


RELU_CONVOLUTION = ReluConvolution()
