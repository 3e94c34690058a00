"""The interval of a ratio: by hand, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernelwright.records.intervals import Interval, noise_floor, ratio_interval


def simulate(generator, processes, blocks, truth=0.0):
    """Log ratios with an effect of each process, as fresh processes show, and noise of each block."""
    effects = generator.normal(truth, 0.01, processes)
    return [list(generator.normal(effect, 0.02, blocks)) for effect in effects]


def test_students_interval_by_hand():
    # Constant blocks leave the bootstrap only the processes, whose range is narrower than Student's interval.
    found = ratio_interval([[0.1] * 4, [0.2] * 4, [0.3] * 4])
    margin = 4.302652729911275 * 0.1 / math.sqrt(3)
    assert found.estimate == pytest.approx(math.exp(0.2))
    assert found.low == pytest.approx(math.exp(0.2 - margin))
    assert found.high == pytest.approx(math.exp(0.2 + margin))
    assert found.half_width == pytest.approx(margin)


def test_students_interval_with_two_processes_by_hand():
    found = ratio_interval([[0.0] * 3, [0.02] * 3])
    assert math.log(found.high) == pytest.approx(0.01 + 12.706204736432095 * 0.02 / math.sqrt(2) / math.sqrt(2))


def test_a_smaller_probability_widens_students_margin_too():
    processes = [[0.1] * 4, [0.2] * 4, [0.3] * 4]
    margins = [ratio_interval(processes, miss_probability=miss).half_width for miss in (0.05, 0.0125)]
    # t of 2 degrees of freedom has a closed form: (2p - 1) / sqrt(2 p (1 - p)).
    for margin, p in zip(margins, (1 - 0.025, 1 - 0.025 / 4), strict=True):
        assert margin == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)) * 0.1 / math.sqrt(3))


def test_many_processes_approach_the_normal_quantile():
    centres = [0.01 * (k % 2) for k in range(40)]
    found = ratio_interval([[value] * 3 for value in centres])
    margin = 2.0226909117347285 * np.std(centres, ddof=1) / math.sqrt(40)
    assert found.half_width >= margin - 1e-12


def test_the_interval_of_one_process_is_the_bootstrap_alone():
    found = ratio_interval([[0.1, 0.2, 0.3]])
    assert math.exp(0.1) - 1e-12 <= found.low <= found.estimate <= found.high <= math.exp(0.3) + 1e-12
    assert found.estimate == pytest.approx(math.exp(0.2))


def test_the_interval_takes_a_median_per_process_which_ignores_one_wild_block():
    found = ratio_interval([[0.1, 0.1, 9.0], [0.1, 0.1, 0.1], [0.1, -9.0, 0.1]])
    assert found.estimate == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("broken", [[], [[]], [[0.1], []]])
def test_no_blocks_are_refused(broken):
    with pytest.raises(ValueError, match="at least one block"):
        ratio_interval(broken)
    if not any(broken):
        with pytest.raises(ValueError, match="A/A"):
            noise_floor(broken)


def test_a_smaller_probability_never_narrows_the_interval():
    widened = 0
    for seed in range(20):
        data = simulate(np.random.default_rng(seed), 1, 24)
        once, often = ratio_interval(data), ratio_interval(data, miss_probability=0.0125)
        assert often.low <= once.low
        assert often.high >= once.high
        widened += often.high > once.high
    assert widened >= 18


def test_an_aa_interval_covers_one_in_93_of_100_runs():
    generator = np.random.default_rng(7)
    covered = 0
    for _ in range(300):
        found = ratio_interval(simulate(generator, 3, 12))
        covered += found.low <= 1.0 <= found.high
    assert covered >= 279


def test_a_true_speedup_of_a_tenth_is_found():
    generator = np.random.default_rng(8)
    lows = [ratio_interval(simulate(generator, 6, 12, truth=math.log(1.1))).low for _ in range(50)]
    assert sum(low > 1.05 for low in lows) >= 45


def test_the_same_record_gives_the_same_digits():
    data = simulate(np.random.default_rng(9), 3, 12)
    assert ratio_interval(data) == ratio_interval(data)
    assert noise_floor(data) == noise_floor(data)


def test_the_noise_floor_of_silence_is_zero_and_grows_with_the_noise():
    assert noise_floor([[0.0] * 4] * 3) == 0.0
    generator = np.random.default_rng(10)
    quiet = [list(generator.normal(0, 0.001, 12)) for _ in range(3)]
    loud = [list(generator.normal(0, 0.1, 12)) for _ in range(3)]
    assert 0 < noise_floor(quiet) < 0.005 < noise_floor(loud)


def test_processes_without_aa_blocks_do_not_count_for_the_noise_floor():
    assert noise_floor([[], [0.5] * 3]) == pytest.approx(math.expm1(0.5))


def test_the_interval_always_contains_its_estimate():
    generator = np.random.default_rng(11)
    for _ in range(50):
        processes, blocks = generator.integers(1, 5), generator.integers(1, 9)
        found = ratio_interval(simulate(generator, int(processes), int(blocks)))
        assert found.low <= found.estimate <= found.high


def test_half_width_is_in_log_units():
    assert Interval(1.0, 1 / math.e, math.e).half_width == pytest.approx(1.0)
