"""The core that sides of a comparison share on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernelwright.judge import Judge, Settings
from kernelwright.judge.isolation import cores
from kernelwright.judge.isolation.cores import cores_beside, siblings_of
from kernelwright.judge.isolation.process import Worker
from kernelwright.judge.isolation.zygote import Zygote
from kernelwright.judge.timing.timing_core import timing_core
from kernelwright.pools.rotation import rotate
from kernelwright.records import Candidate
from tests.judge.snippets import RELU

SETTINGS = Settings.quick(threads=1, blocks=2)
ON = "len(os.sched_getaffinity(0)) == 1"


@pytest.mark.parametrize(
    ("device", "visible", "cores", "chosen"),
    [
        ("cuda:0", None, range(8), 7),
        ("cuda:1", None, range(8), 6),
        ("cuda", "", range(8), 7),
        ("cuda:0", "3", range(8), 4),
        ("cuda:1", "3,2", range(8), 5),
        ("cuda:0", "GPU-5e1f", range(8), 7),
        ("cuda:0", "5", range(10, 14), 12),
        ("cuda:0", None, range(3), None),
        ("cpu", None, range(8), None),
    ],
)
def test_each_gpu_has_another_core_where_one_is_to_spare(monkeypatch, device, visible, cores, chosen):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert timing_core(torch.device(device)) == chosen


@pytest.mark.parametrize(
    ("said", "siblings", "beside"),
    [
        ("6-7\n", {6, 7}, {0, 1, 2, 3, 4, 5}),
        ("3,7\n", {3, 7}, {0, 1, 2, 4, 5, 6}),
        ("7\n", {7}, set(range(7))),
        ("1-7\n", set(range(1, 8)), set(range(7))),
        ("what?\n", {7}, set(range(7))),
        (None, {7}, set(range(7))),
    ],
)
def test_its_siblings_are_kept_free_too_where_others_are_left(monkeypatch, tmp_path, said, siblings, beside):
    monkeypatch.setattr(cores, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    if said is not None:
        (tmp_path / "cpu7/topology").mkdir(parents=True)
        (tmp_path / "cpu7/topology/thread_siblings_list").write_text(said)
    assert siblings_of(7) == siblings
    assert cores_beside(7) == beside
    assert cores_beside(None) == set(range(8))


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
    assert moves == [{judge.core}] * 2 + [cores_beside(judge.core)] * 2


def test_candidates_are_checked_where_they_like_and_timed_on_it(judge, moves):
    checked = judge.evaluate(RELU, candidate(ON), settings=SETTINGS.model_copy(update={"timed": False}))
    assert checked.detail.startswith("RuntimeError: on {")
    assert moves == []
    timed = SETTINGS.model_copy(update={"processes_min": 1, "processes_max": 1})
    judge.evaluate(RELU, candidate("True"), settings=timed)  # whatever a busy machine makes of it
    once = [{judge.core}] * 3 + [cores_beside(judge.core)] * 3
    assert moves == once * (len(moves) // 6)
    assert moves


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
    zygote = Zygote(off=max(cores))
    try:
        assert os.sched_getaffinity(zygote.process.pid) == cores - {max(cores)}
    finally:
        zygote.process.kill()  # it need not import torch first
        zygote.close()
