"""The rule of improvement: what breaks when the noise floor is not cleared, not computed or not asked for."""

from __future__ import annotations

import math

import pytest

from kernelwright.deploy.deploy import gpu_of
from kernelwright.judge.schedules import Confirmation
from kernelwright.records import TimingBlock
from kernelwright.records.improvement import PROCESSES_MAX, clears_noise_floor, processes_to_settle
from kernelwright.records.intervals import upper_bound
from kernelwright.records.scoring import score_ratios
from tests.samples import accepted

BLOCK = TimingBlock(process=0, reference_us=(1.0,), candidate_us=(1.0,))
RULE = [
    (1.03, 0.02, True),
    (1.02, 0.02, False),
    (1.01, 0.02, False),
    (1.01, None, True),
    (1.0, None, False),
    (None, 0.02, False),
]


@pytest.mark.parametrize(("low", "floor", "improves"), RULE)
def test_a_lower_bound_must_clear_the_noise_floor(low, floor, improves):
    assert clears_noise_floor(low, floor) is improves


@pytest.mark.parametrize(("low", "floor", "improves"), RULE)
def test_modules_and_schedules_must_clear_the_same_noise_floor(low, floor, improves):
    module = accepted(1.5).model_copy(update={"speedup_low": low, "noise_floor": floor})
    schedule = Confirmation(1.5, low, 1.6, floor, None, None, 3)
    assert module.is_improvement is improves
    assert schedule.is_improvement is improves


def test_the_noise_floor_is_that_of_the_reference_against_itself():
    speedup, floor = score_ratios([[0.2] * 3] * 2, [[0.05] * 3] * 2)
    assert speedup.estimate == pytest.approx(math.exp(0.2))
    assert floor == pytest.approx(math.expm1(0.05))


def test_without_an_aa_comparison_there_is_no_noise_floor():
    assert score_ratios([[0.2] * 3] * 2, [])[1] is None


def test_a_one_sided_bound_lies_above_most_of_what_was_measured():
    assert upper_bound([[3.0] * 4, [3.0] * 4]) == 3.0
    assert 2.0 < upper_bound([[1.0] * 4, [2.0] * 4, [3.0] * 4]) <= 3.0


def test_a_schedule_of_a_model_names_no_gpu_that_measured_it():
    with pytest.raises(ValueError, match="a model's costs"):
        gpu_of(Confirmation(1.5, 1.4, 1.6, 0.0, None, None, 3))


def test_more_processes_settle_a_near_miss_until_there_are_too_many():
    close, closer = processes_to_settle(1.1, 0.98, 0.05, 6), processes_to_settle(1.1, 1.045, 0.05, 6)
    assert close is not None
    assert closer is not None
    assert 12 <= closer < close <= PROCESSES_MAX
    assert processes_to_settle(1.2, 1.049, 0.05, 20) == 40, "twice as many at least"
    assert processes_to_settle(1.051, 0.9, 0.05, 3) is None


def test_a_near_miss_seems_faster_and_is_not_sure():
    def found(speedup, low):
        return accepted(speedup).model_copy(update={"speedup_low": low, "noise_floor": 0.05, "blocks": (BLOCK,)})

    assert found(1.1, 1.03).is_near_miss
    assert not found(1.04, 1.03).is_near_miss
    assert not found(1.1, 1.06).is_near_miss
    assert not found(1.6, 0.34).is_near_miss
    assert found(1.04, 1.03).processes_to_settle is None


def test_the_latency_that_is_shown_is_that_of_the_paired_speedup():
    found = accepted(2.0).model_copy(update={"reference_us": 10.0, "candidate_us": 7.0})
    assert found.paired_us == 5.0
    assert found.model_copy(update={"speedup": None}).paired_us is None
