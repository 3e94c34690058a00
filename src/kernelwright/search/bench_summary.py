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
    bench_table,
    comparison_of_line,
    table_json,
    tally,
    task_results,
)
from kernelwright.report.page import write_bench_report
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
    """Status of each task, as in `table.json`."""


def summarise(run: RunDirectory, suite: Suite, errors: dict[str, str]) -> BenchResult:
    """The table from what is on disk; also written to `table.json`, `table.md` and `report.html`."""
    entries = [
        BenchEntry(entry.task.id, entry.task.sha256, entry.level, entry.candidate.sha256 if entry.candidate else None)
        for entry in suite.entries
    ]
    run.write_json(ENTRIES, [asdict(entry) for entry in entries])
    results = task_results(run, entries, errors)
    table = table_json(run, results)
    run.write_json("table.json", table)
    write_bench_report(run, results, table["tasks"])
    return BenchResult(run.path, bench_table(results), tally(results), errors, table["tasks"])


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
        run: The run directory.
        suite: Tasks.
        winners: Confirmed winners by the task's id.
        lines: Status of each task, as in `table.json`.
    """
    shutil.rmtree(run.path / DROP_INS, ignore_errors=True)  # another look may have found some to be no faster
    tasks = {entry.task.id: entry.task for entry in suite.entries}
    for line in lines:
        best, comparison = winners.get(line["task"]), comparison_of_line(line)
        if best is not None and comparison is not None and comparison.is_ahead:
            (run.path / DROP_INS).mkdir(exist_ok=True)
            name = re.sub(r"\W+", "_", line["task"])
            text = drop_in(tasks[line["task"]], best, run, module=name, comparison=str(comparison))
            run.write_text(f"{DROP_INS}/{name}.py", text)
