"""Keeps all that is not timed away from the core on which calls are timed, and from that core's siblings."""

from __future__ import annotations

import os
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")
_REST_MIN = 2
"""Fewest cores that must be left for siblings to be kept free as well. Our choice."""


def cores_beside(core: int | None) -> set[int]:
    """Cores that this process may use beside one on which calls are timed; all where that is None.

    A core's siblings share its units: beside a busy one it launches kernels half as fast.
    """
    mine = os.sched_getaffinity(0)
    if core is None:
        return mine
    rest = mine - siblings_of(core)
    return rest if len(rest) >= _REST_MIN else mine - {core}


def siblings_of(core: int) -> set[int]:
    """The core and those that share its units, as Linux tells them; itself alone where it does not."""
    try:
        text = (_SYSTEM / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
        ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except (OSError, ValueError):
        return {core}
    return {core, *(one for ends in ranges for one in range(ends[0], ends[-1] + 1))}
