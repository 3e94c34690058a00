"""The harness of a screening process, driven in this process."""

from __future__ import annotations

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


@pytest.mark.parametrize("own_thread", [False, True])
def test_a_candidate_runs_in_a_thread_of_its_own_where_it_wants_one(own_thread: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(screening, "wants_own_thread", lambda source, device: own_thread)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "strict_fp32": False,
        "arenas": {},
        "private": str(tmp_path),
    }
    harness = ScreeningHarness(config, [])
    task = Task(id="double", source=SOURCE)
    harness.op_task({"task": task.model_dump_json(), "settings": Settings.quick().model_dump_json()})
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
