"""Judges in Ray actors: every work has one last result, whatever happens to the process that has it."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernelwright.errors import ConfigError, DeviceError, InfrastructureError, TaskError
from kernelwright.execution import ray_executor
from kernelwright.execution.executor import TRIES
from kernelwright.execution.ray_executor import JUDGE_RESOURCE, OBJECT_STORE_BYTES, JudgeActor, RayExecutor, connect
from kernelwright.execution.work import Evaluate, run_all
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task, Verdict
from tests.judge.snippets import RELU, candidate

ray = pytest.importorskip("ray")

SETTINGS = Settings.quick(threads=1, timed=False)
SLOTS = 2
SPARE = 1
"""Places of the cluster that the shared executor leaves to others."""
LIMIT_S = 60


def judge(number, act="", **options):
    return Evaluate(Task(id=str(number), source="x"), Candidate(source=act), **options)


def run(executor, work, stop=None):
    """Outcomes by the tasks' names."""
    results = list(run_all(executor, work, stop))
    assert Counter(result.work.task.id for result in results).most_common(1)[0][1] == 1
    return {result.work.task.id: result.outcome for result in results}


# --- a Ray that runs its actors in this process -------------------------------------------------------------------------


class RayError(Exception):
    """Ray's own, which says that an actor is gone."""


class Handle:
    """An actor of this process: what it is asked runs in the thread that asks, until it is killed."""

    def __init__(self, *arguments):
        self.actor, self.killed = JudgeActor(*arguments), threading.Event()

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *given: Answer(self, getattr(self.actor, name), given))


class Answer:
    """What an actor will have answered; `get` makes it do so."""

    def __init__(self, handle, method, given):
        self.handle, self.method, self.given = handle, method, given

    def get(self):
        if self.handle.killed.is_set():
            raise RayError("the actor is gone")
        found = self.method(*self.given)
        if self.handle.killed.is_set():
            raise RayError("the actor died")
        return found

    def future(self):
        """Ray answers from a thread of its own."""
        done = Future()
        threading.Timer(0.0, lambda: done.set_result(self.get())).start()
        return done


class Absent:
    """An actor for which there is no place before it is killed."""

    def __init__(self):
        self.answer = Future()
        self.ready = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: self.answer))


class StandIn:
    """Ray with a CPU judge's place for each of two actors, or with none."""

    def __init__(self, places=SLOTS, starts=True):
        self.made, self.places, self.starts, self.address = [], places, starts, None
        self.began, self.gate = threading.Semaphore(0), threading.Event()
        self.exceptions, self.up = SimpleNamespace(RayError=RayError), False

    def is_initialized(self):
        return self.up

    def init(self, address, **options):
        self.up, self.address = True, address

    def shutdown(self):
        self.up = False

    def cluster_resources(self):
        return {"CPU": 8.0, "accelerator_type:H200": 1.0, JUDGE_RESOURCE: float(self.places)}

    def remote(self, **options):
        return lambda kind: SimpleNamespace(remote=self._start)

    def _start(self, *arguments):
        if not self.starts:
            return Absent()
        self.made.append(Handle(*arguments))
        return self.made[-1]

    def get(self, answer, timeout=None):
        return answer.get()

    def wait(self, answers, **limits):
        for answer in answers:
            answer.get()

    def kill(self, handle, no_restart):
        if self.starts:
            handle.killed.set()
        else:
            handle.answer.set_exception(RayError("it is killed"))

    def make_judge(self, device, settings):
        def evaluate(task, candidate, *, settings=None, alongside=()):
            if candidate.source == "die":
                self.made[-1].killed.set()
            if candidate.source == "broken-task":
                raise TaskError("Wanted another task.")
            if candidate.source == "wait":
                self.began.release()
                self.gate.wait(LIMIT_S)
            return Evaluation(
                task=task.id,
                task_sha256=task.sha256,
                candidate_sha256=candidate.sha256,
                verdict=Verdict.ACCEPTED,
                checks={"changed": settings is not None, "alongside": [one.source for one in alongside]},
            )

        return SimpleNamespace(evaluate=evaluate, close=lambda: None)

    def alive(self):
        return [handle for handle in self.made if not handle.killed.is_set()]


@pytest.fixture
def stand_in(monkeypatch):
    """A Ray that is there when it is imported."""
    made = StandIn()
    monkeypatch.setitem(sys.modules, "ray", made)
    yield made
    made.gate.set()


def started(stand_in, **options):
    return RayExecutor(SETTINGS, **{"device": "cpu", "make_judge": stand_in.make_judge, **options})


def test_every_work_has_one_result_and_actors_stay(stand_in):
    with started(stand_in) as executor:
        found = run(executor, (judge(number) for number in range(9)))
        assert (executor.kinds, executor.slots, executor.hardware) == ({Evaluate}, SLOTS, ["H200"])
        assert len(stand_in.alive()) == len(stand_in.made) <= SLOTS
    assert {name: outcome.task for name, outcome in found.items()} == {str(number): str(number) for number in range(9)}
    assert (stand_in.alive(), stand_in.up) == ([], False), "a Ray of its own ends with it"


def test_settings_and_what_is_beside_reach_the_judge(stand_in):
    baseline = Candidate(source="baseline")
    work = [judge(0), judge(1, settings=SETTINGS), judge(2, alongside=(baseline,))]
    with started(stand_in) as executor:
        checks = {name: outcome.checks for name, outcome in run(executor, work).items()}
    assert [(checks[name]["changed"], checks[name]["alongside"]) for name in "012"] == [
        (False, []),
        (True, []),
        (False, ["baseline"]),
    ]


def test_work_whose_actors_die_is_tried_again_and_then_an_error(stand_in):
    with started(stand_in, slots=1) as executor:
        found = run(executor, [judge(0, "die"), judge(1), judge(2, "broken-task")])
    assert isinstance(found["0"], InfrastructureError)
    assert "its judge died" in str(found["0"])
    assert len(stand_in.made) == TRIES + 1
    assert found["1"].accepted
    assert (type(found["2"]), str(found["2"])) == (TaskError, "Wanted another task.")


def test_cancelled_work_leaves_no_actor_at_work(stand_in):
    with started(stand_in) as executor:
        running, waiting = [judge(number, "wait") for number in range(SLOTS)], judge(SLOTS)
        for work in (*running, waiting):
            executor.submit(work)
        assert all(stand_in.began.acquire(timeout=LIMIT_S) for _ in running)
        assert executor.free(Evaluate) == -1
        executor.cancel(running[0])
        executor.cancel(waiting)
        executor.cancel(judge("another"))
        assert len(stand_in.alive()) == SLOTS - 1
        stand_in.gate.set()
        found = {result.work: result.outcome for result in (executor.next_result(LIMIT_S) for _ in range(SLOTS + 1))}
        assert (found[running[0]], found[waiting]) == (None, None)
        assert found[running[1]].accepted
        assert executor.next_result(LIMIT_S) is None, "nothing is at work"
        assert len(run(executor, [judge(number) for number in range(2 * SLOTS)])) == 2 * SLOTS


def test_work_for_which_there_is_no_place_is_an_infrastructure_error(stand_in):
    stand_in.starts = False
    with started(stand_in, start_limit_s=0.0) as executor:
        assert "no place" in str(run(executor, [judge(0)])["0"])


def test_what_is_submitted_after_the_end_has_an_error(stand_in):
    with started(stand_in) as executor:
        executor.submit(judge(0, "wait"))
        assert stand_in.began.acquire(timeout=LIMIT_S)
        assert executor.next_result(0.0) is None
        stand_in.gate.set()
    executor.submit(judge(1))
    found = [executor.next_result() for _ in range(2)]
    assert "shut down" in str(found[1].outcome)


def test_a_cluster_without_a_place_is_a_device_error(stand_in):
    stand_in.places = 0
    with pytest.raises(DeviceError, match=JUDGE_RESOURCE):
        started(stand_in)
    assert not stand_in.up
    with pytest.raises(DeviceError, match="with a GPU"):
        started(stand_in, device="cuda")


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'kernelwright\[ray\]'"):
        RayExecutor(SETTINGS)


@pytest.mark.parametrize("options", [{"device": "cuda:1"}, {"per_gpu": 0}, {"slots": 0}])
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match="Wanted"):
        RayExecutor(SETTINGS, **options)


def test_a_cluster_that_listens_is_connected_to():
    asked = []
    fake = SimpleNamespace(init=lambda **options: asked.append(options["address"]), exceptions=ray.exceptions)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        connect(fake, address, None)
        server.settimeout(5.0)
        server.accept()[0].close()
    with pytest.raises(DeviceError, match=address):
        connect(fake, address, None)
    connect(fake, "auto", None)
    connect(fake, "ray://nobody.invalid:10001", None)  # Ray's own client knows how to ask
    assert asked == [address, "auto", "ray://nobody.invalid:10001"]


# --- what runs in an actor, in this process -----------------------------------------------------------------------------


def actor(device="cpu"):
    """And the judges that it makes, each a list of what it was told."""
    judges = []

    def make(device, settings):
        told = [(device, settings)]
        judges.append(told)
        if len(judges) == 1 and device == "cuda:0":
            raise DeviceError("Wanted a GPU.")

        def evaluate(task, candidate, *, settings=None, alongside=()):
            return Evaluation(
                task=task.id, task_sha256="a", candidate_sha256="b", verdict=Verdict.ACCEPTED, checks={"seen": 1}
            )

        return SimpleNamespace(evaluate=evaluate, close=lambda: told.append("closed"))

    return JudgeActor(device, SETTINGS.model_dump_json(), make), judges


def asked(one, number=0):
    work = judge(number)
    kind, value = one.evaluate(work.task.model_dump_json(), work.candidate.model_dump_json())
    return value if kind == "error" else Evaluation.model_validate_json(value)


def test_an_actor_makes_one_judge_says_where_it_judged_and_closes_it_once():
    one, judges = actor()
    assert (one.ready(), judges) == (os.getpid(), [])
    one.close()
    found = asked(one, 4)
    assert (found.task, found.device, found.checks) == ("4", "cpu", {"seen": 1, "node": socket.gethostname()})
    asked(one, 5)
    one.close()
    one.close()
    assert judges == [[("cpu", SETTINGS), "closed"]]


@pytest.mark.parametrize(("visible", "device"), [("3", "cuda:3"), (None, "cuda:0")])
def test_an_actor_sees_one_gpu_and_names_it_as_its_machine_counts(monkeypatch, visible, device):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    one, judges = actor("cuda")
    assert isinstance(asked(one), DeviceError)
    assert asked(one).device == device  # a judge that could not be made is tried anew
    assert [told[0][0] for told in judges] == ["cuda:0"] * 2


# --- on a Ray, on CPUs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(ray_home):
    """A Ray with places for CPU judges and two GPUs that only Ray believes in."""
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=2,
        resources={JUDGE_RESOURCE: SLOTS + SPARE},
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


def make_fake():
    """A judge that does what the candidate's text says; defined in here so that Ray sends it by value."""

    class FakeJudge:
        def __init__(self, device, settings):
            self.device = device

        def evaluate(self, task, candidate, *, settings=None, alongside=()):
            import os
            import time
            from pathlib import Path

            from kernelwright.errors import TaskError
            from kernelwright.records import Evaluation, Verdict

            act, _, argument = candidate.source.partition(" ")
            if act == "die":
                os.abort()
            if act == "broken-task":
                raise TaskError("Wanted another task.")
            if act == "fault-once" and not Path(argument).exists():
                Path(argument).touch()
                raise ZeroDivisionError("a fault of the judge")
            if act == "block-once" and not Path(argument, "seen").exists():
                Path(argument, "seen").touch()
                with open(Path(argument, "pid"), "w") as pipe:  # waits for a reader
                    pipe.write(str(os.getpid()))
                time.sleep(1000)  # until it is killed
            if act == "wait":
                Path(argument).read_text()  # waits for a writer
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            checks = {"pid": os.getpid(), "device": self.device, "visible": visible, "changed": settings is not None}
            return Evaluation(
                task=task.id, task_sha256=task.sha256, candidate_sha256="b", verdict=Verdict.ACCEPTED, checks=checks
            )

        def close(self):
            pass

    return FakeJudge


def fakes(**options):
    return RayExecutor(SETTINGS, **{"device": "cpu", "make_judge": make_fake(), **options})


@pytest.fixture(scope="module")
def executor(cluster):
    """One for most tests: each process of an actor imports torch."""
    with fakes(slots=SLOTS) as made:
        yield made


def pids(found):
    return {outcome.checks["pid"] for outcome in found.values()}


def wait_until_gone(handles):
    """Wait for processes, by handles that were taken while they lived."""
    for handle in handles:
        assert select.select([handle], [], [], LIMIT_S)[0], "a process was left behind"
        os.close(handle)


def descendants(pid):
    """Of a process, itself included, as handles (pidfd_open)."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return [os.pidfd_open(member) for member in family]


@pytest.mark.exhaustive
def test_every_work_has_one_result_on_a_ray_and_its_actors_stay(executor):
    found = run(executor, (judge(n, settings=SETTINGS if n == 4 else None) for n in range(9)))
    assert set(found) == {str(n) for n in range(9)}
    assert all(outcome.accepted and outcome.device == "cpu" and outcome.checks["node"] for outcome in found.values())
    assert [name for name, outcome in found.items() if outcome.checks["changed"]] == ["4"]
    # One actor may have been quick enough to do all nine; a new one for each work would show.
    assert len(pids(found) | pids(run(executor, [judge(n) for n in range(3)]))) <= executor.slots


@pytest.mark.exhaustive
def test_every_place_of_the_cluster_is_a_slot_and_a_lane_of_the_service(cluster):
    with fakes() as wide, fakes(device="auto", per_gpu=2) as shared:
        assert (wide.slots, wide.device) == (SLOTS + SPARE, "cpu")
        assert (shared.slots, shared.device) == (4, "cuda")


@pytest.mark.exhaustive
def test_a_killed_process_in_the_middle_of_work_loses_nothing(executor, tmp_path):
    os.mkfifo(tmp_path / "pid")
    killed = []

    def kill():
        killed.append(int((tmp_path / "pid").read_text()))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(executor, [judge(n, f"block-once {tmp_path}" if n == 4 else "") for n in range(12)])
    killer.join(LIMIT_S)
    assert len(found) == 12
    assert all(outcome.accepted for outcome in found.values())
    assert found["4"].checks["pid"] not in killed


@pytest.mark.exhaustive
def test_what_fails_twice_is_an_infrastructure_error_and_errors_of_the_task_keep_their_type(executor, tmp_path):
    acts = {"0": "", "dies": "die", "task": "broken-task", "fault": f"fault-once {tmp_path / 'seen'}", "1": ""}
    found = run(executor, [judge(name, act) for name, act in acts.items()])
    assert isinstance(found["dies"], InfrastructureError)
    assert "died" in str(found["dies"])
    assert "2 times" in str(found["dies"])
    assert (type(found["task"]), str(found["task"])) == (TaskError, "Wanted another task.")
    assert all(found[name].accepted for name in ("0", "fault", "1"))


@pytest.mark.exhaustive
def test_actors_that_die_while_idle_cost_no_work_a_try(executor):
    first = pids(run(executor, [judge(n) for n in range(SLOTS)]))
    handles = [os.pidfd_open(pid) for pid in first]
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(handles)
    found = run(executor, [judge(n) for n in range(SLOTS)])
    assert all(outcome.accepted for outcome in found.values())
    assert not pids(found) & first


@pytest.mark.exhaustive
def test_each_judge_sees_one_gpu_and_a_slot_without_a_place_holds_no_work_up(cluster):
    with fakes(device="cuda", slots=3) as executor:
        found = run(executor, [judge(n) for n in range(12)])
    assert set(found) == {str(n) for n in range(12)}
    seen = {(one.device, one.checks["visible"], one.checks["device"]) for one in found.values()}
    assert seen <= {("cuda:0", "0", "cuda:0"), ("cuda:1", "1", "cuda:0")}
    assert len(pids(found)) <= 2


@pytest.mark.exhaustive
def test_an_actor_that_cannot_start_is_tried_twice(cluster, monkeypatch):
    def broken(self, *arguments):
        raise ImportError("no kernelwright on this machine")

    monkeypatch.setattr(JudgeActor, "__init__", broken)
    ray.cloudpickle.register_pickle_by_value(ray_executor)
    try:
        with fakes(slots=1) as executor:
            found = run(executor, [judge(0)])
    finally:
        ray.cloudpickle.unregister_pickle_by_value(ray_executor)
    assert isinstance(found["0"], InfrastructureError)
    assert "could not be started" in str(found["0"])
    assert "no kernelwright on this machine" in str(found["0"])


@pytest.mark.exhaustive
def test_ending_at_once_ends_what_is_running(cluster, tmp_path):
    os.mkfifo(tmp_path / "pid")
    handles = []

    def interrupted():
        yield judge(0, f"block-once {tmp_path}")
        # Asked for the next one: the first has begun.
        handles.append(os.pidfd_open(int((tmp_path / "pid").read_text())))
        raise KeyboardInterrupt

    def judging():
        with fakes(device="cuda") as executor:
            run(executor, [judge(9)])
            list(run_all(executor, interrupted()))

    with pytest.raises(KeyboardInterrupt):
        judging()
    wait_until_gone(handles)


@pytest.mark.exhaustive
def test_the_real_judge_works_in_an_actor_and_leaves_nothing_when_it_is_killed(cluster):
    with RayExecutor(SETTINGS, device="cpu", slots=1) as executor:
        wrong = candidate("return torch.relu(self.linear(x)) + 1")
        walls = candidate(top="open('/tmp/escaped', 'w')\n")
        results = run_all(executor, [Evaluate(RELU, candidate()), Evaluate(RELU, wrong), Evaluate(RELU, walls)])
        found = [result.outcome for result in results]
        assert [outcome.accepted for outcome in found] == [True, False, False], found
        assert found[1].reason == "wrong-output"
        assert "Permission denied" in found[2].detail
        (one,) = executor.actors
        handles = descendants(ray.get(one.ready.remote()))
        assert len(handles) >= 2  # the actor and its fork server
        ray.kill(one)
        wait_until_gone(handles)


@pytest.mark.exhaustive
def test_a_ray_of_its_own_ends_with_the_executor(ray_home):
    if ray.is_initialized():
        ray.shutdown()
    with fakes(slots=1) as executor:
        assert len(run(executor, [judge(n) for n in range(2)])) == 2
        assert ray.is_initialized()
    assert not ray.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_real_judges_work_on_every_gpu_that_ray_gives_them(ray_home):
    work = [Evaluate(RELU, Candidate(source=candidate().source + f"# {number}\n")) for number in range(4)]
    with RayExecutor(Settings.quick(), device="cuda", per_gpu=2) as executor:
        found = [result.outcome for result in run_all(executor, work)]
        assert executor.slots == 2 * torch.cuda.device_count()
    assert [outcome.accepted for outcome in found] == [True] * 4, found
    assert all(outcome.device.startswith("cuda:") and outcome.speedup_low is not None for outcome in found)
