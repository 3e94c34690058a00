"""Fuses pointwise chains and row reductions into one kernel: C++ on a CPU, Triton on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from kernelwright.rewrites.fusion import cpp, triton
from kernelwright.rewrites.fusion.groups import Signature, find, order, replace_group
from kernelwright.rewrites.fusion.program import LoopProgram
from kernelwright.rewrites.fusion.triton import SPLIT_ROWS
from kernelwright.rewrites.graph import Editor, value
from kernelwright.rewrites.tracing import OperatorGraph

__all__ = ["SPLIT_ROWS", "Foundry"]


class Foundry:
    """Makes the kernels of one module; equal kernels are made once. With `single`, one operator alone may become one."""

    def __init__(self, device: str, single: bool = False) -> None:
        self._kernels: dict[str, Any] = {}
        self._single = single
        on_gpu = device.startswith("cuda")
        self.technique = f"fuse-{'all' if single else 'chains'}-{'triton' if on_gpu else 'cpp'}"
        self._type: Callable[..., Any] = triton.TritonKernel if on_gpu else cpp.CppKernel
        self._accepts = triton.accepts if on_gpu else cpp.accepts

    def fuse(self, graph: OperatorGraph) -> tuple[str, ...]:
        """Replace groups of operators by kernels, in place; return the technique's name when there were any."""
        editor = Editor(graph.graph, graph.mode)
        groups = find(graph.graph, self._accepts, self._single)
        replaced: dict[fx.Node, fx.Node] = {}
        updates = {replace_group(editor, group, self._make, replaced): group.program.updates for group in groups}
        order(graph.graph, updates)
        graph.graph.lint()
        if not groups:
            return ()
        return (self.technique, *({SPLIT_ROWS} if any(one.splits_rows for one in self._kernels.values()) else ()))

    def _make(self, program: LoopProgram, signature: Signature, inputs: list[fx.Node]) -> Any:
        strides = tuple(tuple(value(node).stride()) for node in inputs)
        text = self._type("kernel", program, signature, strides).text()
        if text not in self._kernels:
            self._kernels[text] = self._type(f"fused_{len(self._kernels)}", program, signature, strides)
        return self._kernels[text]
