"""The process that runs schedules: what each kind of bad schedule becomes, and that the next one still runs."""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelwright.errors import DeviceError
from kernelwright.judge.schedules import (
    ContainedLauncher,
    Plan,
    Ready,
    ScheduleFailedError,
    ScheduleFailure,
    _timed,
    time_blocks,
)
from tests.gpu.fakes import (
    GPU,
    HANGS,
    ORIGINAL_US,
    SPEC,
    FakeLauncher,
    Placed,
    fake_launcher,
    launcher_of_a_random_kernel,
    launcher_of_a_trivial_kernel,
    no_gpu,
)
from tests.quick import exhaustive_but

PLAN = Plan(coarse=3, fine=6)


@pytest.fixture(scope="module")
def child():
    with ContainedLauncher(SPEC, b"original", fake_launcher) as launcher:
        yield launcher


def test_it_says_what_it_runs_on(child):
    ready = child.ready()
    assert ready.gpu == GPU
    assert ready.original_us == pytest.approx(ORIGINAL_US, rel=0.01)


@pytest.mark.parametrize(
    ("cubin", "failure", "detail"),
    [
        (b"fault", ScheduleFailure.FAULT, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (b"refused", ScheduleFailure.FAULT, "CUDA_ERROR_INVALID_IMAGE"),
        (b"exit", ScheduleFailure.CRASH, "exit status 41"),
    ],
)
def test_a_bad_schedule_is_reported_and_the_next_one_runs(child, cubin, failure, detail):
    before = child.restarts
    with pytest.raises(ScheduleFailedError) as failed:
        child.time(cubin, PLAN)
    assert (failed.value.failure, failed.value.detail) == (failure, detail)
    assert child.restarts == before + 1
    assert child.time(b"us=10", PLAN).ratios[0] == pytest.approx(2.0, rel=0.01)


def test_a_schedule_that_never_ends_is_stopped():
    with ContainedLauncher(SPEC, b"original", fake_launcher, limit_s=0.3) as child:
        process = child.process
        with pytest.raises(ScheduleFailedError) as failed:
            child.compare(b"hang", [1])
        assert failed.value.failure is ScheduleFailure.HANG
        assert not process.is_alive()
        child.limit_s = 60.0
        assert child.compare(b"same", [1]) is None


def test_outputs_are_compared_on_every_seed(child):
    assert child.compare(b"same", [3, 4, 5]) is None
    assert "1 of 256 bytes of y differ" in child.compare(b"wrong", [3, 4])


@pytest.mark.parametrize(
    ("original", "factory", "said"),
    exhaustive_but(
        [
            (b"fault", fake_launcher, "CUDA_ERROR_ILLEGAL_ADDRESS"),
            (b"exit", fake_launcher, "exit status 41"),
            (b"original", launcher_of_a_random_kernel, "two launches of the original differ"),
            (b"original", launcher_of_a_trivial_kernel, "leaves every byte of y the same"),
            (b"original", no_gpu, "wanted the CUDA driver"),
        ],
        (b"exit", fake_launcher, "exit status 41"),
        (b"original", launcher_of_a_random_kernel, "two launches of the original differ"),
        (b"original", no_gpu, "wanted the CUDA driver"),
    ),
)
def test_an_original_that_does_not_run_is_the_machines_or_the_specs_fault(original, factory, said):
    child = ContainedLauncher(SPEC, original, factory)
    with pytest.raises(DeviceError, match=said):
        child.ready()
    assert child.process is None


def test_a_defect_of_the_launcher_is_not_blamed_on_the_schedule(child):
    with pytest.raises(DeviceError, match="a defect of the launcher"):
        child.time(b"defect", PLAN)
    assert child.compare(b"same", [1]) is None


def test_an_answer_of_another_form_is_a_defect_of_ours(monkeypatch):
    launcher = ContainedLauncher(SPEC, b"original", fake_launcher)
    launcher._ready = Ready(GPU, 1.0)
    monkeypatch.setattr(ContainedLauncher, "_answer", lambda self, *asked: 5)
    with pytest.raises(DeviceError, match="wanted ScheduleSamples"):
        launcher.time(b"same", PLAN)
    with pytest.raises(DeviceError, match=r"wanted str \| None"):
        launcher.compare(b"same", [1])


def test_a_process_that_survives_its_killing_is_a_device_error():
    launcher = ContainedLauncher(SPEC, b"original", fake_launcher)
    immortal = SimpleNamespace(pid=7, is_alive=lambda: True, kill=lambda: None, join=lambda seconds: None)
    launcher.process, launcher._connection = immortal, SimpleNamespace(close=lambda: None)
    with pytest.raises(DeviceError, match="the GPU has to be reset"):
        launcher._stop()
    launcher.process = None


def test_no_process_is_left_behind():
    child = ContainedLauncher(SPEC, b"original", fake_launcher)
    child.ready()
    pid = child.process.pid
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.exhaustive
def test_a_hanging_schedule_does_not_outlive_a_killed_parent(tmp_path):
    code = (
        "import sys, threading\n"
        "from kernelwright.judge.schedules import ContainedLauncher\n"
        "from tests.gpu.fakes import SPEC, fake_launcher\n"
        "if __name__ == '__main__':\n"
        "    child = ContainedLauncher(SPEC, b'original', fake_launcher, limit_s=100)\n"
        "    child.ready()\n"
        "    print(child.process.pid, flush=True)\n"
        "    child.compare(b'hang', [1])\n"
    )
    os.mkfifo(tmp_path / "hangs")
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, HANGS: str(tmp_path / "hangs")}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    descriptor = os.pidfd_open(int(parent.stdout.readline()))
    (tmp_path / "hangs").read_text()
    parent.kill()
    parent.wait()
    try:
        ended, _, _ = select.select([descriptor], [], [], 30)
    finally:
        os.close(descriptor)
    assert ended


@pytest.mark.parametrize(
    ("cubin", "blocks"), [(b"us=30", 3), (b"us=20.1", 6), (b"us=19", 6)], ids=["slower", "alike", "faster"]
)
def test_what_is_clearly_slower_gets_only_a_first_look(cubin, blocks):
    samples = time_blocks(FakeLauncher(SPEC), [b"original"] * 2, [cubin] * 2, PLAN)
    assert len(samples.ratios) == blocks
    assert len(samples.original_us) == 2 * blocks


def test_linear_drift_cancels_in_a_block():
    samples = time_blocks(FakeLauncher(SPEC), [b"original"] * 2, [b"same"] * 2, PLAN)
    assert all(ratio == pytest.approx(1.0, abs=1e-7) for ratio in samples.ratios)
    assert samples.original_us[-1] > samples.original_us[0] * 1.001


@pytest.mark.parametrize("sets", [1, 2], ids=["same places again", "places in turns"])
def test_where_code_lies_cancels_in_a_steady_plan(sets):
    launcher = Placed(sets)
    samples = _timed(launcher, b"original", b"same", Plan.steady(40), lambda: None)
    assert len(samples.ratios) == 10
    assert samples.ratios == pytest.approx([1.0] * 10, abs=1e-9)
    assert launcher.loaded == {}


def test_where_code_lies_shows_in_a_single_round():
    samples = _timed(Placed(1), b"original", b"same", PLAN, lambda: None)
    assert abs(samples.ratios[0] - 1.0) > 0.01


@pytest.mark.parametrize("sets", [1, 2], ids=["same places again", "places in turns"])
def test_what_a_search_compares_lay_in_the_same_places(sets):
    launcher = Placed(sets)
    found = [statistics.median(_timed(launcher, b"original", b"same", PLAN, lambda: None).ratios) for _ in range(2 * sets)]
    assert found[:sets] == found[sets:]
