"""Tags a candidate's text with the techniques that it shows: for records and reports, never for a reward.

The names follow CUDA-L1's list of techniques (section 4.6) where it has one.
"""

from __future__ import annotations

import re

_SHOWN_BY = {
    "triton": r"@triton\.jit",
    "cuda-kernel": r"__global__",
    "cpp-extension": r"\bload_inline\(|\bcpp_extension\.load\(",
    "shared-memory": r"__shared__",
    "warp-primitives": r"__shfl_\w+|__ballot_sync|__reduce_\w+_sync",
    "vectorised-access": r"\bfloat[24]\b|\bhalf2\b|__m(?:128|256|512)",
    "tensor-cores": r"\bwmma::|\bmma\.sync|\btl\.dot\(",
    "autotuning": r"@triton\.autotune",
    "loop-unrolling": r"#pragma unroll|\btl\.static_range\(",
    "openmp": r"#pragma omp",
    "cuda-graph": r"\bCUDAGraph\(|\bcuda\.graph\(",
    "streams": r"\bcuda\.Stream\(|\bcudaStreamCreate",
    "torch-compile": r"\btorch\.compile\(|@torch\.compile",
    "torch-script": r"\btorch\.jit\.",
    "memory-format": r"\bchannels_last",
    "inplace-operators": r"\binplace=True|\b\w+\.(?:add|mul|sub|div|relu|sigmoid|clamp)_\(",
    "fused-attention": r"\bscaled_dot_product_attention\(",
    "fused-product-sum": r"\b(?:addmm|baddbmm|addmv|addcmul|addcdiv)\(",
    "einsum": r"\beinsum\(",
    "half-precision": r"\.half\(\)|\bfloat16\b|\bbfloat16\b|\bautocast\b",
    "tf32": r"\ballow_tf32\b|\bset_float32_matmul_precision\(",
}
_PATTERNS = {tag: re.compile(pattern) for tag, pattern in _SHOWN_BY.items()}


def techniques_in(source: str) -> tuple[str, ...]:
    """Tags of what appears in a module's text; `operators` when there is nothing but PyTorch's own."""
    return tuple(tag for tag, pattern in _PATTERNS.items() if pattern.search(source)) or ("operators",)


_REWRITTEN_BY = {
    "library-norm": r"\bF\.(?:layer_norm|rms_norm|batch_norm|group_norm|normalize)\(",
    "library-activation": r"\bF\.(?:gelu|silu|mish|hardswish|hardsigmoid|softsign|leaky_relu|relu6|glu)\(",
    "library-softmax": r"\b(?:softmax|log_softmax|logsumexp|cross_entropy)\(",
    "library-reduction": r"\b(?:var|var_mean|smooth_l1_loss|cosine_similarity|vector_norm|amax)\(",
    "scan": r"\bcumsum\(",
    "reduce-before-product": r"@ \w+\.(?:mean|sum)\(|\.(?:mean|sum)\([^()]*\) @|weight\.sum\(",
    "reordered-product": r"@ \([\w.(), ]+ @ |\(\w+ @ \w+\) @ ",
    "broadcast": r"\[:, None\]|\.unsqueeze\(|\.expand\(",
    "indexing": r"\[(?::, )?index\]|\bindex_select\(|\.gather\(|\bF\.embedding\(",
}
_REWRITES = {tag: re.compile(pattern) for tag, pattern in _REWRITTEN_BY.items()}


def rewrites_in(code: str) -> tuple[str, ...]:
    """Tags of an answer without its reference: those of `techniques_in`, and ways to do less work with operators alone."""
    found = tuple(tag for tag, pattern in _REWRITES.items() if pattern.search(code))
    return found + tuple(tag for tag in techniques_in(code) if not found or tag != "operators")
