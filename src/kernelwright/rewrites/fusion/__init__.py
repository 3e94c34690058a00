"""Fuses pointwise chains and row reductions into one kernel: C++ on a CPU, Triton on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class KernelFuser:
    """Makes the kernels of one module; equal kernels are made once. Its options are the knobs of `FusionPass`."""

    device: str
    single: bool = False
    convolutions: bool = False
    single_pass: bool = False
    channels: bool = False
    fp16: bool = False
    products: bool = False
    kernels: dict[str, FusedKernel] = field(default_factory=dict)
    """Kernels so far, by their text under a common name."""
    alone: bool = False
    """True where some operator alone became a kernel."""

    @property
    def on_gpu(self) -> bool:
        """True where kernels run on a GPU."""
        return self.device.startswith("cuda")

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what was done so far: `fuse-all` only where some operator alone became a kernel."""
        if not self.kernels:
            return ()
        used = {name for kernel in self.kernels.values() for name in kernel.techniques}
        fused = f"fuse-{'all' if self.alone else 'chains'}-{'triton' if self.on_gpu else 'cpp'}"
        return (fused, *(name for name in TECHNIQUES if name in used))

    def fuse(self, graph: OperatorGraph) -> None:
        """Replace groups of operators by kernels, in place."""
        editor = Editor(graph.graph, graph.mode)
        worth = (WORTH_ALONE_ON_GPU if self.on_gpu else WORTH_ALONE) if self.single else ()
        groups = find(graph.graph, self, worth)
        replaced: dict[fx.Node, fx.Node] = {}
        updates = {replace_group(editor, group, self, replaced): group.program.updates for group in groups}
        order(graph.graph, updates)
        for node in reversed(list(graph.graph.nodes)):
            if packet_of(node) is not None and not (node.users or has_effect(node) or is_random(node)):
                graph.graph.erase_node(node)
        graph.graph.lint()
        self.alone |= any(len(group.members) == 1 for group in groups)

    def accepts(self, program: LoopProgram) -> bool:
        """True where a kernel may compute a program, and its printer can print it."""
        if program.convolution is not None:
            fits = (self.channels or not (program.reduced or program.pooled)) and (self.fp16 or program.is_of_float32)
            if not (self.convolutions and fits):
                return False
        if program.multiplied is not None and not self.products:
            return False
        return triton.accepts(program) if self.on_gpu else cpp.accepts(program)

    def kernel(self, program: LoopProgram, signature: Signature, inputs: list[fx.Node]) -> FusedKernel:
        """The kernel that computes a program of these inputs."""
        strides = tuple(tuple(value(node).stride()) for node in inputs)
        text = self._printed("kernel", program, signature, strides).text()
        if text not in self.kernels:
            self.kernels[text] = self._printed(f"fused_{len(self.kernels)}", program, signature, strides)
        return self.kernels[text]

    def _printed(
        self, name: str, program: LoopProgram, signature: Signature, strides: tuple[tuple[int, ...], ...]
    ) -> FusedKernel:
        """A program in the form that suits it."""
        if not self.on_gpu:
            return cpp.CppKernel(name, program, signature, strides)
        if program.convolution is not None:
            return ConvolutionKernel(name, program, signature, strides, FP16 if self.fp16 else TF32)
        if program.multiplied is not None:
            return ProductKernel(name, program, signature, strides)
        kind = ScanKernel if program.scans else WindowKernel if program.windows else triton.TritonKernel
        kernel = kind(name, program, signature, strides)
        if self.single_pass and kernel.nest.kind == ROWS and reads_once(kernel.nest) and kernel.full_stores:
            return OneReadKernel(name, program, signature, strides)
        return kernel
