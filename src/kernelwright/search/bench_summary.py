"""Summarises a bench run from its directory alone: the results of each task, the table and the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelwright.records import RunDirectory
from kernelwright.report.bench_table import ENTRIES, BenchEntry, table_json, task_results
from kernelwright.report.page import write_report
from kernelwright.report.standing import render_tasks
from kernelwright.report.table import TableRow, Tally, baseline_table, bench_table, render_markdown, tally
from kernelwright.tasks.entries import Suite


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Results of a bench run."""

    run: Path
    rows: list[TableRow]
    counts: Tally
    errors: dict[str, str]
    """Errors of the task or the machine, by task and baseline."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Where each task stands, as in `table.json`."""


def summarise(run: RunDirectory, suite: Suite, errors: dict[str, str]) -> BenchResult:
    """The table from what is on disk; also written to `table.json`, `table.md` and `report.html`."""
    entries = [
        BenchEntry(entry.task.id, entry.task.sha256, entry.level, entry.candidate.sha256 if entry.candidate else None)
        for entry in suite.entries
    ]
    run.write_json(ENTRIES, [asdict(entry) for entry in entries])
    results = task_results(run, entries, errors)
    rows, counts = bench_table(results), tally(results)
    table = table_json(run, results)
    run.write_json("table.json", table)
    searched = bool((run.read_json("config.json") or {}).get("policy"))
    statistics = render_markdown(rows, counts, baseline_table(results), searched=searched)
    run.write_text("table.md", f"{render_tasks(table['tasks'])}\n{statistics}")
    write_report(run, run.path / "report.html")
    return BenchResult(run.path, rows, counts, errors, table["tasks"])
