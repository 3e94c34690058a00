"""Chooses the processor's core on which calls of a GPU are timed, and the cores that are left for everything else.

The host's part of a call is as fast as the core it runs on, and cores of one machine are not alike: beside a busy sibling
one launches the same kernels half as fast, for as long as a process stays there. Sides are asked one at a time, so they can
share a core, whose speed then cancels out. Everything else that a judge starts stays off it and off its siblings.

On a processor the core is what is measured, and threads want several: there the workers stay where they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SYSTEM = Path("/sys/devices/system/cpu")
_REST_MIN = 2
"""Fewest cores that must be left for siblings to be kept free as well. Our choice."""
_CORES_MIN = 4
"""Least number of cores of which one can be spared. Our choice."""
_CORES_WORTH_SHARING = 4
"""Fewest cores of a device that are worth keeping to it. Our choice."""


def timing_core(device: torch.device) -> int | None:
    """The core on which a judge of this GPU times, another for each GPU; None where workers stay where they are."""
    mine = sorted(os.sched_getaffinity(0))
    if device.type != "cuda" or len(mine) < _CORES_MIN:
        return None
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = int(visible[index]) if index < len(visible) and visible[index].isdigit() else index
    return mine[-1 - number % len(mine)]


def cores_except(core: int | None) -> set[int]:
    """Cores that this process may use beside one on which calls are timed; all where that is None.

    A core's siblings share its units: beside a busy one it launches kernels half as fast.
    """
    mine = os.sched_getaffinity(0)
    if core is None:
        return mine
    rest = mine - siblings_of(core)
    return rest if len(rest) >= _REST_MIN else mine - {core}


def cores_of_each(devices: Sequence[str]) -> dict[str, frozenset[int]]:
    """An equal share of the processor's cores for each of several devices; nothing where there are too few.

    Without it what compiles for one GPU may run on the core on which calls of another are timed.
    """
    mine = sorted(os.sched_getaffinity(0))
    share = len(mine) // len(devices)
    if len(devices) < 2 or share < _CORES_WORTH_SHARING:
        return {}
    return {device: frozenset(mine[index * share : (index + 1) * share]) for index, device in enumerate(devices)}


def siblings_of(core: int) -> set[int]:
    """The core and those that share its units, as Linux tells them; itself alone where it does not."""
    try:
        text = (_SYSTEM / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except (OSError, ValueError):
        return {core}
    return {core, *(one for ends in ranges for one in range(ends[0], ends[-1] + 1))}
