"""Prepares a convolution's operands for tensor cores: a template that emits Triton source.

A float32 convolution for which PyTorch allows TF32 multiplies numbers of eleven significant bits. So many does float16 have,
which tensor cores multiply twice as fast and memory moves twice as fast; its range is what it lacks. So each image of the
inputs and each output channel of the weights is multiplied by a power of two, which the sums are divided by again. A value
that is less than 2^-24 of the largest beside it may lose bits. Inf and NaN stay what they are.

The inputs are laid out with channels side by side and with edges of zeros, so that each step of the convolution's kernel
reads whole lines of memory, without a test, straight to where tensor cores read. They are multiplied by 2^12 as they are
laid out, while their largest magnitude is found; images that this does not suit are laid out once more. No step waits for
the host.

Where PyTorch does not allow TF32 the operands stay float32. This module itself imports the standard library alone.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).with_name("fp16_convolution.triton.txt")
"""Text of the emitted functions."""
VECTOR = 8
"""Float16 that one load takes: channels of a group are filled up to a multiple."""
LONGEST = 64
"""Length of the longest step."""


def choices(channels: int) -> dict[str, tuple[object, ...]]:
    """Choices of tiles (positions, channels, length of a step), warps and stages, the default first.

    By the times of eight convolutions on an H100 (results/2026-11-27-fp16-convolutions-h100).

    Args:
        channels: Of a tile, a power of two.
    """
    points, others = (128, 64) if channels >= 128 else (128, 256) if channels == 64 else (256, 128)
    tiles = ((points, channels, LONGEST), (points, channels, LONGEST // 2), (others, channels, LONGEST))
    if channels >= 128:
        return {"tile": tiles, "warps": (8, 4), "stages": (4, 3)}
    return {"tile": tiles, "warps": (4, 8), "stages": (3, 4, 2)}


def emit() -> str:
    """Text of the functions that lay operands out, which `_Prepared` calls."""
    return SOURCE.read_text(encoding="utf-8")
