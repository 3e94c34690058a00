"""Processes that propose for a task and screen for it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from kernelwright.errors import DeviceError, TaskError
from kernelwright.judge import Settings
from kernelwright.pools.local import cores_of_each
from kernelwright.records import Candidate, Reason, Task
from kernelwright.records.screened import Screened, screened_of
from kernelwright.search import searchers
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
    """A process whose estimates are nothing, and whose device is too full for what is large beside others."""

    def __init__(self, taken):
        self._taken = taken

    def send(self, job):
        self._job = job
        self._taken.append((job.task.id, job.budget, job.alone))

    def recv(self):
        return DeviceError("full") if self._job.task.id.startswith("large") and not self._job.alone else None

    def close(self):
        pass


def test_a_job_may_wait_for_another_and_a_full_device_is_tried_again(monkeypatch):
    taken, ended = [], []
    monkeypatch.setattr(Searchers, "_start", lambda self, member: _Connection(taken))
    tasks = {name: Task(id=name, source=f"{TASK.source}\n# {name}") for name in ("first", "large", "second")}

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


def test_large_tasks_have_the_memory_alone_one_after_another_in_later_rounds_too(monkeypatch):
    taken, at_work, beside = [], [], []

    class Watched(_Connection):
        def send(self, job):
            beside.append([*at_work] if job.alone else [other for other in at_work if other.alone])
            at_work.append(job)
            super().send(job)

        def recv(self):
            for _ in range(1000 * self._job.alone):
                os.sched_yield()  # others could begin meanwhile
            answer = super().recv()
            at_work.remove(self._job)
            return answer

    monkeypatch.setattr(Searchers, "_start", lambda self, member: Watched(taken))
    tasks = [Task(id=name, source=f"{TASK.source}\n# {name}") for name in ("large-1", "small", "large-2", "large-3")]
    ended = []

    def jobs():
        for budget in (8, 16):
            yield from (ScreenJob(task, budget) for task in tasks)
            while len(ended) < len(tasks):
                yield None
            ended.clear()

    with Searchers(["cpu"], Settings.quick(), at_once=4) as searchers:
        for job, found in searchers.screen(jobs()):
            assert found is None
            ended.append(job)
    assert not any(beside)
    assert sorted(one for one in taken if not one[2]) == [
        ("large-1", 8, False),
        ("large-2", 8, False),
        ("large-3", 8, False),
        ("small", 8, False),
        ("small", 16, False),
    ], "what did not fit once is not tried beside others again"
    assert sorted(one for one in taken if one[2]) == sorted((f"large-{n}", b, True) for n in (1, 2, 3) for b in (8, 16))


def test_what_runs_out_of_memory_beside_others_is_no_estimate_until_it_had_the_memory_alone(monkeypatch):
    full = screened_of(TASK, Candidate(source="full", policy="test"), correct=False, reason=Reason.OUT_OF_MEMORY)
    said = []

    class Pool:
        slots = 1

        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def takes(self, kind):
            return True

        def screen(self, candidates):
            yield next(iter(candidates)), full

    jobs = [ScreenJob(TASK, 1), ScreenJob(TASK, 1, alone=True)]

    class Pipe:
        def recv(self):
            if not jobs:
                raise EOFError
            return jobs.pop(0)

        def send(self, answer):
            said.append(answer)

    monkeypatch.setattr(searchers, "ScreeningPool", Pool)
    monkeypatch.setattr(
        searchers, "Zygote", lambda **_: SimpleNamespace(import_compiler=lambda kind: None, close=lambda: None)
    )
    monkeypatch.setattr(searchers.sandbox, "die_with_parent", lambda: None)
    monkeypatch.setattr(searchers.os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(searchers.signal, "signal", lambda number, handler: None)
    searchers._run(Pipe(), "cpu", Settings.quick().model_dump_json(), "builtin")
    assert [type(one) for one in said] == [DeviceError, Screened, type(None)]
    assert said[1].reason is Reason.OUT_OF_MEMORY
