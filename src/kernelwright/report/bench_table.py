"""Computes the table of a bench run from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from kernelwright.records import Evaluation, RunDirectory
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.report.standing import Beside, beside_of, standings
from kernelwright.report.table import OVERWRITING, TaskResult, baseline_table, bench_table, tally

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
    run_is_strict = bool((run.read_json("config.json") or {}).get("settings", {}).get("strict_fp32"))
    failed: dict[str, list[str]] = {}
    for name in errors:
        task, _, what = name.rpartition(" ")
        failed.setdefault(task, []).append(what)
    results = [
        _result(entry, found.get(entry.task_sha256, []), run_is_strict, failed.get(entry.task, ())) for entry in entries
    ]
    return [replace(result, never_best=never_best) for result in results]


def beside_winner(run: RunDirectory, winner: Evaluation) -> Beside | None:
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


def is_strict(found: Evaluation) -> bool:
    """True for an evaluation with TF32 off on both sides."""
    return bool(found.checks.get("strict_fp32"))


def _result(entry: BenchEntry, found: Sequence[Evaluation], run_is_strict: bool, failed: Sequence[str]) -> TaskResult:
    """Baselines' latencies relative to eager's, which is the median over all of the task's evaluations."""
    judged = [one for one in found if one.policy != BASELINE_POLICY and one.candidate_sha256 == entry.candidate_sha256]
    main = [evaluation for evaluation in found if is_strict(evaluation) == run_is_strict]
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
        next((one for one in reversed(judged) if is_strict(one) == run_is_strict), None),
        next((one for one in reversed(judged) if is_strict(one) != run_is_strict), None),
        has_candidate=entry.candidate_sha256 is not None,
        failed=tuple(failed),
        intervals=intervals,
    )
