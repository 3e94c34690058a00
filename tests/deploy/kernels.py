"""Triton kernels of the tests."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x * factor + y * 0.0, mask=i < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def tuned_scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x * factor + y * 0.0, mask=i < n)


@triton.jit
def misbehaves(x_ptr, y_ptr, n, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """MODE 0: y = x + 1. 1: y = x + 2. 2: writes far outside. 3: never ends."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = x + (2.0 if MODE == 1 else 1.0)
    if MODE == 2:
        y_ptr += tl.full((), 1 << 40, tl.int64)
    rounds = tl.load(x_ptr) * 0.0 + 1.0
    if MODE == 3:
        while rounds > 0.0:
            rounds = tl.load(x_ptr, volatile=True) * 0.0 + 1.0
    tl.store(y_ptr + i, y + rounds * 0.0, mask=i < n)


@triton.jit
def plus_one(x, y):
    index = tl.arange(0, 32)
    tl.store(y + index, tl.load(x + index) + 1)
