"""Summarises a bench run from its directory alone: the results of each task, the table and the report; and hands out the
winners of a search, as candidates of that table and as drop-ins."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kernelwright.deploy.drop_in import drop_in
from kernelwright.records import Candidate, Evaluation, RunDirectory
from kernelwright.records.tables import (
    ENTRIES,
    BenchEntry,
    TableRow,
    Tally,
    baseline_table,
    bench_table,
    comparison_of_line,
    table_json,
    tally,
    task_results,
)
from kernelwright.report.page import write_report
from kernelwright.report.tables import render_markdown, render_tasks
from kernelwright.tasks.entries import Suite

DROP_INS = "optimized"
"""Folder of a run directory with the drop-ins that are handed out."""


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


def with_winners(suite: Suite, winners: Mapping[str, Evaluation]) -> Suite:
    """The suite with the winner of each task as its candidate, by the task's id; the others have none."""
    entries = []
    for entry in suite.entries:
        best = winners.get(entry.task.id)
        won = Candidate(source=best.source, policy=best.policy, techniques=best.techniques) if best else None
        entries.append(replace(entry, candidate=won))
    return replace(suite, entries=tuple(entries))


def hand_out(run: RunDirectory, suite: Suite, winners: Mapping[str, Evaluation], lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a drop-in for each task whose winner is certainly ahead of the best baseline that was measured.

    Args:
        run: Where to.
        suite: Tasks.
        winners: Confirmed winners by the task's id.
        lines: Where each task stands, as in `table.json`.
    """
    shutil.rmtree(run.path / DROP_INS, ignore_errors=True)  # what another look has found to be no faster
    tasks = {entry.task.id: entry.task for entry in suite.entries}
    for line in lines:
        best, beside = winners.get(line["task"]), comparison_of_line(line)
        if best is not None and beside is not None and beside.is_ahead:
            (run.path / DROP_INS).mkdir(exist_ok=True)
            name = re.sub(r"\W+", "_", line["task"])
            text = drop_in(tasks[line["task"]], best, run, module=name, beside=str(beside))
            run.write_text(f"{DROP_INS}/{name}.py", text)
