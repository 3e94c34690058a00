"""Kernels that may have headroom above ptxas -O3, as targets for `kernelwright sass optimize FILE:NAME`.

Each is bound by something other than memory bandwidth or the tensor cores: latency of a small grid, long chains
of dependent arithmetic, conversions beside matrix products, fp32 multiply-adds with operand reuse. Sizes are our
choice, for 5 to 100 us on an H200. `sgemm_small` is the corpus's kernel at a size that fills the GPU less.
"""

# Triton's arguments have no Python types, and its decorator none that a checker could use.
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from kernelwright.gpu.launch_spec import ScalarArgument, TensorArgument
from kernelwright.gpu.target import corpus_specs
from kernelwright.gpu.triton_spec import TritonSpec


@triton.jit
def gelu_chain(out_ptr, in_ptr, n, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """A polynomial GELU applied again and again: one long chain of fp32 arithmetic for each element."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(in_ptr + cols, mask=cols < n, other=0.0)
    for _ in range(ROUNDS):
        u = 0.7978845608 * (x + 0.044715 * x * x * x)
        t = u * (27.0 + u * u) / (27.0 + 9.0 * u * u)
        x = 0.5 * x * (1.0 + t) + 0.25
    tl.store(out_ptr + cols, x, mask=cols < n)


@triton.jit
def gemv(out_ptr, w_ptr, x_ptr, K, stride_w, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """y = W x in fp16 with fp32 sums, as in decoding one token; K is a multiple of BLOCK_K."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        w = tl.load(w_ptr + rows[:, None] * stride_w + start + ks[None, :]).to(tl.float32)
        x = tl.load(x_ptr + start + ks).to(tl.float32)
        total += w * x[None, :]
    tl.store(out_ptr + rows, tl.sum(total, axis=1).to(tl.float16))


@triton.jit
def int8_gemm(
    a_ptr, b_ptr, scale_ptr, c_ptr, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = A @ (B * scale), A fp16, B int8 turned into fp16 on the way; K is a multiple of BLOCK_K."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :]
    b_ptrs = b_ptr + ks[:, None] * stride_bk + cols[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        total = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs).to(tl.float16), total)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    total *= tl.load(scale_ptr + cols).to(tl.float32)[None, :]
    tl.store(c_ptr + rows[:, None] * stride_cm + cols[None, :], total.to(tl.float16))


@triton.jit
def rope(out_ptr, in_ptr, cos_ptr, sin_ptr, stride, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Rotary position embedding of ROWS rows a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, HALF)
    at = rows[:, None] * stride + cols[None, :]
    angle = rows[:, None] * HALF + cols[None, :]
    c = tl.load(cos_ptr + angle).to(tl.float32)
    s = tl.load(sin_ptr + angle).to(tl.float32)
    x = tl.load(in_ptr + at).to(tl.float32)
    y = tl.load(in_ptr + at + HALF).to(tl.float32)
    tl.store(out_ptr + at, (x * c - y * s).to(tl.float16))
    tl.store(out_ptr + at + HALF, (y * c + x * s).to(tl.float16))


@triton.jit
def scale_twice(out_ptr, in_ptr, scale_ptr, n, BLOCK: tl.constexpr):
    """A row read twice with the cache policies of Inductor: kept for the second pass, then evicted first."""
    at = tl.program_id(0) * n
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(in_ptr + at + cols, mask=cols < n, other=0.0, eviction_policy="evict_last")
    mean = tl.sum(total) / n
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(in_ptr + at + cols, mask=cols < n, other=0.0, eviction_policy="evict_first")
        scale = tl.load(scale_ptr + cols, mask=cols < n, other=0.0, eviction_policy="evict_last")
        tl.store(out_ptr + at + cols, (x - mean) * scale, mask=cols < n)


@triton.jit
def recurrence(out_ptr, in_ptr, gate_ptr, T, stride, BLOCK: tl.constexpr):
    """h = sigmoid(g) * h + x along T steps, one channel a thread: latency of loads and of a chain."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(0, T):
        x = tl.load(in_ptr + step * stride + cols)
        g = tl.load(gate_ptr + step * stride + cols)
        h = h / (1.0 + tl.exp(-g)) + x
        tl.store(out_ptr + step * stride + cols, h)


@triton.jit
def pairwise(out_ptr, x_ptr, y_ptr, N, D, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """L1 distance of every row of x to every row of y: fp32 subtract and add, no tensor cores."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for d in range(0, D):
        x = tl.load(x_ptr + d * stride + rows)
        y = tl.load(y_ptr + d * stride + cols)
        total += tl.abs(x[:, None] - y[None, :])
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], total)


def _tensor(name, dtype, *shape, output=False):
    role, init = ("output", "zeros") if output else ("input", "normal")
    return TensorArgument.model_validate(
        {"name": f"{name}_ptr", "dtype": dtype, "shape": shape, "role": role, "init": init, "scale": 0.5}
    )


def _bytes(name, *shape):
    return TensorArgument.model_validate(
        {"name": f"{name}_ptr", "dtype": "i8", "shape": shape, "init": "integers", "low": -100, "high": 100}
    )


def _integers(**values):
    return [ScalarArgument(name=name, value=value) for name, value in values.items()]


_CHANNELS, _STEPS = 4096, 128
_SMALL_M, _SMALL_K, _SMALL_N = 64, 1024, 2048


def _product(dtype, m, n, k):
    return [
        _tensor("a", dtype, m, k),
        _tensor("b", dtype, k, n),
        _tensor("c", dtype, m, n, output=True),
        *_integers(M=m, N=n, K=k, stride_am=k, stride_bk=n, stride_cm=n),
    ]


SPECS = {
    "gelu_chain": TritonSpec(
        gelu_chain,
        [_tensor("out", "fp32", 1 << 18, output=True), _tensor("in", "fp32", 1 << 18), *_integers(n=1 << 18)],
        ((1 << 18) // 512,),
        {"ROUNDS": 16, "BLOCK": 512},
    ),
    "gemv": TritonSpec(
        gemv,
        [
            _tensor("out", "fp16", 2048, output=True),
            _tensor("w", "fp16", 2048, 2048),
            _tensor("x", "fp16", 2048),
            *_integers(K=2048, stride_w=2048),
        ],
        (2048 // 8,),
        {"BLOCK_N": 8, "BLOCK_K": 512},
    ),
    "int8_gemm": TritonSpec(
        int8_gemm,
        [
            _tensor("a", "fp16", _SMALL_M, _SMALL_K),
            _bytes("b", _SMALL_K, _SMALL_N),
            _tensor("scale", "fp16", _SMALL_N),
            _tensor("c", "fp16", _SMALL_M, _SMALL_N, output=True),
            *_integers(K=_SMALL_K, stride_am=_SMALL_K, stride_bk=_SMALL_N, stride_cm=_SMALL_N),
        ],
        (_SMALL_M // 32, _SMALL_N // 64),
        {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64},
    ),
    "rope": TritonSpec(
        rope,
        [
            _tensor("out", "fp16", 8192, 128, output=True),
            _tensor("in", "fp16", 8192, 128),
            _tensor("cos", "fp16", 8192, 64),
            _tensor("sin", "fp16", 8192, 64),
            *_integers(stride=128),
        ],
        (8192 // 16,),
        {"HALF": 64, "ROWS": 16},
    ),
    "scale_twice": TritonSpec(
        scale_twice,
        [
            _tensor("out", "fp32", 2048, 4096, output=True),
            _tensor("in", "fp32", 2048, 4096),
            _tensor("scale", "fp32", 4096),
            *_integers(n=4096),
        ],
        (2048,),
        {"BLOCK": 1024},
    ),
    "recurrence": TritonSpec(
        recurrence,
        [
            _tensor("out", "fp32", _STEPS, _CHANNELS, output=True),
            _tensor("in", "fp32", _STEPS, _CHANNELS),
            _tensor("gate", "fp32", _STEPS, _CHANNELS),
            *_integers(T=_STEPS, stride=_CHANNELS),
        ],
        (_CHANNELS // 32,),
        {"BLOCK": 32},
        num_warps=1,
    ),
    "pairwise": TritonSpec(
        pairwise,
        [
            _tensor("out", "fp32", 1024, 1024, output=True),
            _tensor("x", "fp32", 128, 1024),
            _tensor("y", "fp32", 128, 1024),
            *_integers(N=1024, D=128, stride=1024),
        ],
        (1024 // 64, 1024 // 64),
        {"BLOCK_M": 64, "BLOCK_N": 64},
    ),
    # Few blocks for each multiprocessor, so that latencies show. Tiles of 32 rows: mma.sync and cp.async, as on an A100.
    "gemm_mma": TritonSpec(
        corpus_specs()["gemm_leakyrelu"].kernel,
        _product("fp16", 256, 1024, 2048),
        (256 // 32, 1024 // 64),
        {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32},
        num_warps=2,
    ),
    "sgemm_small": TritonSpec(
        corpus_specs()["sgemm"].kernel,
        _product("fp32", 512, 512, 1024),
        (512 // 32, 512 // 32),
        {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16},
        num_stages=2,
    ),
    "sgemm_wide": TritonSpec(
        corpus_specs()["sgemm"].kernel,
        _product("fp32", 1024, 1024, 1024),
        (1024 // 64, 1024 // 64),
        {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16},
        num_stages=2,
    ),
}
