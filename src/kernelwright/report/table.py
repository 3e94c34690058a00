"""Computes the table of CUDA-L1 (arXiv 2507.14111) from the results of a bench run, and more statistics.

Per level and over all, against each baseline: mean, largest and 75/50/25 % speedup, successes and the number
above 1.01x. Beside them the geometric mean and fast_p (KernelBench, arXiv 2502.10517), and one more baseline:
the fastest of each task. Every statistic comes in two variants, because published tables mix them: over the
solved tasks alone, and over all tasks with an unsolved one counted as 1.0x, as its user keeps the baseline.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernelwright.errors import UsageError
from kernelwright.records import Contract, Evaluation, Label, Reason, Verdict
from kernelwright.records.decisions import OVERWRITING, STOCK

REFERENCE = "eager"
"""The baseline that `Evaluation.speedup` is measured against."""

BEST = "best"
"""Fastest baseline of each task that keeps the contract of a drop-in, the reference included."""

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
        found = self.evaluation
        if found is None or found.policy != "builtin" or len(found.techniques) != 1:
            return None
        name = STOCK.get(found.techniques[0])
        return name if name in self.latencies_us else None

    def runs(self, baseline: str) -> bool:
        """True when the task can be compared with a baseline."""
        return baseline in (REFERENCE, BEST) or baseline in self.latencies_us

    def _named(self, baseline: str) -> str:
        """The baseline itself in place of `BEST`."""
        return self.best if baseline == BEST else baseline

    def gain(self, baseline: str) -> float | None:
        """A baseline's speedup over the reference; None without it."""
        found, name = self.baselines_us(), self._named(baseline)
        if name == REFERENCE:
            return 1.0
        return found[REFERENCE] / found[name] if REFERENCE in found and name in found else None

    def _paired(self, baseline: str) -> tuple[float, float, float] | None:
        """Speedup against a baseline and its interval, from the candidate's own process triples; None where it was not timed
        there."""
        found = self.evaluation
        if found is None or found.rival is None or found.rival != self._named(baseline):
            return None
        if found.vs_rival is None or found.vs_rival_low is None or found.vs_rival_high is None:
            return None
        return found.vs_rival, found.vs_rival_low, found.vs_rival_high

    def speedup(self, baseline: str = REFERENCE) -> float | None:
        """The candidate's speedup against a baseline; None when unsolved, untimed or without that baseline.

        Where the baseline was timed in the candidate's own process triples, as its rival, it is that paired ratio. Elsewhere
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


_SECONDS = {"strict": "TF32 off", "tf32_products": "TF32 products"}
"""Columns of second judgements in another precision, by their fields of a row."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of candidates, without regard to speed."""

    tasks: int
    without_candidate: int
    failed: int
    """Tasks whose candidate could not be judged, by a fault of the task or of the machine."""
    owed: int
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


def bench_table(results: Sequence[TaskResult], baselines: Sequence[str] | None = None) -> list[TableRow]:
    """The rows of the table: level by level and then all, each against every baseline and then the best.

    By default the baselines are the reference and every other one, as met.

    Raises:
        UsageError: two results are of the same task, or a baseline ran on no task.
    """
    repeated = [task for task, count in Counter(result.task for result in results).items() if count > 1]
    if repeated:
        raise UsageError(f"Wanted one result for each task; found several for {', '.join(repeated)}.")
    met = list(dict.fromkeys([REFERENCE, *(name for result in results for name in result.latencies_us)]))
    if baselines is None:
        baselines = met
    unknown = [name for name in baselines if name not in met]
    if unknown:
        raise UsageError(f"Wanted the baselines {', '.join(unknown)}; the results have {', '.join(met)}.")
    levels = sorted({result.level for result in results if result.level is not None})
    rows = []
    for level in (*levels, None):
        chosen = [result for result in results if level is None or result.level == level]
        rows += [_row(chosen, level, baseline) for baseline in (*baselines, BEST)]
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
        owed=len(unjudged) - without_candidate - failed,
        baselines_failed=sum(bool({*result.failed} - {CANDIDATE}) for result in results),
        accepted=len(accepted),
        built=sum(evaluation.reason not in NOT_BUILT for evaluation in evaluations),
        clean=sum(not UNCLEAN & set(evaluation.labels) for evaluation in accepted),
        improved=sum(evaluation.is_improvement for evaluation in accepted),
        rejected=dict(reasons.most_common()),
        labels=dict(labels.most_common()),
    )


def render_markdown(
    rows: Sequence[TableRow],
    counts: Tally | None = None,
    baselines: Sequence[BaselineRow] = (),
    *,
    searched: bool = False,
) -> str:
    """The tables as Markdown, that of the candidates once for each variant, terms explained; the tally first.

    In a run that searched, a task's candidate is its confirmed winner.
    """
    parts = [] if counts is None else [_render_tally(counts, "confirmed winner" if searched else "candidate")]
    if counts is None or counts.without_candidate < counts.tasks:
        parts += [
            "Speedups of the solved tasks; unsolved ones are left out:",
            _render_rows(rows, filled=False),
            f"Speedups of all tasks; unsolved ones count as {_times(UNSOLVED_SPEEDUP)}:",
            _render_rows(rows, filled=True),
            f"`{BEST}` is the fastest baseline of each task whose outputs the next call leaves alone. fast_p is the share "
            "of all tasks that are solved and more than p times as fast. Ahead counts tasks whose candidate is certainly "
            "faster: an improvement whose interval over the baseline lies above 1. Where a baseline was timed in the same "
            "processes as the candidate, that interval is of paired calls; elsewhere it is as wide as the candidate's and "
            "the baseline's together. Counts and fast_p are the same in both tables. Columns with a contract's name count "
            "the candidates that keep it; success is by the contract that decides.",
        ]
    if baselines:
        parts += [f"The baselines themselves against {REFERENCE}, where they run:", _render_baselines(baselines)]
    return "\n\n".join(parts) + "\n"


def _render_baselines(rows: Sequence[BaselineRow]) -> str:
    heads = ["Baseline", "Tasks", "Mean", "Max", "75 %", "50 %", "25 %", "Geomean"]
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    lines += [_line([row.baseline, str(row.ran), *map(_times, _numbers(row.speedups))]) for row in rows]
    return "\n".join(lines)


def _numbers(of: Statistics) -> tuple[float | None, ...]:
    return (of.mean, of.largest, of.p75, of.p50, of.p25, of.geomean)


def _render_rows(rows: Sequence[TableRow], *, filled: bool) -> str:
    heads = ["Level", "Baseline", "Mean", "Max", "75 %", "50 %", "25 %", "Geomean"]
    heads += [f"fast_{p:g}" for p in FAST_P]
    heads += ["Success", f">{ABOVE:g}x", "Ahead"]
    has_contracts = any(row.contracts is not None for row in rows)
    if has_contracts:
        heads += [contract.value for contract in Contract]
    seconds = [name for name in _SECONDS if not filled and any(getattr(row, name) is not None for row in rows)]
    for name in seconds:
        heads += [f"Geomean, {_SECONDS[name]}", f"Success, {_SECONDS[name]}"]
    lines = [_line(heads), _line(["---", "---", *["---:"] * (len(heads) - 2)])]
    for row in rows:
        numbers = _numbers(row.filled if filled else row.solved)
        cells = ["all" if row.level is None else str(row.level), row.baseline, *map(_times, numbers)]
        cells += [f"{100.0 * share:.1f} %" for share in row.fast_p.values()]
        cells += [f"{row.success}/{row.tasks}", f"{row.above}/{row.tasks}", f"{row.ahead}/{row.tasks}"]
        if has_contracts:
            cells += ["-" if row.contracts is None else f"{row.contracts[contract]}/{row.tasks}" for contract in Contract]
        for found in (getattr(row, name) for name in seconds):
            cells += ["-", "-"] if found is None else [_times(found.geomean), f"{found.count}/{row.tasks}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _render_tally(counts: Tally, candidate: str) -> str:
    tasks = f"{counts.tasks} task{'s' * (counts.tasks != 1)}, {counts.without_candidate} without a {candidate}"
    if counts.failed:
        tasks += f", {counts.failed} failed (a fault of the task or of the machine, not of the candidate)"
    if counts.owed:
        tasks += f", {counts.owed} not judged yet"
    if counts.without_candidate == counts.tasks:
        return f"{tasks}."
    judged = f"{candidate}s judged" if counts.failed or counts.owed else f"{candidate}s"
    lines = [
        f"{tasks}. Of the {judged} {counts.built} build, "
        f"{counts.accepted} are accepted and {sum(counts.rejected.values())} rejected; {counts.clean} of the accepted are "
        f"clean drop-ins. {counts.improved} are improvements: the lower end of their interval clears the noise floor."
    ]
    if counts.baselines_failed:
        lines.append(f"Of {counts.baselines_failed} tasks a baseline failed by a fault of the task or of the machine.")
    if counts.rejected:
        lines.append("Rejected for " + _counted(counts.rejected) + ".")
    if counts.labels:
        lines.append("Labels of the accepted: " + _counted(counts.labels) + ".")
    return "\n\n".join(lines)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _times(speedup: float | None) -> str:
    """Three figures, as CUDA-L1 prints them."""
    if speedup is None:
        return "-"
    decimals = 3 if speedup < 1.0 else 2 if speedup < 10.0 else 1 if speedup < 100.0 else 0
    return f"{speedup:.{decimals}f}x"
