"""Processes that propose for a task and screen for it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kernelwright.cores import cores_of_each
from kernelwright.errors import DeviceError, InfrastructureError, TaskError
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Reason, Task
from kernelwright.records.screened import Screened, screened_of
from kernelwright.search import searchers as searching
from kernelwright.search.searchers import FEW_AT_ONCE, Others, ScreenJob, Searchers
from tests.execution.test_screening import TASK


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


def test_judges_give_back_what_they_hold_before_a_task_is_alone_and_not_before(monkeypatch):
    told, taken = [], []
    monkeypatch.setattr(Searchers, "_start", lambda self, member: _Connection(taken))
    judges = SimpleNamespace(rest=lambda device: told.append((device, len(taken))), is_idle=lambda device: True)
    with Searchers(["cuda:0"], Settings.quick(), at_once=1, judges=judges) as searchers:
        assert [found for _, found in searchers.screen([ScreenJob(task, 1) for task in _named("medium", "large")])] == [
            None
        ] * 2
    assert [others for _, _, others in taken] == [Others.MANY, Others.MANY, Others.FEW, Others.FEW, Others.NONE]
    assert told == [("cuda:0", 4)]


def test_a_task_that_has_to_be_alone_waits_until_the_judges_are_idle(monkeypatch):
    """Those that fit beside others do not."""
    taken, asked, wants = [], [], []
    monkeypatch.setattr(Searchers, "_start", lambda self, member: _Connection(taken))
    monkeypatch.setattr(searching, "_ASK_AGAIN_S", 0.01)

    def is_idle(device):
        asked.append((device, len(taken)))
        wants.append(searchers.want_a_device)
        return len(asked) > 3

    judges = SimpleNamespace(rest=lambda device: None, is_idle=is_idle)
    with Searchers(["cuda:0"], Settings.quick(), at_once=1, judges=judges) as searchers:
        assert len(list(searchers.screen([ScreenJob(task, 1) for task in _named("large", "medium")]))) == 2
    assert [others for _, _, others in taken] == [Others.MANY, Others.MANY, Others.FEW, Others.FEW, Others.NONE]
    assert asked == [("cuda:0", 4)] * 4, "only what has to be alone asks, and waits for the answer"
    assert wants == [True] * 4
    assert not searchers.want_a_device


@pytest.mark.parametrize(("cores", "shares"), [(8, ({0, 1, 2, 3}, {4, 5, 6, 7})), (7, None)])
def test_each_of_several_devices_has_an_equal_share_of_the_cores(monkeypatch, cores, shares):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    devices = ["cuda:0", "cuda:1"]
    assert cores_of_each(devices) == (dict(zip(devices, map(frozenset, shares), strict=True)) if shares else {})
    assert cores_of_each(devices[:1]) == {}


FITS = {"medium": Others.FEW, "large": Others.NONE, "huge": None}
"""Most others beside which the tasks of a name have enough memory; those of no other name always have."""


class _Connection:
    """A process without estimates, whose device is too full for what is large. It refuses to try the same thing twice."""

    def __init__(self, taken):
        self._taken = taken

    def send(self, job):
        self._job, one = job, (job.task.id, job.budget, job.others)
        self._is_repeated = one in self._taken
        self._taken.append(one)

    def recv(self):
        if self._is_repeated:
            return TaskError(f"{self._job.task.id} was tried before")
        return None if _fits(self._job) else DeviceError("full")

    def close(self):
        pass


def _fits(job: ScreenJob) -> bool:
    most = FITS.get(job.task.id.split("-")[0], Others.MANY)
    return most is not None and job.others <= most


def _named(*names: str) -> list[Task]:
    return [Task(id=name, source=f"{TASK.source}\n# {name}") for name in names]


class _Crowds(threading.Condition):
    """Lets tasks end one at a time, each when no searcher can begin another, and notes which were at work together.

    It takes the place of the searchers' own condition, so that it knows how many of them wait.
    """

    def __init__(self, monkeypatch, searchers):
        super().__init__()
        monkeypatch.setattr(Searchers, "_start", lambda *_: self._connection())
        monkeypatch.setattr(searchers, "_changed", self)
        self._searchers, self._idle, self._changes = searchers, 0, threading.Condition()
        self.taken, self.at_work, self.seen = [], [], []

    def wait(self, timeout=None):
        with self._changes:
            self._idle += 1
            self._changes.notify_all()
        if not super().wait(60):  # not told though others were done: a search that is stuck ends, so that its test fails
            self._searchers._closing.set()
            self.notify_all()

    def notify_all(self):
        with self._changes:
            self._idle = 0
            self._changes.notify_all()
        super().notify_all()

    def _may_end(self, job):
        if self._searchers._closing.is_set():
            return True
        is_settled = len(self.at_work) + self._idle == self._searchers.at_once
        return is_settled and job is min(self.at_work, key=_fits)  # what runs out of memory does so soon

    def _connection(self):
        crowds = self

        class Held(_Connection):
            def send(self, job):
                super().send(job)
                with crowds._changes:
                    crowds.at_work.append(job)
                    crowds._changes.notify_all()

            def recv(self):
                with crowds._changes:
                    assert crowds._changes.wait_for(lambda: crowds._may_end(self._job), timeout=60)
                    crowds.seen.append(sorted(one.others for one in crowds.at_work))
                    crowds.at_work.remove(self._job)
                    crowds._changes.notify_all()
                    return super().recv()

        return Held(self.taken)

    def screen(self, *rounds: list[ScreenJob] | Callable[[], list[ScreenJob] | None]) -> None:
        """Screen each round once those before it have ended; None from a callable says that it is too early."""
        begun, ended = [], []

        def jobs():
            for one in rounds:
                while (made := one() if callable(one) else one) is None:
                    yield None
                begun.extend(made)
                yield from made
                while not callable(one) and len(ended) < len(begun):
                    yield None
            while len(ended) < len(begun):
                yield None

        for job, found in self._searchers.screen(jobs()):
            assert found is None
            ended.append(job)
        assert sorted((job.task.id, job.budget) for job in ended) == sorted((job.task.id, job.budget) for job in begun)


def test_a_job_may_wait_for_another_and_a_full_device_is_tried_again(monkeypatch):
    taken, ended = [], []
    monkeypatch.setattr(Searchers, "_start", lambda self, member: _Connection(taken))
    first, large, second = _named("first", "large", "second")

    def jobs():
        yield ScreenJob(first, 1)
        yield ScreenJob(large, 1)
        while ("first", 1) not in ended or ("large", 1) not in ended:
            yield None
        yield ScreenJob(second, 2)

    with Searchers(["cpu"], Settings.quick(), at_once=2) as searchers:
        assert searchers.at_once == 2
        for job, found in searchers.screen(jobs()):
            assert found is None
            ended.append((job.task.id, job.budget))
    assert sorted(ended) == [("first", 1), ("large", 1), ("second", 2)]
    assert taken[-1] == ("second", 2, Others.MANY)
    assert sorted(taken[:-1]) == [("first", 1, Others.MANY), *(("large", 1, others) for others in sorted(Others))]


def test_large_tasks_have_the_memory_alone_one_after_another_in_later_rounds_too(monkeypatch):
    tasks = _named("large-1", "small", "large-2", "large-3")
    with Searchers(["cpu"], Settings.quick(), at_once=4) as searchers:
        crowds = _Crowds(monkeypatch, searchers)
        crowds.screen(*([ScreenJob(task, budget) for task in tasks] for budget in (8, 16)))
    assert all(len(crowd) == 1 for crowd in crowds.seen if Others.NONE in crowd)
    larges = [task.id for task in tasks if task.id != "small"]
    for others, taken in {
        Others.MANY: [*((task.id, 8) for task in tasks), ("small", 16)],
        Others.FEW: [(name, 8) for name in larges],
        Others.NONE: [(name, budget) for name in larges for budget in (8, 16)],
    }.items():
        found = sorted(one[:2] for one in crowds.taken if one[2] is others)
        assert found == sorted(taken), "what did not fit once is not tried beside as many again"


def test_tasks_that_fit_beside_few_are_never_alone_and_few_are_at_work_meanwhile(monkeypatch):
    mediums = _named(*(f"medium-{n}" for n in range(FEW_AT_ONCE + 2)))
    with Searchers(["cpu"], Settings.quick(), at_once=FEW_AT_ONCE + 4) as searchers:
        crowds = _Crowds(monkeypatch, searchers)
        crowds.screen(*([ScreenJob(task, budget) for task in mediums] for budget in (8, 16)))
    assert {one[2] for one in crowds.taken} == {Others.MANY, Others.FEW}
    assert {one for one in crowds.taken if one[2] is Others.MANY} == {(task.id, 8, Others.MANY) for task in mediums}
    assert max(len(crowd) for crowd in crowds.seen if Others.FEW in crowd) == FEW_AT_ONCE
    assert crowds.seen.count([Others.FEW] * FEW_AT_ONCE) == 6, "as many at once as may be, in both rounds"


def test_what_needs_few_others_waits_until_few_are_at_work(monkeypatch):
    medium, *smalls = _named("medium", *(f"small-{n}" for n in range(FEW_AT_ONCE + 2)))
    with Searchers(["cpu"], Settings.quick(), at_once=len(smalls) + 1) as searchers:
        crowds = _Crowds(monkeypatch, searchers)
        crowds.screen([ScreenJob(task, 8) for task in (*smalls, medium)])
    few = [crowd for crowd in crowds.seen if Others.FEW in crowd]
    assert few[0] == [Others.FEW, *[Others.MANY] * (FEW_AT_ONCE - 1)]
    assert [Others.MANY] * len(smalls) in crowds.seen, "the medium one had run out and waited"


def test_others_that_come_while_few_may_be_at_work_wait_too(monkeypatch):
    mediums, smalls = _named("medium-1", "medium-2"), _named(*(f"small-{n}" for n in range(FEW_AT_ONCE + 2)))
    with Searchers(["cpu"], Settings.quick(), at_once=len(smalls) + 2) as searchers:
        crowds = _Crowds(monkeypatch, searchers)

        def later():
            has_begun = any(others is not Others.MANY for *_, others in crowds.taken)
            return [ScreenJob(task, 8) for task in smalls] if has_begun else None

        crowds.screen(lambda: [ScreenJob(task, 8) for task in mediums], later)
    mixed = [crowd for crowd in crowds.seen if Others.FEW in crowd and Others.MANY in crowd]
    assert max(map(len, mixed)) == FEW_AT_ONCE
    assert [Others.MANY] * len(smalls) in crowds.seen, "all that were left begin at once after it"


def test_tasks_that_fit_beside_few_go_before_those_that_want_to_be_alone(monkeypatch):
    tasks = _named("large", "medium-1", "medium-2")
    with Searchers(["cpu"], Settings.quick(), at_once=3) as searchers:
        crowds = _Crowds(monkeypatch, searchers)
        crowds.screen(*([ScreenJob(task, budget) for task in tasks] for budget in (8, 16)))
    assert crowds.taken[-1] == ("large", 16, Others.NONE)
    assert all(len(crowd) == 1 for crowd in crowds.seen if Others.NONE in crowd)


class _Dying(_Connection):
    """A process that makes one estimate for a job, and then dies until the job has three."""

    def __init__(self, estimates, taken):
        super().__init__(taken)
        self._estimates = estimates

    def send(self, job):
        super().send(job)
        self._made = len(job.earlier)
        self._said = 0

    def recv(self):
        if self._is_repeated or self._made + self._said == len(self._estimates):
            return super().recv()
        if self._said:
            raise EOFError
        self._said += 1
        return self._estimates[self._made]


def test_a_process_that_died_is_tried_beside_fewer_and_its_estimates_are_kept(monkeypatch):
    estimates = [screened_of(TASK, Candidate(source=f"{n}", policy="test"), correct=True) for n in range(3)]
    taken, started = [], []
    monkeypatch.setattr(Searchers, "_start", lambda self, member: started.append(member) or _Dying(estimates, taken))
    with Searchers(["cpu"], Settings.quick(), at_once=1) as searchers:
        found = list(searchers.screen([ScreenJob(TASK, 8)]))
        assert [one for _, one in found] == [*estimates, None]
        assert [one[2] for one in taken] == [Others.MANY, Others.FEW, Others.NONE]
        assert len(started) == 3
        assert found[-1][0].earlier == tuple(estimates[:2])


def test_a_task_whose_process_always_dies_ends_with_one_error(monkeypatch):
    taken = []

    class Dead(_Connection):
        def recv(self):
            if self._is_repeated:
                return super().recv()
            raise EOFError

    monkeypatch.setattr(Searchers, "_start", lambda self, member: Dead(taken))
    with Searchers(["cpu"], Settings.quick(), at_once=2) as searchers:
        ((job, error),) = searchers.screen([ScreenJob(TASK, 8)])
    assert isinstance(error, InfrastructureError)
    assert job.task == TASK
    assert [one[2] for one in taken] == [Others.MANY, Others.FEW, Others.NONE]


def test_a_task_too_large_for_the_device_ends_with_one_error(monkeypatch):
    taken, (huge,) = [], _named("huge")
    monkeypatch.setattr(Searchers, "_start", lambda self, member: _Connection(taken))
    with Searchers(["cpu"], Settings.quick(), at_once=2) as searchers:
        ((_, error),) = searchers.screen([ScreenJob(huge, 8)])
    assert isinstance(error, DeviceError)
    assert [one[2] for one in taken] == [Others.MANY, Others.FEW, Others.NONE]


def test_a_process_that_is_killed_at_the_end_is_not_tried_again(monkeypatch):
    taken = []

    class Killed(_Connection):
        def recv(self):
            searchers._closing.set()
            raise EOFError

    monkeypatch.setattr(Searchers, "_start", lambda self, member: Killed(taken))
    with Searchers(["cpu"], Settings.quick(), at_once=1) as searchers:
        ((_, error),) = searchers.screen([ScreenJob(TASK, 8)])
    assert isinstance(error, InfrastructureError)
    assert len(taken) == 1


def test_what_runs_out_of_memory_beside_others_is_no_estimate_until_it_had_the_memory_alone(monkeypatch):
    full = screened_of(TASK, Candidate(source="full", policy="test"), correct=False, reason=Reason.OUT_OF_MEMORY)
    said, entered, unlimited = [], [], []

    class Pool:
        slots = 1

        def __init__(self, *_, alone):
            unlimited.append(alone)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def takes(self, kind):
            return True

        def screen(self, candidates):
            yield next(iter(candidates)), full

    jobs = [ScreenJob(TASK, 1, others=others) for others in (Others.MANY, Others.FEW, Others.NONE)]

    class Pipe:
        def recv(self):
            if not jobs:
                raise EOFError
            return jobs.pop(0)

        def send(self, answer):
            said.append(answer)

    def memory(alone):
        entered.append(alone)
        return contextlib.nullcontext()

    monkeypatch.setattr(searching, "DeviceMemory", lambda device: memory)
    monkeypatch.setattr(searching, "ScreeningPool", Pool)
    monkeypatch.setattr(
        searching, "ForkServer", lambda **_: SimpleNamespace(import_compiler=lambda kind: None, close=lambda: None)
    )
    monkeypatch.setattr(searching.sandbox, "die_with_parent", lambda: None)
    monkeypatch.setattr(searching.os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(searching.signal, "signal", lambda number, handler: None)
    searching._run(Pipe(), "cpu", Settings.quick().model_dump_json(), "builtin")
    assert [type(one) for one in said] == [DeviceError, DeviceError, Screened, type(None)]
    assert said[2].reason is Reason.OUT_OF_MEMORY
    assert entered == unlimited == [False, False, True], "beside few others the memory is shared"
