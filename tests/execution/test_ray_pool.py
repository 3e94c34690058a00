"""Judges in Ray actors: every job gets one outcome, whatever happens to the process that has it. A real Ray, on CPUs."""

from __future__ import annotations

import inspect
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kernelwright.cli import serve
from kernelwright.errors import ConfigError, DeviceError, InfrastructureError, TaskError
from kernelwright.execution import ray_pool
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import Job, JudgePool
from kernelwright.execution.ray_cluster import JUDGE_RESOURCE, OBJECT_STORE_BYTES
from kernelwright.execution.ray_pool import RayPool
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task, Verdict
from tests.judge.snippets import RELU, candidate

ray = pytest.importorskip("ray")

SETTINGS = Settings.quick(threads=1, timed=False)
SLOTS = 2
SPARE = 1
"""Places of the cluster that the shared pool leaves to others."""
LIMIT_S = 60


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

        def evaluate(self, task, candidate, *, settings=None, paired_baseline=None):
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


def job(number, act=""):
    return Job(Task(id=str(number), source="x"), Candidate(source=act))


def fake_pool(**options):
    return RayPool(SETTINGS, **{"device": "cpu", "make_judge": make_fake(), **options})


def run(pool, jobs, stop=None):
    found = {}
    for one, outcome in pool.evaluate(jobs, stop):
        assert one.task.id not in found
        found[one.task.id] = outcome
    return found


@pytest.fixture(scope="module")
def pool(cluster):
    """One for most tests: each process of an actor imports torch."""
    with fake_pool(slots=SLOTS) as made:
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


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'kernelwright\[ray\]'"):
        RayPool(SETTINGS)


@pytest.mark.parametrize("options", [{"device": "cuda:1"}, {"per_gpu": 0}, {"slots": 0}])
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match="Wanted"):
        RayPool(SETTINGS, **options)


@pytest.mark.parametrize("kind", [JudgePool, RayPool])
def test_both_pools_are_evaluators(kind):
    for name in ("slots", "evaluate", "close", "__enter__", "__exit__"):
        assert hasattr(kind, name)
    for name in ("evaluate", "close"):
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(Evaluator, name))


# --- what runs in an actor, in this process -------------------------------------------------------


def actor(device="cpu"):
    """And the judges that it makes, each a list of what it was told."""
    judges = []

    def make(device, settings):
        told = [(device, settings)]
        judges.append(told)
        if len(judges) == 1 and device == "cuda:0":
            raise DeviceError("Wanted a GPU.")

        def evaluate(task, candidate, *, settings=None, paired_baseline=None):
            told.append((task, candidate, settings) if paired_baseline is None else paired_baseline)
            if task.id == "broken":
                raise TaskError("Wanted another task.")
            return Evaluation(
                task=task.id, task_sha256="a", candidate_sha256="b", verdict=Verdict.ACCEPTED, checks={"seen": 1}
            )

        return SimpleNamespace(evaluate=evaluate, close=lambda: told.append("closed"))

    return ray_pool._JudgeActor(device, SETTINGS.model_dump_json(), make), judges


def asked(one, number=0, changed=None, rival=None):
    work = job(number)
    kind, value = one.evaluate(work.task.model_dump_json(), work.candidate.model_dump_json(), changed, rival)
    return value if kind == "error" else Evaluation.model_validate_json(value)


def test_an_actor_makes_one_judge_and_says_where_it_judged():
    one, judges = actor()
    assert one.ready() == os.getpid()
    assert judges == []
    found = asked(one, 4)
    assert (found.task, found.device, found.checks) == ("4", "cpu", {"seen": 1, "node": socket.gethostname()})
    other = SETTINGS.model_copy(update={"thorough": False})
    asked(one, 5, other.model_dump_json())
    assert judges == [[("cpu", SETTINGS), (job(4).task, job(4).candidate, None), (job(5).task, job(5).candidate, other)]]
    rival = Candidate(source="rival", techniques=("compile",))
    asked(one, 6, rival=rival.model_dump_json())
    assert judges[0][-1] == rival


@pytest.mark.parametrize(("visible", "device"), [("3", "cuda:3"), (None, "cuda:0")])
def test_an_actor_sees_one_gpu_and_names_it_as_its_machine_counts(monkeypatch, visible, device):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    one, judges = actor("cuda")
    assert isinstance(asked(one), DeviceError)
    assert asked(one).device == device  # a judge that could not be made is tried anew
    assert [told[0][0] for told in judges] == ["cuda:0"] * 2


def test_an_error_of_the_task_comes_back_from_an_actor_with_its_type():
    error = asked(actor()[0], "broken")
    assert (type(error), str(error)) == (TaskError, "Wanted another task.")
    assert error.__traceback__ is None  # it need not survive the journey


def test_an_actor_closes_its_judge_once():
    one, judges = actor()
    one.close()
    assert judges == []
    asked(one)
    one.close()
    one.close()
    assert judges[0][-1:] == ["closed"]
    assert judges[0].count("closed") == 1
    asked(one)
    assert len(judges) == 2


# --- what another thread did in between, with a Ray that is told what to say -----------------------


def bare_pool(**fake):
    made = object.__new__(RayPool)
    made._ray = SimpleNamespace(exceptions=ray.exceptions, **fake)
    made._lock, made._closing, made._waiting, made._slots = threading.Lock(), False, 0, 1
    made._actors, made._starting, made._idle = set(), {}, queue.Queue()
    made._start_limit_s = 0.0
    return made


def test_an_actor_that_was_discarded_while_it_started_is_not_made_idle():
    made = bare_pool()
    made._started("gone", Future())
    assert made._idle.empty()


def test_a_job_waits_for_an_actor_that_works_and_no_longer_once_the_pool_is_closed():
    made = bare_pool()
    made._actors = {"works"}
    made._give_up(ray_pool._Call(), 0.0)
    with pytest.raises(ray_pool._NoActorError, match="closed"):
        made._give_up(ray_pool._Call(is_over=True), 0.0)
    made._closing = True
    with pytest.raises(ray_pool._NoActorError, match="closed"):
        made._give_up(ray_pool._Call(), 0.0)


def test_an_actor_is_started_for_each_job_that_waits_as_far_as_there_are_slots():
    made = bare_pool()
    answers = []

    def start(*arguments):
        answers.append(Future())
        made_actor = Mock()
        made_actor.ready.remote().future.return_value = answers[-1]
        return made_actor

    made._actor_class, made._start_arguments = SimpleNamespace(remote=start), ()
    made._slots, made._waiting = 2, 1
    made._start()
    made._start()
    assert len(answers) == 1
    made._waiting = 3
    made._start()
    assert len(answers) == 2
    answers[0].set_result(1)
    assert made._idle.qsize() == 1
    assert len(made._starting) == 1


def test_an_actor_is_killed_once():
    killed = []
    made = bare_pool(kill=lambda actor, no_restart: killed.append(actor))
    made._actors = {"it"}
    made._discard("it")
    made._discard("it")
    assert killed == ["it"]
    assert made._actors == set()


# --- on a Ray -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_every_job_has_one_outcome_and_its_actors_stay(pool):
    found = run(pool, (job(n) for n in range(9)))
    assert set(found) == {str(n) for n in range(9)}
    assert all(outcome.accepted and outcome.device == "cpu" and outcome.checks["node"] for outcome in found.values())
    # One actor may have been quick enough to do all nine; a new one for each job would show.
    assert len(pids(found) | pids(run(pool, [job(n) for n in range(3)]))) <= pool.slots


@pytest.mark.exhaustive
def test_every_place_of_the_cluster_is_a_slot(cluster):
    with fake_pool() as wide, fake_pool(device="auto", per_gpu=2) as shared:
        assert (wide.slots, wide.device) == (SLOTS + SPARE, "cpu")
        assert (shared.slots, shared.device) == (4, "cuda")


@pytest.mark.exhaustive
def test_a_killed_process_in_the_middle_of_a_job_loses_nothing(pool, tmp_path):
    os.mkfifo(tmp_path / "pid")
    killed = []

    def kill():
        killed.append(int((tmp_path / "pid").read_text()))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    jobs = [job(n, f"block-once {tmp_path}" if n == 4 else "") for n in range(12)]
    answers = list(pool.evaluate(jobs))
    killer.join(LIMIT_S)
    assert Counter(one.task.id for one, _ in answers) == Counter(str(n) for n in range(12))
    found = {one.task.id: outcome for one, outcome in answers}
    assert all(outcome.accepted for outcome in found.values())
    assert found["4"].checks["pid"] not in killed


@pytest.mark.exhaustive
def test_what_fails_twice_is_an_infrastructure_error_and_errors_of_the_task_keep_their_type(pool, tmp_path):
    acts = {"0": "", "dies": "die", "task": "broken-task", "fault": f"fault-once {tmp_path / 'seen'}", "1": ""}
    found = run(pool, [job(name, act) for name, act in acts.items()])
    assert isinstance(found["dies"], InfrastructureError)
    assert "died" in str(found["dies"])
    assert "2 times" in str(found["dies"])
    assert (type(found["task"]), str(found["task"])) == (TaskError, "Wanted another task.")
    assert all(found[name].accepted for name in ("0", "fault", "1"))


@pytest.mark.exhaustive
def test_actors_that_die_while_idle_cost_no_job_a_try(pool):
    first = pids(run(pool, [job(n) for n in range(SLOTS)]))
    handles = [os.pidfd_open(pid) for pid in first]
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(handles)
    found = run(pool, [job(n) for n in range(SLOTS)])
    assert all(outcome.accepted for outcome in found.values())
    assert not pids(found) & first


@pytest.mark.exhaustive
def test_outcomes_come_as_they_end_and_jobs_are_taken_as_slots_become_free(pool, tmp_path):
    os.mkfifo(tmp_path / "gate")
    taken = []

    def jobs():
        for number in range(6):
            taken.append(number)
            yield job(number, f"wait {tmp_path / 'gate'}" if number == 0 else "")

    outcomes = pool.evaluate(jobs())
    assert {next(outcomes)[0].task.id for _ in range(5)} == set("12345")
    assert len(taken) == 6
    (tmp_path / "gate").write_text("go")
    assert [one.task.id for one, _ in outcomes] == ["0"]


@pytest.mark.exhaustive
def test_stopping_leaves_the_rest_undone(pool):
    answers = iter([False, False])
    assert len(run(pool, [job(n) for n in range(9)], lambda: next(answers, True))) == 2


@pytest.mark.exhaustive
def test_a_caller_that_walks_away_leaves_no_place_taken(pool, tmp_path):
    os.mkfifo(tmp_path / "gate")
    outcomes = pool.evaluate([job(0), *(job(n, f"wait {tmp_path / 'gate'}") for n in range(1, SLOTS))])
    next(outcomes)
    outcomes.close()
    assert len(run(pool, [job(n) for n in range(SLOTS * 2)])) == SLOTS * 2


@pytest.mark.exhaustive
def test_several_threads_may_share_a_pool(pool):
    with ThreadPoolExecutor(SLOTS) as threads:
        found = list(threads.map(lambda number: run(pool, [job(number)]), range(4 * SLOTS)))
    assert [set(one) for one in found] == [{str(number)} for number in range(4 * SLOTS)]
    assert all(outcome.accepted for one in found for outcome in one.values())


@pytest.mark.exhaustive
def test_the_service_has_a_lane_for_each_place(cluster):
    with ExitStack() as stack:
        lanes, kind, _ = serve._on_ray(stack, "auto", SETTINGS, 2, "auto")
        assert (len(lanes), kind) == (4, "cuda")
        lanes, kind, _ = serve._on_ray(stack, "cpu", SETTINGS, None, "auto")
        assert (len(lanes), kind) == (SLOTS + SPARE, "cpu")


@pytest.mark.exhaustive
def test_settings_of_a_job_reach_its_judge(pool):
    ((_, outcome),) = pool.evaluate([Job(Task(id="0", source="x"), Candidate(source=""), SETTINGS)])
    assert outcome.checks["changed"]


@pytest.mark.exhaustive
def test_each_judge_sees_one_gpu_and_a_slot_without_a_place_holds_no_job_up(cluster):
    with fake_pool(device="cuda", slots=3) as pool:
        found = run(pool, [job(n) for n in range(12)])
    assert set(found) == {str(n) for n in range(12)}
    seen = {(one.device, one.checks["visible"], one.checks["device"]) for one in found.values()}
    assert seen <= {("cuda:0", "0", "cuda:0"), ("cuda:1", "1", "cuda:0")}
    assert len(pids(found)) <= 2


@pytest.mark.exhaustive
def test_a_job_for_which_there_is_no_place_is_an_infrastructure_error(cluster):
    with fake_pool(slots=1, cpus=1000.0, start_limit_s=0.0) as pool:
        ((_, outcome),) = pool.evaluate([job(0)])
    assert isinstance(outcome, InfrastructureError)
    assert "no place" in str(outcome)


@pytest.mark.exhaustive
def test_an_actor_that_cannot_start_is_tried_twice(cluster, monkeypatch):
    def broken(self, *arguments):
        raise ImportError("no kernelwright on this machine")

    monkeypatch.setattr(ray_pool._JudgeActor, "__init__", broken)
    ray.cloudpickle.register_pickle_by_value(ray_pool)
    try:
        with fake_pool(slots=1) as pool:
            found = run(pool, [job(0)])
    finally:
        ray.cloudpickle.unregister_pickle_by_value(ray_pool)
    assert isinstance(found["0"], InfrastructureError)
    assert "could not be started" in str(found["0"])
    assert "no kernelwright on this machine" in str(found["0"])


@pytest.mark.exhaustive
def test_ending_at_once_ends_what_is_running(cluster, tmp_path):
    os.mkfifo(tmp_path / "pid")
    handles = []

    def interrupted():
        yield job(0, f"block-once {tmp_path}")
        # Asked for the next one: the first has begun.
        handles.append(os.pidfd_open(int((tmp_path / "pid").read_text())))
        raise KeyboardInterrupt

    def judging():
        with fake_pool(device="cuda") as pool:
            run(pool, [job(9)])
            list(pool.evaluate(interrupted()))

    with pytest.raises(KeyboardInterrupt):
        judging()
    wait_until_gone(handles)


@pytest.mark.exhaustive
def test_the_real_judge_works_in_an_actor_and_leaves_nothing_when_it_is_killed(cluster):
    with RayPool(SETTINGS, device="cpu", slots=1) as pool:
        wrong = candidate("return torch.relu(self.linear(x)) + 1")
        walls = candidate(top="open('/tmp/escaped', 'w')\n")
        found = [outcome for _, outcome in pool.evaluate([Job(RELU, candidate()), Job(RELU, wrong), Job(RELU, walls)])]
        assert [outcome.accepted for outcome in found] == [True, False, False], found
        assert found[1].reason == "wrong-output"
        assert "Permission denied" in found[2].detail
        (one,) = pool._actors
        handles = descendants(ray.get(one.ready.remote()))
        assert len(handles) >= 2  # the actor and its fork server
        ray.kill(one)
        wait_until_gone(handles)
