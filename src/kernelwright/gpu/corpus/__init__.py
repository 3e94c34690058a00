"""Collects ten kernels to play on: the six of CuAsmRL and four more, with the configuration of each.

Importing this package does not import Triton; `KernelSpec.function` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel of the corpus in one configuration: a function of `kernels.py` and the element type of its pointers."""

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
