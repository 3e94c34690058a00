"""Fuses pointwise chains and row reductions into one kernel: C++ on a CPU, Triton on a GPU."""

from __future__ import annotations

from typing import Any

from torch import fx

from kernelwright.rewrites.fusion import cpp, triton
from kernelwright.rewrites.fusion.convolution import POOLED_TILES, WHOLE_CHANNELS, ConvolutionKernel
from kernelwright.rewrites.fusion.groups import WORTH_ALONE, WORTH_ALONE_ON_GPU, find, order, replace_group
from kernelwright.rewrites.fusion.kernel import FusedKernel
from kernelwright.rewrites.fusion.products import PRODUCT_16, ProductKernel
from kernelwright.rewrites.fusion.products import TECHNIQUES as OF_PRODUCTS
from kernelwright.rewrites.fusion.program import ROWS, LoopProgram, Signature
from kernelwright.rewrites.fusion.tiles import ScanKernel, WindowKernel
from kernelwright.rewrites.fusion.triton import ONE_READ, SPLIT_ROWS, OneReadKernel, reads_once
from kernelwright.rewrites.graph import Editor, has_effect, is_random, packet_of, value
from kernelwright.rewrites.templates.convolution import TF32, TILED
from kernelwright.rewrites.templates.fp16_convolution import FP16, FP16_CONVOLUTION
from kernelwright.rewrites.tracing import OperatorGraph

__all__ = [
    "FP16_CONVOLUTION",
    "ONE_READ",
    "POOLED_TILES",
    "PRODUCT_16",
    "SPLIT_ROWS",
    "TILED",
    "WHOLE_CHANNELS",
    "KernelFuser",
]

TECHNIQUES = (SPLIT_ROWS, TILED, FP16_CONVOLUTION, WHOLE_CHANNELS, POOLED_TILES, ONE_READ, *OF_PRODUCTS)
"""Names of what kernels do, in the order in which a candidate tells them."""


class KernelFuser:
    """Makes the kernels of one module; equal kernels are made once.

    Args:
        device: Where they run.
        single: Whether one operator alone may become one.
        convolutions: Whether convolutions that cuDNN would compute may, on a GPU.
        single_pass: Whether long rows are read once, by programs that wait for one another, on a GPU.
        channels: Whether the kernel of a convolution may reduce its channels, and pool.
        fp16: Whether it multiplies numbers of 16 bits: float16 where it may use TF32, or those of the task.
        products: Whether products of 16 bits become kernels with what follows, on a GPU.
    """

    def __init__(
        self,
        device: str,
        single: bool = False,
        convolutions: bool = False,
        single_pass: bool = False,
        channels: bool = False,
        fp16: bool = False,
        products: bool = False,
    ) -> None:
        self._kernels: dict[str, FusedKernel] = {}
        self._alone = False
        self._on_gpu = device.startswith("cuda")
        self._worth: tuple[Any, ...] = (WORTH_ALONE_ON_GPU if self._on_gpu else WORTH_ALONE) if single else ()
        self._convolutions = convolutions
        self._single_pass = single_pass
        self._channels = channels
        self._fp16 = fp16
        self._products = products

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what was done so far: `fuse-all` only where some operator alone became a kernel."""
        if not self._kernels:
            return ()
        used = {name for kernel in self._kernels.values() for name in kernel.techniques}
        fused = f"fuse-{'all' if self._alone else 'chains'}-{'triton' if self._on_gpu else 'cpp'}"
        return (fused, *(name for name in TECHNIQUES if name in used))

    def fuse(self, graph: OperatorGraph) -> None:
        """Replace groups of operators by kernels, in place."""
        editor = Editor(graph.graph, graph.mode)
        groups = find(graph.graph, self, self._worth)
        replaced: dict[fx.Node, fx.Node] = {}
        updates = {replace_group(editor, group, self, replaced): group.program.updates for group in groups}
        order(graph.graph, updates)
        for node in reversed(list(graph.graph.nodes)):
            if packet_of(node) is not None and not (node.users or has_effect(node) or is_random(node)):
                graph.graph.erase_node(node)
        graph.graph.lint()
        self._alone |= any(len(group.members) == 1 for group in groups)

    def accepts(self, program: LoopProgram) -> bool:
        """Whether a kernel may compute a program, and its printer can print it."""
        if program.convolution is not None:
            fits = (self._channels or not (program.reduced or program.pooled)) and (self._fp16 or program.is_of_float32)
            if not (self._convolutions and fits):
                return False
        if program.multiplied is not None and not self._products:
            return False
        return triton.accepts(program) if self._on_gpu else cpp.accepts(program)

    def kernel(self, program: LoopProgram, signature: Signature, inputs: list[fx.Node]) -> FusedKernel:
        """The kernel that computes a program of these inputs."""
        strides = tuple(tuple(value(node).stride()) for node in inputs)
        text = self._printed("kernel", program, signature, strides).text()
        if text not in self._kernels:
            self._kernels[text] = self._printed(f"fused_{len(self._kernels)}", program, signature, strides)
        return self._kernels[text]

    def _printed(
        self, name: str, program: LoopProgram, signature: Signature, strides: tuple[tuple[int, ...], ...]
    ) -> FusedKernel:
        """A program in the form that suits it."""
        if not self._on_gpu:
            return cpp.CppKernel(name, program, signature, strides)
        if program.convolution is not None:
            return ConvolutionKernel(name, program, signature, strides, FP16 if self._fp16 else TF32)
        if program.multiplied is not None:
            return ProductKernel(name, program, signature, strides)
        kind = ScanKernel if program.scans else WindowKernel if program.windows else triton.TritonKernel
        kernel = kind(name, program, signature, strides)
        if self._single_pass and kernel.nest.kind == ROWS and reads_once(kernel.nest) and kernel.full_stores:
            return OneReadKernel(name, program, signature, strides)
        return kernel
