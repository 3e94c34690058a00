"""Processes that propose for a task and screen for it."""

from __future__ import annotations

import pytest

from kernelwright.errors import TaskError
from kernelwright.judge import Settings
from kernelwright.records import Task
from kernelwright.records.screened import Screened
from kernelwright.search.searchers import ScreenJob, Searchers
from tests.pools.test_screening import TASK


@pytest.mark.exhaustive
def test_estimates_come_one_by_one_then_the_end_of_each_task_or_its_error():
    broken = Task(id="broken", source=TASK.source.replace("torch.diag(a) @ b", "torch.relu(a @ nothing)"))
    settings = Settings.quick(threads=1)
    with Searchers(["cpu"], settings) as searchers:
        found = list(searchers.screen([ScreenJob(TASK, 1), ScreenJob(broken, 1)]))
        estimates = [one for _, one in found if isinstance(one, Screened)]
        assert [(one.task, one.techniques, one.correct) for one in estimates] == [("diagonal", ("diagonal-operand",), True)]
        assert [type(one) for _, one in found] == [Screened, type(None), TaskError]
        assert list(searchers.screen([], lambda: False)) == []
        spent = ScreenJob(TASK, 1, tuple(estimates))
        assert list(searchers.screen([spent])) == [(spent, None)]
