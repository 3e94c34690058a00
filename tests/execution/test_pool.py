"""Several judges at once: every job gets an outcome, whatever happens to the process that has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kernelwright.errors import CrowdedError, DeviceError, InfrastructureError, KernelwrightError, TaskError
from kernelwright.execution import judge_process
from kernelwright.execution import local as pool
from kernelwright.execution.judge_process import JudgeProcess
from kernelwright.execution.local import Job, JudgePool, RotationJob
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task, Verdict
from tests.judge.snippets import RELU, candidate
from tests.quick import exhaustive_but

SETTINGS = Settings.quick(threads=1, timed=False)


def job(number=0):
    return Job(Task(id=str(number), source="x"), Candidate(source=str(number)))


def evaluation(task):
    return Evaluation(task=task.id, task_sha256="a", candidate_sha256="b", verdict=Verdict.ACCEPTED)


class FakeMember:
    """A process that does what its class is told."""

    act = staticmethod(lambda one: [evaluation(one.task)])

    def __init__(self, device, settings):
        self.device = device
        self.rested = 0
        self.started.append(device)
        self.made.append(self)

    def do(self, one, alone):
        self.asked.append((one.task.id, alone))
        return self.act(one) if not self.crowded or alone or one.task.id not in self.crowded else CrowdedError("too little")

    def rest(self):
        self.rested += 1

    def kill(self):
        self.ended.append(-9)

    def end(self):
        self.ended.append(0)
        return 0


@pytest.fixture
def member(monkeypatch):
    made = type("Member", (FakeMember,), {"started": [], "ended": [], "asked": [], "made": [], "crowded": ()})
    monkeypatch.setattr(pool, "JudgeProcess", made)
    return made


def run(jobs, devices=("cpu",), per_device=1, stop=None):
    with JudgePool(devices, SETTINGS, per_device) as judges:
        return {one.task.id: outcome for one, outcome in judges.evaluate(jobs, stop)}


def test_every_job_has_one_outcome(member):
    found = run([job(number) for number in range(20)], ("cpu", "cpu"), 2)
    assert {name: outcome.task for name, outcome in found.items()} == {str(n): str(n) for n in range(20)}
    assert 1 <= len(member.started) <= 4
    assert len(member.ended) == len(member.started)


def test_no_device_is_an_error():
    with pytest.raises(DeviceError, match="at least one"):
        JudgePool([], SETTINGS)


def test_no_job_starts_no_process(member):
    assert run([]) == {}
    assert member.started == []


def test_jobs_are_taken_only_as_slots_become_free(member):
    taken = []

    def jobs():
        for number in range(6):
            taken.append(number)
            yield job(number)

    with JudgePool(["cpu"], SETTINGS, 2) as judges:
        assert judges.slots == 2
        outcomes = judges.evaluate(jobs())
        next(outcomes)
        assert len(taken) <= 3
        assert len(list(outcomes)) == 5


def test_a_job_goes_to_a_process_that_waits_before_another_is_started(member):
    with JudgePool(["cpu"], SETTINGS, per_device=4) as judges:
        for number in range(8):
            assert len(list(judges.evaluate([job(number)]))) == 1
        assert member.started == ["cpu"]
        both = threading.Barrier(2)
        member.act = staticmethod(lambda one: both.wait(60) is None or [evaluation(one.task)])
        assert len(list(judges.evaluate([job(1), job(2)]))) == 2
        assert member.started == ["cpu"] * 2


@pytest.mark.parametrize("slots", [1, 2])
def test_where_all_jobs_need_the_memory_alone_they_have_it_in_turn(member, monkeypatch, slots):
    monkeypatch.setattr(pool, "_QUIET_S", 0.1)
    member.crowded = ("0", "1", "2")
    found = run([job(number) for number in range(3)], ("cpu",), slots)
    assert {name: outcome.task for name, outcome in found.items()} == {str(number): str(number) for number in range(3)}
    assert sorted(member.asked) == [(str(number), alone) for number in range(3) for alone in (False, True)]


@pytest.mark.parametrize("slots", exhaustive_but([1, 2, 3, 4], 3))
def test_a_job_that_needs_the_memory_alone_waits_until_nothing_else_is_left(member, monkeypatch, slots):
    monkeypatch.setattr(pool, "_ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(pool, "_QUIET_S", 0.5)
    member.crowded = ("1", "2")
    at_work, most = [], []

    def act(one):
        at_work.append(one.task.id)
        most.append((one.task.id, len(at_work)))
        at_work.remove(one.task.id)
        return [evaluation(one.task)]

    member.act = staticmethod(act)
    found = run([job(number) for number in range(6)], ("cpu",), slots)
    assert {name: outcome.task for name, outcome in found.items()} == {str(number): str(number) for number in range(6)}
    assert sorted(member.asked[-2:]) == [("1", True), ("2", True)], "they come last, alone"
    assert sorted(member.asked[:-2]) == [(str(number), False) for number in range(6)], "each was tried beside others once"
    assert [(name, 1) for name in ("1", "2")] == sorted(one for one in most if one[0] in member.crowded)


def test_what_has_to_be_alone_waits_for_another_pool_on_the_device_too(member, monkeypatch):
    monkeypatch.setattr(pool, "_QUIET_S", 0.1)
    member.crowded = ("1",)
    may_end = threading.Event()
    member.act = staticmethod(lambda one: may_end.wait(60) is None or [evaluation(one.task)])
    with JudgePool(["cpu"], SETTINGS) as judges, JudgePool(["cpu"], SETTINGS, beside=judges) as rotating:
        busy, crowded = judges._submit(job(0)), rotating._submit(job(1))
        with rotating._changed:
            assert rotating._changed.wait_for(lambda: rotating._crowded, 60)
        assert not crowded.done()
        with judges._changed:
            assert judges._changed is rotating._changed
            assert not judges._changed.wait_for(lambda: ("1", True) in member.asked, timeout=5 * pool._QUIET_S)
        may_end.set()
        assert [found.task for future in (busy, crowded) for found in future.result(60)] == ["0", "1"]
    assert member.asked[-1] == ("1", True)


def test_before_a_job_has_the_memory_alone_all_on_its_device_give_back_what_only_waits(member, monkeypatch):
    monkeypatch.setattr(pool, "_QUIET_S", 0.1)
    both = threading.Barrier(3)
    member.act = staticmethod(lambda one: both.wait(60) is None or [evaluation(one.task)])
    with JudgePool(["cpu", "cuda:0"], SETTINGS) as judges, JudgePool(["cpu"], SETTINGS, beside=judges) as rotating:
        for future in [judges._submit(job(0)), judges._submit(job(1)), rotating._submit(job(2))]:
            future.result(60)
        member.act, member.crowded = staticmethod(FakeMember.act), ("3",)
        rotating._submit(job(3)).result(60)
    assert member.asked[-1] == ("3", True)
    members = [one for pooled in (judges, rotating) for one in pooled._members]
    assert sorted((one.device, one.rested) for one in members) == [("cpu", 1), ("cpu", 1), ("cuda:0", 0)]


def test_a_record_says_why_a_job_was_done_alone(member, monkeypatch):
    monkeypatch.setattr(pool, "_QUIET_S", 0.1)
    monkeypatch.setattr(pool, "memory_of", lambda device: 10)
    member.crowded = ("1",)
    found = run([job(0), job(1), replace(job(2), memory_bytes=20)])
    alone = {name: outcome.checks.get("alone") for name, outcome in found.items()}
    assert alone == {"0": None, "1": "too little", "2": "it may take more memory than a device has"}


def test_a_job_that_failed_beside_others_waits_for_twice_its_memory_before_it_has_to_be_alone(member, monkeypatch):
    monkeypatch.setattr(pool, "_QUIET_S", 0.1)
    monkeypatch.setattr(pool, "memory_of", lambda device: 100)
    too_little = {"1": (20,), "2": (20, 40), "3": (60,)}
    asked, may_end = [], threading.Event()

    def act(one):
        asked.append((one.task.id, one.memory_bytes))
        if one.task.id == "0":
            may_end.wait(60)
        elif not may_end.is_set() and one.memory_bytes in too_little[one.task.id]:
            return CrowdedError("too little")
        return [evaluation(one.task)]

    member.act = staticmethod(act)
    with JudgePool(["cpu"], SETTINGS, per_device=2) as judges:
        busy = judges._submit(replace(job(0), memory_bytes=40))
        (found,) = judges._submit(replace(job(1), memory_bytes=20)).result(60)
        assert not busy.done(), "it does not wait for the others"
        assert found.checks.get("alone") is None
        later = [judges._submit(replace(job(2), memory_bytes=20)), judges._submit(replace(job(3), memory_bytes=60))]
        with judges._changed:
            assert judges._changed.wait_for(lambda: len(judges._crowded) == 2, 60)
        may_end.set()
        assert [one.result(60)[0].checks.get("alone") for one in later] == ["too little"] * 2
    assert sorted(asked[:6]) == [("0", 40), ("1", 20), ("1", 40), ("2", 20), ("2", 40), ("3", 60)]


def test_a_job_for_which_the_memory_alone_does_not_suffice_either_has_an_outcome(member, monkeypatch):
    monkeypatch.setattr(pool, "_QUIET_S", 0.1)
    member.act = staticmethod(lambda one: CrowdedError("others are no judges"))
    found = run([job(0)])
    assert isinstance(found["0"], CrowdedError)
    assert member.asked == [("0", False), ("0", True)]


@pytest.fixture
def limited(monkeypatch):
    """A device with room for ten bytes."""
    monkeypatch.setattr(pool, "memory_of", lambda device: 10)
    monkeypatch.setattr(pool, "_ASK_AGAIN_S", 0.05)


class AtWork:
    """Notes the jobs that are at work at once, and ends none before it may."""

    def __init__(self):
        self.names, self.may_end, self.changed = set(), set(), threading.Condition()

    def __call__(self, one):
        with self.changed:
            self.names.add(one.task.id)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: one.task.id in self.may_end, 60)
            self.names.discard(one.task.id)
            self.changed.notify_all()
        return [evaluation(one.task)]

    def become(self, *names):
        with self.changed:
            return self.changed.wait_for(lambda: self.names == {*names}, 60)

    def end(self, *names):
        with self.changed:
            self.may_end |= {*names}
            self.changed.notify_all()


def sized(number, memory_bytes):
    return Job(Task(id=str(number), source="x"), Candidate(source=str(number)), memory_bytes=memory_bytes)


def test_a_job_waits_until_the_memory_that_it_may_take_is_left_and_others_pass_it(member, limited):
    member.act = at_work = AtWork()
    jobs = [sized(0, 6), sized(1, 5), sized(2, 4), sized(3, 0)]
    with JudgePool(["cpu"], SETTINGS, 4) as judges, JudgePool(["cpu"], SETTINGS, beside=judges) as rotating:
        futures = [judges._submit(one) for one in jobs[:1]]
        assert at_work.become("0")
        futures += [rotating._submit(jobs[1]), *map(judges._submit, jobs[2:])]
        assert at_work.become("0", "2", "3"), "what takes little of it, or nobody knows how much, does not wait"
        assert (judges.waiting, rotating.waiting) == (0, 1)
        at_work.end("0", "1", "2", "3")
        assert [found.task for future in futures for found in future.result(60)] == ["0", "1", "2", "3"]
    assert {alone for _, alone in member.asked} == {False}


@pytest.mark.parametrize("beside", [False, True], ids=["in its own pool", "in another one"])
def test_few_jobs_pass_one_that_waits_for_memory(member, limited, monkeypatch, beside):
    monkeypatch.setattr(pool, "PASSES_MAX", 2)
    member.act = at_work = AtWork()
    with JudgePool(["cpu"], SETTINGS, 4) as judges, JudgePool(["cpu"], SETTINGS, 4, beside=judges) as others:
        small = others if beside else judges
        futures = [judges._submit(sized(0, 6))]
        assert at_work.become("0")
        futures += [judges._submit(sized(1, 5)), *(small._submit(sized(number, 1)) for number in (2, 3, 4))]
        assert at_work.become("0", "2", "3"), "two pass it"
        at_work.end("2", "3")
        assert at_work.become("0"), "and no third one, though it would fit"
        at_work.end("0")
        assert at_work.become("1", "4")
        at_work.end("1", "4")
        assert [found.task for future in futures for found in future.result(60)] == ["0", "1", "2", "3", "4"]


def test_one_device_makes_room_for_what_too_many_have_passed(member, limited, monkeypatch):
    monkeypatch.setattr(pool, "PASSES_MAX", 1)
    member.act = at_work = AtWork()
    with JudgePool(["cuda:0", "cuda:1"], SETTINGS, 4) as judges:
        futures = [judges._submit(sized(number, size)) for number, size in enumerate((6, 7))]
        assert at_work.become("0", "1")
        futures += [judges._submit(sized(number, size)) for number, size in ((2, 8), (3, 1), (4, 1), (5, 1))]
        assert at_work.become("0", "1", "3", "4", "5"), "one passes it, and the fuller device takes the others"
        assert sorted(judges._taken_bytes.values()) in ([7, 9], [6, 10]), "by where the one has gone that passed"
        at_work.end(*map(str, range(6)))
        assert sorted(found.task for future in futures for found in future.result(60)) == [*map(str, range(6))]


def test_a_job_that_takes_more_than_a_device_has_is_alone_without_being_tried_beside_others(member, limited, monkeypatch):
    """It comes last."""
    monkeypatch.setattr(pool, "_QUIET_S", 0.1)
    member.act = at_work = AtWork()
    with JudgePool(["cpu"], SETTINGS, 3) as judges:
        first, large = judges._submit(sized(0, 1)), judges._submit(sized(1, 11))
        assert at_work.become("0")
        at_work.end("0")
        first.result(60)
        assert at_work.become("1")
        small = judges._submit(sized(2, 1))
        assert judges.waiting == 1, "nothing fits beside it"
        at_work.end("1", "2")
        assert [found.task for future in (large, small) for found in future.result(60)] == ["1", "2"]
    assert member.asked == [("0", False), ("1", True), ("2", False)]


def test_what_waits_for_memory_takes_no_slot_from_others(member, limited, monkeypatch):
    monkeypatch.setattr(pool, "_QUIET_S", 0.1)
    jobs = [sized(0, 11), *(sized(number, 9) for number in range(1, 7)), sized(7, 0)]
    taken = []
    member.act = at_work = AtWork()

    def given():
        for one in jobs:
            taken.append(one.task.id)
            yield one

    with JudgePool(["cpu"], SETTINGS, 2) as judges:
        found = []
        thread = threading.Thread(target=lambda: found.extend(judges.evaluate(given())))
        thread.start()
        assert at_work.become("1", "7"), "what has to be alone comes last"
        assert len(taken) == len(jobs)
        at_work.end(*(one.task.id for one in jobs))
        thread.join(60)
    assert sorted(one.task.id for one, _ in found) == [str(number) for number in range(8)]


def test_a_job_that_still_waits_for_the_memory_has_an_outcome_when_the_pool_is_closed(member):
    member.crowded = ("1",)
    with JudgePool(["cpu"], SETTINGS) as judges:
        waiting = judges._submit(job(1))
        with judges._changed:
            assert judges._changed.wait_for(lambda: judges._crowded, 60)
    assert "closed" in str(waiting.result(60))


def test_a_device_has_cores_of_its_own(member):
    member.act = staticmethod(lambda one: [evaluation(one.task).model_copy(update={"detail": str(os.sched_getaffinity(0))})])
    all_cores, first = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    for cores, expected in (({"cpu": frozenset({first})}, {first}), ({}, all_cores)):
        with JudgePool(["cpu"], SETTINGS, cores=cores) as judges:
            assert [found.detail for _, found in judges.evaluate([job()])] == [str(expected)]
    assert os.sched_getaffinity(0) == all_cores


def test_a_rotation_has_one_outcome_for_each_baseline(member):
    member.act = staticmethod(lambda one: [evaluation(one.task) for _ in one.baselines])
    rotations = [RotationJob(job(number).task, (candidate(),) * number) for number in (1, 3)]
    with JudgePool(["cpu"], SETTINGS) as judges:
        found = {one.task.id: outcomes for one, outcomes in judges.rotate(rotations)}
        stopped = list(judges.rotate(rotations, lambda: True))
    assert {name: [one.task for one in outcomes] for name, outcomes in found.items()} == {"1": ["1"], "3": ["3"] * 3}
    assert stopped == []


def test_stopping_leaves_the_rest_undone(member):
    answers = iter([False, False])
    assert set(run([job(n) for n in range(9)], stop=lambda: next(answers, True))) == {"0", "1"}


def test_a_process_that_dies_is_replaced_and_its_job_tried_again(member):
    deaths = iter([EOFError(), None, BrokenPipeError(), None])

    def act(one):
        error = next(deaths)
        if error:
            raise error
        return [evaluation(one.task)]

    member.act = staticmethod(act)
    found = run([job(0), job(1)])
    assert {outcome.accepted for outcome in found.values()} == {True}
    assert len(member.started) == 3


def test_a_job_that_kills_every_process_is_an_infrastructure_error(member):
    def act(one):
        if one.task.id == "1":
            raise EOFError
        return [evaluation(one.task)]

    member.act = staticmethod(act)
    found = run([job(n) for n in range(3)])
    assert isinstance(found["1"], InfrastructureError)
    assert "died" in str(found["1"])
    assert found["0"].accepted
    assert found["2"].accepted


def test_an_exception_ends_the_processes_at_once(member):
    held = threading.Event()
    begun = threading.Event()

    def act(one):
        begun.set()
        held.wait(30)
        raise EOFError

    def kill(self):
        self.ended.append(-9)
        held.set()

    member.act, member.kill = staticmethod(act), kill

    def interrupted():
        yield job(0)
        begun.wait(30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), JudgePool(["cpu"], SETTINGS, 2) as judges:
        list(judges.evaluate(interrupted()))
    assert -9 in member.ended


# --- the process, in this one ---------------------------------------------------------------------


class FakeJudge:
    core = None

    def __init__(self, device="cpu", settings=None):
        self.device = torch.device(device)
        self.closed = False
        self.rested = 0
        self.seen = []

    def release_idle(self):
        self.rested += 1

    def evaluate(self, task, candidate, settings=None, alone=None, paired_baseline=None):
        self.seen.append((settings, alone) if paired_baseline is None else paired_baseline)
        if task.id == "broken":
            raise TaskError("Wanted another task.")
        return evaluation(task)

    def close(self):
        self.closed = True


def sent(one, alone=False):
    together = isinstance(one, RotationJob)
    return (
        together,
        one.task.model_dump_json(),
        [each.model_dump_json() for each in (one.baselines if together else (one.candidate,))],
        one.settings and one.settings.model_dump_json(),
        alone,
    )


def test_an_evaluation_or_an_error_comes_back(monkeypatch):
    def rotate(judge, task, baselines, settings=None, alone=None):
        judge.seen.append((settings, alone))
        return [evaluation(task) for _ in baselines]

    monkeypatch.setattr("kernelwright.judge.timing.rotation.rotate", rotate)
    judge = FakeJudge()
    (value,) = judge_process._do(judge, "cuda:3", *sent(job(4)))
    assert Evaluation.model_validate_json(value) == evaluation(job(4).task).model_copy(update={"device": "cuda:3"})
    error = judge_process._do(judge, "cuda:3", *sent(job("broken")))
    assert (type(error), str(error)) == (TaskError, "Wanted another task.")
    judge_process._do(judge, "cuda:3", *sent(Job(RELU, candidate(), SETTINGS)))
    assert len(judge_process._do(judge, "cuda:3", *sent(RotationJob(RELU, (candidate(), candidate()), SETTINGS), True))) == 2
    assert judge.seen == [(None, False), (None, False), (SETTINGS, False), (SETTINGS, True)]


def test_a_record_says_how_much_of_a_gpu_the_judge_itself_took(monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 << 30)
    judge = FakeJudge("cuda:0")
    (value,) = judge_process._do(judge, "cuda:3", *sent(job(4)))
    assert Evaluation.model_validate_json(value).checks == {"judge_bytes": 5 << 30}
    assert reset == [judge.device]


def test_a_rival_reaches_the_judge():
    judge, member, rival = (
        FakeJudge(),
        object.__new__(JudgeProcess),
        Candidate(source="rival", techniques=("compile",)),
    )
    answers = []

    def send(message):
        answers.append(judge_process._do(judge, "cpu", *message))

    member._connection, member._sending = SimpleNamespace(send=send, recv=lambda: answers.pop()), threading.Lock()
    (found,) = member.do(Job(RELU, candidate(), SETTINGS, rival), False)
    assert found.task == RELU.id
    member.do(Job(RELU, candidate(), SETTINGS), True)
    assert judge.seen == [rival, (SETTINGS, True)]


@pytest.mark.parametrize("count", [0, 2])
def test_the_process_judges_until_the_other_side_hangs_up(monkeypatch, count):
    rest = None
    waiting = [rest, *(message for number in range(count) for message in (sent(job(number)), rest))]
    answers, judges = [], []

    def receive():
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    def make(device, settings, fork_server):
        judges.append(FakeJudge())
        return judges[0]

    monkeypatch.setattr("kernelwright.judge.judge.Judge", make)
    monkeypatch.setattr(judge_process, "ForkServer", FakeJudge)
    monkeypatch.setattr(judge_process.sandbox, "die_with_parent", lambda: None)
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(len(answers)))
    handler = signal.getsignal(signal.SIGINT)
    try:
        judge_process._run(SimpleNamespace(recv=receive, send=answers.append), "cpu", SETTINGS.model_dump_json())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [len(answer) for answer in answers] == [1] * count
    assert given_back == [*range(1, count + 1)]
    assert [(judge.closed, judge.rested) for judge in judges] == [(True, count)] * min(count, 1)


@pytest.mark.parametrize(
    ("device", "visible", "wanted"),
    [("cuda:1", None, "1"), ("cuda:1", "4,6", "6"), ("cpu", "4", "4"), ("cpu", None, None)],
)
def test_a_process_for_one_gpu_sees_no_other(monkeypatch, device, visible, wanted):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setattr(judge_process.os, "environ", environment)
    waiting, devices = [sent(job())], []

    def receive():
        if not waiting:
            raise EOFError
        return waiting.pop()

    def make(device, settings, fork_server):
        devices.append(device)
        return FakeJudge()

    monkeypatch.setattr("kernelwright.judge.judge.Judge", make)
    monkeypatch.setattr(judge_process, "ForkServer", FakeJudge)
    monkeypatch.setattr(judge_process.sandbox, "die_with_parent", lambda: None)
    handler = signal.getsignal(signal.SIGINT)
    try:
        judge_process._run(SimpleNamespace(recv=receive, send=lambda answer: None), device, SETTINGS.model_dump_json())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert environment.get("CUDA_VISIBLE_DEVICES") == wanted
    assert devices == ["cpu" if device == "cpu" else "cuda:0"]


def test_a_judge_that_cannot_be_made_is_the_jobs_error_and_the_processs_end(monkeypatch):
    waiting, answers = [sent(job(1)), sent(job(2))], []

    def receive():
        if not waiting:
            raise EOFError
        return waiting.pop()

    def make(device, settings, fork_server):
        raise DeviceError("Wanted a GPU.")

    monkeypatch.setattr("kernelwright.judge.judge.Judge", make)
    monkeypatch.setattr(judge_process, "ForkServer", FakeJudge)
    monkeypatch.setattr(judge_process.sandbox, "die_with_parent", lambda: None)
    handler = signal.getsignal(signal.SIGINT)
    try:
        judge_process._run(SimpleNamespace(recv=receive, send=answers.append), "cpu", SETTINGS.model_dump_json())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [(type(answer), str(answer)) for answer in answers] == [(DeviceError, "Wanted a GPU.")]
    assert len(waiting) == 1, "another process must try"


# --- the real thing -------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_real_member_judges_dies_and_is_ended():
    member = JudgeProcess("cpu", SETTINGS)
    try:
        (found,) = member.do(Job(RELU, candidate()), False)
        assert found.accepted, found.detail
        broken = member.do(Job(Task(id="t", source="def ("), candidate()), False)
        assert isinstance(broken, KernelwrightError)
        assert isinstance(broken, TaskError)
        os.kill(member._process.pid, signal.SIGKILL)
        with pytest.raises((EOFError, OSError)):
            member.do(Job(RELU, candidate()), False)
    finally:
        assert member.end() == -signal.SIGKILL


def test_a_member_that_does_not_go_is_killed(monkeypatch):
    made = object.__new__(JudgeProcess)
    calls = []
    made._connection = SimpleNamespace(close=lambda: calls.append("close"))
    made._process = SimpleNamespace(
        join=lambda timeout=None: calls.append("join"),
        is_alive=lambda: True,
        kill=lambda: calls.append("kill"),
        exitcode=-9,
    )
    assert made.end() == -9
    assert calls == ["close", "join", "kill", "join"]
    made.kill()
    assert calls[-1] == "kill"


def ignores_interrupts(status: Path) -> bool:
    (mask,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigIgn")]
    return bool(int(mask, 16) & 1 << signal.SIGINT - 1)


@pytest.mark.exhaustive
def test_a_pool_process_does_not_outlive_a_killed_run():
    code = (
        "import os, signal\n"
        "from kernelwright.judge import Settings\nfrom kernelwright.execution.judge_process import JudgeProcess\n"
        "if __name__ == '__main__':\n"
        "    member = JudgeProcess('cpu', Settings.quick())\n"
        "    print(member._process.pid, flush=True)\n"
        "    signal.pause()\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        parent = subprocess.Popen([sys.executable, file.name], stdout=subprocess.PIPE, text=True)
        pid = int(parent.stdout.readline())
        status = Path(f"/proc/{pid}/status")
        deadline_s = time.monotonic() + 60
        while not ignores_interrupts(status):  # the last step of its setting up
            assert time.monotonic() < deadline_s, "it has not begun"
            time.sleep(0.05)
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline_s = time.monotonic() + 30
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline_s, "it lives on"
        time.sleep(0.05)


def test_a_process_is_started_without_the_users_script(monkeypatch):
    script, names = ModuleType("__main__"), {"init_main_from_path", "init_main_from_name"}
    script.__file__ = "script.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert names & spawn.get_preparation_data("x").keys()  # by these multiprocessing runs it again
    with judge_process._without_main_program():
        assert not names & spawn.get_preparation_data("x").keys()
    assert sys.modules["__main__"] is script
