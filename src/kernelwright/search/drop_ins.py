"""Hands out the winners of a suite: as candidates of its table, and as drop-ins."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernelwright.deploy.drop_in import drop_in
from kernelwright.records import Candidate, Evaluation, RunDirectory
from kernelwright.report.standing import beside_of
from kernelwright.tasks.entries import Suite

DROP_INS = "optimized"
"""Folder of a run directory with the drop-ins that are handed out."""


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
        best, beside = winners.get(line["task"]), beside_of(line)
        if best is not None and beside is not None and beside.is_ahead:
            (run.path / DROP_INS).mkdir(exist_ok=True)
            name = re.sub(r"\W+", "_", line["task"])
            text = drop_in(tasks[line["task"]], best, run, module=name, beside=str(beside))
            run.write_text(f"{DROP_INS}/{name}.py", text)
