"""Tells from a candidate's text what it has compiled before its first call: how long a look at it will take."""

from __future__ import annotations

import re
from enum import IntEnum


class Compiles(IntEnum):
    """Kind of a candidate by its compilers, cheapest first. A wrong guess costs time and nothing else."""

    NOTHING = 0
    CODE = 1
    """C++, CUDA or Triton: seconds."""
    INDUCTOR = 2
    """torch.compile, whose own imports take seconds before it compiles anything."""
    VARIANTS = 3
    """An autotuner that compiles many variants of each kernel: tens of seconds."""


_VARIANTS = re.compile(r"max[-_]autotune|triton\.autotune|coordinate_descent")
_INDUCTOR = re.compile(r"torch\s*\.\s*(_inductor|compile)\b")
_CODE = re.compile(r"\b(triton|cpp_extension|load_inline|nvcc|nvrtc|gcc|subprocess|jit|numba|cupy)\b|g\+\+")


def compiles(source: str) -> Compiles:
    """Kind of compiler work that a candidate's text asks for."""
    if _VARIANTS.search(source):
        return Compiles.VARIANTS
    if uses_inductor(source):
        return Compiles.INDUCTOR
    return Compiles.CODE if _CODE.search(source) else Compiles.NOTHING


def uses_inductor(source: str) -> bool:
    """Whether it uses torch.compile, with an autotuner or without."""
    return _INDUCTOR.search(source) is not None
