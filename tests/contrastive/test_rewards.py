"""Rewards, the smoother and the second look at what is too good: numbers from records alone."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.contrastive.evaluations import agree, is_suspicious, reverify, settled
from kernelwright.contrastive.scoring import RewardSmoother
from kernelwright.errors import ConfigError, DeviceError
from kernelwright.records import Evaluation, Reason
from kernelwright.records.rewards import conservative, reward_named
from tests.executors import FakeExecutor
from tests.samples import TASK, accepted, module, rejected

COMPILED = {TASK.sha256: 5.0}
NAMES = ("speedup", "lower-bound", "log", "clamped", "milestone", "success")


@pytest.mark.parametrize(
    ("speedup", "rounded"),
    [(1.118, 1.11), (0.992, 1.0), (1.0, 1.0), (1.009, 1.0), (0.001, 0.01), (1.15, 1.15), (0.57, 0.57), (2.30, 2.30)],
)
def test_rounding_goes_towards_one(speedup, rounded):
    assert conservative(speedup) == rounded


@given(st.floats(1e-3, 1e3))
def test_rounding_never_helps_and_costs_less_than_a_hundredth(speedup):
    rounded = conservative(speedup)
    assert abs(rounded - 1) <= abs(speedup - 1) + 1e-9
    assert abs(rounded - speedup) < 0.01 + 1e-9
    assert conservative(rounded) == rounded


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("speedup", [0.0, 0.51, 1.0, 2.34, 20.0]),
        ("lower-bound", [0.0, 0.48, 0.95, 2.22, 19.0]),
        ("log", [-5.0, math.log2(0.51), 0.0, math.log2(2.34), 4.0]),
        ("clamped", [0.0, 0.51, 1.0, 2.34, 3.0]),
        ("milestone", [-1.0, 1.0, 1.0, 2.0, 3.0]),
        ("success", [0.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_named_rewards(name, rewards):
    reward = reward_named(name, compile_speedups=COMPILED)
    evaluations = [rejected(Reason.CLOCK_DISAGREEMENT), accepted(0.503), accepted(1.0), accepted(2.344), accepted(20.0)]
    assert [reward(evaluation) for evaluation in evaluations] == pytest.approx(rewards)
    assert reward.name == name
    assert reward(None) == reward.floor == rewards[0]


@given(st.floats(1e-6, 1e6), st.sampled_from(NAMES), st.sampled_from([None, -0.25, 0.5]))
def test_no_accepted_candidate_gets_less_than_a_failed_one(speedup, name, floor):
    reward = reward_named(name, floor=floor, compile_speedups=COMPILED)
    assert reward(accepted(speedup)) >= reward.floor == reward(rejected())


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.sampled_from(NAMES))
def test_faster_never_gets_less(one, other, name):
    reward = reward_named(name, compile_speedups=COMPILED)
    assert reward(accepted(min(one, other))) <= reward(accepted(max(one, other)))


def test_the_highest_milestone_needs_to_know_torch_compile():
    assert reward_named("milestone", compile_speedups={})(accepted(20.0)) == 2.0
    assert reward_named("milestone", compile_speedups={TASK.sha256: 0.1})(accepted(1.12)) == 3.0
    assert reward_named("milestone", compile_speedups={})(accepted(1.06)) == 1.0, "its lower bound is no 5 % faster"
    with pytest.raises(ConfigError, match=r"torch\.compile, which the reward `milestone` compares with"):
        reward_named("milestone")


def test_milestones_are_ratios_to_the_best_baseline_on_both_sides():
    baselines = {TASK.sha256: 4.0}
    reward = reward_named("milestone", baselines=baselines, compile_speedups=COMPILED)
    assert [reward(accepted(speedup)) for speedup in (4.0, 5.0, 6.0)] == [1.0, 2.0, 3.0]


def test_a_record_read_back_gives_the_same_reward():
    evaluation = accepted(1.2345)
    again = Evaluation.model_validate_json(evaluation.model_dump_json())
    for name in NAMES:
        reward = reward_named(name, compile_speedups=COMPILED)
        assert reward(again) == reward(evaluation)


def test_an_untimed_evaluation_has_no_speed_reward():
    untimed = accepted(speedup=None, speedup_low=None)
    assert reward_named("success")(untimed) == 1.0
    for name in NAMES[:-1]:
        with pytest.raises(ConfigError, match="without a time"):
            reward_named(name, compile_speedups=COMPILED)(untimed)


def test_an_unknown_reward_names_the_known():
    with pytest.raises(ConfigError, match="speedup, lower-bound, log"):
        reward_named("fast")


@pytest.mark.parametrize(
    ("speedup", "best", "suspicious"),
    [(3.0, None, False), (3.01, None, True), (3.01, 3.0, True), (1.5, 0.7, True), (1.5, 0.75, False), (1.5, None, False)],
)
def test_what_is_suspicious(speedup, best, suspicious):
    assert is_suspicious(accepted(speedup), best) is suspicious
    assert not is_suspicious(accepted(speedup, confirms=True), best)


def test_what_is_rejected_or_untimed_is_not_suspicious():
    assert not is_suspicious(rejected(), None)
    assert not is_suspicious(accepted(speedup=None, speedup_low=None), None)


def test_measured_again_on_another_device_where_there_is_one():
    sources = [module(note=str(number)) for number in range(3)]
    again = {source: accepted(4.0 + number, source) for number, source in enumerate(sources)}
    devices = ["cuda:0", "cuda:1", "cuda:0"]
    cases = [(TASK, accepted(4.0, source, device=device)) for source, device in zip(sources, devices, strict=True)]
    executor = FakeExecutor(lambda work: again[work.candidate.source])
    found = reverify(cases, executor)
    assert [second.speedup for second in found] == [4.0, 5.0, 6.0]
    assert all(second.confirms for second in found)
    assert [work.elsewhere_than for work in executor.submitted] == devices


def test_what_agrees_counts_by_its_second_measurement():
    first = accepted(4.0)
    executor = FakeExecutor(lambda work: accepted(3.9))
    (second,) = reverify([(TASK, first)], executor)
    assert agree(first, second)
    assert settled(first, second) is second
    assert reverify([], executor) == []


def test_infrastructure_that_fails_raises():
    with pytest.raises(DeviceError):
        reverify([(TASK, accepted(4.0))], FakeExecutor(lambda work: DeviceError("gone")))


@pytest.mark.parametrize(
    ("first", "second", "agrees", "counts"),
    [(4.0, 4.39, True, 4.39), (4.0, 3.64, True, 3.64), (4.0, 4.41, False, 4.0), (4.0, 3.6, False, 3.6)],
)
def test_agreement_is_within_a_tenth_and_doubt_takes_the_worse(first, second, agrees, counts):
    one, other = accepted(first), accepted(second, confirms=True)
    assert agree(one, other) is agrees
    assert settled(one, other).speedup == counts


def test_what_is_rejected_the_second_time_is_rejected():
    first, second = accepted(9.0), rejected(Reason.STALE_OUTPUT, confirms=True)
    assert not agree(first, second)
    assert not settled(first, second).accepted


def test_smoothing_normalises_and_clips():
    smoother = RewardSmoother()
    rewards = [0.0, 1.0, 1.0, 2.0, 50.0]
    smoothed = smoother.smooth(rewards)
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert smoothed[:4] == pytest.approx([(reward - mean) / deviation for reward in rewards[:4]])
    assert smoothed[4] == 1.5


def test_statistics_change_every_hundred_rewards_once_there_are_enough():
    smoother = RewardSmoother()
    smoother.smooth([1.0, 2.0] * 50)
    assert (smoother.mean, smoother.deviation) == (1.5, 0.5)
    smoother.smooth([3.0] * 99)
    assert (smoother.mean, smoother.deviation) == (1.5, 0.5)
    smoother.smooth([3.0])
    assert smoother.mean == 2.25


def test_only_the_latest_rewards_count():
    smoother = RewardSmoother()
    smoother.smooth([9.0] * 1000)
    smoother.smooth([1.0, 2.0] * 500)
    assert smoother.mean == 1.5


def test_equal_rewards_are_all_zero_and_nothing_is_nothing():
    assert RewardSmoother().smooth([1.3] * 8) == pytest.approx([0.0] * 8)
    assert RewardSmoother().smooth([]) == []


@given(st.lists(st.lists(st.floats(-5, 100), max_size=8), max_size=8), st.integers(0, 8))
def test_a_smoother_goes_on_where_its_state_was_taken(batches, cut):
    whole, first = RewardSmoother(), RewardSmoother()
    batches = [batch * 40 for batch in batches]
    expected = [whole.smooth(batch) for batch in batches]
    found = [first.smooth(batch) for batch in batches[:cut]]
    second = RewardSmoother.from_state(json.loads(json.dumps(first.state())))
    assert found + [second.smooth(batch) for batch in batches[cut:]] == expected
    for batch, smoothed in zip(batches, expected, strict=True):
        assert all(-1.5 <= value <= 1.5 for value in smoothed)
        pairs = sorted(zip(batch, smoothed, strict=True))
        assert [value for _, value in pairs] == sorted(smoothed), "order within a batch stays"
