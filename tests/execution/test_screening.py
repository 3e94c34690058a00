"""Screening processes: what they estimate, and that a candidate that dies, hangs or leaks costs nothing but itself."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import defaultdict
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernelwright.errors import CrowdedError, DeviceError, TaskError
from kernelwright.execution import screening
from kernelwright.execution import screens as screens_module
from kernelwright.execution.local import Job
from kernelwright.execution.screening import SPARED_BYTES, ScreeningPool, ScreeningProcess, device_limit_bytes
from kernelwright.execution.screens import Screens
from kernelwright.judge import Settings
from kernelwright.judge.isolation.gate import DisturbedError
from kernelwright.judge.isolation.process import Worker
from kernelwright.records import Candidate, Reason, Task
from kernelwright.records.compiling import Compiles
from kernelwright.records.screened import screened_of
from tests.samples import module

TASK = Task(
    id="diagonal",
    source="""import torch


class Model(torch.nn.Module):
    def forward(self, a, b):
        return torch.diag(a) @ b


def get_inputs():
    return [torch.randn(512), torch.randn(512, 512)]


def get_init_inputs():
    return []
""",
)
SETTINGS = Settings.quick(threads=1, run_limit_s=3.0)

RIGHT = module()
WRONG = module("a[:, None] + b")
TRANSPOSED = module("(a[:, None] * b).mT.contiguous().mT")
RAISES = module("a @ b.nowhere")
DIES = module("__import__('os').kill(__import__('os').getpid(), 11)")
HANGS = module("__import__('time').sleep(1000)")
CHANGES_FLAGS = module("torch.use_deterministic_algorithms(True) or a[:, None] * b")
NO_MODULE = "class ModelNew: pass"
NO_PYTHON = "def broken(:"


@pytest.fixture(scope="module")
def pool():
    with ScreeningPool(TASK, "cpu", SETTINGS, slots=1) as pool:
        yield pool


def look(pool: ScreeningPool, *sources: str):
    found = {candidate.source: one for candidate, one in pool.screen(Candidate(source=source) for source in sources)}
    return [found[source] for source in sources]


def test_a_right_candidate_is_estimated_and_a_wrong_one_is_not(pool):
    right, wrong = look(pool, RIGHT, WRONG)
    assert (right.correct, right.reason) == (True, None)
    assert right.estimate > 0
    assert right.spread >= 0
    assert right.pairs >= 7
    assert right.candidate().sha256 == right.candidate_sha256 == Candidate(source=RIGHT).sha256
    assert (wrong.correct, wrong.reason, wrong.estimate) == (False, Reason.WRONG_OUTPUT, None)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (TRANSPOSED, Reason.WRONG_STRIDES),
        (RAISES, Reason.RUNTIME_ERROR),
        (NO_MODULE, Reason.NO_MODEL_NEW),
        (NO_PYTHON, Reason.SYNTAX_ERROR),
        (module("b * 1"), Reason.WRONG_OUTPUT),
        (module("(a[:, None] * b).half()"), Reason.WRONG_DTYPE),
        (module("(a[:, None] * b)[0]"), Reason.WRONG_SHAPE),
        (module("[a[:, None] * b]"), Reason.WRONG_TYPE),
        (module("b.mul_(a[:, None])"), Reason.INPUT_MUTATED),
    ],
)
def test_what_is_wrong_has_a_reason_code(pool, source, reason):
    (found,) = look(pool, source)
    assert (found.correct, found.reason) == (False, reason), found.detail


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("source", "reason"),
    [(DIES, Reason.CRASHED), (HANGS, Reason.RUN_TIMEOUT), (CHANGES_FLAGS, None)],
)
def test_after_a_crash_a_hang_or_changed_settings_the_next_candidate_has_a_fresh_process(source, reason):
    settings = SETTINGS.model_copy(update={"build_limit_s": 5.0})
    with ScreeningPool(TASK, "cpu", settings, slots=1) as pool:
        before, bad, after = look(pool, RIGHT, source, RIGHT + "\n")
    assert bad.reason == reason
    assert (before.correct, after.correct) == (True, True)
    assert [one.spent_s["task"] > 0.02 for one in (before, bad, after)] == [True, False, True]


def test_one_that_has_a_gpus_memory_alone_may_have_nearly_all_of_it(monkeypatch):
    total = 0
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    limit = 2 * SETTINGS.device_memory_limit_bytes
    gpu = torch.device("cuda:0")
    total = 140 << 30
    assert device_limit_bytes(SETTINGS, gpu, alone=True) == total - SPARED_BYTES > limit
    assert device_limit_bytes(SETTINGS, gpu, alone=False) == limit
    total = limit
    assert device_limit_bytes(SETTINGS, gpu, alone=True) == limit
    assert device_limit_bytes(SETTINGS, torch.device("cpu"), alone=True) == limit


@pytest.mark.exhaustive
def test_a_task_that_does_not_run_is_the_tasks_fault():
    broken = Task(id="broken", source=TASK.source.replace("torch.diag(a) @ b", "a @ nothing"))
    with ScreeningPool(broken, "cpu", SETTINGS, slots=1) as pool:
        (found,) = look(pool, RIGHT)
    assert isinstance(found, TaskError)


@pytest.mark.exhaustive
def test_one_whose_process_was_ended_for_anothers_kernels_is_looked_at_again(monkeypatch):
    request, calls = Worker.request, []

    def disturbed(self, op, timeout_s, **fields):
        if op == "check" and not calls:
            calls.append(self.spec.gate)
            raise DisturbedError("others")
        return request(self, op, timeout_s, **fields)

    monkeypatch.setattr(Worker, "request", disturbed)
    with ScreeningPool(TASK, "cpu", SETTINGS, slots=1) as pool:
        (found,) = look(pool, RIGHT)
        assert found.correct
        assert pool._processes[0].worker.spec.gate is not calls[0]


@pytest.mark.exhaustive
def test_one_for_whose_kernels_others_waited_too_long_is_no_good_and_its_process_is_replaced(monkeypatch):
    request, calls = Worker.request, []

    def waited_for(self, op, timeout_s, **fields):
        if op == "check" and not calls:
            calls.append(op)
            self.close()
            raise CrowdedError("work on the GPU went on for 10 s.")
        return request(self, op, timeout_s, **fields)

    monkeypatch.setattr(Worker, "request", waited_for)
    with ScreeningPool(TASK, "cpu", SETTINGS, slots=1) as pool:
        found = look(pool, RIGHT, RIGHT + "# again")
    assert [one.correct for one in found] == [False, True]
    assert (found[0].reason, found[0].detail) == (Reason.RUN_TIMEOUT, "work on the GPU went on for 10 s.")


@pytest.mark.exhaustive
def test_candidates_of_several_tasks_are_looked_at_and_a_broken_task_is_missing():
    broken = Task(id="broken", source=TASK.source.replace("torch.diag(a) @ b", "a @ nothing"))
    other = Task(id="other", source=TASK.source + "# other\n")
    jobs = [Job(task, Candidate(source=text)) for task in (TASK, broken, other) for text in (RIGHT, WRONG)]
    with Screens(["cpu"], SETTINGS) as screens:
        screens.prepare([other])
        found = {(job.task.id, job.candidate.source): one.correct for job, one in screens.look(jobs)}
        assert list(screens.look([])) == []
    assert found == {(task.id, text): text == RIGHT for task in (TASK, other) for text in (RIGHT, WRONG)}


def test_processes_of_a_task_may_start_before_its_candidates_are_there(monkeypatch):
    events = []

    class FakeScreeningPool:
        def __init__(self, task, *given):
            self.name = task.id
            events.append(("starts", task.id))

        def __enter__(self):
            return self

        def __exit__(self, *given):
            self.close()

        def close(self):
            events.append(("ends", self.name))

        def screen(self, candidates):
            return iter([(one, screened_of(TASK, one, correct=True)) for one in candidates])

    monkeypatch.setattr(screens_module, "ScreeningPool", FakeScreeningPool)
    monkeypatch.setattr(screens_module, "ForkServer", lambda off: io.StringIO())  # something to close
    other = Task(id="other", source=TASK.source + "# other\n")
    with Screens(["cuda:0"], SETTINGS) as screens:
        screens.prepare([other])
        screens.prepare([TASK])
        assert events == [("starts", "other"), ("ends", "other"), ("starts", TASK.id)], "what nobody asked for ends"
        assert len(list(screens.look([Job(TASK, Candidate(source=RIGHT))]))) == 1
        assert len(list(screens.look([Job(TASK, Candidate(source=WRONG))]))) == 1
        screens.prepare([other])
    assert events[3:] == [("ends", TASK.id), ("starts", TASK.id), ("ends", TASK.id), ("starts", "other"), ("ends", "other")]


def test_what_compiles_nothing_waits_for_the_first_process_and_compilers_for_any(pool):
    first, *_ = pool._processes
    assert all(pool.takes(kind) for kind in Compiles)
    pool._free.remove(first)
    assert not any(pool.takes(kind) for kind in Compiles)
    pool._free.append(ScreeningProcess(pool))
    assert [kind for kind in Compiles if pool.takes(kind)] == [Compiles.CODE, Compiles.INDUCTOR, Compiles.VARIANTS]
    pool._free[:] = [first]


def test_the_reference_makes_way_for_those_who_measure_and_is_not_ended_for_it(monkeypatch):
    """In float64 it is at work for seconds, and what was timed beside it read twice as long."""
    asked = []

    @contextlib.contextmanager
    def gate(*, shared):
        asked.append(("gate", shared))
        yield
        asked.append("left")

    class FakeWorker:
        is_trusted = Worker.is_trusted

        def __init__(self, zygote, spec, settings):
            self.spec = spec

        def request(self, op, limit_s, **_):
            asked.append((op, self.is_trusted))
            return {"least_us": 1.0, "operations_us": 3.0, "reference_us": 2.0}

    monkeypatch.setattr(screening, "Worker", FakeWorker)
    zygotes = SimpleNamespace(keep_off=lambda core: None)
    process = object.__new__(ScreeningProcess)
    process._pool = SimpleNamespace(
        device="cpu",
        directory=Path("none"),
        task=TASK,
        settings=SETTINGS,
        build_limit_s=20.0,
        closing=False,
        zygote_for=lambda compiling: zygotes,
    )
    process._gate = gate
    worker = process._start(compiling=False)
    assert asked == [("task", True), ("gate", True), ("truth", True), "left"]
    assert not worker.is_trusted, "candidates' code runs in it from now on"
    assert process._reference_us == 2.0
    monkeypatch.setattr(process, "_started", lambda compiling: worker)
    monkeypatch.setattr(process, "_look", lambda *_: {"correct": True})
    monkeypatch.setattr(process, "_make_ready", lambda worker: None)
    process._pool.wants_compiler = lambda source: False
    found = process.screen(Candidate(source=""))
    assert (found.least_us, found.operations_us) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("device", "reference_us", "alone"), [("cuda", 1200.0, True), ("cuda", 90.0, False), ("cpu", None, False)]
)
def test_long_calls_have_a_gpu_alone_while_they_are_timed(device, reference_us, alone):
    process, asked = object.__new__(ScreeningProcess), []
    timed = {"estimate": 2.0, "spread": 0.1, "pairs": 9, "reference_us": 1200.0, "candidate_us": 600.0}

    @contextlib.contextmanager
    def gate(*, shared):
        asked.append(("gate", shared))
        yield

    def request(what, limit_s, **_):
        asked.append((what, limit_s) if what == "time" else what)
        return timed if what == "time" else {}

    looked_at = SimpleNamespace(
        build_limit_s=20.0,
        run_limit_s=20.0,
        where=torch.device(device),
        settings=SETTINGS,
        timing=lambda *_: contextlib.nullcontext(),
    )
    process._pool, process._gate, process._reference_us = looked_at, gate, reference_us
    found = process._look(SimpleNamespace(request=request), Candidate(source=""), defaultdict(float))
    assert found["estimate"] == 2.0
    assert asked == [
        "build",
        ("gate", True),
        "call",
        "check",
        ("gate", not alone),
        ("time", pytest.approx(5.12) if alone else 20.0),
    ]


def test_on_a_gpu_whatever_compiles_is_forked_from_the_zygote_with_the_compiler(pool, monkeypatch):
    sources = [module(note=note) for note in ("", "triton", "torch.compile")]
    assert [pool.wants_compiler(one) for one in sources] == [False, False, True]
    monkeypatch.setattr(pool, "where", torch.device("cuda"))
    assert [pool.wants_compiler(one) for one in sources] == [False, True, True]
    monkeypatch.setattr(pool._zygote, "_compiling", pool)  # stands for it
    assert pool.zygote_for(True) is pool
    assert pool.zygote_for(False) is pool._zygote.plain
    monkeypatch.setattr(pool, "_zygote", "one that was given")
    assert pool.zygote_for(True) == "one that was given"


def test_on_a_gpu_some_processes_for_compilers_start_before_there_is_a_candidate(monkeypatch):
    begun = []
    monkeypatch.setattr(ScreeningProcess, "begin", lambda self, compiling: begun.append(compiling))
    monkeypatch.setattr(screening, "lock_path", lambda device, what: None)
    monkeypatch.setattr(screening, "DeviceGate", lambda *_: None)
    monkeypatch.setattr(screening, "Zygotes", NoZygotes)
    for device, slots, wanted in (
        ("cuda:0", 8, [False, True, True, True]),
        ("cuda:0", 2, [False, True]),
        ("cpu", 4, [False]),
    ):
        with ScreeningPool(TASK, device, SETTINGS, slots) as pool:
            wait(pool._begun)
        assert sorted(begun) == wanted
        begun.clear()


class NoZygotes:
    """Starts nothing."""

    def __init__(self, device_type):
        pass

    def keep_off(self, core):
        pass

    def close(self):
        pass


def test_what_runs_out_of_memory_beside_other_processes_is_tried_again_when_they_have_ended(monkeypatch):
    alive, seen, together = set(), set(), threading.Barrier(2)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.\nProcess 1 has 6 GiB")

    def screen(process, candidate):
        alive.add(process)
        if candidate.sha256 in seen:
            assert alive == {process}, "others still hold the task"
            return screened_of(TASK, candidate, correct=True)
        seen.add(candidate.sha256)
        together.wait(timeout=60)
        if candidate.source == RIGHT:
            raise full  # its own look at whether the GPU rests, say
        return screened_of(TASK, candidate, correct=False, reason=Reason.OUT_OF_MEMORY)

    monkeypatch.setattr(ScreeningProcess, "begin", lambda process, compiling: None)
    monkeypatch.setattr(ScreeningProcess, "screen", screen)
    monkeypatch.setattr(ScreeningProcess, "close", lambda process: alive.discard(process))
    candidates = [Candidate(source=source, policy="test") for source in (RIGHT, WRONG)]
    with ScreeningPool(TASK, "cpu", SETTINGS, 2) as pool:
        found = list(pool.screen(candidates))
    assert [one.correct for _, one in found] == [True, True]


def test_what_runs_out_of_memory_alone_says_so(monkeypatch):
    def screen(process, candidate):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 600.00 GiB.\nProcess 1 has 6 GiB")

    monkeypatch.setattr(ScreeningProcess, "begin", lambda process, compiling: None)
    monkeypatch.setattr(ScreeningProcess, "screen", screen)
    with ScreeningPool(TASK, "cpu", SETTINGS, 2) as pool:
        ((_, error),) = pool.screen([Candidate(source=RIGHT, policy="test")])
    assert isinstance(error, DeviceError)
    assert str(error).endswith("out-of-memory: CUDA out of memory. Tried to allocate 600.00 GiB.")
