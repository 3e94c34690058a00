"""Workers of the reference that are kept: what they forget, and when they are ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernelwright.errors import DeviceError
from kernelwright.gpu.devices import has_room_for
from kernelwright.judge import Judge
from kernelwright.judge.isolation import process
from kernelwright.judge.isolation.workers import Workers
from kernelwright.judge.settings import Settings
from kernelwright.judge.timing.rotation import rotate
from kernelwright.judge.worker.arena import SharedArena
from kernelwright.records import Candidate, Reason, Task
from tests.judge.snippets import LOCKS
from tests.quick import exhaustive_but

MODULE = """
import torch
from torch import nn
{before}

class Model(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        {inside}
        return {body}

def get_inputs():
    return [torch.randn(4, {size})]

def get_init_inputs():
    return [{size}]
"""


def task(body: str, *, size: int = 8, before: str = "", inside: str = "pass") -> Task:
    source = MODULE.format(body=body, size=size, before=before, inside=inside)
    return Task(id="kept", source=source)


def candidate(made: Task) -> Candidate:
    return Candidate(source=made.source.replace("class Model(", "class ModelNew("), policy="test")


# What forks them is shared: which of them are kept is the judge's to decide.
pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture
def judge(one_fork_server: None) -> Iterator[Judge]:
    """A judge that keeps the reference's workers on a processor too, where all of it can be tried."""
    with Judge("cpu", Settings.quick(threads=1, timed=False, thorough=False)) as made:
        made.workers = Workers(made.fork_server, keep=3)
        yield made


def waiting(judge: Judge) -> list[int]:
    return [worker.pid for worker in judge.workers.waiting]


RELU = task("torch.relu(self.linear(x))")
WIDER = task("torch.sigmoid(self.linear(x)) * 2", size=32)


@pytest.fixture
def started(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Role, build folder and process id of each worker that is forked."""
    seen, spawn = [], judge.fork_server.spawn

    def spawn_seen(config, files):
        seen.append((config["role"], config["build"], pid := spawn(config, files)))
        return pid

    monkeypatch.setattr(judge.fork_server, "spawn", spawn_seen)
    return seen


@pytest.mark.exhaustive
def test_references_serve_one_task_after_another_and_candidates_are_always_fresh(judge, started):
    for made in (RELU, WIDER, RELU):
        accepted = judge.evaluate(made, candidate(made))
        assert accepted.verdict == "accepted", accepted.detail
        wrong = judge.evaluate(made, Candidate(source=candidate(made).source.replace("(x))", "(x)) + 1e-2"), policy="test"))
        assert wrong.reason is Reason.WRONG_OUTPUT
    assert [role for role, *_ in started].count("reference") == 1
    timed = judge.settings.model_copy(update={"timed": True, "processes_min": 1, "processes_max": 1})
    judge.evaluate(RELU, candidate(RELU), settings=timed)  # whatever a busy machine makes of it
    assert [role for role, *_ in started].count("reference") == 3  # one checks, two are timed
    candidates = [pid for role, _, pid in started if role == "candidate"]
    assert len(set(candidates)) == len(candidates) >= 3 * 2 + 2
    assert len(waiting(judge)) == 3


@pytest.mark.exhaustive
def test_baselines_have_processes_of_their_own_kind(judge, started):
    settings = judge.settings.model_copy(update={"timed": True, "blocks": 2, "triple_s": 0.0})
    for made in (RELU, WIDER, RELU):
        source = made.source + "\n\nclass ModelNew(Model):\n    pass\n"
        both = [Candidate(source=f"{source}# {name}", policy="baseline", techniques=(name,)) for name in ("one", "other")]
        assert [found.accepted for found in rotate(judge, made, both, settings=settings)] == [True, True]
    builds = [build for role, build, _ in started if role == "baseline"]
    assert len(builds) == len(set(builds)) == 2, "one process and one folder of caches for each kind"


def test_a_kept_worker_has_let_go_of_its_arenas(judge):
    judge.evaluate(RELU, candidate(RELU))
    assert all(worker.arenas == {} for worker in judge.workers.waiting)


@pytest.mark.parametrize(
    "changes",
    [
        {"before": "torch.set_default_dtype(torch.float32); torch.backends.cudnn.benchmark = True"},
        {"inside": "nn.functional.kernelwright_was_here = lambda: None"},
    ],
    ids=["setting", "patch"],
)
def test_one_whose_task_left_a_trace_is_ended(judge, changes):
    made = task("torch.relu(self.linear(x))", **changes)
    judge.evaluate(made, candidate(made))
    assert waiting(judge) == []


def test_one_that_died_or_cannot_forget_is_ended(judge):
    judge.evaluate(RELU, candidate(RELU))
    (worker,) = judge.workers.waiting
    os.kill(worker.pid, signal.SIGKILL)
    assert not worker.forget()


def test_one_that_died_while_it_waited_is_replaced(judge):
    judge.evaluate(RELU, candidate(RELU))
    (before,) = waiting(judge)
    os.kill(before, signal.SIGKILL)
    assert judge.evaluate(RELU, candidate(RELU)).verdict == "accepted"
    assert waiting(judge) not in ([], [before])


@pytest.mark.parametrize("change", exhaustive_but(["strict_fp32", "tf32_products"], "tf32_products"))
def test_other_limits_want_other_processes(judge, change):
    judge.workers = Workers(judge.fork_server, keep=1)
    judge.evaluate(RELU, candidate(RELU))
    before = waiting(judge)
    other = judge.settings.model_copy(update={change: True})
    assert judge.evaluate(RELU, candidate(RELU), settings=other).verdict == "accepted"
    assert waiting(judge) == before  # no room for a second


def test_without_room_none_is_kept_and_what_waits_ends_before_the_judge_has_the_memory_alone(judge, simulated_gpu):
    rooms = [True]
    judge.workers = Workers(judge.fork_server, keep=3, has_room=lambda kind: rooms[-1])
    judge.evaluate(RELU, candidate(RELU))
    (kept,) = waiting(judge)
    rooms.append(False)
    judge.evaluate(RELU, candidate(RELU))
    assert waiting(judge) == []
    with pytest.raises(ProcessLookupError):
        os.kill(kept, 0)
    rooms.append(True)
    judge.evaluate(RELU, candidate(RELU))
    assert len(waiting(judge)) == 1
    simulated_gpu.asked.clear()
    with judge.memory(alone=True):
        assert (waiting(judge), simulated_gpu.asked) == ([], ["empty_cache"])
    assert judge.evaluate(RELU, candidate(RELU)).verdict == "accepted"


@pytest.mark.parametrize(("free", "kept"), [(30, {"reference", "compile"}), (10, {"reference"}), (3, set())])
def test_where_memory_is_scarce_the_references_processes_alone_stay(simulated_gpu, free, kept):
    simulated_gpu.free_gib, simulated_gpu.total_gib = free, 100
    assert {kind for kind in ("reference", "compile") if has_room_for(kind, torch.device("cuda"))} == kept


def test_whether_one_is_kept_is_asked_of_its_kind(judge):
    asked = []
    judge.workers = Workers(judge.fork_server, keep=3, has_room=lambda kind: asked.append(kind))
    judge.evaluate(RELU, candidate(RELU))
    assert set(asked) == {"reference"}
    assert waiting(judge) == []


def test_closing_ends_them_and_removes_their_directory(temporary):
    with Judge("cpu", Settings.quick(threads=1, timed=False)) as made:
        made.workers = Workers(made.fork_server, keep=3)
        made.evaluate(RELU, candidate(RELU))
        assert len(list(temporary.glob("kernelwright-judge-*/*"))) > 0
    assert sorted(path.name for path in temporary.iterdir()) == LOCKS


def open_arenas() -> int:
    """How many arenas' files this process has open."""
    handles = Path("/proc/self/fd").iterdir()
    return sum(handle.is_symlink() and "memfd:kernelwright" in str(handle.readlink()) for handle in handles)


@pytest.mark.parametrize("last", [3, 6, 9])
def test_where_memory_for_the_last_arena_is_lacking_those_before_it_are_given_back(judge, monkeypatch, last):
    class Scarce(SharedArena):
        def __init__(self, device, size_bytes):
            counted.append(size_bytes)
            if len(counted) == last:
                self.device, self._file, self._pointer = device, None, 0
                raise DeviceError("Wanted an arena; the GPU is full.")
            super().__init__(device, size_bytes)

    counted: list[int] = []
    monkeypatch.setattr(process, "SharedArena", Scarce)
    before = open_arenas()
    settings = Settings.quick(threads=1, blocks=2, processes_min=1, processes_max=1, fresh_processes=True)
    with pytest.raises(DeviceError, match="GPU is full"):
        judge.evaluate(RELU, candidate(RELU), settings=settings)
    judge.release_idle()
    assert len(counted) >= last
    assert open_arenas() == before
