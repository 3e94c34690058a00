"""Processes that propose for a task and screen for it."""

from __future__ import annotations

import os

import pytest

from kernelwright.errors import DeviceError, TaskError
from kernelwright.judge import Settings
from kernelwright.pools.local import cores_of_each
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


def test_what_searches_for_a_device_stays_on_its_cores(monkeypatch):
    first, found = min(os.sched_getaffinity(0)), []

    def start(self, member):
        found.append((member.device, os.sched_getaffinity(0)))
        return _Connection([])

    monkeypatch.setattr(Searchers, "_start", start)
    cores = {"cuda:0": frozenset({first})}
    with Searchers(["cuda:0"], Settings.quick(), at_once=1, cores=cores) as searchers:
        assert list(searchers.screen([ScreenJob(TASK, 1)])) == [(ScreenJob(TASK, 1), None)]
    assert found == [("cuda:0", {first})]


@pytest.mark.parametrize(("cores", "shares"), [(8, ({0, 1, 2, 3}, {4, 5, 6, 7})), (7, None)])
def test_each_of_several_devices_has_an_equal_share_of_the_cores(monkeypatch, cores, shares):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    devices = ["cuda:0", "cuda:1"]
    assert cores_of_each(devices) == (dict(zip(devices, map(frozenset, shares), strict=True)) if shares else {})
    assert cores_of_each(devices[:1]) == {}


class _Connection:
    """A process whose estimates are nothing, and whose device is full at the first look at `large`."""

    def __init__(self, taken):
        self._taken = taken

    def send(self, job):
        self._job = job
        self._taken.append((job.task.id, job.budget, job.is_last_try))

    def recv(self):
        return DeviceError("full") if self._job.task.id == "large" and not self._job.is_last_try else None

    def close(self):
        pass


def test_a_job_may_wait_for_another_and_a_full_device_is_tried_again(monkeypatch):
    taken, ended = [], []
    monkeypatch.setattr(Searchers, "_start", lambda self, member: _Connection(taken))
    tasks = {name: Task(id=name, source=TASK.source) for name in ("first", "large", "second")}

    def jobs():
        yield ScreenJob(tasks["first"], 1)
        yield ScreenJob(tasks["large"], 1)
        while ("first", 1) not in ended or ("large", 1) not in ended:
            yield None
        yield ScreenJob(tasks["second"], 2)

    with Searchers(["cpu"], Settings.quick(), at_once=2) as searchers:
        assert searchers.at_once == 2
        for job, found in searchers.screen(jobs()):
            assert found is None
            ended.append((job.task.id, job.budget))
    assert sorted(ended) == [("first", 1), ("large", 1), ("second", 2)]
    assert taken[-1] == ("second", 2, False)
    assert sorted(taken[:-1]) == [("first", 1, False), ("large", 1, False), ("large", 1, True)]
