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

from kernelwright.rewrites.templates.text import kernel_text

VECTOR = 8
"""Float16 that one load takes at most."""
LONGEST = 64
"""Length of the longest step over the channels of one position."""
MOST = 128
"""Values of a sum that are loaded before they are multiplied, where few channels make a position's values no whole step."""


def filled(channels: int) -> int:
    """Channels of a group with zeros after them, so that each position begins where a load may, of 4 bytes or more.

    Three become four. Filled up to eight they were estimated behind the kernel in TF32 on 34 of 49 tasks, and more channels
    on 5 of 22 (results/kernelbench-h200/cuda-l1-fp16-1-h200 to -4-h200).
    """
    return channels + -channels % VECTOR if channels > VECTOR // 2 else max(2, 1 << (channels - 1).bit_length())


def choices(channels: int, each: int, taps: int, *, transposed: bool) -> dict[str, tuple[object, ...]]:
    """Choices of tiles (positions, channels, length of a step), warps and stages, the default first.

    By the times of 33 convolutions on H200s (results/2026-11-28-fp16-convolutions-h200). Of the 28 that take 180 us or more
    the default took 1.03 of the time of the best of 20 to 40 choices in the geometric mean. Loads `at_once` came after that:
    with them all 12 of few channels are faster, in 0.6 to 0.98 of the time. Two programs on a multiprocessor are faster than
    one with more stages. Why a transposed convolution to 64 channels wants another tile is not known.

    Args:
        channels: Of a tile, a power of two.
        each: Channels of a position, filled up.
        taps: Positions that a sum reads.
        transposed: Whether the convolution is computed by phases.
    """
    if at_once(each, taps):
        length = step_at_once(each, taps)
        points = (256, 128, 64) if length <= LONGEST // 2 else (64, 128, 256)
        return {"tile": tuple((one, channels, length) for one in points), "warps": (4, 8), "stages": (1,)}
    length = 1 << (taps * each - 1).bit_length()
    if each <= VECTOR:
        tiles, warps, stages = ((128, LONGEST // 2), (128, LONGEST), (64, LONGEST // 2)), (4, 8), (3, 2, 4)
    elif channels >= 128 or (channels == 64 and transposed):
        tiles, warps, stages = ((128, LONGEST), (128, LONGEST // 2), (64, LONGEST)), (4, 8), (3, 2, 4)
    elif channels == 64:
        tiles, warps, stages = ((256, LONGEST // 2), (128, LONGEST), (128, LONGEST // 2)), (8, 4), (3, 4, 2)
    else:
        tiles, warps, stages = ((128, LONGEST // 2), (256, LONGEST // 2), (128, LONGEST)), (4, 8), (4, 3, 2)
    shaped = [(points, channels, max(32, min(step, length))) for points, step in tiles]
    most = max(2, -(-taps * each // shaped[0][2]))  # stages beyond the steps would load nothing
    return {
        "tile": tuple(dict.fromkeys(shaped)),
        "warps": warps,
        "stages": tuple(dict.fromkeys(min(one, most) for one in stages)),
    }


def at_once(each: int, taps: int) -> bool:
    """Whether a thread loads all that a position's sum reads, at places that are constants relative to the position.

    Else a loop works out for each position and step where what the step reads is. For three channels that is half of all
    instructions.
    """
    return each <= VECTOR and taps * each <= 2 * MOST


def step_at_once(each: int, taps: int) -> int:
    """Values of a sum that are multiplied together: a power of two, of which tensor cores take 16 at least."""
    return max(16, min(MOST, 1 << (taps * each - 1).bit_length()))


def emit() -> str:
    """Text of the functions that lay operands out, which `_Prepared` calls."""
    return kernel_text("fp16_convolution.triton.txt")
