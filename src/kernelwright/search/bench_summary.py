"""Summarises a bench run from its directory alone: the results of each task, the table and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kernelwright.records import Evaluation, RunDirectory
from kernelwright.report.page import write_report
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.report.table import TableRow, Tally, TaskResult, baseline_table, bench_table, render_markdown, tally
from kernelwright.tasks.entries import Suite, SuiteEntry


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What a bench run found."""

    run: Path
    rows: list[TableRow]
    counts: Tally
    errors: dict[str, str]
    """Per task and baseline, what kept it from being measured: the task's fault or the machine's."""


def summarise(run: RunDirectory, suite: Suite, errors: dict[str, str]) -> BenchResult:
    """The table from what is on disk; also written to `table.json`, `table.md` and `report.html`."""
    found: dict[str, list[Evaluation]] = {}
    for evaluation in run.evaluations():
        found.setdefault(evaluation.task_sha256, []).append(evaluation)
    run_is_strict = bool((run.read_json("config.json") or {}).get("settings", {}).get("strict_fp32"))
    failed: dict[str, list[str]] = {}
    for name in errors:
        task, _, what = name.rpartition(" ")
        failed.setdefault(task, []).append(what)
    results = [
        _result(entry, found.get(entry.task.sha256, []), run_is_strict, failed.get(entry.task.id, ()))
        for entry in suite.entries
    ]
    rows, counts, own = bench_table(results), tally(results), baseline_table(results)
    table = {
        "rows": [_row_json(row) for row in rows],
        "tally": asdict(counts),
        "baselines": [asdict(row) for row in own],
    }
    run.write_json("table.json", table)
    run.write_text("table.md", render_markdown(rows, counts, own))
    write_report(run, run.path / "report.html")
    return BenchResult(run.path, rows, counts, errors)


def is_strict(found: Evaluation) -> bool:
    """Whether an evaluation was made with TF32 off on both sides."""
    return bool(found.checks.get("strict_fp32"))


def _row_json(row: TableRow) -> dict[str, Any]:
    values = asdict(row)
    values["fast_p"] = {str(p): share for p, share in row.fast_p.items()}
    return values


def _result(entry: SuiteEntry, found: Sequence[Evaluation], run_is_strict: bool, failed: Sequence[str]) -> TaskResult:
    """Baselines' latencies relative to eager's, which is the median over all of the task's evaluations.

    Two entries may have one task and different candidates.
    """
    mine = entry.candidate.sha256 if entry.candidate else None
    judged = [one for one in found if one.policy != BASELINE_POLICY and one.candidate_sha256 == mine]
    main = [evaluation for evaluation in found if is_strict(evaluation) == run_is_strict]
    eager_us = [evaluation.reference_us for evaluation in main if evaluation.reference_us is not None]
    latencies_us: dict[str, float] = {}
    if eager_us:
        latencies_us["eager"] = median(eager_us)
        for evaluation in main:
            if evaluation.policy == BASELINE_POLICY and evaluation.speedup:
                latencies_us[evaluation.techniques[0]] = latencies_us["eager"] / evaluation.speedup
    return TaskResult(
        entry.task.id,
        entry.level,
        latencies_us,
        next((one for one in reversed(judged) if is_strict(one) == run_is_strict), None),
        next((one for one in reversed(judged) if is_strict(one) != run_is_strict), None),
        has_candidate=entry.candidate is not None,
        failed=tuple(failed),
    )
