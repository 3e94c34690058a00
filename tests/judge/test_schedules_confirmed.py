"""Verdicts of schedules, and costs during a search, with a launcher that stands in for the GPU."""

from __future__ import annotations

import json

import pytest

from kernelwright.assembly.backends import GpuBackend, Status
from kernelwright.assembly.search import numbers_and_ratios_of, numbers_of, read_confirmation
from kernelwright.errors import InfrastructureError
from kernelwright.gpu import disassemble
from kernelwright.gpu.launch_spec import Target
from kernelwright.judge.schedules import Confirmation, Plan, ScheduleFailure, confirm
from kernelwright.sass import Schedule, load
from tests.gpu.fakes import ORIGINAL_US, SPEC, fake_launcher, faster_by_every_changed_byte, lucky_at_first

PLAN = Plan(coarse=2, fine=3)
AGAIN = Plan(coarse=2, fine=4, rounds=4)


class Program:
    """Enough of a program for a schedule that is only bytes."""

    def __init__(self, data):
        self.image = type("Image", (), {"data": data})


class Bytes:
    """A schedule that is only bytes."""

    def __init__(self, cubin):
        self._cubin = cubin

    def cubin(self, program):
        return self._cubin


@pytest.fixture
def backend():
    with GpuBackend(
        Program(b"original"), Target(SPEC, b"original", 90), plan=PLAN, again=AGAIN, factory=fake_launcher, limit_s=2
    ) as it:
        yield it


def test_a_cost_is_on_the_scale_of_the_originals_own_time(backend):
    assert backend.measure(Bytes(b"original")).cost == backend.control().original_us == pytest.approx(ORIGINAL_US, rel=0.02)
    assert backend.measure(Bytes(b"us=10")).cost == pytest.approx(backend.control().original_us / 2, rel=0.01)
    assert backend.measure(Bytes(b"us=40")).cost == pytest.approx(2 * backend.control().original_us, rel=0.01)


def test_a_slower_schedule_is_given_up_early_and_a_new_best_is_checked(backend):
    slow, fast = backend.measure(Bytes(b"us=40")), backend.measure(Bytes(b"us=10"))
    assert (slow.blocks, slow.checked) == (PLAN.coarse, False)
    assert (fast.blocks, fast.checked) == (AGAIN.fine, True)
    # Better than the original, but not than the best so far.
    assert backend.measure(Bytes(b"us=15")).blocks == PLAN.coarse


def test_what_was_only_lucky_is_no_new_best(tmp_path, monkeypatch):
    lucky = Bytes(b"lucky=10")
    with GpuBackend(
        Program(b"original"), Target(SPEC, b"original", 90), plan=PLAN, again=AGAIN, factory=lucky_at_first, limit_s=2
    ) as backend:
        found = backend.measure(lucky)
        assert found.blocks == AGAIN.coarse
        assert found.speedup == pytest.approx(0.8, rel=0.01)
        assert (backend.best_speedup, found.checked) == (1.0, False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cubin", "status"),
    [
        (b"us=10 wrong", Status.WRONG_OUTPUT),
        (b"fault", Status.FAULT),
        (b"exit", Status.CRASH),
        (b"hang", Status.HANG),
    ],
)
def test_a_schedule_that_fails_has_no_cost_and_says_why(backend, cubin, status):
    found = backend.measure(Bytes(cubin))
    assert found.status is status
    assert (found.cost, found.baseline, found.speedup) == (None, None, None)
    assert backend.counts == {status: 1}
    assert backend.best_speedup == 1.0


def test_every_output_is_checked_on_request():
    target = Target(SPEC, b"original", 90)
    with GpuBackend(Program(b"original"), target, plan=PLAN, factory=fake_launcher, check_all=True) as backend:
        assert backend.measure(Bytes(b"us=40 wrong")).status is Status.WRONG_OUTPUT


def test_the_same_schedule_runs_once(backend):
    assert backend.measure(Bytes(b"us=12")) is backend.measure(Bytes(b"us=12"))
    assert backend.counts[Status.MEASURED] == 1


def test_a_program_of_another_cubin_is_refused():
    with pytest.raises(InfrastructureError, match="another"):
        GpuBackend(Program(b"other"), Target(SPEC, b"original", 90))


@pytest.mark.exhaustive
def test_it_is_a_backend_of_the_game(row_sum):
    pytest.importorskip("gymnasium")
    from kernelwright.assembly.game import AssemblyGameEnv

    program = load(row_sum.cubin, disassemble)
    with GpuBackend(program, row_sum, plan=PLAN, factory=faster_by_every_changed_byte) as backend:
        env = AssemblyGameEnv(program, backend=backend, memory_only=False)
        _, info = env.reset(seed=0)
        assert (info["backend"], info["unit"]) == ("gpu-time", "us")
        action = int(env.action_masks()[:-1].argmax())
        _, reward, *_ = env.step(action)
        assert reward > 0
        assert backend.measure(Schedule(program.kernel())).detail == "the original"


def test_confirmation_takes_fresh_processes_and_an_a_a_control():
    seen, target = [], Target(SPEC, b"original", 90)
    found, same, wrong, faulty = confirm(
        target,
        [b"us=16", b"same", b"us=10 wrong", b"fault"],
        processes=2,
        plan=Plan.steady(16),
        factory=fake_launcher,
        on_process=lambda number, samples: seen.append((number, len(samples.ratios))),
    )
    assert seen[0] == (0, 4)
    assert (found.processes, len(found.log_ratios), len(found.null_log_ratios)) == (2, 2, 2)
    assert found.speedup == pytest.approx(1.25, rel=1e-3)
    assert [one.is_improvement for one in (found, same, wrong, faulty)] == [True, False, False, False]
    assert wrong.speedup is None
    assert (wrong.failure, faulty.failure) == (None, ScheduleFailure.FAULT)


def test_a_confirmation_follows_from_its_own_ratios():
    (found,) = confirm(Target(SPEC, b"original", 90), [b"us=16"], processes=3, factory=fake_launcher)
    recorded = json.loads(json.dumps(numbers_and_ratios_of(found)))
    again = Confirmation.of_ratios(recorded["log_ratios"], recorded["null_log_ratios"], recorded["baseline"])
    assert numbers_of(again) == numbers_of(found)
    assert numbers_of(read_confirmation(recorded)) == numbers_of(found)
