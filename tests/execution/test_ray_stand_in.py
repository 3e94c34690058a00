"""What a pool on Ray does with its actors, with a Ray that runs them in this process; `test_ray_pool.py` has a real one."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kernelwright.errors import InfrastructureError
from kernelwright.execution import ray_pool
from kernelwright.execution.local import Job
from kernelwright.execution.ray_pool import RayPool
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task, Verdict

SETTINGS = Settings.quick(threads=1, timed=False)
SLOTS = 2


class RayError(Exception):
    """Ray's own, which says that an actor is gone."""


class Handle:
    """An actor of this process: what it is asked runs in the thread that asks, until it is killed."""

    def __init__(self, *arguments):
        self._actor, self.killed = ray_pool._JudgeActor(*arguments), threading.Event()

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *given: Answer(self, getattr(self._actor, name), given))


class Answer:
    """What an actor will have answered; `get` makes it do so."""

    def __init__(self, handle, method, given):
        self._handle, self._method, self._given = handle, method, given

    def get(self):
        if self._handle.killed.is_set():
            raise RayError("the actor is gone")
        found = self._method(*self._given)
        if self._handle.killed.is_set():
            raise RayError("the actor died")
        return found

    def future(self):
        done = Future()
        done.set_result(self.get())
        return done


@pytest.fixture
def pool():
    """A `RayPool` of two places, the handles it made in `made`; a judge that waits sets `began` and waits for `gate`."""
    gate, began, made = threading.Event(), threading.Event(), []

    def make_judge(device, settings):
        def evaluate(task, candidate, *, settings=None, paired_baseline=None):
            if candidate.source == "die":
                made[-1].killed.set()
            if candidate.source == "wait":
                began.set()
                gate.wait(60)
            return Evaluation(
                task=task.id,
                task_sha256=task.sha256,
                candidate_sha256=candidate.sha256,
                verdict=Verdict.ACCEPTED,
                checks={"changed": settings is not None},
            )

        return SimpleNamespace(evaluate=evaluate, close=lambda: None)

    def start(*arguments):
        made.append(Handle(*arguments))
        return made[-1]

    one = object.__new__(RayPool)
    one._ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError),
        is_initialized=lambda: True,
        get=lambda answer, timeout=None: answer.get(),
        wait=lambda answers, **limits: [answer.get() for answer in answers],
        kill=lambda handle, no_restart: handle.killed.set(),
    )
    one._actor_class, one._start_arguments = SimpleNamespace(remote=start), ("cpu", SETTINGS.model_dump_json(), make_judge)
    # Ray answers from threads of its own, after `_start` has let go of the lock.
    one._lock, one._closing, one._waiting, one._slots = threading.RLock(), False, 0, SLOTS
    one._actors, one._starting, one._idle = set(), {}, queue.Queue()
    one._start_limit_s, one._owns_ray, one._threads = 0.0, False, ThreadPoolExecutor(SLOTS)
    one.made, one.gate, one.began = made, gate, began
    yield one
    gate.set()
    one.close()


def job(number, act="", settings=None):
    return Job(Task(id=str(number), source="x"), Candidate(source=act), settings)


def test_every_job_has_one_outcome_and_actors_stay(pool):
    found = [(one.task.id, outcome.task) for one, outcome in pool.evaluate(job(number) for number in range(9))]
    assert sorted(found) == [(str(number), str(number)) for number in range(9)]
    assert 1 <= len(pool.made) <= SLOTS
    assert not any(handle.killed.is_set() for handle in pool.made)


def test_settings_of_a_job_reach_its_judge(pool):
    outcomes = {one.task.id: outcome for one, outcome in pool.evaluate([job(0), job(1, settings=SETTINGS)])}
    assert {name: outcome.checks["changed"] for name, outcome in outcomes.items()} == {"0": False, "1": True}


def test_a_job_whose_actors_die_is_tried_again_and_then_an_error(pool):
    pool._slots = 1
    ((_, outcome),) = pool.evaluate([job(0, "die")])
    assert isinstance(outcome, InfrastructureError)
    assert "its judge died" in str(outcome)
    assert len(pool.made) == ray_pool._TRIES
    ((_, outcome),) = pool.evaluate([job(1)])
    assert outcome.accepted


def test_a_caller_that_walks_away_leaves_no_actor_at_work(pool):
    outcomes = pool.evaluate([job(0), job(1, "wait")])
    assert next(outcomes)[0].task.id == "0"
    assert pool.began.wait(60)
    outcomes.close()
    assert sum(handle.killed.is_set() for handle in pool.made) == 1
    assert pool._actors == {handle for handle in pool.made if not handle.killed.is_set()}
    pool.gate.set()
    assert len(list(pool.evaluate(job(number) for number in range(2 * SLOTS)))) == 2 * SLOTS
