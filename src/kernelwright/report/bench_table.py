"""Computes the table of a bench run from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from kernelwright.records import Evaluation, RunDirectory
from kernelwright.records.decisions import BASELINE_POLICY, OVERWRITING, BaselineComparison
from kernelwright.records.models import Precision
from kernelwright.report.standing import beside_of, standings
from kernelwright.report.table import TaskResult, baseline_table, bench_table, tally

ENTRIES = "entries.json"
"""File with the lines of the table, without which it cannot be computed again."""


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


def beside_winner(run: RunDirectory, winner: Evaluation) -> BaselineComparison | None:
    """How a search's winner stands against the baselines of its run; None where none but eager was measured."""
    entry = BenchEntry(winner.task, winner.task_sha256, None, winner.candidate_sha256)
    (line,) = standings(run, task_results(run, [entry], {}))
    return beside_of(line) if line["baselines"] else None


def table_json(run: RunDirectory, results: Sequence[TaskResult]) -> dict[str, Any]:
    """Content of `table.json`."""
    rows = []
    for row in bench_table(results):
        rows.append({**asdict(row), "fast_p": {str(p): share for p, share in row.fast_p.items()}})
    return {
        "rows": rows,
        "tally": asdict(tally(results)),
        "baselines": [asdict(row) for row in baseline_table(results)],
        "tasks": standings(run, results),
    }


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
