"""Records what a quick look estimates of a candidate, and chooses those that the judge takes.

An estimate may be fooled, so it is no verdict, no result and no reward. The judge takes the best few, one after another, and
what looks too good to be true.

The best of several measurements is partly the luckiest, so a winner is measured again. What screening put first was chosen
by other numbers than the judge's: its first measurement is unbiased already. Where that is far from no gain, it stands.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kernelwright.records.knobs import shown
from kernelwright.records.models import Candidate, Evaluation, Reason, Task

JUDGED = 3
"""Screened candidates that the judge takes at most, by default."""
CLEAR_LOW = 1.1
"""Lower end from which the one measurement of what screening put first is its confirmation. Our choice."""
TOO_GOOD = 3.0
"""Estimate, in multiples of the next best, above which a candidate is judged beside the best few. Our choice."""
OWN_POLICY = "builtin"
"""Name of the policy whose code is this package's own, which may be slow or wrong but does not cheat."""
CONFIRMATIONS_TRIED = 3
"""Winners to re-measure, best first, until one holds. The best of many is partly the luckiest."""
_WORTH = 1.05
"""Estimate, in multiples of the upper end of what was judged, from which another candidate is judged. Our choice: single
estimates are off by as much (results/2026-11-24-search-h200)."""
_BUSY = 0.5
"""Power of the reference's latency with which a CUDA graph's estimate grows while the host is busy. On an H200 a fit to 24
graphs that were screened and judged gives 0.56; other candidates' estimates do not grow."""
_TRIED = 3
"""Candidates that may be judged for each one wanted: those that the judge rejects do not count."""


class Screened(BaseModel):
    """Estimate of one candidate by a process that the candidate ran in, and could have forged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["screened"] = "screened"
    task: str
    task_sha256: str
    candidate_sha256: str
    correct: bool
    """Whether its outputs were right on the few inputs that were tried."""
    reason: Reason | None = None
    """Reason for not being correct."""
    detail: str = ""
    estimate: float | None = None
    """Reference latency / candidate latency, the median of paired calls in one process; None where it was not timed."""
    spread: float | None = None
    """Half the distance between the quartiles of the pairs' logarithmic ratios."""
    pairs: int = 0
    """Number of paired calls."""
    reference_us: float | None = None
    candidate_us: float | None = None
    """Median latency per call, microseconds."""
    least_us: float | None = None
    """Time that the device takes to move the task's inputs and outputs once, microseconds."""
    operations_us: float | None = None
    """Time that the device takes for the products, convolutions and attention of one call of the reference, at its measured
    rate of a large product, microseconds; None where that is unknown."""
    memory_bytes: int | None = None
    """Most GPU memory that the task took until its truths were known, in the process that screened it."""
    policy: str = "file"
    techniques: tuple[str, ...] = ()
    parent: str | None = None
    knobs: dict[str, str] = Field(default_factory=dict)
    """Values of the knobs that its source declares, as text."""
    source: str = ""
    device: str = "cpu"
    started: str = ""
    """UTC, ISO 8601."""
    elapsed_s: float = 0.0
    spent_s: dict[str, float] = Field(default_factory=dict)
    """Seconds by phase: start, task, build, check, time, wait, end."""

    @property
    def is_beyond_roofline(self) -> bool:
        """Whether it claims less time than moving the inputs and outputs takes.

        Operations have no part in it: algebra may avoid them, and no candidate avoids the bytes.
        """
        return self.candidate_us is not None and self.least_us is not None and self.candidate_us < self.least_us

    @property
    def replays_graph(self) -> bool:
        """Whether it replays a CUDA graph, by its text or, where that was not published, by its techniques."""
        named = any("cuda-graph" in name or name == "compile-max-autotune" for name in self.techniques)
        return named or "CUDAGraph(" in self.source

    def candidate(self) -> Candidate:
        """The candidate that was looked at, for the judge."""
        return Candidate(source=self.source, policy=self.policy, techniques=self.techniques, parent=self.parent)


def screened_of(task: Task, candidate: Candidate, **found: Any) -> Screened:
    """A record of one candidate of a task with what was found."""
    return Screened(
        task=task.id,
        task_sha256=task.sha256,
        candidate_sha256=candidate.sha256,
        policy=candidate.policy,
        techniques=candidate.techniques,
        parent=candidate.parent,
        source=candidate.source,
        knobs=shown(candidate.source),
        **found,
    )


def steady(screened: Sequence[Screened]) -> dict[str, float]:
    """Estimates by the candidate's hash, those of CUDA graphs made independent of how busy the host was.

    What else runs on the host slows the launches of the reference more than a graph's one launch. The reference's latency
    in the same look, against the median of all looks at the task, says by how much.
    """
    latest = {one.candidate_sha256: one for one in screened}
    timed = {sha256: one for sha256, one in latest.items() if one.correct and one.estimate is not None}
    references = [one.reference_us for one in timed.values() if one.reference_us]
    usual_us = statistics.median(references) if references else 1.0
    found = {}
    for sha256, one in timed.items():
        busy = one.reference_us / usual_us if one.replays_graph and one.reference_us else 1.0
        found[sha256] = (one.estimate or 0.0) / min(2.0, max(0.5, busy)) ** _BUSY
    return found


def ranked(screened: Sequence[Screened]) -> list[Screened]:
    """Candidates that were right and timed, highest steady estimate first; the later of two looks at one counts."""
    estimates = steady(screened)
    latest = {one.candidate_sha256: one for one in screened if one.candidate_sha256 in estimates}
    return sorted(latest.values(), key=lambda one: -estimates[one.candidate_sha256])


def too_good(order: Sequence[Screened]) -> set[str]:
    """Hashes of those beyond the roofline, and of all above a gap of `TOO_GOOD` in the ranking."""
    found = {one.candidate_sha256 for one in order if one.is_beyond_roofline}
    for place, (better, worse) in enumerate(itertools.pairwise(order)):
        if (better.estimate or 0.0) > TOO_GOOD * (worse.estimate or 0.0) and (better.estimate or 0.0) > 1.0:
            found |= {one.candidate_sha256 for one in order[: place + 1]}
    return found


def next_to_judge(screened: Sequence[Screened], judged: Mapping[str, Evaluation], count: int) -> Screened | None:
    """The candidate that the judge should take now, or is at; None once it has seen enough.

    Those that look too good come first: where one of them is good, slower ones have lost. The next one follows only where
    its estimate is clearly above what was judged: the interval of an improvement, the speedup of any other.

    Args:
        screened: Estimates of one task's candidates.
        judged: First verdicts so far, by the candidate's hash.
        count: Candidates to judge at most; those rejected are replaced by the next best.
    """
    order, estimates = ranked(screened), steady(screened)
    suspects = too_good(order)
    plausible = [one for one in order if (one.estimate or 0.0) * (1.0 + (one.spread or 0.0)) > 1.0]
    best = 0.0
    for group in (
        [one for one in plausible if one.candidate_sha256 in suspects],
        [one for one in plausible if one.candidate_sha256 not in suspects],
    ):
        wanted = count
        for one in group[: _TRIED * count]:
            if wanted == 0 or estimates[one.candidate_sha256] < _WORTH * best:
                break
            verdict = judged.get(one.candidate_sha256)
            if verdict is None:
                return one
            if verdict.accepted:
                wanted -= 1
                # Where a busy machine makes an interval wide, its upper end would keep out all others for nothing.
                reached = verdict.speedup_high if verdict.is_improvement else verdict.speedup
                best = max(best, reached or 0.0)
    return None


def is_named(sha256: str, screened: Sequence[Screened], judged: Mapping[str, Evaluation]) -> bool:
    """Whether screening puts a candidate first by a gain that one measurement can show, and does not doubt it.

    Those that the judge rejected for what they compute are left out: no time had a part in that. A large gap to the next
    best is no reason to doubt this package's own code.
    """
    order = ranked(screened)
    left = [one for one in order if (found := judged.get(one.candidate_sha256)) is None or found.accepted]
    if not left or left[0].candidate_sha256 != sha256:
        return False
    doubted = left[0].is_beyond_roofline or (left[0].policy != OWN_POLICY and sha256 in too_good(left))
    return (left[0].estimate or 0.0) > CLEAR_LOW and not doubted


def is_clear(found: Evaluation) -> bool:
    """Whether the measurement of a named candidate is its confirmation."""
    return found.is_improvement and (found.speedup_low or 0.0) >= CLEAR_LOW


def next_to_confirm(judged: Mapping[str, Evaluation], confirmed: Mapping[str, Evaluation]) -> Evaluation | None:
    """The improvement to measure again now, best first; None once one has held, or where none is left to try.

    Args:
        judged: First verdicts on one task's candidates, by the candidate's hash; not those of named ones that stand.
        confirmed: Verdicts that stand, by the same.
    """
    held = max((one.speedup_low or 0.0 for one in confirmed.values() if one.is_improvement), default=0.0)
    won = sorted((one for one in judged.values() if one.is_improvement), key=lambda one: -(one.speedup_low or 0.0))
    for winner in won[:CONFIRMATIONS_TRIED]:
        again = confirmed.get(winner.candidate_sha256)
        if again is None:
            return winner if (winner.speedup_low or 0.0) > held else None
        if again.is_improvement:
            return None
    return None


def next_owed(
    screened: Sequence[Screened], judged: Mapping[str, Evaluation], confirmed: Mapping[str, Evaluation], count: int
) -> Screened | None:
    """The candidate that the judge should take now: the best few in turn, then a winner once more until one holds.

    Args:
        screened, count: As for `next_to_judge`.
        judged, confirmed: As for `next_to_confirm`. The first verdict on a candidate counts before its confirmation.
    """
    if (chosen := next_to_judge(screened, {**confirmed, **judged}, count)) is not None:
        return chosen
    winner = next_to_confirm(judged, confirmed)
    sha256 = winner.candidate_sha256 if winner is not None else None
    return next((one for one in reversed(screened) if one.candidate_sha256 == sha256), None)


def confirmed_best(own: Iterable[Evaluation]) -> Evaluation | None:
    """The confirmed improvement with the highest lower end, each candidate by its last confirmation."""
    confirmed = {one.candidate_sha256: one for one in own if one.confirms}
    held = [one for one in confirmed.values() if one.is_improvement]
    return max(held, key=lambda one: one.speedup_low or 0.0, default=None)
