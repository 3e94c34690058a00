"""Fuses pointwise chains and row reductions into one kernel: C++ on a CPU, Triton on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from kernelwright.rewrites.fusion import cpp, triton
from kernelwright.rewrites.fusion.convolution import ConvolutionKernel, HalfConvolutionKernel
from kernelwright.rewrites.fusion.groups import WORTH_ALONE, WORTH_ALONE_ON_GPU, Signature, find, order, replace_group
from kernelwright.rewrites.fusion.nest import ROWS
from kernelwright.rewrites.fusion.one_read import ONE_READ, OneReadKernel, reads_once
from kernelwright.rewrites.fusion.program import LoopProgram
from kernelwright.rewrites.fusion.triton import SPLIT_ROWS
from kernelwright.rewrites.fusion.window_kernel import ScanKernel, WindowKernel
from kernelwright.rewrites.fusion.windows import FP16_CONVOLUTION, POOLED_TILES, TILED, WHOLE_CHANNELS
from kernelwright.rewrites.graph import Editor, has_effect, is_random, packet_of, value
from kernelwright.rewrites.tracing import OperatorGraph

__all__ = ["FP16_CONVOLUTION", "ONE_READ", "POOLED_TILES", "SPLIT_ROWS", "TILED", "WHOLE_CHANNELS", "Foundry"]


def _triton_kernel(
    name: str,
    program: LoopProgram,
    signature: Signature,
    strides: tuple[tuple[int, ...], ...],
    *,
    once: bool = False,
    half: bool = False,
) -> triton.TritonKernel:
    if program.convolution is not None:
        return (HalfConvolutionKernel if half else ConvolutionKernel)(name, program, signature, strides)
    kind = ScanKernel if program.scans else WindowKernel if program.windows else triton.TritonKernel
    made = kind(name, program, signature, strides)
    once = once and made.nest.kind == ROWS and reads_once(made.nest) and bool(made.full_stores)
    return OneReadKernel(name, program, signature, strides) if once else made


class Foundry:
    """Makes the kernels of one module; equal kernels are made once.

    Args:
        device: Where they run.
        single: Whether one operator alone may become one.
        convolutions: Whether convolutions that cuDNN would compute may, on a GPU.
        once: Whether long rows are read once, by programs that wait for one another, on a GPU.
        channels: Whether the kernel of a convolution may reduce its channels, and pool.
        half: Whether it multiplies numbers of 16 bits: float16 where it may use TF32, or those of the task.
    """

    def __init__(
        self,
        device: str,
        single: bool = False,
        convolutions: bool = False,
        once: bool = False,
        channels: bool = False,
        half: bool = False,
    ) -> None:
        self._kernels: dict[str, Any] = {}
        self._alone = False
        on_gpu = device.startswith("cuda")
        self._worth: tuple[Any, ...] = (WORTH_ALONE_ON_GPU if on_gpu else WORTH_ALONE) if single else ()
        self._language = "triton" if on_gpu else "cpp"
        self._type: Callable[..., Any] = functools.partial(_triton_kernel, once=once, half=half) if on_gpu else cpp.CppKernel
        printable = triton.accepts if on_gpu else cpp.accepts

        def accepts(program: LoopProgram) -> bool:
            if program.convolution is not None:
                fits = (channels or not (program.reduced or program.pooled)) and (half or program.is_of_float32)
                return convolutions and fits and printable(program)
            return printable(program)

        self._accepts = accepts

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what was done so far: `fuse-all` only where some operator alone became a kernel."""
        if not self._kernels:
            return ()
        kernels = [*self._kernels.values()]
        convolutions = [kernel for kernel in kernels if isinstance(kernel, ConvolutionKernel)]
        used = {
            f"fuse-{'all' if self._alone else 'chains'}-{self._language}": True,
            SPLIT_ROWS: any(kernel.splits_rows and not isinstance(kernel, OneReadKernel) for kernel in kernels),
            TILED: bool(convolutions),
            FP16_CONVOLUTION: any(isinstance(kernel, HalfConvolutionKernel) for kernel in convolutions),
            WHOLE_CHANNELS: any(kernel.program.reduced for kernel in convolutions),
            POOLED_TILES: any(kernel.program.pooled for kernel in kernels),
            ONE_READ: any(isinstance(kernel, OneReadKernel) for kernel in kernels),
        }
        return tuple(name for name, is_used in used.items() if is_used)

    def fuse(self, graph: OperatorGraph) -> None:
        """Replace groups of operators by kernels, in place."""
        editor = Editor(graph.graph, graph.mode)
        groups = find(graph.graph, self._accepts, self._worth)
        replaced: dict[fx.Node, fx.Node] = {}
        updates = {replace_group(editor, group, self._make, replaced): group.program.updates for group in groups}
        order(graph.graph, updates)
        for node in reversed(list(graph.graph.nodes)):
            if packet_of(node) is not None and not (node.users or has_effect(node) or is_random(node)):
                graph.graph.erase_node(node)
        graph.graph.lint()
        self._alone |= any(len(group.members) == 1 for group in groups)

    def _make(self, program: LoopProgram, signature: Signature, inputs: list[fx.Node]) -> Any:
        strides = tuple(tuple(value(node).stride()) for node in inputs)
        text = self._type("kernel", program, signature, strides).text()
        if text not in self._kernels:
            self._kernels[text] = self._type(f"fused_{len(self._kernels)}", program, signature, strides)
        return self._kernels[text]
