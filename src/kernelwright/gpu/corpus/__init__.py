"""Ten kernels to play on: the six of CuAsmRL and four more, with the configuration of each.

Importing this package does not import Triton; `KernelSpec.function` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel of the corpus in one configuration.

    Attributes:
        name: name in the corpus.
        source: name of the function in `kernels.py`.
        dtype: element type of its pointer arguments, Triton's spelling.
        constants: values of its compile-time arguments.
        num_warps: warps of a thread block.
        num_stages: depth of software pipelining.
    """

    name: str
    source: str
    dtype: str
    constants: dict[str, int]
    num_warps: int = 4
    num_stages: int = 3

    @property
    def function(self) -> Any:
        """The `@triton.jit` function."""
        from kernelwright.gpu.corpus import kernels

        return getattr(kernels, self.source)

    @property
    def signature(self) -> dict[str, str]:
        """Types of the run-time arguments, by the corpus's naming: `*_ptr` is a pointer."""
        return {name: self._type(name) for name in self.function.arg_names if name not in self.constants}

    @property
    def aligned(self) -> frozenset[str]:
        """Arguments promised to be divisible by 16: pointers, sizes and strides."""
        return frozenset(name for name, kind in self.signature.items() if kind != "fp32")

    def _type(self, name: str) -> str:
        if name.endswith("_ptr"):
            return f"*{self.dtype}"
        return "fp32" if name in ("eps", "scale") else "i32"


_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}

CORPUS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        KernelSpec("softmax", "softmax", "fp32", {"BLOCK": 1024}),
        KernelSpec("rmsnorm", "rmsnorm", "fp16", {"BLOCK": 1024}),
        KernelSpec("layernorm", "layernorm", "fp16", {"BLOCK": 1024}),
        KernelSpec("gemm_leakyrelu", "gemm_leakyrelu", "fp16", _TILE),
        KernelSpec("batched_gemm", "batched_gemm", "fp16", _TILE),
        KernelSpec("fused_feed_forward", "fused_feed_forward", "fp16", {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32}),
        # Tiles under 64 rows use mma.sync on every architecture; 64 rows use wgmma on sm_90.
        KernelSpec("attention_mma", "flash_attention", "fp16", {"BLOCK_M": 32, "BLOCK_N": 32, "HEAD": 64}, 2, 2),
        KernelSpec("attention_wgmma", "flash_attention", "fp16", {"BLOCK_M": 64, "BLOCK_N": 64, "HEAD": 64}, 4, 2),
        KernelSpec("sgemm", "sgemm", "fp32", {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16}, 4, 2),
        KernelSpec("row_sum", "row_sum", "fp32", {"BLOCK": 1024}),
    )
}
