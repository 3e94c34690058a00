"""Chooses one core of the processor for all sides that are timed against one another on a GPU.

The host's part of a call is as fast as the core it runs on, and cores of one machine are not alike: beside a busy sibling
one launches the same kernels half as fast, for as long as a process stays there. Sides are asked one at a time, so they can
share a core, whose speed then cancels out. Everything else that a judge starts stays off it and off its siblings.

On a processor the core is what is measured, and threads want several: there the workers stay where they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import torch

from kernelwright.judge.isolation.cores import cores_beside
from kernelwright.judge.isolation.process import Worker

_CORES_MIN = 4
"""Least number of cores of which one can be spared. Our choice."""


def timing_core(device: torch.device) -> int | None:
    """The core on which a judge of this GPU times, another for each GPU; None where workers stay where they are."""
    mine = sorted(os.sched_getaffinity(0))
    if device.type != "cuda" or len(mine) < _CORES_MIN:
        return None
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = int(visible[index]) if index < len(visible) and visible[index].isdigit() else index
    return mine[-1 - number % len(mine)]


@contextlib.contextmanager
def on_core(core: int | None, workers: Iterable[Worker]) -> Iterator[None]:
    """Run workers, with all their threads, on this core only; afterwards on all others that this process may use."""
    if core is None:
        yield
        return
    moved = list(workers)
    for worker in moved:
        worker.run_on({core})
    try:
        yield
    finally:
        for worker in moved:
            worker.run_on(cores_beside(core))
