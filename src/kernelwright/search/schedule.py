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
from kernelwright.records.screened import Screened, ranked

SETTLED_ROOM = 1.1
"""Room below which a task needs no more proposals. Our choice."""
_UNKNOWN_ROOM = 2.0
_LONG_COMPILE_S = 20.0
"""Length of a look at what torch.compile compiles from which another is asked for only where it pays. Our choice."""
_FAR_BEHIND = 0.7
"""Share of the best estimate below which torch.compile's are no reason to wait for it again. On 42 tasks that were screened
beside judges no best estimate would have been lost; with 0.8 one (results/2026-11-24-search-h200)."""


def room(screened: Sequence[Screened]) -> float:
    """How much faster than its best candidate a task could be, by the roofline, and by how much estimates differ."""
    order = ranked(screened)
    if not order or not order[0].least_us or not order[0].candidate_us:
        return _UNKNOWN_ROOM
    differ = median(abs((one.estimate or 1.0) / (order[0].estimate or 1.0) - 1.0) for one in order)
    return max(1.0, order[0].candidate_us / order[0].least_us) * (1.0 + differ)


def compiling_pays(screened: Sequence[Screened]) -> bool:
    """Whether torch.compile may be asked once more: not where a look at it took long, and what it gave is far behind."""
    compiled = [one for one in screened if compiles(one.source) is Compiles.INDUCTOR]
    if all(one.elapsed_s < _LONG_COMPILE_S for one in compiled):
        return True
    best = max((one.estimate or 0.0 for one in compiled if one.correct), default=0.0)
    return best >= _FAR_BEHIND * max([1.0, *(one.estimate or 0.0 for one in ranked(screened)[:1])])


def tuning_pays(screened: Sequence[Screened]) -> bool:
    """Whether an autotuner could still give a task's best candidate: torch.compile without it does, and none was tried.

    Of 234 tasks of CUDA-L1 it gave the best baseline of 5, by at most 1.19 (results/2026-11-22-cuda-l1-h200), and it took a
    quarter of the time for screening 42 tasks (results/2026-11-24-search-h200).
    """
    order = ranked(screened)
    kinds = [compiles(one.source) for one in order]
    if Compiles.VARIANTS in kinds or room(screened) < SETTLED_ROOM:
        return False
    compiled = next((one for one, kind in zip(order, kinds, strict=True) if kind is Compiles.INDUCTOR), None)
    return compiled is None or (compiled.estimate or 0.0) >= max(1.0, order[0].estimate or 0.0)


def is_worth_its_compiler(candidate: Candidate, screened: Sequence[Screened]) -> bool:
    """Whether a proposal may still win, given how long its compiler takes."""
    match compiles(candidate.source):
        case Compiles.VARIANTS:
            return tuning_pays(screened)
        case Compiles.INDUCTOR:
            return compiling_pays(screened)
        case _:
            return True


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
    worth = [one for one in waiting if is_worth_its_compiler(one, screened)]
    for kind in (Compiles.NOTHING, Compiles.CODE, Compiles.INDUCTOR):
        fitting = [one for one in worth if compiles(one.source) is kind]
        if fitting and takes(kind):
            return fitting[0]
    if all(compiles(one.source) is Compiles.VARIANTS for one in [*worth, *busy]):
        return next((one for one in worth if takes(Compiles.VARIANTS)), None)
    return None
