"""The harness of a screening process, driven in this process."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest
import torch

from kernelwright.judge import Settings
from kernelwright.judge.worker import screening
from kernelwright.judge.worker.screening import ScreeningHarness
from kernelwright.records import Task

SOURCE = """
import threading
import torch

class Model(torch.nn.Module):
    threads = set()
    def forward(self, x):
        type(self).threads.add(threading.get_ident())
        return x * 2

def get_inputs():
    return [torch.randn(64)]

def get_init_inputs():
    return []
"""


def made_in(tmp_path, source: str = SOURCE) -> ScreeningHarness:
    """One that holds the task of this text."""
    config = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "strict_fp32": False,
        "arenas": {},
        "private": str(tmp_path),
    }
    made = ScreeningHarness(config, [])
    task = Task(id="double", source=source)
    made.op_task({"task": task.model_dump_json(), "settings": Settings.quick().model_dump_json()})
    made.op_truth({})
    return made


@pytest.fixture
def harness(tmp_path) -> ScreeningHarness:
    return made_in(tmp_path)


@pytest.mark.parametrize("own_thread", [False, True])
def test_a_candidate_runs_in_a_thread_of_its_own_where_it_wants_one(own_thread: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(screening, "wants_own_thread", lambda source, device: own_thread)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    harness = made_in(tmp_path)
    used = []
    for _ in range(2):
        assert harness.op_build({"source": SOURCE.replace("Model(", "ModelNew(")}) == {}
        harness.op_call({})
        assert harness.op_check({}) == {}
        assert harness.op_time({})["pairs"] >= screening.PAIRS_MIN
        used.append(sys.modules[harness.config["role"]].ModelNew.threads)
        assert harness.op_next({})["clean"]
    here = {threading.get_ident()}
    assert type(harness._facts.oracle.model).threads == here
    assert all((threads == here) != own_thread and len(threads) == 1 for threads in used)


@pytest.mark.parametrize("buffer", [False, True])
def test_each_candidate_that_counts_its_calls_is_timed_beside_a_reference_that_has_counted_as_many(buffer, tmp_path) -> None:
    counts = "register_buffer('calls', torch.tensor(0))" if buffer else "__dict__['calls'] = 0"
    init = f"\n    def __init__(self):\n        super().__init__()\n        self.{counts}"
    source = SOURCE.replace("    threads = set()", init).replace(
        "type(self).threads.add(threading.get_ident())", "self.calls += 1"
    )
    source = source.replace("x * 2", "x * self.calls")
    harness = made_in(tmp_path, source)
    for _ in range(2):
        assert harness.op_build({"source": source.replace("Model(", "ModelNew(")}) == {}
        harness.op_call({})
        assert harness.op_check({}) == {}
        assert int(harness.model.calls) == int(harness._reference.calls) == 3
        harness.op_time({})
        assert int(harness.model.calls) == int(harness._reference.calls) > 3
        assert harness.op_next({})["clean"]


class SharedDevice:
    """A clock whose first event waited until the host had launched all: it has seen the kernels alone."""

    def ready(self) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def settle(self) -> None: ...

    def elapsed_us(self) -> float:
        return 14.0


@pytest.mark.parametrize(("launches_us", "wanted"), [(80, 80.0), (5, 14.0)])
def test_a_call_takes_no_less_than_its_launches(launches_us: int, wanted: float, harness, monkeypatch) -> None:
    harness.op_build({"source": SOURCE.replace("Model(", "ModelNew(")})
    steps = itertools.count(0, 1000 * launches_us)
    monkeypatch.setattr(screening.time, "perf_counter_ns", lambda: next(steps))
    harness.clock = SharedDevice()
    assert harness._call_us(harness.model, harness._timed[0], 1) == wanted
    assert harness._call_us(harness.model, harness._timed[0], 2) == max(launches_us, 14.0) / 2


def test_what_others_take_of_the_device_does_not_count_as_the_reference_s(harness, monkeypatch) -> None:
    """Half of the reference's calls are interrupted, as the longer call is more often."""
    harness.op_build({"source": SOURCE.replace("Model(", "ModelNew(")})
    interrupted = itertools.cycle([0.0, 4000.0])

    def call_us(model, inputs, calls):
        return 50.0 if model is harness.model else 100.0 + next(interrupted)

    monkeypatch.setattr(harness, "_call_us", call_us)
    found = harness.op_time({})
    assert (found["estimate"], found["reference_us"], found["candidate_us"]) == (2.0, 100.0, 50.0)


@pytest.mark.parametrize(
    ("source", "device", "wanted"),
    [
        ("torch.backends.cudnn.benchmark = True", "cuda", True),
        ("torch.backends.cudnn.benchmark = True", "cpu", False),
        ("x * 2", "cuda", False),
    ],
)
def test_only_what_speaks_of_cudnn_on_a_gpu_wants_a_thread(source: str, device: str, wanted: bool) -> None:
    assert screening.wants_own_thread(source, torch.device(device)) is wanted
