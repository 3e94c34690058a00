"""Work on this machine: every work has one last result, whatever happens to the process that has it."""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from dataclasses import replace

import pytest

from kernelwright.errors import CrowdedError, DeviceError, InfrastructureError, TaskError
from kernelwright.execution import executor as executors
from kernelwright.execution.executor import LocalExecutor
from kernelwright.execution.processes import judge_main, screen_main
from kernelwright.execution.work import Baselines, Evaluate, Progress, Screen, run_all
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task, Verdict
from kernelwright.records.screened import Compiles, screened_of
from kernelwright.rewrites.builtin import BuiltinPolicy
from tests.execution import answering
from tests.execution.test_screening import RIGHT, TASK, WRONG
from tests.judge.snippets import RELU, candidate

SETTINGS = Settings.quick(threads=1, timed=False)
LIMIT_S = 60


def task(name):
    return Task(id=str(name), source=f"# {name}")


def judge(name=0, **options):
    return Evaluate(task(name), Candidate(source=str(name)), **options)


def screen(name=0, budget=8, **options):
    return Screen(task(name), SamePolicy(), budget=budget, **options)


class SamePolicy:
    name = "same"
    look = "screened"

    def propose(self, context, count):
        return []


def evaluation(of):
    return Evaluation(task=of.id, task_sha256=of.sha256, candidate_sha256="b", verdict=Verdict.ACCEPTED)


class Processes:
    """Starts processes that answer as a test says. An answer that is an exception is raised: the process has died."""

    def __init__(self, act):
        self.act, self.started, self.ended, self.asked, self.released = act, [], [], [], Counter()
        self.cores = []

    def __call__(self, main, device, settings_json, ready=False):
        self.started.append((main, device, ready))
        self.cores.append(os.sched_getaffinity(0))
        self.latest = Process(self, device)
        return self.latest


class Process:
    def __init__(self, processes, device):
        self.processes, self.device, self.answers = processes, device, queue.SimpleQueue()
        self.is_alive = True

    def send(self, message):
        self.processes.asked.append((message[0].task.id, message[-1]))
        threading.Thread(target=self._act, args=message, daemon=True).start()

    def _act(self, *message):
        for answer in self.processes.act(*message):
            self.answers.put(answer)

    def receive(self):
        answer = self.answers.get(timeout=LIMIT_S)
        if isinstance(answer, EOFError | OSError):
            raise answer
        return answer

    def release_idle(self):
        self.processes.released[self.device] += 1

    def stop(self):
        self.answers.put(EOFError())

    def end(self):
        self.processes.ended.append(self.device)
        return -9


def accept(work, is_alone):
    yield tuple(evaluation(work.task) for _ in getattr(work, "baselines", [0]))


def outcomes(act, work, devices=("cpu",), stop=None, **options):
    """The last outcome of each work by its task's name, and the processes."""
    processes = Processes(act)
    with LocalExecutor(devices, SETTINGS, start=processes, quiet_s=0.05, **options) as executor:
        found = [(result.work, result.outcome) for result in run_all(executor, work, stop) if result.is_last]
    assert len({id(one) for one, _ in found}) == len(found)
    assert len(processes.ended) == len(processes.started)
    return {one.task.id: outcome for one, outcome in found}, processes


def test_every_work_has_one_last_result():
    found, processes = outcomes(accept, [judge(number) for number in range(20)], ("cpu", "cpu"), judges=2)
    assert {name: outcome.task for name, outcome in found.items()} == {str(n): str(n) for n in range(20)}
    assert 1 <= len(processes.started) <= 4
    assert {main for main, *_ in processes.started} == {judge_main}


def test_no_device_is_an_error():
    with pytest.raises(DeviceError, match="at least one"):
        LocalExecutor([], SETTINGS)


def test_no_work_starts_no_process_and_a_ready_judge_waits_for_it():
    assert outcomes(accept, [])[1].started == []
    assert outcomes(accept, [], judges=3, ready=2)[1].started == [(judge_main, "cpu", True)] * 2


def test_what_it_can_do_follows_from_its_slots():
    with LocalExecutor(["cpu"], SETTINGS, judges=2) as executor:
        assert executor.kinds == {Evaluate, Baselines}
        assert (executor.free(Evaluate), executor.free(Baselines)) == (2, 2)
        assert executor.next_result() is None, "nothing is at work"
    with LocalExecutor(["cpu"], SETTINGS, judges=2, baselines=1, rounds=3) as executor:
        assert executor.kinds == {Evaluate, Baselines, Screen}
        assert [executor.free(kind) for kind in (Evaluate, Baselines, Screen)] == [2, 1, 3]


def test_work_is_taken_only_as_slots_become_free():
    taken = []

    def work():
        for number in range(6):
            taken.append(number)
            yield judge(number)

    with LocalExecutor(["cpu"], SETTINGS, judges=2, start=Processes(accept)) as executor:
        results = run_all(executor, work())
        next(results)
        assert len(taken) <= 4
        assert len(list(results)) == 5


def test_stopping_leaves_the_rest_undone():
    answers = iter([False, False])
    found, _ = outcomes(accept, [judge(number) for number in range(9)], stop=lambda: next(answers, True))
    assert set(found) == {"0", "1"}


def test_work_may_depend_on_work_that_is_running():
    ended = []

    def work():
        yield judge("first")
        while not ended:
            yield None
        yield judge("second")

    with LocalExecutor(["cpu"], SETTINGS, judges=2, start=Processes(accept)) as executor:
        ended += (result.work.task.id for result in run_all(executor, work()))
    assert ended == ["first", "second"]


def test_baselines_have_one_outcome_each():
    found, _ = outcomes(accept, [Baselines(task(number), (candidate(),) * number) for number in (1, 3)])
    assert {name: [one.task for one in outcome] for name, outcome in found.items()} == {"1": ["1"], "3": ["3"] * 3}


def test_a_process_that_dies_is_replaced_and_its_work_tried_again():
    deaths = iter([EOFError(), None, BrokenPipeError(), None])

    def act(work, is_alone):
        error = next(deaths)
        yield from [error] if error else accept(work, is_alone)

    found, processes = outcomes(act, [judge(0), judge(1)])
    assert all(outcome.accepted for outcome in found.values())
    assert len(processes.started) == 3


def test_a_process_that_died_while_it_waited_costs_its_next_work_no_try_and_is_told():
    deaths = iter([None, EOFError(), None])

    def act(work, is_alone):
        error = next(deaths)
        yield from [error] if error else accept(work, is_alone)

    processes, told = Processes(act), []
    with LocalExecutor(["cpu"], SETTINGS, start=processes, quiet_s=0.05) as executor:
        for work in (judge(0), judge(1)):
            for result in run_all(executor, [work]):
                told += [result.outcome.message] if isinstance(result.outcome, Progress) else []
            assert result.outcome.accepted
            processes.latest.is_alive = False
    assert len(processes.started) == 3
    assert "on cpu died while it waited (status -9)" in told[0]
    assert "the judge of 1 on cpu died (status -9)" in told[1]


def test_work_that_kills_every_process_is_an_infrastructure_error():
    def act(work, is_alone):
        yield from [EOFError()] if work.task.id == "1" else accept(work, is_alone)

    found, _ = outcomes(act, [judge(number) for number in range(3)])
    assert isinstance(found["1"], InfrastructureError)
    assert "died (status -9" in str(found["1"])
    assert found["0"].accepted
    assert found["2"].accepted


def test_an_error_of_the_task_is_its_result():
    found, _ = outcomes(lambda work, is_alone: [TaskError("Wanted another task.")], [judge()])
    assert isinstance(found["0"], TaskError)


def test_a_record_says_why_work_was_done_alone(monkeypatch):
    monkeypatch.setattr(executors, "memory_of", lambda device: 10)

    def act(work, is_alone):
        yield from accept(work, is_alone) if is_alone or work.task.id != "1" else [CrowdedError("too little")]

    found, processes = outcomes(act, [judge(0), judge(1), judge(2, memory_bytes=20)], judges=2)
    assert {name: outcome.checks.get("alone") for name, outcome in found.items()} == {
        "0": None,
        "1": "too little",
        "2": "it may take more memory than a device has",
    }
    assert sorted(processes.asked) == [("0", False), ("1", False), ("1", True), ("2", True)]
    assert processes.released["cpu"] >= 2, "judges give back what only waits before one is alone"


def test_work_for_which_the_memory_alone_does_not_suffice_either_has_an_outcome():
    found, processes = outcomes(lambda work, is_alone: [CrowdedError("others are no judges")], [judge()])
    assert isinstance(found["0"], CrowdedError)
    assert processes.asked == [("0", False), ("0", True)]


def test_a_device_has_cores_of_its_own(monkeypatch):
    all_cores, first = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    for cores, expected in (({"cpu": frozenset({first})}, {first}), ({}, all_cores)):
        monkeypatch.setattr(executors, "cores_of_each", lambda devices, cores=cores: cores)
        assert outcomes(accept, [judge()], ready=1)[1].cores == [expected]
        assert outcomes(accept, [judge()])[1].cores == [expected]
    assert os.sched_getaffinity(0) == all_cores


# --- the end ----------------------------------------------------------------------------------------------------------


class Held:
    """Work that does not end before its process is stopped."""

    def __init__(self):
        self.begun = threading.Semaphore(0)

    def __call__(self, *message):
        self.begun.release()
        return iter(())

    def has_begun(self):
        return self.begun.acquire(timeout=LIMIT_S)


def test_what_has_not_begun_when_the_executor_is_closed_has_an_outcome():
    act = Held()
    with LocalExecutor(["cpu"], SETTINGS, start=Processes(act)) as executor:
        first, second = judge(0), judge(1)
        executor.submit(first)
        executor.submit(second)
        assert act.has_begun()
        executor.close(at_once=True)
        found = {result.work: str(result.outcome) for result in iter(executor.next_result, None)}
        executor.submit(late := judge(2))
        assert "closed before" in str(executor.next_result().outcome)
    assert "died" in found[first]
    assert "closed before" in found[second]
    assert late not in found


def test_an_exception_ends_the_processes_at_once():
    act = Held()

    def work():
        yield judge(0)
        act.has_begun()
        raise KeyboardInterrupt

    processes = Processes(act)
    with pytest.raises(KeyboardInterrupt), LocalExecutor(["cpu"], SETTINGS, judges=2, start=processes) as executor:
        list(run_all(executor, work()))
    assert len(processes.ended) == len(processes.started) == 1


def test_work_is_cancelled_while_it_waits_and_while_it_runs():
    act = Held()
    with LocalExecutor(["cpu"], SETTINGS, rounds=1, apart=True, start=Processes(act)) as executor:
        running, waiting = screen(0), screen(1)
        executor.submit(running)
        executor.submit(waiting)
        assert act.has_begun()
        executor.cancel(waiting)
        executor.cancel(running)
        found = [executor.next_result(LIMIT_S) for _ in range(2)]
        assert [(result.work, result.outcome) for result in found] == [(waiting, None), (running, None)]
        assert executor.free(Screen) == 1
        assert executor.next_result() is None


def test_a_result_that_is_not_there_in_time_is_none():
    act = Held()
    with LocalExecutor(["cpu"], SETTINGS, start=Processes(act)) as executor:
        executor.submit(judge())
        assert executor.next_result(0.01) is None
        executor.close(at_once=True)


# --- rounds in processes of their own -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "used"), [(None, 1), (3, 3)])
def test_a_round_apart_has_one_process_for_its_candidates_unless_it_asks_for_more(asked, used):
    """Other rounds have the other cores; with several each, a GPU's driver makes contexts all the time."""
    slots = []

    def act(work, policy, is_alone):
        slots.append(work.slots)
        yield None, None

    with LocalExecutor(["cpu"], SETTINGS, rounds=1, apart=True, start=Processes(act)) as executor:
        list(run_all(executor, [replace(screen(0), slots=asked)]))
    assert slots == [used]


ESTIMATES = [screened_of(TASK, Candidate(source=f"{number}", policy="test"), correct=True) for number in range(3)]


def rounds(act, work, **options):
    """All results, and the processes."""
    processes = Processes(act)
    with LocalExecutor(["cpu"], SETTINGS, rounds=2, apart=True, start=processes, quiet_s=0.05, **options) as executor:
        return list(run_all(executor, work)), processes


def test_a_round_has_estimates_and_messages_and_then_its_end():
    def act(work, policy, is_alone):
        yield Progress("proposing"), None
        yield ESTIMATES[0], Compiles.INDUCTOR
        yield None, None

    (message, estimate, end), processes = rounds(act, [screen()])
    assert (message.outcome, message.is_last) == (Progress("proposing"), False)
    assert (estimate.outcome.candidate_sha256, estimate.left) == (ESTIMATES[0].candidate_sha256, Compiles.INDUCTOR)
    assert (estimate.outcome.device, estimate.is_last) == ("cpu", False)
    assert (end.outcome, end.is_last) == (None, True)
    assert [main for main, *_ in processes.started] == [screen_main]


def levels(processes):
    return [is_alone for _, is_alone in processes.asked]


def test_a_full_device_is_tried_beside_few_then_alone_and_so_are_later_rounds():
    def act(work, policy, is_alone):
        yield (None, None) if is_alone else (DeviceError("full"), None)

    processes = Processes(act)
    with LocalExecutor(["cpu"], SETTINGS, rounds=2, apart=True, start=processes, quiet_s=0.05) as executor:
        for _ in range(2):
            assert [result.outcome for result in run_all(executor, [screen()])] == [None]
    assert levels(processes) == [False, False, True, True]


def test_a_round_whose_process_died_is_tried_beside_fewer_and_keeps_its_estimates():
    earlier = []

    def act(work, policy, is_alone):
        earlier.append(len(work.earlier))
        yield (ESTIMATES[len(work.earlier)], None) if len(work.earlier) < 2 else (None, None)
        yield EOFError()

    found, processes = rounds(act, [screen()])
    assert [getattr(one.outcome, "candidate_sha256", None) for one in found] == [
        *(one.candidate_sha256 for one in ESTIMATES[:2]),
        None,
    ]
    assert earlier == [0, 1, 2]
    assert levels(processes) == [False, False, True]


def test_a_round_whose_process_always_dies_ends_with_one_error():
    (found,), processes = rounds(lambda *message: [EOFError()], [screen()])
    assert isinstance(found.outcome, InfrastructureError)
    assert "its process died" in str(found.outcome)
    assert levels(processes) == [False, False, True]


def test_a_task_that_has_to_be_alone_says_that_it_wants_a_device():
    may_end = threading.Event()

    def act(work, *rest):
        if isinstance(work, Evaluate):
            assert may_end.wait(LIMIT_S)
            yield from accept(work, False)
        else:
            yield (None, None) if rest[-1] else (DeviceError("full"), None)

    with LocalExecutor(["cpu"], SETTINGS, rounds=1, apart=True, start=Processes(act), quiet_s=0.05) as executor:
        executor.submit(judged := judge())
        executor.submit(round_ := screen(1))
        assert executor.next_result(0.2) is None
        assert executor.wants_device
        may_end.set()
        assert [executor.next_result(LIMIT_S).work for _ in range(2)] == [judged, round_]
        assert not executor.wants_device


# --- the real thing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ready", [0, 1])
def test_a_process_outlives_the_work_that_it_was_started_for(ready):
    """Linux kills a process that dies with its parent as soon as the thread that started it ends."""
    with LocalExecutor(["cpu"], SETTINGS, judges=1, ready=ready, start=answering.started) as executor:
        pids = [next(run_all(executor, [judge(number)])).outcome for number in range(3)]
    assert len({*pids}) == 1


class UnsentPolicy(BuiltinPolicy):
    """A policy that cannot leave its process."""

    def __reduce__(self):
        raise TypeError("it stays here")


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", [BuiltinPolicy(), UnsentPolicy()], ids=["apart", "here"])
def test_all_kinds_of_work_are_done(policy):
    broken = Task(id="broken", source=TASK.source.replace("torch.diag(a) @ b", "torch.relu(a @ nothing)"))
    right, wrong = (Candidate(source=source) for source in (RIGHT, WRONG))
    proposed, given, failed = (
        Screen(TASK, policy, budget=1),
        Screen(TASK, candidates=(right, wrong)),
        Screen(broken, policy, budget=1),
    )
    judged, unusable = Evaluate(RELU, candidate()), Evaluate(Task(id="t", source="def ("), candidate())
    with LocalExecutor(["cpu"], SETTINGS, rounds=1, apart=True) as executor:
        executor.prepare([TASK])
        found = list(run_all(executor, [proposed, given, failed, judged, unusable]))
    last = {result.work: result.outcome for result in found if result.is_last}
    assert isinstance(last[failed], TaskError)
    assert isinstance(last[unusable], TaskError)
    assert last[judged].accepted, last[judged].detail
    assert (last[proposed], last[given]) == (None, None)
    estimates = {
        work: [result.outcome for result in found if result.work is work and not result.is_last]
        for work in (proposed, given)
    }
    assert [one.techniques for one in estimates[proposed] if not isinstance(one, Progress)] == [("diagonal-operand",)]
    assert {one.candidate_sha256: one.correct for one in estimates[given]} == {right.sha256: True, wrong.sha256: False}


@pytest.mark.exhaustive
def test_a_round_from_this_process_is_cancelled():
    forever = Candidate(source="while True: pass")
    with LocalExecutor(["cpu"], SETTINGS, rounds=1) as executor:
        executor.submit(work := Screen(TASK, candidates=(Candidate(source=RIGHT), forever)))
        assert executor.next_result(LIMIT_S).outcome.correct
        executor.cancel(work)
        assert executor.next_result(LIMIT_S).is_last
