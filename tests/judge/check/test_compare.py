"""Distances, rounding, calibration and the gate against vacuous tasks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kernelwright.judge import Settings
from kernelwright.judge.check.compare import (
    INFINITELY_FAR,
    Distance,
    VacuityGate,
    calibrate,
    calls_apart,
    distance,
    farthest,
    lower_precisions,
    of_outputs,
    round_mantissa,
    trivial_outputs,
)
from kernelwright.tasks import input_sets
from tests.quick import exhaustive_but

SETTINGS = Settings()
FINITE = st.floats(-1e6, 1e6, allow_nan=False, width=32)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
ARRAYS = hnp.arrays("float32", SHAPES, elements=FINITE)
FILLED = hnp.arrays("float32", hnp.array_shapes(max_dims=3, max_side=5), elements=FINITE)
NORMAL = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, width=32)
ROUNDED = hnp.arrays("float32", 16, elements=NORMAL)


# --- distance --------------------------------------------------------------------------------------


@given(ARRAYS)
def test_a_tensor_is_at_no_distance_from_itself(values):
    x = torch.tensor(values)
    assert distance(x, x.double()) == Distance(0.0, 0.0)


@given(FILLED, st.data())
def test_one_nan_is_infinitely_far(values, data):
    x = torch.tensor(values)
    broken = x.clone().reshape(-1)
    broken[data.draw(st.integers(0, x.numel() - 1))] = math.nan
    assert distance(broken.reshape(x.shape), x.double()) == INFINITELY_FAR


@given(FILLED, st.data())
def test_an_infinity_that_the_truth_has_not_is_infinitely_far(values, data):
    x = torch.tensor(values)
    broken = x.clone().reshape(-1)
    broken[data.draw(st.integers(0, x.numel() - 1))] = math.inf
    assert not distance(broken.reshape(x.shape), x.double()).within(Distance(1e30, 1e30))


def test_infinities_must_be_the_same_ones_and_then_count_as_no_error():
    truth = torch.tensor([1.0, math.inf, -math.inf], dtype=torch.float64)
    assert distance(truth.float(), truth) == Distance(0.0, 0.0)
    assert distance(torch.tensor([1.0, math.inf, math.inf]), truth) == INFINITELY_FAR
    assert distance(torch.tensor([1.0, 3.4e38, -math.inf]), truth) == INFINITELY_FAR
    near = distance(torch.tensor([1.5, math.inf, -math.inf]), truth)
    assert 0 < near.rms < math.inf


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_and_booleans_must_be_equal(dtype):
    truth = torch.tensor([0, 1, 1], dtype=dtype)
    assert distance(truth.clone(), truth) == Distance(0.0, 0.0)
    found = distance(torch.tensor([1, 1, 1], dtype=dtype), truth)
    assert found == Distance(0.0, 0.0, pytest.approx(1 / 3))
    assert not found.within(Distance(1.0, 1.0))
    assert found.within(Distance(0.0, 0.0, 0.34))
    assert "33.33% of the integers differ" in str(found)


@given(FILLED, FILLED, st.integers(-12, 12))
def test_distance_does_not_depend_on_the_scale(values, errors, exponent):
    x = torch.tensor(values).double()
    y = x + torch.tensor(errors).double().reshape(-1)[0]
    factor = 2.0**exponent
    before, after = distance(y, x), distance(y * factor, x * factor)
    if not x.any():
        return  # zeros have no scale
    assert after.rms == pytest.approx(before.rms, rel=1e-9)
    assert after.worst == pytest.approx(before.worst, rel=1e-9)


def test_numbers_of_a_distance_by_hand():
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    found = distance(truth + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), truth)
    size = math.sqrt(25 / 4)
    assert found.rms == pytest.approx(math.sqrt(1 / 4) / size)
    assert found.worst == pytest.approx(1.0 / (4.0 + math.sqrt(25 / 2) + 1e-3 * size))


@pytest.mark.parametrize("shape", [(), (5,), (1, 7), (4, 1), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_calls_that_are_compared_together_are_as_far_as_each_alone(shape, dtype):
    wanted = [(torch.randn(shape) * 8 * scale).to(dtype) for scale in (1.0, 0.0, 1e3, 1e30)]
    found = [one + (torch.rand(shape) < 0.5) for one in wanted]
    found[2], wanted[2] = found[2].clone(), wanted[2].clone()
    if dtype is torch.float32:
        found[2].view(-1)[0], wanted[2].view(-1)[0] = math.nan, math.inf
    together = calls_apart([[one] for one in found], [[one] for one in wanted])
    for mine, theirs, both in zip(found, wanted, together, strict=True):
        alone = distance(mine, theirs)
        assert (both.rms, both.worst, both.differing) == pytest.approx((alone.rms, alone.worst, alone.differing), rel=1e-12)


def test_a_scalar_and_an_all_zero_truth_have_a_distance_too():
    assert distance(torch.tensor(3.0), torch.tensor(2.0, dtype=torch.float64)).rms == pytest.approx(0.5)
    assert distance(torch.full((4,), 0.5), torch.zeros(4, dtype=torch.float64)).rms == pytest.approx(0.5)


def test_an_error_in_a_small_row_is_not_hidden_by_a_large_one():
    truth = torch.tensor([[1e6] * 8, [1.0] * 8], dtype=torch.float64)
    actual = truth.clone()
    actual[1] = 0.0
    found = distance(actual, truth)
    assert found.rms < 1e-5
    assert found.worst > 1e-3


@pytest.mark.parametrize("shape", [(8, 5, 1), (8, 5, 1, 1)])
def test_dimensions_of_one_element_make_no_rows(shape):
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    truth[2, 3] = 1e-9  # compared with itself alone, any rounding would be infinitely far
    actual = truth + 1e-7 * torch.randn(8, 5, generator=generator, dtype=torch.float64)
    assert distance(actual.reshape(shape), truth.reshape(shape)) == distance(actual, truth)
    assert distance(actual.reshape(40, 1), truth.reshape(40, 1)) == distance(actual.reshape(40), truth.reshape(40))
    assert distance(actual.reshape(shape), truth.reshape(shape)).worst < 1e-6


def test_complex_numbers_are_compared_by_their_parts():
    truth = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    assert distance(truth.to(torch.complex64), truth) == Distance(0.0, 0.0)
    assert distance(truth.conj(), truth).rms > 0.1
    assert distance(truth, truth.conj()).rms > 0.1
    assert distance(torch.tensor([complex(math.nan, 0), 3 - 1j]), truth) == INFINITELY_FAR


def test_the_farther_of_several_outputs_counts_number_by_number():
    assert farthest([Distance(1, 5), Distance(2, 3)]) == Distance(2, 5)
    assert farthest([]) == Distance(0.0, 0.0)


def test_a_nan_is_within_nothing():
    assert not Distance(math.nan, 0).within(INFINITELY_FAR)
    assert not Distance(0, math.nan).within(INFINITELY_FAR)
    assert Distance(0, 0).within(Distance(0, 0))


def test_a_distance_as_json_has_no_infinity():
    assert Distance(math.inf, 0.5).to_json() == {"rms": None, "worst": 0.5, "differing": 0.0}
    assert (Distance(1, 2) + Distance(3, 4)) * 2.0 == Distance(8, 12)


# --- rounding --------------------------------------------------------------------------------------


@given(ROUNDED, st.integers(1, 23))
def test_rounding_twice_is_rounding_once(values, bits):
    once = round_mantissa(torch.tensor(values), bits)
    assert torch.equal(round_mantissa(once, bits), once)


@given(ROUNDED)
def test_float32_has_23_bits_already(values):
    x = torch.tensor(values)
    assert torch.equal(round_mantissa(x, 23), x)


@given(hnp.arrays("float32", 16, elements=st.floats(-(2.0**127), 2.0**127, allow_subnormal=False, width=32)))
def test_seven_bits_are_bfloat16(values):
    x = torch.tensor(values)
    x = x[(x == 0) | (x.abs() > 1e-37)]
    assert torch.equal(round_mantissa(x, 7), x.bfloat16().float())


@pytest.mark.parametrize(
    ("value", "bits", "rounded"),
    [
        (1.25, 1, 1.0),
        (1.75, 1, 2.0),
        (-1.25, 1, -1.0),
        (2.5, 1, 2.0),
        (1.125, 2, 1.0),
        (1.375, 2, 1.5),
        (1.3, 1, 1.5),
    ],
)
def test_ties_go_to_even(value, bits, rounded):
    assert float(round_mantissa(torch.tensor([value]), bits)) == rounded


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8), st.sampled_from([3, 7, 10, 23]))
def test_rounding_is_that_of_the_definition_for_every_float(patterns, bits):
    x = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    for value, rounded in zip(x.tolist(), round_mantissa(x.double(), bits).tolist(), strict=True):
        if math.isfinite(value):
            mantissa, exponent = math.frexp(value)
            assert rounded == math.ldexp(round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
        else:
            assert rounded == value or math.isnan(rounded) == math.isnan(value) is True


def test_rounding_keeps_infinities_and_nan():
    full = torch.tensor([-1, 2**31 - 1], dtype=torch.int32).view(torch.float32)  # to round these up would end in a zero
    assert round_mantissa(full, 7).isnan().all()
    x = round_mantissa(torch.tensor([math.inf, -math.inf, math.nan]), 7)
    assert x[0] == math.inf
    assert x[1] == -math.inf
    assert torch.isnan(x[2])


def test_lower_precisions_go_from_the_highest_down():
    assert lower_precisions(torch.float32) == (10, 7)
    assert lower_precisions(torch.float64) == (23,)
    assert lower_precisions(torch.int32) == ()


# --- calibration -----------------------------------------------------------------------------------

ERRORS = st.floats(0, 1e-1, allow_subnormal=False)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])


@given(ERRORS, ERRORS, st.lists(st.tuples(ERRORS, ERRORS), max_size=2), DTYPES)
def test_a_calibrated_tolerance_rejects_the_next_lower_precision(rms, worst, lower, dtype):
    tolerance = calibrate(Distance(rms, worst), [Distance(*pair) for pair in lower], dtype, SETTINGS)
    if tolerance.calibrated:
        assert tolerance.lower in [Distance(*pair) for pair in lower]
        assert not tolerance.lower.within(tolerance.allowed)
    else:
        assert tolerance.lower is None


@given(ERRORS, ERRORS, st.lists(st.tuples(ERRORS, ERRORS), max_size=2), DTYPES)
def test_the_reference_itself_is_always_allowed(rms, worst, lower, dtype):
    reference = Distance(rms, worst)
    tolerance = calibrate(reference, [Distance(*pair) for pair in lower], dtype, SETTINGS)
    assert reference.within(tolerance.allowed)


def test_without_a_lower_precision_the_ratio_or_the_floor_decides():
    eps = torch.finfo(torch.float32).eps
    exact = calibrate(Distance(0, 0), [], torch.float32, SETTINGS)
    assert exact.allowed.rms == pytest.approx(SETTINGS.error_floor_eps * eps)
    rough = calibrate(Distance(1e-4, 1e-3), [], torch.float32, SETTINGS)
    assert rough.allowed == Distance(SETTINGS.error_ratio * 1e-4, SETTINGS.error_ratio * 1e-3)
    assert not exact.calibrated
    assert not rough.calibrated


def test_an_integer_output_allows_nothing():
    assert calibrate(Distance(0, 0), [], torch.int64, SETTINGS).allowed == Distance(0, 0)


def test_a_reference_in_tf32_is_compared_with_the_precision_below_that():
    tf32, bfloat16 = Distance(5e-4, 5e-3), Distance(4e-3, 4e-2)
    assert calibrate(Distance(5e-4, 5e-3), [tf32, bfloat16], torch.float32, SETTINGS).lower == bfloat16
    assert calibrate(Distance(1e-7, 1e-6), [tf32, bfloat16], torch.float32, SETTINGS).lower == tf32


@pytest.mark.parametrize("rows", exhaustive_but([64, 1024], 64))
def test_a_matrix_product_in_float32_passes_and_in_less_does_not(rows):
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(rows, 256, generator=generator) for _ in range(2))
    truth = a.double() @ b.double().T
    lower = [
        distance((round_mantissa(a, bits).double() @ round_mantissa(b, bits).double().T), truth)
        for bits in lower_precisions(torch.float32)
    ]
    tolerance = calibrate(distance(a @ b.T, truth), lower, torch.float32, SETTINGS)
    assert tolerance.calibrated
    one_by_one = torch.zeros_like(truth, dtype=torch.float32)
    for k in range(a.shape[1]):
        one_by_one += a[:, k : k + 1] * b[:, k].unsqueeze(0)
    assert distance(one_by_one, truth).within(tolerance.allowed)
    assert not distance((a.half() @ b.half().T).float(), truth).within(tolerance.allowed)
    assert not distance((a.bfloat16() @ b.bfloat16().T).float(), truth).within(tolerance.allowed)


# --- vacuous tasks ---------------------------------------------------------------------------------

TIGHT = Distance(1e-5, 1e-4)


def observe(outputs, inputs=()):
    gate = VacuityGate([outputs[0].dtype])
    for index, output in enumerate(outputs):
        gate.observe([output], [inputs[index]] if inputs else [], TIGHT)
    return gate.passing


def random(seed):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_zeros_and_ones_and_a_constant_are_found():
    assert set(observe([torch.zeros(6, 5).double()] * 3)) >= {"zeros", "mean", "first-row", "other-output"}
    assert "ones" in observe([torch.ones(6, 5).double()] * 3)
    assert observe([torch.full((6, 5), float(k + 1)).double() for k in range(3)]) == ("first-row", "mean")


def test_a_repeated_row_is_found():
    assert observe([random(k)[:1].expand(6, 5) for k in range(3)]) == ("first-row",)


def test_a_copy_of_an_input_is_found():
    values = [random(k) for k in range(3)]
    assert observe([value.clone() for value in values], values) == ("input-copy",)


def test_the_output_of_another_input_is_found():
    assert observe([random(0)] * 3) == ("other-output",)


def test_the_output_of_another_input_is_kept_as_a_candidate_would_return_it():
    gate = VacuityGate([torch.float32])
    truth = random(0)
    rounding = Distance(1e-7, 1e-6)
    for _ in range(2):
        gate.observe([truth], [], rounding)
    assert gate.passing == ("other-output",)
    gate.observe([truth], [], Distance(1e-12, 1e-12))
    assert gate.passing == ()


def test_a_real_task_has_no_trivial_solution():
    inputs = [random(k) for k in range(4)]
    assert observe([torch.tanh(value) * 2 for value in inputs], inputs) == ()


def test_one_set_that_tells_is_enough():
    assert observe([torch.zeros(6, 5).double(), random(1)]) == ()
    assert observe([random(1), torch.zeros(6, 5).double()]) == ()


def test_every_output_of_several_must_be_trivial_alike():
    gate = VacuityGate([torch.float64, torch.float64])
    for seed in range(3):
        gate.observe([torch.zeros(6, 5).double(), random(seed)], [], TIGHT)
    assert gate.passing == ()


def test_nothing_observed_is_nothing_passed():
    gate = VacuityGate([])
    assert gate.passing == ()
    gate.observe([], [], TIGHT)
    assert gate.passing == ()


def test_trivial_outputs_fit_integers_scalars_and_empty_tensors():
    assert set(trivial_outputs(torch.tensor([1, 2]), [])) == {"zeros", "ones"}
    scalar = trivial_outputs(torch.tensor(2.0), [torch.tensor(1.0)])
    assert set(scalar) == {"zeros", "ones", "input-copy"}  # the mean of one element is that element
    assert set(trivial_outputs(torch.empty(0, 3), [])) == {"zeros", "ones"}


def test_of_several_outputs_each_must_be_near():
    rough, fine = Distance(1e-2, 1e-1), Distance(1e-6, 1e-5)
    allowed = of_outputs([rough, fine])
    assert (allowed.rms, allowed.worst) == (1e-2, 1e-1)
    assert of_outputs([rough, fine]).within(allowed)
    assert of_outputs([fine, fine]).within(allowed)
    assert not of_outputs([fine, rough]).within(allowed)
    assert of_outputs([fine, rough]).within(Distance(1e-2, 1e-1))
    assert of_outputs([fine, rough]).within(farthest([allowed, of_outputs([fine, rough])]))
    assert (allowed * 2.0 + allowed).of(1).rms == pytest.approx(3e-6)
    assert of_outputs([rough]) == rough


def test_where_only_zeros_are_wanted_an_error_counts_as_it_is():
    rounding = torch.full((100,), 7e-9)
    assert distance(rounding, torch.zeros(100, dtype=torch.float64)) == Distance(pytest.approx(7e-9), pytest.approx(7e-9))


@pytest.fixture
def set_part(monkeypatch):
    """Sets the elements that are compared at once."""
    return lambda part: monkeypatch.setattr(input_sets, "PART", part)


@pytest.mark.parametrize("shape", [(7, 5, 3), (11,), (9, 1), (6, 4), (1, 30), ()])
@pytest.mark.parametrize("part", [1, 4, 10])
def test_large_outputs_are_compared_in_parts(set_part, shape, part):
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(shape, generator=generator, dtype=torch.float64)
    actual = (truth + 1e-3 * torch.randn(shape, generator=generator)).float()
    whole = distance(actual, truth)
    set_part(part)
    parts = distance(actual, truth)
    assert parts.rms == pytest.approx(whole.rms, rel=1e-12)
    assert parts.worst == pytest.approx(whole.worst, rel=1e-12)
    if truth.numel() > 1:
        infinite = truth.clone()
        infinite.view(-1)[0] = math.inf
        assert distance(actual, infinite) == INFINITELY_FAR
        actual.view(-1)[0] = math.inf
        assert distance(actual, infinite).rms < 0.01
        actual.view(-1)[-1] = math.nan
        assert distance(actual, truth) == INFINITELY_FAR


def _odd(values):
    return torch.tensor([values] * 7, dtype=torch.float64)


@pytest.mark.parametrize(
    ("actual", "truth"),
    [
        (_odd([1.0, math.nan]).float(), _odd([1.0, 2.0])),
        (_odd([1.0, math.inf]).float(), _odd([1.0, math.inf])),
        (_odd([1.1, math.inf]).float(), _odd([1.0, math.inf])),
        (_odd([1.0, math.inf]).float(), _odd([1.0, -math.inf])),
        (_odd([1.0, math.inf]).float(), _odd([1.0, 2.0])),
        (torch.arange(14), torch.arange(14).flip(0)),
        (torch.arange(14).view(7, 2) > 5, torch.arange(14).view(7, 2) > 3),
        (torch.view_as_complex(_odd([1.1, 2.0]).float()), torch.view_as_complex(_odd([1.0, 2.0]))),
        (torch.tensor(1.5), torch.tensor(1.0, dtype=torch.float64)),
        (torch.tensor(3), torch.tensor(4)),
        (torch.ones(0, 3), torch.ones(0, 3, dtype=torch.float64)),
        (torch.ones(7, 0), torch.ones(7, 0, dtype=torch.float64)),
    ],
    ids=[
        "NaN",
        "inf",
        "error",
        "other inf",
        "one inf",
        "integers",
        "booleans",
        "complex",
        "0-d",
        "integer",
        "no rows",
        "none",
    ],
)
@pytest.mark.parametrize("part", [1, 4])
def test_parts_tell_what_the_whole_tells_of_odd_values_and_shapes(set_part, actual, truth, part):
    whole = distance(actual, truth)
    set_part(part)
    found = distance(actual, truth)
    assert (found.rms, found.worst, found.differing) == pytest.approx((whole.rms, whole.worst, whole.differing), rel=1e-12)
