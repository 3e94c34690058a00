"""Presents what was screened apart from what was judged: estimates, how they compare with verdicts, and where time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from kernelwright.records.screened import Screened
from kernelwright.report import charts
from kernelwright.report.rows import EvaluationRow, candidates, drawable

ROWS_MAX = 200
"""Estimates that the page lists, the best first. Chosen for legibility."""


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
