"""Defines the Triton kernels whose machine code the assembly game is played on and tested with.

The first six are the kernels of CuAsmRL (arXiv 2501.08071); the rest add an fp32 kernel bound by the
CUDA cores, a normalisation with two reductions, a plain reduction, and attention for both kinds of
tensor-core instruction. They are written for this project; each one is ordinary Triton.
"""

# Triton's arguments have no Python types, and its decorator none that a checker could use.
# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax(out_ptr, in_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    """Softmax over the last dimension, one row a program."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(in_ptr + row * row_stride + cols, mask=mask, other=-float("inf"))
    x = x - tl.max(x, axis=0)
    numerator = tl.exp(x)
    tl.store(out_ptr + row * row_stride + cols, numerator / tl.sum(numerator, axis=0), mask=mask)


@triton.jit
def rmsnorm(out_ptr, in_ptr, weight_ptr, row_stride, n_cols, eps, BLOCK: tl.constexpr):
    """RMSNorm of one row a program, in two passes over blocks of columns."""
    row = tl.program_id(0)
    in_ptr += row * row_stride
    out_ptr += row * row_stride
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(in_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        squares += x * x
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / n_cols + eps)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(in_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + cols, (x * scale * w).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layernorm(out_ptr, in_ptr, weight_ptr, bias_ptr, row_stride, n_cols, eps, BLOCK: tl.constexpr):
    """LayerNorm of one row a program, the row held in registers."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(in_ptr + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n_cols
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / n_cols
    w = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = centred / tl.sqrt(variance + eps) * w + b
    tl.store(out_ptr + row * row_stride + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gemm_leakyrelu(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = leaky_relu(A @ B), fp16 in, fp32 accumulation, fp16 out."""
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    rows = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    cols = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :]
    b_ptrs = b_ptr + ks[:, None] * stride_bk + cols[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=ks[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=ks[:, None] < K - k * BLOCK_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    accumulator = tl.where(accumulator >= 0, accumulator, 0.01 * accumulator)
    out_rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    out_cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (out_rows[:, None] < M) & (out_cols[None, :] < N)
    tl.store(c_ptr + out_rows[:, None] * stride_cm + out_cols[None, :], accumulator.to(tl.float16), mask=mask)


@triton.jit
def batched_gemm(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_ab, stride_am, stride_bb, stride_bk, stride_cb, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C[i] = A[i] @ B[i], fp16, the batch on the third grid axis; K is a multiple of BLOCK_K."""
    batch = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + batch * stride_ab + rows[:, None] * stride_am + ks[None, :]
    b_ptrs = b_ptr + batch * stride_bb + ks[:, None] * stride_bk + cols[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        accumulator = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), accumulator)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + batch * stride_cb + rows[:, None] * stride_cm + cols[None, :]
    tl.store(c_ptrs, accumulator.to(tl.float16), mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def fused_feed_forward(
    x_ptr, gate_ptr, up_ptr, out_ptr, M, N, K, stride_xm, stride_wk, stride_om,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = silu(x @ gate) * (x @ up), fp16 in and out; K is a multiple of BLOCK_K."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + ks[None, :]
    gate_ptrs = gate_ptr + ks[:, None] * stride_wk + cols[None, :]
    up_ptrs = up_ptr + ks[:, None] * stride_wk + cols[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs)
        gate = tl.dot(x, tl.load(gate_ptrs), gate)
        up = tl.dot(x, tl.load(up_ptrs), up)
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K * stride_wk
        up_ptrs += BLOCK_K * stride_wk
    result = gate * tl.sigmoid(gate) * up
    out_ptrs = out_ptr + rows[:, None] * stride_om + cols[None, :]
    tl.store(out_ptrs, result.to(tl.float16), mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def flash_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, n_ctx, head_stride, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Non-causal attention of one head and BLOCK_M queries a program; n_ctx is a multiple of both blocks."""
    offset = tl.program_id(1) * head_stride
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD)
    q = tl.load(q_ptr + offset + rows[:, None] * HEAD + dims[None, :])
    row_max = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    accumulator = tl.zeros((BLOCK_M, HEAD), dtype=tl.float32)
    for start in range(0, n_ctx, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + offset + keys[None, :] * HEAD + dims[:, None])
        scores = tl.dot(q, k) * scale
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, axis=1)
        accumulator = accumulator * correction[:, None]
        v = tl.load(v_ptr + offset + keys[:, None] * HEAD + dims[None, :])
        accumulator = tl.dot(p.to(tl.float16), v, accumulator)
        row_max = new_max
    result = accumulator / row_sum[:, None]
    tl.store(out_ptr + offset + rows[:, None] * HEAD + dims[None, :], result.to(tl.float16))


@triton.jit
def sgemm(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = A @ B in strict fp32 (FFMA, no tensor cores); K is a multiple of BLOCK_K."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :]
    b_ptrs = b_ptr + ks[:, None] * stride_bk + cols[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        accumulator = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), accumulator, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    tl.store(c_ptrs, accumulator, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def row_sum(out_ptr, in_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    """Sum of each row, one row a program, fp32."""
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(in_ptr + row * row_stride + cols, mask=cols < n_cols, other=0.0)
    tl.store(out_ptr + row, tl.sum(total, axis=0))
