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
"""Float16 that one load takes at most."""
LONGEST = 64
"""Length of the longest step."""


def filled(channels: int) -> int:
    """Channels of a group with zeros after them, so that each position begins where a load may, of 4 bytes or more.

    Three become four. Filled up to eight they were estimated behind the kernel in TF32 on 34 of 49 tasks, and more channels
    on 5 of 22 (results/kernelbench-h200/cuda-l1-fp16-1-h200 to -4-h200). No GPU has run four.
    """
    return channels + -channels % VECTOR if channels > VECTOR // 2 else max(2, 1 << (channels - 1).bit_length())


def choices(channels: int, each: int, taps: int) -> dict[str, tuple[object, ...]]:
    """Choices of tiles (positions, channels, length of a step), warps and stages, the default first.

    By the times of eight convolutions on an H100 (results/2026-11-27-fp16-convolutions-h100), but for sums of one or two
    steps, which have little else to hide latency than other programs: how many fit on a multiprocessor by the registers and
    the shared memory of what is compiled decides there. Stages beyond the steps that there are would load nothing. No GPU
    has run what differs from those times.

    Args:
        channels: Of a tile, a power of two.
        each: Channels of a position, filled up.
        taps: Positions that a sum reads.
    """
    # Eight threads read what a step has of a position, and each of them works out where that is.
    step, other = (LONGEST, LONGEST // 2) if each >= VECTOR else (LONGEST // 2, LONGEST)
    most = max(2, -(-taps * each // step))
    short = most == 2 and each >= VECTOR
    points, others = (128, 64) if channels >= 128 else (128, 256) if channels == 64 or short else (256, 128)
    tiles = ((points, channels, step), (points, channels, other), (others, channels, step))
    if channels >= 128:
        return {"tile": tiles, "warps": (8, 4), "stages": _at_most((4, 3), most)}
    return {"tile": tiles, "warps": (4, 8), "stages": _at_most((3, 4, 2), most)}


def _at_most(stages: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(min(one, most) for one in stages))


def emit() -> str:
    """Text of the functions that lay operands out, which `_Prepared` calls."""
    return SOURCE.read_text(encoding="utf-8")
