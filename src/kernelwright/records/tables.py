"""Computes the table of CUDA-L1 (arXiv 2507.14111) and where each task stands, from the records of a run.

Per level and over all, against each baseline: mean, largest and 75/50/25 % speedup, successes and the number
above 1.01x. Beside them the geometric mean and fast_p (KernelBench, arXiv 2502.10517), and one more baseline:
the fastest of each task. Every statistic comes in two variants, because published tables mix them: over the
solved tasks alone, and over all tasks with an unsolved one counted as 1.0x, as its user keeps the baseline.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from kernelwright.errors import UsageError
from kernelwright.records import Contract, Evaluation, Label, Reason, RunDirectory, Verdict
from kernelwright.records.decisions import (
    CUT_SHORT,
    JUDGED,
    OVERWRITING,
    BaselineComparison,
    TaskRecords,
    TaskStatus,
    ranked,
    stock_of,
)
from kernelwright.records.models import BASELINE_POLICY, Precision
from kernelwright.records.screened import Screened

REFERENCE = "eager"
"""The baseline that `Evaluation.speedup` is measured against."""

BEST = "best"
"""Fastest baseline of each task that keeps the contract of a drop-in, the reference included."""

ENTRIES = "entries.json"
"""File with the lines of the table, without which it cannot be computed again."""

TALLY_KEYS = {"pending": "owed"}
"""Keys of `table.json` that differ from the names of fields."""

CANDIDATE = "candidate"
"""Name of the candidate beside the names of baselines."""

ABOVE = 1.01
"""Speedup above which CUDA-L1 counts a task as sped up."""

FAST_P = (1.0, 1.5, 2.0)

UNSOLVED_SPEEDUP = 1.0


NOT_BUILT = frozenset({Reason.SYNTAX_ERROR, Reason.NO_MODEL_NEW, Reason.BUILD_FAILED, Reason.BUILD_TIMEOUT})

UNCLEAN = frozenset(
    {Label.STATE_DIFFERS, Label.STRIDES_DIFFER, Label.CONTIGUOUS_ONLY, Label.ALIASED_OUTPUT, Label.GLOBAL_FLAGS}
)
"""Labels of candidates that compute the right thing and are no drop-ins all the same."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Results of a bench run for one task."""

    task: str
    level: int | None
    latencies_us: dict[str, float]
    """Median latency of each baseline that ran, by its name; one that failed is absent."""
    evaluation: Evaluation | None
    """Judge's record of the candidate; None when the task has no candidate, or none that was judged."""
    strict: Evaluation | None = None
    """Second record, with TF32 off on both sides; None where that was not asked for."""
    tf32_products: Evaluation | None = None
    """The same with TF32 allowed in products on both sides."""
    has_candidate: bool = False
    """True when there is a candidate, judged or not; without meaning beside an evaluation."""
    failed: tuple[str, ...] = ()
    """Baselines, or `CANDIDATE`, that a fault of the task or of the machine kept from being measured."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Interval of each other baseline's speedup over the reference."""
    never_best: frozenset[str] = OVERWRITING
    """Baselines that cannot be the best."""

    def __post_init__(self) -> None:
        for name, latency_us in self.latencies_us.items():
            if not (math.isfinite(latency_us) and latency_us > 0.0):
                found = f"{name} with {latency_us!r}"
                raise UsageError(f"Wanted baselines with a latency above 0 us on {self.task}; found {found}.")
            if name == BEST:
                raise UsageError(f"Wanted a baseline of another name than {BEST!r}, which means the fastest.")

    @property
    def solved(self) -> bool:
        """True when there is a candidate and the judge accepted it."""
        return self.evaluation is not None and self.evaluation.accepted

    def baselines_us(self) -> dict[str, float]:
        """Latency of each baseline, with the reference's from the judge where the bench measured none."""
        found = dict(self.latencies_us)
        if self.evaluation is not None and self.evaluation.reference_us is not None:
            found.setdefault(REFERENCE, self.evaluation.reference_us)
        return found

    @property
    def best(self) -> str:
        """Name of the best baseline; the reference where nothing else is faster."""
        found = {name: us for name, us in self.baselines_us().items() if name not in self.never_best}
        return min(found, key=lambda name: (found[name], name != REFERENCE), default=REFERENCE)

    @property
    def stock(self) -> str | None:
        """The measured baseline that the candidate itself is; None for code of its own.

        The two are one program, measured twice, and may still differ: cuDNN's search found an algorithm of half the speed
        when other processes held the GPU's memory (results/kernelbench-h200, level 1, 66).
        """
        name = None if self.evaluation is None else stock_of(self.evaluation)
        return name if name in self.latencies_us else None

    def runs(self, baseline: str) -> bool:
        """True when the task can be compared with a baseline."""
        return baseline in (REFERENCE, BEST) or baseline in self.latencies_us

    def _named(self, baseline: str) -> str:
        """The baseline itself instead of `BEST`."""
        return self.best if baseline == BEST else baseline

    def gain(self, baseline: str) -> float | None:
        """A baseline's speedup over the reference; None without it."""
        found, name = self.baselines_us(), self._named(baseline)
        if name == REFERENCE:
            return 1.0
        return found[REFERENCE] / found[name] if REFERENCE in found and name in found else None

    def _paired(self, baseline: str) -> tuple[float, float, float] | None:
        """Speedup against a baseline and its interval, from the candidate's own process triples; None where it was not timed
        there. The interval over the best begins where the lowest over any does: which one is the best was measured too."""
        found = self.evaluation
        ratio = None if found is None else found.versus.get(self._named(baseline))
        if found is None or ratio is None or baseline != BEST:
            return ratio
        able = found.versus.keys() & self.latencies_us.keys() - self.never_best
        return ratio[0], min((found.versus[name][1] for name in able), default=ratio[1]), ratio[2]

    def speedup(self, baseline: str = REFERENCE) -> float | None:
        """The candidate's speedup against a baseline; None when unsolved, untimed or without that baseline.

        Where the baseline was timed in the candidate's own process triples, it is that paired ratio. Elsewhere
        it is the paired speedup against the reference, times the ratio of the two baselines' latencies, so that each ratio
        is between numbers of one harness. A candidate that is itself a baseline is as fast as that one, and
        no faster than the best.
        """
        if self.evaluation is None or not self.evaluation.accepted or self.evaluation.speedup is None:
            return None
        if (paired := self._paired(baseline)) is not None:
            return self._level(baseline, paired[0])
        gain = self.gain(baseline)
        return self._level(baseline, self.evaluation.speedup / gain) if gain is not None else None

    def _level(self, baseline: str, ratio: float) -> float:
        """A ratio to a baseline, for a candidate that may be a baseline itself."""
        name = self._named(baseline)
        if self.stock is None or (baseline != BEST and name != self.stock):
            return ratio
        return 1.0 if name == self.stock else min(ratio, 1.0)

    def interval(self, baseline: str = REFERENCE) -> tuple[float, float] | None:
        """Interval of `speedup`; None where it is not known.

        Without a paired ratio it is as wide as the candidate's and the baseline's together.
        """
        found = self.evaluation
        if self.speedup(baseline) is None or found is None or found.speedup_low is None or found.speedup_high is None:
            return None
        if (paired := self._paired(baseline)) is not None:
            return self._level(baseline, paired[1]), self._level(baseline, paired[2])
        name = self._named(baseline)
        other = (1.0, 1.0) if name == REFERENCE else self.intervals.get(name)
        if other is None:
            return None
        return self._level(baseline, found.speedup_low / other[1]), self._level(baseline, found.speedup_high / other[0])

    def is_ahead(self, baseline: str) -> bool:
        """True when the candidate is certainly faster: an improvement whose interval over the baseline lies above 1."""
        interval = self.interval(baseline)
        return interval is not None and interval[0] > 1.0 and self.evaluation is not None and self.evaluation.is_improvement


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a list of speedups, all None when it is empty."""

    count: int
    mean: float | None
    largest: float | None
    p75: float | None
    p50: float | None
    p25: float | None
    geomean: float | None


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the table: the tasks of a level, or all, against one baseline."""

    level: int | None
    """None for all levels, tasks without a level included."""
    baseline: str
    tasks: int
    """Tasks on which the baseline ran, of which the counts below are a part."""
    success: int
    """Tasks whose candidate was accepted."""
    above: int
    """Tasks whose speedup is above `ABOVE`."""
    fast_p: dict[float, float]
    """Share of `tasks` whose candidate was accepted and is more than p times as fast."""
    ahead: int
    """Tasks whose candidate is certainly faster: an improvement whose interval over the baseline lies above 1."""
    solved: Statistics
    """Statistics of accepted and timed candidates alone."""
    filled: Statistics
    """Statistics of all `tasks`, with `UNSOLVED_SPEEDUP` for every other one."""
    contracts: dict[Contract, int] | None
    """Tasks whose candidate keeps each contract, whichever decides; None where no record answers both."""
    strict: Statistics | None
    """Statistics of the solved tasks against the reference, both with TF32 off; None where that was not measured, and for
    other baselines."""
    tf32_products: Statistics | None
    """The same with TF32 allowed in products."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of candidates, without regard to speed."""

    tasks: int
    without_candidate: int
    failed: int
    """Tasks whose candidate could not be judged, by a fault of the task or of the machine."""
    pending: int
    """Tasks whose candidate was not judged yet."""
    baselines_failed: int
    """Tasks of which a baseline could not be measured, by such a fault."""
    accepted: int
    built: int
    """Candidates that could be imported and constructed."""
    clean: int
    """Accepted and carrying no label of `UNCLEAN`."""
    improved: int
    """Accepted, and the interval's lower end clears the noise floor against the reference."""
    rejected: dict[str, int] = field(default_factory=dict)
    """By reason code, most frequent first."""
    labels: dict[str, int] = field(default_factory=dict)
    """Labels of the accepted, most frequent first."""


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """One baseline against the reference, without any candidate."""

    baseline: str
    ran: int
    """Tasks on which it runs and is right."""
    speedups: Statistics
    """Against the reference, over those tasks; `BEST` includes the reference itself."""


def baseline_table(results: Sequence[TaskResult]) -> list[BaselineRow]:
    """Speedup of each baseline over the reference, and of always choosing the fastest."""
    timed = [result for result in results if REFERENCE in result.latencies_us]
    names = [name for name in dict.fromkeys(name for found in timed for name in found.latencies_us) if name != REFERENCE]
    every = [*names, BEST] if names else []
    gains = {name: [gain for found in timed if (gain := found.gain(name)) is not None] for name in every}
    return [BaselineRow(name, len(speedups), statistics_of(speedups)) for name, speedups in gains.items()]


def bench_table(results: Sequence[TaskResult]) -> list[TableRow]:
    """The rows of the table: level by level and then all, each against every baseline as met and then the best.

    Raises:
        UsageError: two results are of the same task.
    """
    repeated = [task for task, count in Counter(result.task for result in results).items() if count > 1]
    if repeated:
        raise UsageError(f"Wanted one result for each task; found several for {', '.join(repeated)}.")
    met = dict.fromkeys([REFERENCE, *(name for result in results for name in result.latencies_us)])
    levels = sorted({result.level for result in results if result.level is not None})
    rows = []
    for level in (*levels, None):
        chosen = [result for result in results if level is None or result.level == level]
        rows += [_row(chosen, level, baseline) for baseline in (*met, BEST)]
    return rows


def _row(results: Sequence[TaskResult], level: int | None, baseline: str) -> TableRow:
    compared = [result for result in results if result.runs(baseline)]
    speedups = [result.speedup(baseline) for result in compared]
    solved = [speedup for speedup in speedups if speedup is not None]
    filled = [UNSOLVED_SPEEDUP if speedup is None else speedup for speedup in speedups]
    return TableRow(
        level=level,
        baseline=baseline,
        tasks=len(compared),
        success=sum(result.solved for result in compared),
        above=sum(speedup > ABOVE for speedup in solved),
        fast_p={p: _fast_p(solved, p, len(compared)) for p in FAST_P},
        ahead=sum(result.is_ahead(baseline) for result in compared),
        solved=statistics_of(solved),
        filled=statistics_of(filled),
        contracts=_contracts(compared),
        strict=_of_seconds([result.strict for result in results]) if baseline == REFERENCE else None,
        tf32_products=_of_seconds([result.tf32_products for result in results]) if baseline == REFERENCE else None,
    )


def _contracts(results: Sequence[TaskResult]) -> dict[Contract, int] | None:
    answers = [one.evaluation.contracts for one in results if one.evaluation is not None and one.evaluation.contracts]
    return {contract: sum(found[contract].kept for found in answers) for contract in Contract} if answers else None


def _of_seconds(found: Sequence[Evaluation | None]) -> Statistics | None:
    """Statistics of second judgements, in another precision than the run's."""
    measured = [one for one in found if one is not None]
    if not measured:
        return None
    return statistics_of([one.speedup for one in measured if one.accepted and one.speedup is not None])


def _fast_p(solved: Sequence[float], p: float, tasks: int) -> float:
    return sum(speedup > p for speedup in solved) / tasks if tasks else 0.0


def statistics_of(speedups: Sequence[float]) -> Statistics:
    """Mean, largest, quartiles (linear between neighbours, as numpy's default) and geometric mean."""
    if not speedups:
        return Statistics(0, None, None, None, None, None, None)
    p25, p50, p75 = np.quantile(speedups, (0.25, 0.5, 0.75)).tolist()
    return Statistics(
        count=len(speedups),
        mean=statistics.fmean(speedups),
        largest=max(speedups),
        p75=p75,
        p50=p50,
        p25=p25,
        geomean=statistics.geometric_mean(speedups),
    )


def tally(results: Iterable[TaskResult]) -> Tally:
    """Count the candidates by their fate."""
    results = list(results)
    evaluations = [result.evaluation for result in results if result.evaluation is not None]
    unjudged = [result for result in results if result.evaluation is None]
    failed = sum(CANDIDATE in result.failed for result in unjudged)
    without_candidate = sum(not result.has_candidate for result in unjudged)
    accepted = [evaluation for evaluation in evaluations if evaluation.accepted]
    reasons = Counter(
        "unknown" if evaluation.reason is None else evaluation.reason.value
        for evaluation in evaluations
        if evaluation.verdict is Verdict.REJECTED
    )
    labels = Counter(label.value for evaluation in accepted for label in evaluation.labels)
    return Tally(
        tasks=len(results),
        without_candidate=without_candidate,
        failed=failed,
        pending=len(unjudged) - without_candidate - failed,
        baselines_failed=sum(bool({*result.failed} - {CANDIDATE}) for result in results),
        accepted=len(accepted),
        built=sum(evaluation.reason not in NOT_BUILT for evaluation in evaluations),
        clean=sum(not UNCLEAN & set(evaluation.labels) for evaluation in accepted),
        improved=sum(evaluation.is_improvement for evaluation in accepted),
        rejected=dict(reasons.most_common()),
        labels=dict(labels.most_common()),
    )


@dataclass(frozen=True, slots=True)
class BenchEntry:
    """One line of a suite. Two may have one task and different candidates."""

    task: str
    task_sha256: str
    level: int | None
    candidate_sha256: str | None
    """None where the suite has no candidate."""


def task_results(
    run: RunDirectory,
    entries: Sequence[BenchEntry],
    errors: Mapping[str, str],
    never_best: frozenset[str] = OVERWRITING,
) -> list[TaskResult]:
    """Results of the suite's entries, in order, from the evaluations on disk; `errors` are by task and baseline."""
    found: dict[str, list[Evaluation]] = {}
    for evaluation in run.evaluations():
        found.setdefault(evaluation.task_sha256, []).append(evaluation)
    own = Precision.of((run.read_json("config.json") or {}).get("settings", {}))
    failed: dict[str, list[str]] = {}
    for name in errors:
        task, _, what = name.rpartition(" ")
        failed.setdefault(task, []).append(what)
    results = [_result(entry, found.get(entry.task_sha256, []), own, failed.get(entry.task, ())) for entry in entries]
    return [replace(result, never_best=never_best) for result in results]


def _result(entry: BenchEntry, found: Sequence[Evaluation], own: Precision, failed: Sequence[str]) -> TaskResult:
    """Baselines' latencies relative to eager's, which is the median over all of the task's evaluations in the run's own
    precision."""
    judged = [one for one in found if one.policy != BASELINE_POLICY and one.candidate_sha256 == entry.candidate_sha256]
    latest = {Precision.of(one.checks): one for one in judged}
    main = [evaluation for evaluation in found if Precision.of(evaluation.checks) is own]
    eager_us = [evaluation.reference_us for evaluation in main if evaluation.reference_us is not None]
    latencies_us: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    if eager_us:
        latencies_us["eager"] = median(eager_us)
        for evaluation in main:
            if evaluation.policy == BASELINE_POLICY and evaluation.speedup:
                latencies_us[evaluation.techniques[0]] = latencies_us["eager"] / evaluation.speedup
                if evaluation.speedup_low and evaluation.speedup_high:
                    intervals[evaluation.techniques[0]] = (evaluation.speedup_low, evaluation.speedup_high)
    return TaskResult(
        entry.task,
        entry.level,
        latencies_us,
        latest.pop(own, None),
        latest.get(Precision.STRICT),
        latest.get(Precision.TF32_PRODUCTS),
        has_candidate=entry.candidate_sha256 is not None,
        failed=tuple(failed),
        intervals=intervals,
    )


def table_json(run: RunDirectory, results: Sequence[TaskResult]) -> dict[str, Any]:
    """Content of `table.json`."""
    rows = []
    for row in bench_table(results):
        rows.append({**asdict(row), "fast_p": {str(p): share for p, share in row.fast_p.items()}})
    return {
        "rows": rows,
        "tally": {TALLY_KEYS.get(name, name): count for name, count in asdict(tally(results)).items()},
        "baselines": [asdict(row) for row in baseline_table(results)],
        "tasks": task_status(run, results),
    }


def comparison_of(run: RunDirectory, winner: Evaluation) -> BaselineComparison | None:
    """How a search's winner stands against the baselines of its run; None where none but eager was measured."""
    entry = BenchEntry(winner.task, winner.task_sha256, None, winner.candidate_sha256)
    (line,) = task_status(run, task_results(run, [entry], {}))
    return comparison_of_line(line) if line["baselines"] else None


def comparison_of_line(line: Mapping[str, Any]) -> BaselineComparison | None:
    """From one task's line of `table.json`; None without a winner, or where baselines that were asked for are missing."""
    if line["vs_best_baseline_interval"] is None or not line["baselines_measured"]:
        return None
    low, high = line["vs_best_baseline_interval"]
    return BaselineComparison(
        baselines=line["baselines"],
        best=line["best_baseline"],
        speedup=line["vs_best_baseline"],
        low=low,
        high=high,
        is_ahead=line["ahead"],
    )


def task_status(run: RunDirectory, results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """One line for each task, for programs: `docs/record-format.md` describes the keys."""
    config = run.read_json("config.json") or {}
    own: defaultdict[str, list[Evaluation]] = defaultdict(list)
    measured = set()
    for one in run.evaluations():
        if one.policy == BASELINE_POLICY:
            measured.add(one.task)
        else:
            own[one.task].append(one)
    screened: defaultdict[str, list[Screened]] = defaultdict(list)
    for estimate in run.screened():
        screened[estimate.task].append(estimate)
    searched, cut_short = bool(config.get("policy")), set(run.read_json(CUT_SHORT) or ())
    asks_for_others = bool(set(config.get("baselines") or ()) - {REFERENCE})
    lines = []
    for result in results:
        if searched:
            looks = screened[result.task]
            is_cut_short = any(look.task_sha256 in cut_short for look in looks)
            records = TaskRecords.of([*looks, *own[result.task]])
            state = records.status(config.get("judge") or JUDGED, cut_short=is_cut_short)
        else:
            state = _judged(result)
        estimates = ranked(screened[result.task])
        has_baselines = result.task in measured or not asks_for_others
        lines.append(
            _line(result, *state)
            | {
                "screened": len(screened[result.task]),
                "judged": len(own[result.task]),
                "baselines_measured": has_baselines,
                "ahead": has_baselines and result.is_ahead(BEST) and state[0] is TaskStatus.WINNER,
                "estimate": estimates[0].estimate if estimates else None,
                "roofline": _shares(result, screened[result.task]),
            }
        )
    return lines


def _line(result: TaskResult, outcome: TaskStatus, reason: str) -> dict[str, Any]:
    found = result.evaluation if outcome is TaskStatus.WINNER else None
    best = result.best
    return {
        "task": result.task,
        "level": result.level,
        "outcome": outcome.value,
        "reason": reason,
        "speedup": found.speedup if found else None,
        "low": found.speedup_low if found else None,
        "high": found.speedup_high if found else None,
        "techniques": list(found.techniques) if found else [],
        "candidate_sha256": found.candidate_sha256 if found else None,
        "reference_us": result.baselines_us().get(REFERENCE),
        "baselines": {name: result.gain(name) for name in result.latencies_us if name != REFERENCE},
        "best_baseline": best,
        "best_baseline_speedup": result.gain(best),
        "best_baseline_interval": result.intervals.get(best),
        "vs_best_baseline": result.speedup(BEST) if found else None,
        "vs_best_baseline_interval": result.interval(BEST) if found else None,
    }


def _judged(result: TaskResult) -> tuple[TaskStatus, str]:
    """TaskStatus for a task whose candidate came with the suite or from the user."""
    found = result.evaluation
    if found is None:
        if CANDIDATE in result.failed:
            return TaskStatus.NONE, "the task or the machine failed"
        return (TaskStatus.UNTOUCHED, "not judged yet") if result.has_candidate else (TaskStatus.NONE, "no candidate")
    if not found.accepted:
        return TaskStatus.NONE, f"rejected: {found.reason}"
    return (TaskStatus.WINNER, "") if found.speedup is not None else (TaskStatus.NONE, "not timed")


def _shares(result: TaskResult, screened: Sequence[Screened]) -> dict[str, float | None] | None:
    """The roofline's two times, and the longer one's share of the reference's and the winner's; None if unknown.

    The times are those of moving inputs and outputs once, and of the operations, which older runs did not record.
    """
    known = [one.least_us for one in screened if one.least_us]
    if not known:
        return None
    least_us, found = median(known), result.evaluation
    counted = [one.operations_us for one in screened if one.operations_us is not None]
    operations_us = median(counted) if counted else None
    roofline_us = max(least_us, operations_us or 0.0)
    reference_us = result.baselines_us().get(REFERENCE)
    winner_us = found.paired_us if found is not None and found.accepted else None
    return {
        "least_us": least_us,
        "operations_us": operations_us,
        "reference": roofline_us / reference_us if reference_us else None,
        "winner": roofline_us / winner_us if winner_us else None,
    }
