"""The core that sides of a comparison share on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernelwright.cores import cores_except
from kernelwright.judge import Judge, Settings
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.judge.isolation.process import Worker
from kernelwright.judge.timing.rotation import rotate
from kernelwright.records import Candidate
from tests.judge.snippets import ANY_WAIT, RELU

SETTINGS = Settings.quick(threads=1, blocks=2, thorough=False, **ANY_WAIT)
ON = "len(os.sched_getaffinity(0)) == 1"


def candidate(condition: str) -> Candidate:
    """Runs as long as a condition holds; its first calls, in which compilers work, are not timed."""
    source = f"""import os
{RELU.source.replace("class Model(", "class ModelNew(")}
_forward = ModelNew.forward

def forward(self, *inputs):
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 1 and not ({condition}):
        raise RuntimeError(f"on {{os.sched_getaffinity(0)}}")
    return _forward(self, *inputs)

ModelNew.forward = forward
"""
    return Candidate(source=source, policy="test", techniques=("same",))


@pytest.fixture
def judge(shared_judge: Judge, monkeypatch) -> Judge:
    """One that times on one core on a processor too, where the rest can work on another."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    monkeypatch.setattr(shared_judge, "core", max(os.sched_getaffinity(0)))
    return shared_judge


@pytest.fixture
def moves(monkeypatch) -> list[set[int]]:
    made: list[set[int]] = []
    run_on = Worker.run_on
    monkeypatch.setattr(Worker, "run_on", lambda self, cores: made.append(set(cores)) or run_on(self, cores))
    return made


def test_baselines_are_timed_on_it_and_let_go(judge, moves):
    (found,) = rotate(judge, RELU, [candidate(ON)], settings=SETTINGS)
    assert found.accepted, found.detail
    assert moves == [{judge.core}] * 4 + [cores_except(judge.core)] * 4


def test_candidates_are_checked_where_they_like_and_timed_on_it(judge, moves):
    checked = judge.evaluate(RELU, candidate(ON), settings=SETTINGS.model_copy(update={"timed": False}))
    assert checked.detail.startswith("RuntimeError: on {")
    assert moves == []
    timed = SETTINGS.model_copy(update={"processes_min": 1, "processes_max": 1})
    assert judge.evaluate(RELU, candidate("True"), settings=timed).accepted
    assert moves == [{judge.core}] * 3 + [cores_except(judge.core)] * 3


def test_every_thread_of_every_process_of_a_worker_moves():
    program = """
import os, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
os.fork()
os.write(1, f"{os.getpid()}\\n".encode())  # whole, where two write at once
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    try:
        pids = {int(process.stdout.readline()) for _ in range(2)}
        worker = object.__new__(Worker)
        worker.pid = process.pid
        core = min(os.sched_getaffinity(0))
        worker.run_on({core})
        threads = [int(thread) for pid in pids for thread in os.listdir(f"/proc/{pid}/task")]
        assert len(threads) == 3
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({core})}
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def test_what_a_judge_starts_stays_off_it(monkeypatch):
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    fork_server = ForkServer(off=max(cores))
    try:
        assert os.sched_getaffinity(fork_server.process.pid) == cores - {max(cores)}
    finally:
        fork_server.process.kill()  # it need not import torch first
        fork_server.close()
