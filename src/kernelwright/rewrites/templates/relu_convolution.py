"""Lets cuDNN compute convolutions of 16 bits with the batch norm, the residual and the ReLU that follow.

A batch norm in eval mode is a factor and a shift of each channel. One Triton kernel folds those of all convolutions into
filters and biases in each call, from the live parameters. cuDNN then adds bias and residual and applies ReLU where it
computes the convolution, in channels-last layout, in which its tensor cores work. PyTorch never calls it so by itself, and
torch.compile has kernels of its own for what follows. Folded filters are rounded to 16 bits, as eager rounds the
convolution's result.
"""

from __future__ import annotations

import math
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
from kernelwright.rewrites.templates.base import CallTemplate, Kernels, TemplateKernel, kernel_text

ALIGNED = 8
"""Filters are a multiple of so many, so that those of the next convolution begin at a multiple of 16 bytes."""
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
        state = [given_norm[name] for name in STATE]
        has_all = None not in state and not given_norm["training"]
        kinds = {dtype(item) for item in (convolution, given["weight"], *state) if item is not None}
        of_16_bits = len(kinds) == 1 and not kinds.isdisjoint((torch.float16, torch.bfloat16))
        dense = weight.is_contiguous() or weight.stride(1) == 1
        plain = given["groups"] == 1 and not isinstance(given["padding"], str)
        if of_16_bits and has_all and dense and plain and not len(weight) % ALIGNED:
            return cls(convolution=convolution, norm=norm)
        return None

    @property
    def input(self) -> fx.Node:
        """The input of the convolution."""
        return cast(fx.Node, arguments(self.convolution)["input"])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Filters, channels, and rows and columns of taps."""
        return shape(arguments(self.convolution)["weight"])

    @property
    def state(self) -> tuple[fx.Node | None, ...]:
        """Weight and bias of the convolution, and the norm's state."""
        given, norm = arguments(self.convolution), arguments(self.norm)
        return given["weight"], given["bias"], *(norm[name] for name in STATE)

    @property
    def geometry(self) -> tuple[tuple[int, ...], ...]:
        """Strides, padding and dilation."""
        given = arguments(self.convolution)
        return tuple(numbers(given[name], 2) for name in ("stride", "padding", "dilation"))

    @property
    def epsilon(self) -> float:
        """The number that the norm adds to its variance."""
        return float(arguments(self.norm)["eps"])


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
    """cuDNN's convolution with bias, residual and ReLU. Options: the emitted function, and what it is given first."""

    technique = "relu-convolution"
    function: ClassVar = "relu_convolution"
    operators: ClassVar = (aten.relu, aten.relu_)
    task_operators: ClassVar = frozenset({"conv2d"})
    requires: ClassVar = ("torch.backends.cudnn.enabled",)
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
        """The emitted function."""
        return ("relu_convolution",)

    def module(self, knobs: None) -> str:
        """Text of a module that defines `relu_convolution` and `branch_convolution`."""
        return kernel_text("relu_convolution.triton.txt")

    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text."""
        kind, *given = kernel.options
        return {"kind": kind, "options": "".join(f"{item!r}, " for item in given)}

    def outputs(self, kernel: TemplateKernel, *inputs: Any) -> Any:
        """The result for fake tensors: of a convolution, or flat filters and shifts of all."""
        kind, *given = kernel.options
        if kind == "fold_norms":
            sizes = [(count, count * channels * taps) for count, channels, taps, *_ in given[0]]
            return tuple(inputs[0].new_empty(sum(each)) for each in (*zip(*sizes, strict=True),)[::-1])
        x, *_, sizes, stride, padding, dilation = inputs
        result = torch.ops.aten.conv2d.default(x, x.new_empty(sizes), None, stride, padding, dilation)
        return result.contiguous(memory_format=torch.channels_last)

    def insert(self, editor: Editor, node: fx.Node, sizes: FoldedConvolution, kernel: TemplateKernel) -> None:
        """Put a call of the kernel in the place of a ReLU; `finish` gives it the folded filters."""
        main = sizes.main
        result = editor.call(node, kernel, main.input, main.norm, None, sizes.residual, 0, 0, main.sizes, *main.geometry)
        if sizes.pool is not None:
            result = editor.again(node, sizes.pool, result, *sizes.pool.args[1:], **sizes.pool.kwargs)
        editor.replace(node, result)

    def finish(self, editor: Editor, kernels: Kernels) -> None:
        """Fold all norms before everything else, also those of residuals that are normed convolutions themselves."""
        calls = [node for node in editor.nodes() if getattr(node.target, "template", None) is self]
        if not calls:
            return
        rows = list[tuple[Any, ...]]()
        state = list[fx.Node | None]()
        found = list[tuple[fx.Node, NormedConvolution, NormedConvolution | None]]()
        starts = dict[fx.Node, tuple[int, int]]()
        first = place = 0
        for node in calls:
            main, branch = NormedConvolution.of(node.args[1]), NormedConvolution.of(node.args[3])
            assert main is not None
            for one in filter(None, (branch, main)):
                count, channels, high, wide = one.sizes
                rows.append((count, channels, high * wide, one.epsilon, len(rows) - 1 if branch and one is main else -1))
                state += one.state
                starts[one.norm] = first, place
                first, place = first + count, place + math.prod(one.sizes)
            found.append((node, main, branch))
        start = editor.nodes()[0]
        both = editor.call(start, kernels.kernel((None,), ("fold_norms", tuple(rows))), *state)
        filters, shifts = editor.pick(start, both, 0), editor.pick(start, both, 1)
        for node, main, branch in found:
            residual = node.args[3]
            if branch is not None:
                kernel = kernels.kernel((None,), ("branch_convolution",))
                given = (branch.input, filters, starts[branch.norm][1], branch.sizes, *branch.geometry)
                residual = editor.call(node, kernel, *given)
            node.args = (main.input, filters, shifts, residual, *starts[main.norm], main.sizes, *main.geometry)


RELU_CONVOLUTION = ReluConvolution()
