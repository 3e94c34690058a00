"""Presents the evaluations and estimates of a run: which count, the best of each task, and where the time went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from kernelwright.records import Evaluation
from kernelwright.records.decisions import TaskStatus
from kernelwright.records.models import BASELINE_POLICY
from kernelwright.records.screened import Screened
from kernelwright.report import charts
from kernelwright.report.tables import with_interval

IMPROVEMENT, ACCEPTED, REJECTED = "improvement", "accepted", "rejected"
ROWS_MAX = 200
"""Estimates that the page lists, the best first. Chosen for legibility."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One evaluation on the page."""

    number: int
    """Place in the order of judging, from 1."""
    evaluation: Evaluation
    state: str
    """`improvement`, `accepted` or `rejected`."""
    superseded_by: int | None
    """Number of a later evaluation of the same source, which counts in its place."""
    parent: int | None
    """Number of the evaluation of the parent candidate, where it is in this run."""
    is_again: bool = False
    """True where an earlier evaluation of the same candidate is in this run."""

    @property
    def anchor(self) -> str:
        """Id in the page."""
        return f"e{self.number}"

    @property
    def name(self) -> str:
        """Techniques, or the policy where there are none."""
        return ", ".join(self.evaluation.techniques) or self.evaluation.policy

    @property
    def is_baseline(self) -> bool:
        """True for another way to run the reference, rather than a candidate."""
        return self.evaluation.policy == BASELINE_POLICY

    @property
    def column(self) -> str:
        """Column in a table of tasks: the baseline or the policy."""
        techniques = self.evaluation.techniques
        return techniques[0] if self.is_baseline and techniques else self.evaluation.policy

    @property
    def reason(self) -> str:
        """Reason of a rejection in words; empty when accepted."""
        return self.evaluation.reason.meaning if self.evaluation.reason else ""

    @property
    def labels(self) -> list[tuple[str, str]]:
        """Each label with its meaning."""
        return [(label.value, label.meaning) for label in self.evaluation.labels]

    @property
    def is_near_miss(self) -> bool:
        """True for a candidate that counts and whose interval is too wide to tell whether it is faster."""
        return self.evaluation.is_near_miss and self.superseded_by is None and not self.is_baseline

    @property
    def speedup(self) -> float | None:
        """The speedup where it can be drawn: finite and positive."""
        return drawable(self.evaluation.speedup)

    @property
    def low(self) -> float | None:
        """Lower end of its interval."""
        return drawable(self.evaluation.speedup_low)

    @property
    def high(self) -> float | None:
        """Upper end of its interval."""
        return drawable(self.evaluation.speedup_high)


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one task."""

    task: str
    rows: list[EvaluationRow]
    best: EvaluationRow | None


def rows_of(evaluations: Sequence[Evaluation]) -> list[EvaluationRow]:
    """Number the evaluations, and let the last one of several of the same candidate count."""
    numbered = list(enumerate(evaluations, start=1))
    # The policy is part of it: baselines of a bench may share the reference's source.
    last = {(e.task_sha256, e.candidate_sha256, e.policy): number for number, e in numbered}
    by_source = {(e.task_sha256, e.candidate_sha256): number for number, e in numbered}
    first = {(e.task_sha256, e.candidate_sha256, e.policy): number for number, e in reversed(numbered)}
    rows = []
    for number, evaluation in numbered:
        key = evaluation.task_sha256, evaluation.candidate_sha256, evaluation.policy
        final = last[key]
        state = REJECTED
        if evaluation.accepted:
            state = IMPROVEMENT if evaluation.is_improvement else ACCEPTED
        parent = by_source.get((evaluation.task_sha256, evaluation.parent or ""))
        later = None if final == number else final
        rows.append(EvaluationRow(number, evaluation, state, later, parent, is_again=first[key] < number))
    return rows


def best_of(rows: Sequence[EvaluationRow]) -> EvaluationRow | None:
    """The improvement with the highest lower bound among the evaluations that count.

    Where winners were measured again, only these can be the best; baselines only where there is nothing else.
    """
    pool = candidates(rows)
    if any(row.evaluation.confirms for row in pool):
        pool = [row for row in pool if row.evaluation.confirms]
    standing = [row for row in pool if row.state == IMPROVEMENT and row.superseded_by is None]
    return max(standing, key=lambda row: row.low or 0.0, default=None)


def candidates(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """The rows that are candidates; all of them in a run of baselines alone."""
    return [row for row in rows if not row.is_baseline] or list(rows)


def groups_of(rows: Sequence[EvaluationRow]) -> list[Group]:
    """The rows by task, in the order in which the tasks were first judged.

    A baseline is no task's best where the run has candidates, though this task may have none.
    """
    eligible = {row.number for row in candidates(rows)}
    by_task: dict[str, list[EvaluationRow]] = {}
    for row in rows:
        by_task.setdefault(row.evaluation.task, []).append(row)
    return [
        Group(task, members, best_of([row for row in members if row.number in eligible]))
        for task, members in by_task.items()
    ]


def matrix(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Task by policy, where several policies were judged on several tasks."""
    policies = list(dict.fromkeys(row.column for group in groups for row in group.rows))
    if len(groups) < 2 or len(policies) < 2:
        return None
    lines = []
    for group in groups:
        cells: dict[str, EvaluationRow] = {}
        for row in group.rows:
            if row.superseded_by is None:
                known = cells.get(row.column)
                if known is None or (row.low or 0.0) > (known.low or 0.0):
                    cells[row.column] = row
        lines.append((group.task, [cells.get(policy) for policy in policies]))
    return {"policies": policies, "lines": lines}


def drawable(value: float | None) -> float | None:
    """The value where a logarithmic axis has a place for it, None elsewhere."""
    return value if value is not None and math.isfinite(value) and value > 0 else None


def near_miss(evaluation: Evaluation) -> str:
    """Sentence on how far a near miss falls short and how to settle it; empty for anything else."""
    if not evaluation.is_near_miss:
        return ""
    wanted = 1.0 + (evaluation.noise_floor or 0.0)
    processes = evaluation.processes_to_settle
    settle = "more processes than can be asked for would be needed; quiet the machine"
    if processes is not None:
        settle = f"--processes {processes} is likely to settle it"
    return f"the lower end {evaluation.speedup_low:.3f} is not above {wanted:.3f}, 1 + the noise floor; {settle}"


@dataclass(frozen=True, slots=True)
class ScreenedRow:
    """One estimate on the page."""

    found: Screened
    judged: EvaluationRow | None
    """The judge's first verdict on the same candidate."""

    @property
    def name(self) -> str:
        """Techniques, or the policy where there are none."""
        return ", ".join(self.found.techniques) or self.found.policy

    @property
    def reason(self) -> str:
        """Reason for not being right, in words."""
        return self.found.reason.meaning if self.found.reason else ""


def screened_section(found: Sequence[Screened], rows: Sequence[EvaluationRow]) -> dict[str, Any] | None:
    """Values for the page's section on estimates; None where nothing was screened."""
    if not found:
        return None
    # Confirmations were chosen for their verdicts; the first one was not.
    first: dict[tuple[str, str], EvaluationRow] = {}
    for row in candidates(rows):
        first.setdefault((row.evaluation.task_sha256, row.evaluation.candidate_sha256), row)
    listed = [ScreenedRow(one, first.get((one.task_sha256, one.candidate_sha256))) for one in found]
    listed.sort(key=lambda row: -(row.found.estimate or 0.0))
    return {
        "count": len(listed),
        "right": sum(one.correct for one in found),
        "judged": sum(row.judged is not None for row in listed),
        "rows": listed[:ROWS_MAX],
        "left_out": max(0, len(listed) - ROWS_MAX),
        "scatter": _scatter(listed),
    }


def _scatter(rows: Sequence[ScreenedRow]) -> Markup | None:
    points = [
        charts.EstimatePoint(
            row.judged.anchor, row.judged.state, row.name, estimate, drawable(row.judged.evaluation.speedup)
        )
        for row in rows
        if row.judged is not None and (estimate := drawable(row.found.estimate)) is not None
    ]
    return charts.estimates_against_verdicts(points) if points else None


def time_spent(found: Sequence[Screened], rows: Sequence[EvaluationRow]) -> list[tuple[str, str, str]]:
    """Lines of a table: kind of work, phase, seconds of all processes; empty where no record tells."""
    spent_s: Counter[tuple[str, str]] = Counter()
    for one in found:
        spent_s.update({("screening", phase): seconds for phase, seconds in one.spent_s.items()})
    for row in rows:
        kind = "baselines" if row.is_baseline else "confirming" if row.evaluation.confirms and row.is_again else "judging"
        checks = row.evaluation.checks
        told = checks.get("spent_s")
        if row.is_baseline or not isinstance(told, dict):
            continue
        for phase, seconds in told.items():
            spent_s[kind, phase] += seconds
        waited_s = checks.get("waited_s", 0.0)
        spent_s[kind, "waiting for the device"] += waited_s
        spent_s[kind, "the judge itself"] += max(0.0, row.evaluation.elapsed_s - waited_s - sum(told.values()))
    order = sorted(spent_s.items(), key=lambda one: (one[0][0] != "screening", one[0][0], -one[1]))
    return [(kind, phase, f"{seconds:.1f}") for (kind, phase), seconds in order if seconds >= 0.05]


def roofline_scatter(lines: Sequence[Mapping[str, Any]], rows: Sequence[EvaluationRow]) -> Markup | None:
    """The decided tasks by their distance from the roofline, each linked with its winner; None where none is known.

    Args:
        lines: Tasks in `table.json` that have a `roofline`.
        rows: Evaluations of the page.
    """
    anchors = {
        (row.evaluation.task, row.evaluation.candidate_sha256): row.anchor
        for row in rows
        if row.superseded_by is None and not row.is_baseline
    }
    points = []
    for line in lines:
        won, share = line["outcome"] == TaskStatus.WINNER, drawable(line["roofline"]["reference"])
        speedup = drawable(line["speedup"]) if won else 1.0
        if share is None or speedup is None or line["outcome"] not in (TaskStatus.WINNER, TaskStatus.NONE):
            continue
        gain = with_interval(speedup, (line["low"], line["high"])) if won else f"no winner, {line['reason']}"
        anchor = anchors.get((line["task"], line["candidate_sha256"]), "")
        state = IMPROVEMENT if won else ACCEPTED
        points.append(charts.RooflinePoint(anchor, state, f"{line['task']}: {gain}", 1.0 / share, speedup))
    return charts.speedups_against_roofline(points) if points else None
