"""Decides which proposal is screened next, and which are not worth their compiler.

Candidates that compile nothing come first, then those of a quick compiler, then those of torch.compile, and those of an
autotuner last, only where they can still win. Each of the last kind takes as long as twenty others: 17 s on an H200, 71 % of
all screening were compilers (results/2026-11-23-search-h200). `--minutes` gives more proposals to tasks by the same measure
of room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from kernelwright.pools.compiling import Compiles, compiles
from kernelwright.records import Candidate
from kernelwright.records.screened import Screened
from kernelwright.search.selection import ranked

SETTLED_ROOM = 1.1
"""Room below which a task needs no more proposals. Our choice."""
TUNING_GAIN = 1.2
"""Most that autotuning adds to torch.compile. Of 234 tasks of CUDA-L1 it gave the best baseline of 5, by at most 1.19; on
154 torch.compile without it was behind the best one by more than this (results/2026-11-22-cuda-l1-h200)."""
_UNKNOWN_ROOM = 2.0


def room(screened: Sequence[Screened]) -> float:
    """How much faster than its best candidate a task could be, by the roofline, and by how much estimates differ."""
    order = ranked(screened)
    if not order or not order[0].least_us or not order[0].candidate_us:
        return _UNKNOWN_ROOM
    differ = median(abs((one.estimate or 1.0) / (order[0].estimate or 1.0) - 1.0) for one in order)
    return max(1.0, order[0].candidate_us / order[0].least_us) * (1.0 + differ)


def tuning_pays(screened: Sequence[Screened]) -> bool:
    """Whether an autotuner could still give a task's best candidate."""
    order = ranked(screened)
    compiled = [one for one in order if compiles(one.source) is Compiles.INDUCTOR]
    best = max([1.0, *(one.estimate or 0.0 for one in order[:1])])
    return room(screened) >= SETTLED_ROOM and (not compiled or (compiled[0].estimate or 0.0) * TUNING_GAIN >= best)


def next_of(
    waiting: Sequence[Candidate],
    busy: Sequence[Candidate],
    screened: Sequence[Screened],
    takes: Callable[[Compiles], bool],
) -> Candidate | None:
    """The proposal to screen now; None where none of those waiting can begin yet, or none is worth it.

    Args:
        waiting: Proposals in the policy's order.
        busy: Those that are being looked at.
        screened: Estimates of the task so far.
        takes: Whether a process is free for a candidate of a kind.
    """
    for kind in (Compiles.NOTHING, Compiles.CODE, Compiles.INDUCTOR):
        fitting = [one for one in waiting if compiles(one.source) is kind]
        if fitting and takes(kind):
            return fitting[0]
    if all(compiles(one.source) is Compiles.VARIANTS for one in [*waiting, *busy]):
        return next((one for one in waiting if takes(Compiles.VARIANTS) and tuning_pays(screened)), None)
    return None
