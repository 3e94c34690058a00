"""One judge for all of these tests, on what forks the workers of other tests' judges too: starting one imports torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernelwright.judge import Judge, Settings
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation import side
from kernelwright.judge.timing import triple
from tests.conftest import SECRET
from tests.judge.simulated_gpu import SimulatedGpu, SimulatedMemory


@pytest.fixture(scope="session")
def shared_judge(_one_fork_server: type) -> Iterator[Judge]:
    patch = pytest.MonkeyPatch()
    patch.setenv(SECRET, "hunter2")
    assert SECRET in os.environ
    with Judge("cpu", Settings.quick(threads=1, timed=False), fork_server=_one_fork_server()) as judge:
        yield judge
    patch.undo()


@pytest.fixture
def judge(shared_judge: Judge) -> Judge:
    """The shared judge, checking but not timing; tests may give it other settings."""
    shared_judge.settings = Settings.quick(threads=1, timed=False)
    return shared_judge


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This test's own folder in place of the machine's for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """A GPU of 140 GiB, all of it free, in place of torch's."""
    gpu = SimulatedGpu()
    gpu.stand_in(monkeypatch)
    return gpu


@pytest.fixture
def gpu_judge(judge: Judge, simulated_gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """The shared judge as one of that GPU, whose memory nobody else wants."""
    monkeypatch.setattr(judge, "device", torch.device("cuda:0"))
    monkeypatch.setattr(judge, "memory", SimulatedMemory())
    return judge


@pytest.fixture
def set_large_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes of tensors from which a task is taken for a large one."""
    return lambda size: monkeypatch.setattr(side, "LARGE_BYTES", size)


@pytest.fixture
def few_for_a_series(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes tasks from now on for too large for a series."""
    return lambda: monkeypatch.setattr(side, "SERIES_BYTES_MAX", 1)


@pytest.fixture
def cudnn_in_tf32(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets convolutions of the reference use TF32 from now on, as on a GPU."""
    return lambda: monkeypatch.setattr(Trial, "lets_cudnn_use_tf32", True)


@pytest.fixture
def warm_up_each_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes every call from now on for a brief one of a GPU, before which the host is warmed up."""

    def warm_up_each_call() -> None:
        monkeypatch.setattr(triple, "_WARMED", ("cpu",))
        monkeypatch.setattr(triple, "_BRIEF_US", 1e9)

    return warm_up_each_call
