"""Decides which proposal is screened next, which are not worth their compiler, and what a task of a suite needs next.

Candidates that compile nothing come first, then those of a quick compiler, then those of torch.compile, and those of an
autotuner last, only where they can still win. Each of the last kind takes as long as twenty others: 17 s on an H200, 71 % of
all screening were compilers (results/2026-11-23-search-h200). `--minutes` gives more proposals to tasks by the same measure
of room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.compiling import Compiles, compiles
from kernelwright.records.screened import Screened, confirmed_best, next_owed, ranked

SETTLED_ROOM = 1.1
"""Room below which a task needs no more proposals. Our choice."""
FIRST_LOOK = 8
"""Proposals for each task before any gets more. Our choice."""
SETTLED_GAIN = 1.02
"""A task is settled where its last proposals brought less than this, or where it has no room left."""
SETTLING_PROCESSES = 24
"""Most process triples that a near miss may need by its interval for the search to settle it. Our choice."""
SETTLING_SERIES = 2
"""Series of calls in each process that settles a near miss, for each one that a judge makes otherwise. Of calls of 50 us the
outer clock's noise lies between the series of a process, 28 us, and not between processes, 7 us (`docs/log.md`); and a
series has the GPU for 50 ms, where a process waits for its context. So half of the processes do. Our choice."""
LEAST_GAIN = 1.05
"""What a task counts as whose best estimate is less, so that cheap ones still come first. Our choice."""
_SHORTEST_LOOK_S = 1.0
"""Length of a look that counts for a shorter one: the judge has costs of its own. Our choice."""
SETTLING_COST = 4.0
"""Candidates that could be judged while one near miss is settled: 12 process triples take the place of three. Our choice."""
_UNKNOWN_ROOM = 2.0
_JUDGED_SHARE = 1.7
"""Memory of the judge and its workers over that of the one process that screened a task: 15.5 over 10.3, by a count of
tensors (`tests/judge/test_memory.py`), and more where the module needs room of its own, in three processes. Our choice."""
_CONTEXT_BYTES = 3 << 30
"""GPU memory of their contexts (`JUDGES_PER_GPU`)."""
_LEAST_TO_STAND = 4
"""Process triples of a measurement that may stand early. After three the upper end of an interval is 1.89 times its lower
end, after four 1.38 and after all six 1.20, in the median of 94 candidates of short calls; of 44 timed beside a baseline 15,
24 and 32 are certainly faster or slower than it (runs of CUDA-L1's fifths in results/kernelbench-h200)."""
_LONG_COMPILE_S = 20.0
"""Length of a look at what torch.compile compiles from which another is asked for only where it pays. Our choice."""
_FAR_BEHIND = 0.7
"""Share of the best estimate below which torch.compile's are no reason to wait for it again. On 42 tasks that were screened
beside judges no best estimate would have been lost; with 0.8 one (results/2026-11-24-search-h200)."""


def first_of_two(settings: Settings) -> Settings:
    """Settings of the first of two measurements, which finds the candidates worth a second one."""
    return settings.model_copy(update={"until_certain": True})


def stands_early(settings: Settings) -> Settings:
    """Settings of a measurement that may stand before all process triples are done, where a search's time is limited."""
    least = max(settings.processes_min, min(_LEAST_TO_STAND, settings.processes_max))
    return settings.model_copy(update={"until_certain": True, "processes_min": least})


def best_estimate(screened: Sequence[Screened]) -> float:
    """The best estimate of a task; 1 where nothing is faster."""
    return max([1.0, *(one.estimate or 0.0 for one in ranked(screened)[:1])])


def promise(screened: Sequence[Screened]) -> float:
    """Logarithm of a task's best estimate over the seconds of its longest look by screening: its expected gain a second.

    The judge takes long where screening did, for compilers and large tensors, so that a look's time stands for its own.
    """
    longest_s = max((one.elapsed_s for one in screened), default=0.0)
    return math.log(max(best_estimate(screened), LEAST_GAIN)) / max(longest_s, _SHORTEST_LOOK_S)


def judging_bytes(screened: Sequence[Screened]) -> int:
    """GPU memory that the judge and its workers may take for a candidate of a task; 0 where nothing is known of it."""
    taken_bytes = max((one.memory_bytes or 0 for one in screened), default=0)
    return round(_JUDGED_SHARE * taken_bytes) + _CONTEXT_BYTES if taken_bytes else 0


def room(screened: Sequence[Screened]) -> float:
    """How much faster than its best candidate a task could be, by its bytes, and by how much estimates differ."""
    order = ranked(screened)
    if not order or not order[0].least_us or not order[0].candidate_us:
        return _UNKNOWN_ROOM
    differ = median(abs((one.estimate or 1.0) / (order[0].estimate or 1.0) - 1.0) for one in order)
    # Operations do not count: algebra may avoid them.
    return max(1.0, order[0].candidate_us / order[0].least_us) * (1.0 + differ)


def compiling_pays(screened: Sequence[Screened]) -> bool:
    """Whether torch.compile may be asked once more: not where a look at it took long, and what it gave is far behind."""
    compiled = [one for one in screened if compiles(one.source) is Compiles.INDUCTOR]
    if all(one.elapsed_s < _LONG_COMPILE_S for one in compiled):
        return True
    best = max((one.estimate or 0.0 for one in compiled if one.correct), default=0.0)
    return best >= _FAR_BEHIND * best_estimate(screened)


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


@dataclass(slots=True)
class TaskState:
    """State of one task in a search over a suite."""

    task: Task
    screened: list[Screened] = field(default_factory=list)
    judged: dict[str, Evaluation] = field(default_factory=dict)
    confirmed: dict[str, Evaluation] = field(default_factory=dict)
    looked_at: int = 0
    """Budget of the latest round of screening that ended."""
    before: float = 1.0
    """Best estimate before that round."""
    at_work: bool = False
    """Whether it is being screened."""
    tunes_next: bool = False
    """Whether only proposals with an autotuner are left to be screened."""
    exhausted: bool = False
    """Whether the policy has nothing more, or the task cannot be screened or judged."""

    @property
    def best(self) -> float:
        """Best estimate so far; 1 where nothing is faster."""
        return best_estimate(self.screened)

    @property
    def judging_bytes(self) -> int:
        """GPU memory that the judge may take for it."""
        return judging_bytes(self.screened)

    @property
    def has_winner(self) -> bool:
        """Whether a candidate is confirmed, however much the judge still owes."""
        return confirmed_best(self.confirmed.values()) is not None

    @property
    def is_unseen(self) -> bool:
        """Whether nothing of it is screened, and something may be."""
        return not self.screened and not self.exhausted

    @property
    def is_settled(self) -> bool:
        """Whether more proposals would hardly help."""
        gained = self.tunes_next or self.looked_at <= FIRST_LOOK or self.best >= SETTLED_GAIN * self.before
        return self.exhausted or (self.looked_at > 0 and (not gained or room(self.screened) < SETTLED_ROOM))

    def owed(self, count: int) -> Screened | None:
        """The candidate that the judge should take now: the best few in turn, then a winner once more until one holds."""
        return next_owed(self.screened, self.judged, self.confirmed, count)

    @property
    def near_miss(self) -> Evaluation | None:
        """The measurement that came nearest to a gain, of those that `SETTLING_PROCESSES` are likely to settle; None where
        something is confirmed, or a near miss has been measured again."""
        missed = [one for one in self.judged.values() if one.is_near_miss]
        if self.has_winner or any(one.candidate_sha256 in self.confirmed for one in missed):
            return None
        able = [one for one in missed if (count := one.processes_to_settle) is not None and count <= SETTLING_PROCESSES]
        return max(able, key=lambda one: one.speedup_low or 0.0, default=None)

    def is_screened(self, budget: int, limited: bool) -> bool:
        """Whether it needs no more proposals, of so many, with a limit of time or without."""
        return self.exhausted or len(self.screened) >= budget or (limited and self.is_settled)

    def next_round(self, budget: int, limited: bool) -> tuple[int, bool]:
        """Proposals that its next round ends with, and whether those with an autotuner count.

        Without a limit of time all tasks get the whole budget at once.
        """
        if not limited or self.tunes_next:
            return budget, True
        return min((len(self.screened) // FIRST_LOOK + 1) * FIRST_LOOK, budget), False

    def end_round(self, budget: int, tuned: bool) -> None:
        """Note what a round that was to end with so many proposals has brought."""
        self.before = best_estimate(self.screened[: self.looked_at])
        self.looked_at = budget
        if len(self.screened) < budget:
            self.tunes_next, self.exhausted = not tuned, tuned
