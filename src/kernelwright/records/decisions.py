"""Decides what a search does next and where each task stands. Pure: records in, decisions out.

An estimate may be fooled, so it is no verdict, no result and no reward. The judge takes the best few candidates of a task,
one after another, and those that look too good to be true.

The best of several measurements is partly the luckiest, so no candidate is chosen by the numbers that are published of it.
These come from its *final*, which times it in the same processes as eager, every stock configuration and the next best
candidates. A final's candidate is chosen before, by screening or by first measurements; another candidate that proves
faster there has a final of its own. The final of the top-ranked candidate may be its first measurement, and stands where it
is far from no gain.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from kernelwright.records.improvement import FEWEST
from kernelwright.records.models import BASELINE_POLICY, Candidate, Evaluation
from kernelwright.records.reasons import Label
from kernelwright.records.screened import Compiles, Screened, compiles

JUDGED = 3
"""Screened candidates that the judge takes at most, by default."""
OWN_POLICY = "builtin"
"""Name of the policy whose code is this package's own, which may be slow or wrong but does not cheat."""
TUNED_SCHEDULE = "tuned-schedule"
"""Technique of a winner that carries tuned machine code."""
OVERWRITING = frozenset({"reduce-overhead", "max-autotune", "cudagraph"})
"""Baselines whose outputs the next call overwrites: no drop-ins, so none of them is the best."""
STOCK = {
    "compile": "compile",
    "reduce-overhead-fresh": "reduce-overhead-fresh",
    "cuda-graph": "cudagraph-fresh",
    "cudnn-benchmark": "cudnn",
    "compile-max-autotune": "max-autotune-fresh",
    "channels-last": "channels-last",
}
"""Techniques of the built-in policy, and the baseline that a candidate by one of them alone is."""
CUT_SHORT = "cut_short.json"
"""File of a run with the hashes of the tasks whose first look was cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePolicy:
    """Numbers of a search's schedule. Those without a source are our choice."""

    clear_low: float = 1.1
    """Lower end from which the one measurement of the top-ranked candidate is its confirmation."""
    too_good: float = 3.0
    """Estimate, in multiples of the next best, above which a candidate is judged in addition to the best few."""
    confirmations_tried: int = 3
    """Winners to measure again, best first, until one holds."""
    worth_judging: float = 1.05
    """Estimate, in multiples of the upper end of what was judged, from which another candidate is judged: single estimates
    are off by as much (results/2026-11-24-search-h200)."""
    finalist: float = 0.9
    """Share of a candidate's speedup from which another is timed in its final."""
    level: float = 0.98
    """Ratio to the best stock configuration below which that is judged as a candidate, to be handed out instead; so it is
    where the ratio's interval lies below 1."""
    tried_for_each: int = 3
    """Candidates that may be judged for each one wanted: those that the judge rejects do not count."""
    alike: int = 3
    """Candidates that are rejected alike, and nothing else, after which the judge takes no more."""
    busy_power: float = 0.5
    """Power of the reference's latency with which a CUDA graph's estimate grows while the host is busy. On an H200 a fit to
    24 graphs that were screened and judged gives 0.56; other candidates' estimates do not grow."""
    settled_headroom: float = 1.1
    """Headroom below which a task needs no more proposals."""
    unknown_headroom: float = 2.0
    """Headroom of a task of which no time of its bytes is known."""
    settled_gain: float = 1.02
    """Gain of a round of proposals below which a task is settled."""
    first_look: int = 8
    """Proposals for each task before any gets more."""
    settling_processes: int = 24
    """Most process triples that a near miss may need by its interval for the search to settle it."""
    settling_series: int = 2
    """Series of calls in each process that settles a near miss, for each one that a judge makes otherwise. For calls
    of 50 us the outer clock's noise lies between the series of a process, 28 us, and not between processes, 7 us
    (docs/log.md); and a series has the GPU for 50 ms, where a process waits for its context. Half of the processes do."""
    settling_cost: float = 4.0
    """Candidates that could be judged while one near miss is settled: 12 process triples take the place of three."""
    least_gain: float = 1.05
    """Estimate that stands for a lower one, so that cheap tasks still come first."""
    shortest_look_s: float = 1.0
    """Length of a look that stands for a shorter one, seconds: the judge has costs of its own."""
    judged_memory_share: float = 1.7
    """Memory of the judge and its workers over that of the one process that screened a task: 15.5 over 10.3, by a count of
    tensors (tests/judge/test_memory.py), and more where the module needs workspaces, in three processes."""
    contexts_bytes: int = 3 << 30
    """GPU memory of the judge's contexts (`JUDGES_PER_GPU`)."""
    least_to_stand: int = 4
    """Process triples of a measurement that may stand early. After three the upper end of an interval is 1.89 times its
    lower end, after four 1.38 and after all six 1.20, in the median of 94 candidates of short calls; of 44 timed with a
    baseline 15, 24 and 32 are certainly faster or slower than it (runs of CUDA-L1's tasks in results/kernelbench-h200)."""
    long_compile_s: float = 20.0
    """Length of a look at what torch.compile compiles from which another is asked for only where it pays, seconds."""
    far_behind: float = 0.7
    """Share of the best estimate below which torch.compile's are no reason to wait for it again. On 42 tasks no best
    estimate would have been lost; with 0.8 one (results/2026-11-24-search-h200)."""
    screened_when_judging_begins: float = 0.5
    """Tasks that may still be screened when the judge begins, on a GPU, as a share of those that can be screened at once:
    the last ones are large networks, whose compilers leave the GPU and most cores idle."""
    judges_while_screening: float = 0.5
    """Least share of the judges that work while tasks are screened: each of these takes the place of one. When it was the
    most, a few large networks kept half of the judges idle for eight of ten minutes (docs/log.md)."""
    screening_share: float = 0.5
    """Share of the minutes that screening may take."""
    first_looks_share: float = 0.75
    """The same while there are tasks of which nothing is screened."""


SCHEDULE = SchedulePolicy()


class TaskStatus(StrEnum):
    """Progress of the work on a task."""

    WINNER = "winner"
    """Its candidate is verified: accepted, and confirmed where it was searched for."""
    NONE = "no-winner"
    """All that was asked for was done, and the reference stands."""
    SCREENED = "screened-only"
    """Verdicts on screened candidates are pending: there are estimates and no result."""
    UNTOUCHED = "untouched"
    """Nothing was screened or judged."""


class Effort(StrEnum):
    """Extent of a measurement."""

    FIRST_OF_TWO = "first-of-two"
    """Ends once it is certain; what is worth it is measured again."""
    EARLY = "early"
    """May stand before all process triples are done, where time is limited."""
    FULL = "full"
    SETTLING = "settling"
    """As many series as are likely to settle a near miss."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """A measurement that a task needs next."""

    candidate: Candidate
    effort: Effort = Effort.FULL
    is_repeated: bool = False
    """True for a second measurement, which confirms or refutes the first."""
    may_stand: bool = False
    """True where a clear improvement needs no second measurement: the judge's numbers had no part in its choice."""
    is_final: bool = True
    """True where the stock configurations are timed in the same processes."""
    alongside: tuple[Candidate, ...] = ()
    """Other candidates that are."""
    processes: int = 0
    """Process triples of `Effort.SETTLING`."""

    def confirms(self, evaluation: Evaluation, schedule: SchedulePolicy = SCHEDULE) -> bool:
        """True where its outcome counts as a confirmation, or as the refutation of one."""
        return self.is_repeated or (self.may_stand and needs_no_rerun(evaluation, schedule))


# --- estimates ---------------------------------------------------------------------------------------------------------


def steady(screened: Sequence[Screened]) -> dict[str, float]:
    """Estimates by the candidate's hash, those of CUDA graphs made independent of how busy the host was.

    Other work on the host slows the launches of the reference more than a graph's one launch. The reference's latency in
    the same look, against the median of all looks at the task, says by how much.
    """
    latest = {look.candidate_sha256: look for look in screened}
    timed = {sha256: look for sha256, look in latest.items() if look.correct and look.estimate is not None}
    references = [look.reference_us for look in timed.values() if look.reference_us]
    usual_us = statistics.median(references) if references else 1.0
    estimates = {}
    for sha256, look in timed.items():
        busy = look.reference_us / usual_us if look.replays_graph and look.reference_us else 1.0
        estimates[sha256] = (look.estimate or 0.0) / min(2.0, max(0.5, busy)) ** SCHEDULE.busy_power
    return estimates


def ranked(screened: Sequence[Screened]) -> list[Screened]:
    """Candidates that were right and timed, highest steady estimate first; the later of two looks at one counts."""
    estimates = steady(screened)
    latest = {look.candidate_sha256: look for look in screened if look.candidate_sha256 in estimates}
    return sorted(latest.values(), key=lambda look: -estimates[look.candidate_sha256])


def too_good(order: Sequence[Screened]) -> set[str]:
    """Hashes of those beyond the roofline, and of all above a gap of `too_good` in the ranking."""
    suspects = {look.candidate_sha256 for look in order if look.is_beyond_roofline}
    for place, (better, worse) in enumerate(itertools.pairwise(order)):
        gap = (better.estimate or 0.0) > SCHEDULE.too_good * (worse.estimate or 0.0)
        if gap and (better.estimate or 0.0) > 1.0:
            suspects |= {look.candidate_sha256 for look in order[: place + 1]}
    return suspects


def best_estimate(screened: Sequence[Screened]) -> float:
    """The best estimate of a task; 1 where nothing is faster."""
    return max([1.0, *(look.estimate or 0.0 for look in ranked(screened)[:1])])


def gain_per_second(screened: Sequence[Screened]) -> float:
    """Logarithm of a task's best estimate over the seconds of its longest look by screening.

    The judge takes long where screening did, for compilers and large tensors, so that a look's time stands for its own.
    """
    longest_s = max((look.elapsed_s for look in screened), default=0.0)
    return math.log(max(best_estimate(screened), SCHEDULE.least_gain)) / max(longest_s, SCHEDULE.shortest_look_s)


def judging_bytes(screened: Sequence[Screened], alongside: int = 0) -> int:
    """GPU memory that the judge and its workers may take for a candidate of a task, with so many others in its final; 0
    where nothing is known of it."""
    taken_bytes, sides = max((look.memory_bytes or 0 for look in screened), default=0), 1 + alongside / 3
    return round(sides * (SCHEDULE.judged_memory_share * taken_bytes + SCHEDULE.contexts_bytes)) if taken_bytes else 0


def headroom(screened: Sequence[Screened]) -> float:
    """Factor by which a task could be faster than its best candidate, by its bytes, and by how much estimates differ."""
    order = ranked(screened)
    if not order or not order[0].least_us or not order[0].candidate_us:
        return SCHEDULE.unknown_headroom
    differ = statistics.median(abs((look.estimate or 1.0) / (order[0].estimate or 1.0) - 1.0) for look in order)
    # Operations do not count: algebra may avoid them.
    return max(1.0, order[0].candidate_us / order[0].least_us) * (1.0 + differ)


# --- proposals of one task, in turn ------------------------------------------------------------------------------------


def compiling_pays(screened: Sequence[Screened]) -> bool:
    """True unless a look at what torch.compile compiles took long, and what it gave is far behind."""
    compiled = [look for look in screened if compiles(look.source) is Compiles.INDUCTOR]
    if all(look.elapsed_s < SCHEDULE.long_compile_s for look in compiled):
        return True
    best = max((look.estimate or 0.0 for look in compiled if look.correct), default=0.0)
    return best >= SCHEDULE.far_behind * best_estimate(screened)


def tuning_pays(screened: Sequence[Screened]) -> bool:
    """True where an autotuner could still give the best candidate: torch.compile without it does, and none was tried.

    Of 234 tasks of CUDA-L1 it gave the best baseline of 5, by at most 1.19 (results/2026-11-22-cuda-l1-h200), and it took a
    quarter of the time for screening 42 tasks (results/2026-11-24-search-h200).
    """
    order = ranked(screened)
    kinds = [compiles(look.source) for look in order]
    if Compiles.VARIANTS in kinds or headroom(screened) < SCHEDULE.settled_headroom:
        return False
    compiled = next((look for look, kind in zip(order, kinds, strict=True) if kind is Compiles.INDUCTOR), None)
    return compiled is None or (compiled.estimate or 0.0) >= max(1.0, order[0].estimate or 0.0)


def is_worth_its_compiler(candidate: Candidate, screened: Sequence[Screened]) -> bool:
    """True where a proposal may still win, given how long its compiler takes."""
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
    free: Set[Compiles],
) -> Candidate | None:
    """The proposal to screen now; None where none of those waiting can begin yet, or none is worth it.

    Candidates that compile nothing come first, then those of a quick compiler, then those of torch.compile, and those of an
    autotuner last, only where they can still win. Each of the last kind takes as long as twenty others: 17 s on an H200,
    71 % of all screening were compilers (results/2026-11-23-search-h200).

    Args:
        waiting: Proposals in the policy's order.
        busy: Those that are being looked at.
        screened: Estimates of the task so far.
        free: Kinds of candidates for which a process is free.
    """
    worth = [candidate for candidate in waiting if is_worth_its_compiler(candidate, screened)]
    for kind in (Compiles.NOTHING, Compiles.CODE, Compiles.INDUCTOR):
        fitting = [candidate for candidate in worth if compiles(candidate.source) is kind]
        if fitting and kind in free:
            return fitting[0]
    if all(compiles(candidate.source) is Compiles.VARIANTS for candidate in [*worth, *busy]):
        return worth[0] if worth and Compiles.VARIANTS in free else None
    return None


# --- verdicts ----------------------------------------------------------------------------------------------------------


def next_to_judge(
    screened: Sequence[Screened], judged: Mapping[str, Evaluation], count: int, schedule: SchedulePolicy = SCHEDULE
) -> Screened | None:
    """The candidate that the judge should take now, or is at; None once it has seen enough.

    Those that look too good come first: where one of them is good, slower ones have lost. The next one follows only where
    its estimate is clearly above what was judged: the interval of an improvement, the speedup of any other.

    Args:
        screened: Estimates of one task's candidates.
        judged: First verdicts so far, by the candidate's hash.
        count: Candidates to judge at most; those rejected are replaced by the next best.
        schedule: Numbers of the schedule.
    """
    order, estimates = ranked(screened), steady(screened)
    suspects = too_good(order)
    plausible = [look for look in order if (look.estimate or 0.0) * (1.0 + (look.spread or 0.0)) > 1.0]
    alike = rejected_alike(judged.values())
    if len(alike) > 1:
        # What they have in common may be at fault: those come next that have least of it.
        shared = frozenset.intersection(*(frozenset(found.techniques) for found in alike))
        others = [look for look in plausible if look.candidate_sha256 not in judged and not shared.issubset(look.techniques)]
        if others:
            return min(others, key=lambda look: len(shared.intersection(look.techniques)))
        if len(alike) >= schedule.alike:
            return None
    timed_alongside = {name: is_faster_than(name, judged) for found in judged.values() for name in found.versus}
    for look in plausible:
        if look.candidate_sha256 not in judged and timed_alongside.get(look.candidate_sha256):
            return look
    best = 0.0
    for group in (
        [look for look in plausible if look.candidate_sha256 in suspects],
        [look for look in plausible if look.candidate_sha256 not in suspects],
    ):
        wanted = count
        for look in group[: schedule.tried_for_each * count]:
            if wanted == 0 or estimates[look.candidate_sha256] < schedule.worth_judging * best:
                break
            verdict = judged.get(look.candidate_sha256)
            if verdict is None and look.candidate_sha256 in timed_alongside:
                continue  # a final has shown that it is not faster
            if verdict is None:
                return look
            if verdict.accepted:
                wanted -= 1
                # Where a busy machine makes an interval wide, its upper end would keep out all others for nothing.
                reached = verdict.speedup_high if verdict.is_improvement else verdict.speedup
                best = max(best, reached or 0.0)
    return None


_NUMBER = re.compile(r"[-+.\d]+(e[-+]?\d+)?")


def rejected_alike(judged: Iterable[Evaluation]) -> list[Evaluation]:
    """All that was judged, where it is this package's own code and was rejected in the same words, numbers aside; else
    nothing."""
    found = list(judged)
    words = {(one.policy, one.reason, _NUMBER.sub("", one.detail.partition("\n")[0])) for one in found}
    return found if len(words) == 1 and found[0].policy == OWN_POLICY and not found[0].accepted else []


def is_faster_than(sha256: str, judged: Mapping[str, Evaluation]) -> bool:
    """True where a candidate that was timed beside another in a final is certainly faster than that one."""
    return any(found.accepted and sha256 in found.versus and found.versus[sha256][2] < 1.0 for found in judged.values())


def is_top_ranked(
    sha256: str, screened: Sequence[Screened], judged: Mapping[str, Evaluation], schedule: SchedulePolicy = SCHEDULE
) -> bool:
    """True where screening puts a candidate first by a gain that one measurement can show, and does not doubt it.

    Those that the judge rejected for what they compute are left out: no time had a part in that. A large gap to the next
    best is no reason to doubt this package's own code.
    """
    order = ranked(screened)
    left = [look for look in order if (verdict := judged.get(look.candidate_sha256)) is None or verdict.accepted]
    if not left or left[0].candidate_sha256 != sha256:
        return False
    doubted = left[0].is_beyond_roofline or (left[0].policy != OWN_POLICY and sha256 in too_good(left))
    return (left[0].estimate or 0.0) > schedule.clear_low and not doubted


def needs_no_rerun(evaluation: Evaluation, schedule: SchedulePolicy = SCHEDULE) -> bool:
    """True where the first measurement of a top-ranked candidate is its confirmation."""
    return evaluation.is_improvement and (evaluation.speedup_low or 0.0) >= schedule.clear_low


def next_to_confirm(
    judged: Mapping[str, Evaluation], confirmed: Mapping[str, Evaluation], schedule: SchedulePolicy = SCHEDULE
) -> Evaluation | None:
    """The improvement to measure again now, best first; None once one has held, or where none is left to try.

    Args:
        judged: First verdicts on one task's candidates, by the candidate's hash; not those that stand.
        confirmed: Verdicts that stand, by the same.
        schedule: Numbers of the schedule.
    """
    held = max((found.speedup_low or 0.0 for found in confirmed.values() if found.is_improvement), default=0.0)
    won = sorted((found for found in judged.values() if found.is_improvement), key=lambda found: -(found.speedup_low or 0.0))
    for winner in won[: schedule.confirmations_tried]:
        again = confirmed.get(winner.candidate_sha256)
        if again is None:
            return winner if (winner.speedup_low or 0.0) > held else None
        if again.is_improvement:
            return None
    return None


def confirmed_best(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """The confirmed improvement with the highest lower end, each candidate by its last confirmation.

    One that was slower than another of them in the same processes comes after all others.
    """
    confirmed = {found.candidate_sha256: found for found in evaluations if found.confirms}
    held = [found for found in confirmed.values() if found.is_improvement]
    names = {name for found in held for name in (found.candidate_sha256, stock_of(found))}

    def rank(found: Evaluation) -> tuple[bool, float]:
        own = (found.candidate_sha256, stock_of(found))
        slower = any(ratio[0] < 1.0 for name, ratio in found.versus.items() if name in names and name not in own)
        return not slower, found.speedup_low or 0.0

    return max(held, key=rank, default=None)


def stock_of(found: Evaluation | Candidate) -> str | None:
    """Name of the stock configuration that a candidate is; None for code of its own."""
    return STOCK.get(found.techniques[0]) if found.policy == OWN_POLICY and len(found.techniques) == 1 else None


def interval_in_words(found: Evaluation) -> str:
    """A timed evaluation's speedup and its interval, such as `1.620x (1.590 to 1.650)`."""
    return f"{found.speedup:.3f}x ({found.speedup_low:.3f} to {found.speedup_high:.3f})"


def gains_in_words(best: Evaluation, comparison: BaselineComparison | None) -> str:
    """The code handed out, and its gain over eager and over the best stock configuration, in one line."""
    stock = stock_of(best)
    name = f"{stock}, a stock configuration" if stock else ", ".join(best.techniques) or best.policy
    wraps = " (only wraps the model)" if Label.WRAPPER_ONLY in best.labels and not stock else ""
    gain = f"{name}{wraps}: {interval_in_words(best)} over eager"
    if comparison is None:
        return gain
    if comparison.best == stock:
        return f"{gain}; nothing else is faster"
    over = f"{comparison.speedup:.3f}x ({comparison.low:.3f} to {comparison.high:.3f})"
    return f"{gain}, {over} over the best stock configuration, {comparison.best}"


def is_composed(evaluation: Evaluation) -> bool:
    """True for a winner with tuned kernels, which is no part of the search over sources."""
    return TUNED_SCHEDULE in evaluation.techniques


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """A winner against the baselines that were measured with it."""

    baselines: dict[str, float]
    """Speedup of each over eager; without those that failed."""
    best: str
    """The fastest of them that keeps a drop-in's contract; `eager` where none is faster."""
    speedup: float
    """Speedup of the winner over that baseline, by paired calls where both were timed in the same processes."""
    low: float
    high: float
    """Ends of its 95 % interval."""
    is_ahead: bool
    """True when the whole interval lies above 1: only such a winner is handed out."""

    def __str__(self) -> str:
        others = ", ".join(f"{name} {speedup:.3f}x" for name, speedup in self.baselines.items())
        return (
            f"Baselines over eager: {others or 'none measured'}. Over the best of them, {self.best}, this is "
            f"{self.speedup:.3f}x ({self.low:.3f} to {self.high:.3f})."
            f"{'' if any('max-autotune' in name for name in self.baselines) else ' max-autotune was not measured.'}"
        )


# --- one task ----------------------------------------------------------------------------------------------------------


@dataclass
class TaskRecords:
    """Records of one task, and what follows from them. Values that follow are kept until the next record is added."""

    screened: list[Screened] = field(default_factory=list)
    own: list[Evaluation] = field(default_factory=list)
    """Verdicts on candidates in order, confirmations and composed winners included."""
    judged: dict[str, Evaluation] = field(default_factory=dict)
    """Verdicts that do not confirm, by the candidate's hash."""
    confirmed: dict[str, Evaluation] = field(default_factory=dict)
    baselines: list[Evaluation] = field(default_factory=list)
    looked_at: int = 0
    """Budget of the latest round of screening that ended."""
    before: float = 1.0
    """Best estimate before that round."""
    tunes_next: bool = False
    """True when only proposals with an autotuner are left to be screened."""
    exhausted: bool = False
    """True when the policy has nothing more, or the task cannot be screened or judged."""
    schedule: SchedulePolicy = SCHEDULE

    @classmethod
    def of(cls, records: Iterable[Screened | Evaluation]) -> TaskRecords:
        """Records of one task, filed."""
        made = cls()
        for record in records:
            made.add(record)
        return made

    def add(self, record: Screened | Evaluation) -> None:
        """File one record."""
        for name in ("headroom", "best_estimate", "gain_per_second", "winner", "near_miss_to_settle", "_pending"):
            self.__dict__.pop(name, None)
        if isinstance(record, Screened):
            self.screened.append(record)
        elif record.policy == BASELINE_POLICY:
            self.baselines.append(record)
        else:
            self.own.append(record)
            if not is_composed(record):
                (self.confirmed if record.confirms else self.judged)[record.candidate_sha256] = record

    # --- verdicts

    @property
    def verdicts(self) -> dict[str, Evaluation]:
        """Verdicts by the candidate's hash, of a final where there was one."""
        return {**self.judged, **self.confirmed}

    @property
    def history(self) -> tuple[Evaluation, ...]:
        """First verdicts in order, for the policy: without repeated measurements and composed winners."""
        first: dict[str, None] = {}
        kept = []
        for found in self.own:
            if is_composed(found) or (found.confirms and found.candidate_sha256 in first):
                continue
            first[found.candidate_sha256] = None
            kept.append(found)
        return tuple(kept)

    @cached_property
    def winner(self) -> Evaluation | None:
        """The confirmed winner, without tuned kernels, however much is pending."""
        return confirmed_best(self.confirmed.values())

    @property
    def composed(self) -> list[Evaluation]:
        """Verdicts on the present winner with tuned kernels."""
        winner = self.winner
        sha256 = winner.candidate_sha256 if winner is not None else None
        return [found for found in self.own if is_composed(found) and found.parent == sha256]

    @property
    def composed_again(self) -> MeasurementPlan | None:
        """A second measurement of the winner with tuned kernels, where the first is an improvement; None elsewhere."""
        first = next((found for found in self.composed if not found.confirms), None)
        if first is None or not first.is_improvement or any(found.confirms for found in self.composed):
            return None
        return MeasurementPlan(first.candidate(), is_repeated=True)

    @property
    def best(self) -> Evaluation | None:
        """The confirmed winner, with tuned kernels where these are confirmed to be faster."""
        winner = self.winner
        tuned = next((found for found in self.composed if found.confirms and found.is_improvement), None)
        faster = winner is not None and tuned is not None and (tuned.speedup or 0.0) > (winner.speedup or 0.0)
        return tuned if faster else winner

    @property
    def nearest_miss(self) -> Evaluation | None:
        """The near miss with the highest lower bound, each candidate by its last measurement."""
        latest = {found.candidate_sha256: found for found in self.own if not is_composed(found)}
        misses = [found for found in latest.values() if found.is_near_miss]
        return max(misses, key=lambda found: found.speedup_low or 0.0, default=None)

    @cached_property
    def near_miss_to_settle(self) -> Evaluation | None:
        """The measurement that came nearest to a gain, of those that `settling_processes` are likely to settle.

        None where something is confirmed, or a near miss has been measured again: of several the luckiest would count.
        """
        missed = [found for found in self.judged.values() if found.is_near_miss]
        if self.winner is not None or any(found.candidate_sha256 in self.confirmed for found in missed):
            return None
        most = self.schedule.settling_processes
        able = [found for found in missed if (count := found.processes_to_settle) is not None and count <= most]
        return max(able, key=lambda found: found.speedup_low or 0.0, default=None)

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """Name and speedup of the fastest measured baseline that keeps a drop-in's contract; None where none is faster than
        eager."""
        gains = {found.techniques[0]: found.speedup for found in self.baselines if found.speedup is not None}
        able = [name for name, gain in gains.items() if gain > 1.0 and name not in OVERWRITING]
        name = max(able, key=gains.__getitem__, default=None)
        return None if name is None else (name, gains[name])

    @property
    def needs_fallback(self) -> bool:
        """True where the best baseline is faster than the winner, or there is none: nobody should get less than it gives."""
        best, winner = self.best_baseline, self.winner
        if best is None or winner is None:
            return best is not None
        apart = (winner.speedup or 0.0) / best[1]
        ratio, _, high = winner.versus.get(best[0]) or (apart, apart, 1.0)
        return (ratio < self.schedule.level or high < 1.0) and stock_of(winner) != best[0]

    @cached_property
    def _pending(self) -> dict[int, Candidate | None]:
        """Answers of `pending` by the number of candidates."""
        return {}

    def pending(self, count: int) -> Candidate | None:
        """The candidate that the judge should take now: the best few in turn, then a winner once more until one holds."""
        if count not in self._pending:
            self._pending[count] = self._next_pending(count)
        return self._pending[count]

    def _next_pending(self, count: int) -> Candidate | None:
        if (chosen := next_to_judge(self.screened, self.verdicts, count, self.schedule)) is not None:
            return chosen.candidate()
        winner = next_to_confirm(self.judged, self.confirmed, self.schedule)
        return None if winner is None else winner.candidate()

    def finalists(self, candidate: Candidate, count: int) -> tuple[Candidate, ...]:
        """Other candidates to time in a candidate's final, so that there are so many at most: those that are about as fast.

        The judge has accepted them, or they are this package's own and not judged yet.
        """
        known = steady(self.screened) | {name: found.speedup or 0.0 for name, found in self.verdicts.items()}
        looks = [look for look in self.screened if look.source and look.policy == OWN_POLICY]
        able = {look.candidate_sha256: look.candidate() for look in looks if look.candidate_sha256 in known}
        able |= {name: found.candidate() for name, found in self.verdicts.items()}
        least = max(1.0, self.schedule.finalist * known.get(candidate.sha256, 0.0))
        near = [name for name in able if known[name] > least and name != candidate.sha256]
        return tuple(able[name] for name in sorted(near, key=lambda name: -known[name])[: count - 1])

    def measure(self, candidate: Candidate, count: int = JUDGED, *, limited: bool = False) -> MeasurementPlan:
        """The measurement of a pending candidate: its final where it may be the last of it, else the first of two.

        With a limit of time a clear gain need not have all process triples: each takes the driver a second.
        """
        is_repeated = candidate.sha256 in self.judged
        may_stand = not is_repeated and (
            is_top_ranked(candidate.sha256, self.screened, self.judged, self.schedule)
            or is_faster_than(candidate.sha256, self.verdicts)
        )
        if not (is_repeated or may_stand):
            return MeasurementPlan(candidate, Effort.FIRST_OF_TWO, is_final=False)
        effort = Effort.EARLY if limited and may_stand else Effort.FULL
        return MeasurementPlan(candidate, effort, is_repeated, may_stand, alongside=self.finalists(candidate, count))

    def settle(self) -> MeasurementPlan | None:
        """A second measurement of the near miss, which alone decides; None where there is none to settle.

        Half of the processes that would settle it make `settling_series` times as many series each.
        """
        miss = self.near_miss_to_settle
        if miss is None or miss.processes_to_settle is None:
            return None
        processes = max(FEWEST, math.ceil(miss.processes_to_settle / 2))
        return MeasurementPlan(miss.candidate(), Effort.SETTLING, is_repeated=True, processes=processes)

    # --- estimates

    @cached_property
    def best_estimate(self) -> float:
        """The best estimate; 1 where nothing is faster."""
        return best_estimate(self.screened)

    @cached_property
    def headroom(self) -> float:
        """Factor by which the task could be faster than its best candidate."""
        return headroom(self.screened)

    @cached_property
    def gain_per_second(self) -> float:
        """Logarithm of the best estimate over the seconds of the longest look."""
        return gain_per_second(self.screened)

    # --- rounds of screening

    @property
    def is_unseen(self) -> bool:
        """True while nothing of it is screened, and something may be."""
        return not self.screened and not self.exhausted

    @property
    def is_settled(self) -> bool:
        """True when further proposals are unlikely to help."""
        first = self.tunes_next or self.looked_at <= self.schedule.first_look
        gained = first or self.best_estimate >= self.schedule.settled_gain * self.before
        enough = not gained or self.headroom < self.schedule.settled_headroom
        return self.exhausted or (self.looked_at > 0 and enough)

    def is_screened(self, budget: int, limited: bool) -> bool:
        """True when it needs no more proposals, of so many, with a limit of time or without."""
        return self.exhausted or len(self.screened) >= budget or (limited and self.is_settled)

    def next_round(self, budget: int, limited: bool) -> tuple[int, bool]:
        """Proposals that its next round ends with, and True where those with an autotuner count.

        Without a limit of time all tasks get the whole budget at once.
        """
        if not limited or self.tunes_next:
            return budget, True
        return min((len(self.screened) // self.schedule.first_look + 1) * self.schedule.first_look, budget), False

    def end_round(self, budget: int, tuned: bool) -> None:
        """Note what a round that was to end with so many proposals has brought."""
        self.before = best_estimate(self.screened[: self.looked_at])
        self.looked_at = budget
        if len(self.screened) < budget:
            self.tunes_next, self.exhausted = not tuned, tuned

    # --- turns among the tasks of a suite; the lowest comes first

    def screening_turn(self, budget: int, limited: bool, source: str) -> tuple[bool, int, float, int]:
        """The task that has had the fewest proposals, and of those the one with the most headroom."""
        limit, tunes = self.next_round(budget, limited)
        # Long programs take longest: begun last, they would hold up the rest.
        return tunes, limit, -self.headroom, -len(source)

    @property
    def judging_turn(self) -> tuple[bool, float]:
        """Tasks without a winner first, then the most promising. Settling a near miss takes as long as several
        candidates."""
        settles = self.near_miss_to_settle is not None
        worth = self.gain_per_second / (self.schedule.settling_cost if settles else 1.0)
        return self.winner is not None, -worth

    @property
    def baselines_turn(self) -> tuple[bool, float]:
        """Winners first, which count for nothing without baselines, then the tasks that the judge takes next."""
        return self.winner is None, -self.gain_per_second

    # --- status

    def status(self, count: int, *, cut_short: bool = False) -> tuple[TaskStatus, str]:
        """Status of a task that was searched, and the reason where it has no winner."""
        if confirmed_best(self.own) is not None:
            return TaskStatus.WINNER, ""
        if not self.screened and not self.own:
            return TaskStatus.UNTOUCHED, "nothing was screened"
        if next_to_judge(self.screened, self.verdicts, count, self.schedule) is not None:
            return TaskStatus.SCREENED, "a verdict is owed"
        if next_to_confirm(self.judged, self.confirmed, self.schedule) is not None:
            return TaskStatus.SCREENED, "a confirmation is owed"
        if cut_short:
            return TaskStatus.SCREENED, "its first look was cut short"
        if self.confirmed:
            return TaskStatus.NONE, "no improvement held when it was measured again"
        return TaskStatus.NONE, self._why_none()

    @property
    def alike_in_words(self) -> str:
        """Sentence on candidates that failed alike, once no more are judged for that; empty elsewhere."""
        alike = rejected_alike(self.judged.values())
        words = f"all {len(alike)} that were judged fail alike, so no more are: " if alike else ""
        return (
            f"{words}{alike[-1].reason}: {alike[-1].detail.partition(chr(10))[0]}"
            if len(alike) >= self.schedule.alike
            else ""
        )

    def _why_none(self) -> str:
        accepted = [found for found in self.judged.values() if found.accepted]
        if accepted:
            timed = [(found.speedup, found.speedup_low) for found in accepted if found.speedup is not None]
            if not timed:
                return f"{len(accepted)} accepted, not timed"
            speedup, low = max(timed, key=lambda both: both[0])
            return f"{len(accepted)} judged, none an improvement: at best {speedup:.2f} from {low:.2f}"
        if words := self.alike_in_words:
            return words
        if self.judged:
            return "rejected: " + _counted(found.reason for found in self.judged.values())
        order = ranked(self.screened)
        if order:
            return f"{len(order)} right when screened, none faster: at best {order[0].estimate:.2f}"
        return "none right when screened: " + _counted(look.reason for look in self.screened)


def _counted(reasons: Iterable[Any]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in Counter(map(str, reasons)).most_common())
