"""The check of single answers, with both sides in this process: what nothing settles, and what rounding does to a task."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernelwright.errors import TaskError
from kernelwright.judge import Settings
from kernelwright.judge.check import bounds, oracle
from kernelwright.judge.check.check import _change, _swap
from kernelwright.judge.check.compare import Distance, apart, round_mantissa
from kernelwright.judge.check.examiner import Examiner
from kernelwright.judge.check.facts import measure_task
from kernelwright.judge.check.findings import CheckFindings, Demands, RejectionError
from kernelwright.judge.check.oracle import OtherSums, OutOfDomainError
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.check.weights import buffer_has_kept_up, check_weight_structure
from kernelwright.judge.isolation.side import CallOutput, Described, Output
from kernelwright.judge.worker.structure import flatten
from kernelwright.records import Candidate, Label, Reason
from kernelwright.tasks import INPUT_SETS, WEIGHT_SETS, bring_to_life
from tests.judge.snippets import candidate, task
from tests.quick import exhaustive_but

OWN = INPUT_SETS[0]
(CONSTANT,) = (one for one in INPUT_SETS if one.name == "constant")


class LocalSide:
    """A side that computes here."""

    def __init__(self, function):
        self.function = function
        self.rested = 0

    def place(self, inputs, slot):
        self.inputs = inputs
        return 0

    def call(self, layout, *, seed, hold=False):
        skeleton, outputs = flatten(self.function(*self.inputs))
        described = Described(
            skeleton=skeleton,
            strange=(),
            outputs=tuple(
                Output(
                    dtype=str(one.dtype), shape=tuple(one.shape), stride=one.contiguous().stride(), device="cpu", aliases=()
                )
                for one in outputs
            ),
        )
        return CallOutput(outputs, described, None, inputs_intact=True)

    def release_idle(self):
        self.rested += 1


def checker(made, answer=None, **changes):
    """Of a task, with `answer(*inputs)` in the candidate's place, or the reference itself."""
    settings = Settings.quick(threads=1, timed=False, **changes)
    trial = Trial(
        facts=measure_task(bring_to_life(made), torch.device("cpu")),
        candidate=candidate(),
        settings=settings,
        findings=CheckFindings(Demands(forbidden=settings.forbid)),
        workers=None,
        directory=Path(),
        gate=lambda shared=False: contextlib.nullcontext(),
    )
    model = trial.facts.oracle.model
    return Examiner(trial, LocalSide(model), LocalSide(answer or model))


def judged(one, inputs=OWN):
    return one.ask(inputs, slot=0).question


def posed(one, inputs=OWN):
    """The question before the answer to it is judged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Examiner, "judge", lambda self, posed, answer, reason: posed)
        question = judged(one, inputs)
    return one.bounds.whole(question)


@pytest.mark.parametrize("large", [False, True])
def test_the_reference_gives_memory_back_after_each_call_of_a_large_task(set_large_bytes, large):
    set_large_bytes(0 if large else 1 << 30)
    one = checker(task("return inputs[0] + 1", "[torch.rand(4)]"))
    judged(one)
    assert [one.reference.rested, one.candidate.rested] == [large, 0], "a candidate would see that it is checked"


# --- which of several equal elements ----------------------------------------------------------------

ROWS = "[torch.randint(0, 3, (64, 32)).float()]"
TIES = task("return inputs[0].topk(2, dim=1)[1]", ROWS)
WITHOUT_TIES = task("return inputs[0].topk(2, dim=1)[1]", "[torch.stack([torch.randperm(32) for _ in range(64)]).float()]")


def last_of_equals(x):
    return 31 - x.flip(1).sort(dim=1, descending=True, stable=True)[1][:, :2]


@pytest.mark.parametrize(
    ("forward", "answer"),
    [
        ("inputs[0].topk(2, dim=1)[1]", last_of_equals),
        ("inputs[0].long().topk(2, dim=1)[1]", last_of_equals),
        ("inputs[0].argsort(1, descending=True)[:, :2]", last_of_equals),
        ("inputs[0].topk(2, dim=1)[1] * 2", lambda x: last_of_equals(x) * 2),
        ("inputs[0].sort(1)[1].int()", lambda x: 31 - x.flip(1).sort(dim=1, stable=True)[1].int()),
        ("inputs[0].kthvalue(9, dim=1)[1]", lambda x: 31 - x.flip(1).kthvalue(9, dim=1)[1]),
        ("(inputs[0] / 3).sum(1)[None].tile(4, 1).argmax(0)", lambda x: torch.full((64,), 3)),
        ("(inputs[0] / 3).T.tile(2, 1).flatten().argmax()", lambda x: 2048 + (x / 3).T.flatten().argmax()),
    ],
)
def test_any_of_several_equal_elements_may_be_named_where_no_operator_promises_one_or_rounding_decides(forward, answer):
    one = checker(task(f"return {forward}", ROWS), answer)
    for _ in range(5):
        judged(one)


@pytest.mark.parametrize(
    ("forward", "answer"),
    [
        ("inputs[0].argmax(1)", lambda x: last_of_equals(x)[:, 0]),
        ("inputs[0].max(1)[1]", lambda x: last_of_equals(x)[:, 0]),
        ("inputs[0].sort(dim=1, stable=True)[1]", lambda x: 31 - x.flip(1).sort(dim=1, stable=True)[1]),
        ("inputs[0].topk(2, dim=1)[1]", lambda x: last_of_equals(x)[:, :1].repeat(1, 2)),
        ("inputs[0].topk(2, dim=1)[1]", lambda x: last_of_equals(x) - 32),
        ("inputs[0].topk(2, dim=1)[1]", lambda x: (last_of_equals(x) + 1) % 32),
    ],
    ids=["argmax", "max", "stable", "twice", "nowhere", "another"],
)
def test_but_none_where_an_operator_promises_the_first_and_none_twice_or_elsewhere(forward, answer):
    with pytest.raises(RejectionError) as caught:
        judged(checker(task(f"return {forward}", ROWS), answer), CONSTANT if "topk" not in forward else OWN)
    assert caught.value.reason is Reason.WRONG_OUTPUT


def test_where_no_elements_are_equal_there_is_nothing_to_choose():
    judged(checker(WITHOUT_TIES, last_of_equals))
    with pytest.raises(RejectionError):
        judged(checker(WITHOUT_TIES, lambda x: last_of_equals(x).flip(1)))


# --- what rounding the inputs does to single elements ---------------------------------------------------

SPECTRUM = task("return torch.fft.rfft(inputs[0], dim=-1)", "[torch.randn(64, 96)]")


def spectrum_by_products(x):
    """Zero where the reference's is, but for the rounding of a sum."""
    angles = torch.outer(torch.arange(96.0, dtype=torch.float64), torch.arange(49.0, dtype=torch.float64))
    waves = torch.polar(torch.ones_like(angles), -2 * torch.pi * angles / 96).to(torch.complex64)
    return x.to(torch.complex64) @ waves


def test_an_element_may_be_as_wrong_as_rounding_the_inputs_makes_it():
    one = checker(SPECTRUM, spectrum_by_products)
    before = posed(one, CONSTANT).tolerance.allowed
    after = judged(one, CONSTANT).tolerance
    assert after.allowed.worst > before.worst
    assert after.allowed.rms == pytest.approx(before.rms, rel=0.5)
    assert one.tolerances[CONSTANT] == (after.allowed + after.reference) * 2.0
    assert one.trial.findings.checks["sets"]["constant"]["allowed"]["worst"] == after.allowed.worst
    one.bounds.conditioned = lambda question: question
    with pytest.raises(RejectionError):
        judged(one, CONSTANT)


def test_the_mean_error_keeps_its_limit():
    one = checker(SPECTRUM, lambda x: torch.fft.rfft(x) * (1 + 3e-4))
    with pytest.raises(RejectionError):
        judged(one, CONSTANT)


def test_a_wrong_element_is_not_excused_by_rounding_that_does_not_reach_it():
    def one_wrong(x):
        y = (x * 2).flatten()
        y[y.abs().argmin()] += 4e-4
        return y.view_as(x)

    one = checker(task("return inputs[0] * 2", "[torch.randn(1024, 256)]"), one_wrong)
    with pytest.raises(RejectionError):
        judged(one)
    (found,) = one.trial.findings.checks["sets"].values()
    assert found["error"]["rms"] < found["allowed"]["rms"]
    assert found["error"]["worst"] > found["allowed"]["worst"]


ROUNDED = task("return inputs[0] * 2 + 1", "[torch.randint(0, 3, (64, 32)).float()]")


def test_a_tolerance_is_only_ever_widened_and_only_for_single_elements():
    one = checker(SPECTRUM)
    question = posed(one, CONSTANT)
    tight = replace(question, tolerance=replace(question.tolerance, allowed=Distance(1e-9, 1e-9, 0.25)))
    found = one.bounds.conditioned(tight).tolerance.allowed
    assert (found.rms, found.differing) == (1e-9, 0.25)
    assert found.worst > 1e-9
    wide = replace(question, tolerance=replace(question.tolerance, allowed=Distance(1e-9, 1e9)))
    assert one.bounds.conditioned(wide).tolerance.allowed.worst == 1e9


@pytest.mark.parametrize(
    "forward",
    [
        "assert (inputs[0] == inputs[0].round()).all()\n        return inputs[0] * 2 + 1",
        "return torch.where(inputs[0] == inputs[0].round(), torch.inf, inputs[0])",
        "return (inputs[0] * 2 + 1).long()",
    ],
    ids=["the reference takes whole numbers only", "rounding makes infinities", "no rounding error"],
)
def test_a_task_whose_condition_cannot_be_told_keeps_its_tolerance(forward):
    one = checker(task(forward, "[torch.randint(0, 3, (64, 32)).float()]"))
    question = posed(one)
    assert one.bounds.conditioned(question) is question


def test_without_float64_a_task_keeps_its_tolerance():
    one = checker(ROUNDED)
    question = posed(one)
    assert one.bounds.conditioned(question) is not question
    question = replace(question, has_float64=False)
    assert one.bounds.conditioned(question) is question


# --- what another layout does to the reference's own norms ----------------------------------------

NORMALISED = task(
    "return torch.nn.functional.batch_norm(torch.conv2d(inputs[0], self.filter), None, None, training=True) + 0.5",
    "[torch.randn(8, 3, 32, 32)]",
    init="self.register_buffer('filter', "
    "torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(5)), persistent=False)",
)


def normalised(x, filters):
    return torch.nn.functional.batch_norm(torch.conv2d(x, filters), None, None, training=True) + 0.5


def with_channels_last(x):
    return normalised(x.contiguous(memory_format=torch.channels_last), FILTER).contiguous()


def test_what_the_reference_loses_with_channels_last_a_candidate_may_lose_too():
    one = checker(NORMALISED, with_channels_last)
    judged(one)
    judged(one, CONSTANT)
    one.bounds.norms_summed_otherwise = lambda question: []
    with pytest.raises(RejectionError):
        judged(one, CONSTANT)


def test_that_is_only_where_another_set_has_told_the_precision_and_never_narrower():
    one = checker(NORMALISED)
    question = posed(one, CONSTANT)
    assert one.bounds.norms_summed_otherwise(question) == []
    judged(one)
    before, after = question.tolerance.allowed, one.bounds.summed_otherwise(question).tolerance.allowed
    assert after.rms > before.rms
    assert after.worst >= before.worst
    assert after.differing == before.differing
    wide = replace(question, tolerance=replace(question.tolerance, allowed=Distance(1e9, 1e9)))
    assert one.bounds.summed_otherwise(wide).tolerance.allowed == Distance(1e9, 1e9)


def test_lower_precision_is_not_excused_by_other_sums_on_any_set_of_the_tasks_own_kind():
    one = checker(NORMALISED, lambda x: normalised(round_mantissa(x, 10), round_mantissa(FILTER, 10)))
    posed(one)  # which tells the precision
    with pytest.raises(RejectionError) as caught:
        judged(one, INPUT_SETS[1])
    assert caught.value.reason is Reason.PRECISION_DOWNGRADE


NORM = "torch.nn.functional.batch_norm(inputs[0], None, None, training=True)"


@pytest.mark.parametrize(
    "forward",
    [
        "return inputs[0] * 2",
        "return torch.nn.functional.batch_norm(inputs[0].flatten(2), None, None, training=True)",
        f"return {NORM}.view(4, -1)",
        f"y = {NORM}; return y / (1.0 if y.dtype == torch.float64 or y.is_contiguous() else 0.0)",
    ],
    ids=["no norm", "no image", "the reference does not take that layout", "what it makes of it is infinite"],
)
def test_where_another_layout_says_nothing_the_tolerance_stays(forward):
    one = checker(task(forward, "[torch.randn(4, 3, 8, 8)]"))
    judged(one)
    question = posed(one, INPUT_SETS[1])
    assert one.bounds.norms_summed_otherwise(question) == []


# --- sums in another order ------------------------------------------------------------------------------

MEAN_LOSS = task("return ((inputs[0] - inputs[1]) ** 2).mean(-1)", "[torch.randn(8, 32768), torch.randn(8, 32768)]")
(BIASED,) = (one for one in INPUT_SETS if one.name == "biased")


def in_series(first, second):
    """One term after the other."""
    running = np.cumsum(((first - second) ** 2).numpy(), axis=-1, dtype=np.float32)
    return torch.from_numpy(running[:, -1].copy()) / first.shape[-1]


def in_tf32(first, second):
    return ((round_mantissa(first, 10) - round_mantissa(second, 10)) ** 2).mean(-1)


def test_a_loss_that_sums_in_series_is_accepted_on_every_set():
    one = checker(MEAN_LOSS, in_series)
    judged(one)
    judged(one, BIASED)
    one.bounds.summed_otherwise = lambda question: question
    with pytest.raises(RejectionError):
        judged(one)


def test_the_same_loss_in_tf32_is_rejected_where_its_errors_do_not_average_away():
    one = checker(MEAN_LOSS, in_tf32)
    with pytest.raises(RejectionError) as caught:
        judged(one, BIASED)
    assert caught.value.reason is Reason.PRECISION_DOWNGRADE
    # On random elements they do: there the loss may pass.
    judged(one)


def test_no_order_of_sums_explains_half_of_what_shows_lower_precision():
    one = checker(MEAN_LOSS)
    question = posed(one)
    one.bounds.ask_biased = lambda question: None
    before = max(question.tolerance.allowed.rms, question.tolerance.lower.rms / 2 if question.tolerance.lower else 0.0)
    for told, limit in (
        ({0: (0, 1e-6)}, max(5e-7, before)),
        ({0: (0, 1.0)}, 2**-24 * 32768**0.5),
        ({}, 2**-24 * 32768**0.5),
    ):
        one.bounds.told = told
        assert one.bounds.summed_otherwise(question).tolerance.allowed.rms == pytest.approx(limit, rel=0.03)


DOT = task("return (inputs[0] * inputs[1]).sum()", "[torch.randn(1 << 16), torch.randn(1 << 16)]")


def rejections(one, sets=(OWN,), draws=40):
    """How many of the draws are rejected."""
    found = 0
    for inputs in sets * (draws // len(sets)):
        try:
            judged(one, inputs)
        except RejectionError:
            found += 1
    return found


CODES = task(
    "x, codes, values = inputs; return values[(x[:, None] - codes).square().sum(-1).argmin(1)]",
    "(lambda x, step: [x, torch.cat([x[:1] + step, x[:1] - step, torch.randn(30, 16)]), torch.randn(32, 8)])"
    "((torch.randn(32, 16) * 128).round() / 64, torch.randint(1, 33, (16,)) / 64)",
)


@pytest.mark.parametrize("row", [0, 1])
def test_an_element_that_rounding_chooses_may_be_another_and_no_other_one(row):
    def second_nearest(x, codes, values):
        chosen = (x[:, None].double() - codes).square().sum(-1).sort(stable=True).indices
        return values[torch.where(torch.arange(32) == row, chosen[:, 1], chosen[:, 0])]

    found = rejections(checker(CODES, second_nearest))
    assert found < 4 if row == 0 else found > 30


def test_terms_that_cancel_may_be_added_one_after_the_other(monkeypatch):
    def added(first, second):
        return torch.from_numpy(np.cumsum((first * second).numpy(), dtype=np.float32)[-1:].copy())[0]

    assert rejections(checker(DOT, added)) == 0
    in_ten_bits = checker(DOT, lambda first, second: (round_mantissa(first, 10) * round_mantissa(second, 10)).sum())
    assert rejections(in_ten_bits, (BIASED,)) > 20
    monkeypatch.setattr(oracle, "_ROUNDED_TERMS", 0.0)
    assert rejections(checker(DOT, added), draws=400) > 0


@pytest.mark.parametrize("name", ["ordered", "far"])
def test_terms_in_order_or_all_nearly_alike_may_be_added_in_series_and_none_left_out(name):
    (inputs,) = (one for one in INPUT_SETS if one.name == name)
    mean = task("return inputs[0].square().mean(-1)", "[torch.randn(4, 16384)]")
    rejected = {}
    for share in (1.0, 0.999):

        def added(x, share=share):
            terms = x[:, : int(share * x.shape[1])]
            running = np.cumsum(terms.square().numpy(), axis=-1, dtype=np.float32)
            return torch.from_numpy(running[:, -1].copy()) / terms.shape[1]

        rejected[share] = rejections(checker(mean, added), (inputs,), draws=10)
    assert rejected[1.0] == 0
    assert rejected[0.999] > 5 or name == "far"


def test_only_near_large_elements_may_tiles_leave_a_convolution_far_off():
    x, weight = torch.rand(1, 4, 32, 32, dtype=torch.float64), torch.rand(4, 4, 3, 3, dtype=torch.float64)
    x[0, 0, 16] = 1e6
    exact = torch.conv2d(x, weight, padding=1)
    moved = []
    for tiles in (False, True):
        with OtherSums(2.0**-24, tiles=tiles):
            moved.append((torch.conv2d(x, weight, padding=1) - exact).abs()[0].amax(dim=(0, 2)))
    rows, tiled = moved
    assert rows[12] < 1e-4 < tiled[13]
    assert tiled[8] < 1e-2 < 1e-1 < tiled[13]


@pytest.mark.parametrize("forward", ["(x > 0).sum()", "x.cumsum_(0)", "x.softmax(0)", "x.norm()"])
def test_what_is_not_a_sum_of_terms_is_moved_by_its_own_size_or_not_at_all(forward):
    x = torch.rand(64, dtype=torch.float64)
    exact = eval(forward, {"x": x.clone()})
    with OtherSums(2.0**-24):
        found = eval(forward, {"x": x.clone()})
    assert torch.allclose(found.double(), exact.double(), rtol=2.0**-24 * 9, atol=0)


HALVES = task(
    "return inputs[0] @ inputs[1]",
    "[torch.randn(8, 16384, dtype=torch.float16), torch.randn(16384, 8, dtype=torch.float16)]",
)


def in_slices(first, second):
    """Each slice of the sum in float32."""
    pairs = zip(first.float().chunk(64, 1), second.float().chunk(64, 0), strict=True)
    return sum(a @ b for a, b in pairs).half()


def in_eight_bits(first, second):
    return (round_mantissa(first.float(), 3) @ second.float()).half()


def test_long_sums_in_sixteen_bits_excuse_no_eight_bits_since_pytorch_adds_them_in_float32(monkeypatch):
    judged(checker(HALVES, in_slices))
    with pytest.raises(RejectionError) as caught:
        judged(checker(HALVES, in_eight_bits))
    assert caught.value.reason in (Reason.PRECISION_DOWNGRADE, Reason.WRONG_OUTPUT)
    monkeypatch.setattr(bounds, "unit_of_sums", lambda dtype: 2.0**-11)
    judged(checker(HALVES, in_eight_bits, lower_precision_share=0.9))


@pytest.mark.parametrize(
    ("forward", "shape", "terms", "is_linear"),
    [
        ("x.mean()", (8, 16), 128, True),
        ("x.sum(-1)", (8, 16), 16, True),
        ("x.relu()[0]", (8, 16), 0, False),
        ("torch.nn.functional.layer_norm(x, (16,))", (8, 16), 16, False),
        ("torch.nn.functional.group_norm(x, 2)", (2, 4, 6), 12, False),
        ("torch.softmax(x, 0)", (8, 16), 8, False),
        ("x.cumsum(1)", (8, 16), 16, True),
        ("x @ x.T", (8, 16), 16, True),
        ("torch.nn.functional.mse_loss(x, x + 1)", (8, 16), 128, False),
        ("torch.conv2d(x, x[:2])", (4, 3, 5, 5), 75, True),
    ],
)
def test_a_sum_may_err_by_the_root_of_its_terms_and_by_those_that_cancel(forward, shape, terms, is_linear):
    values = {"torch": torch, "x": torch.rand(shape, dtype=torch.float64)}
    exact = eval(forward, values)
    with OtherSums(1e-3):
        moved = (eval(forward, values) - exact).abs()
    assert torch.allclose(moved, 1e-3 * (math.sqrt(terms) + 2 * is_linear) * exact.abs())


# --- convolutions, which PyTorch lets use TF32 -----------------------------------------------------------

FILTER = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(5))
CONVOLUTION = task(
    "return torch.relu(torch.conv2d(inputs[0], self.filter))",
    "[torch.randn(4, 3, 20, 20)]",
    init="self.register_buffer('filter', "
    "torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(5)), persistent=False)",
)
PRODUCT = task("return inputs[0] @ inputs[1]", "[torch.randn(32, 64), torch.randn(64, 48)]")


@pytest.fixture
def tf32(monkeypatch):
    monkeypatch.setattr(Trial, "lets_cudnn_use_tf32", True)


def convolution(bits=None, **changes):
    """The task's module, and a candidate whose convolution loses all but so many bits of the mantissa."""
    rounded = (lambda x: x) if bits is None else functools.partial(round_mantissa, bits=bits)
    return checker(CONVOLUTION, lambda x: torch.relu(torch.conv2d(rounded(x), rounded(FILTER))), **changes)


def test_a_convolution_may_use_tf32_where_pytorch_lets_it_and_that_is_said(tf32):
    one = convolution(bits=10)
    judged(one)
    assert Label.TF32 in one.trial.findings.labels


def test_one_that_does_not_is_not_said_to(tf32):
    one = convolution()
    judged(one)
    assert Label.TF32 not in one.trial.findings.labels


def test_elsewhere_tf32_is_less_than_what_the_reference_has():
    with pytest.raises(RejectionError) as caught:
        judged(convolution(bits=10))
    assert caught.value.reason is Reason.PRECISION_DOWNGRADE


def test_bfloat16_is_less_than_tf32(tf32):
    with pytest.raises(RejectionError) as caught:
        judged(convolution(bits=7))
    assert caught.value.reason is Reason.PRECISION_DOWNGRADE


def test_a_matrix_product_may_not_use_tf32(tf32):
    def product(x, y):
        return round_mantissa(x, 10) @ round_mantissa(y, 10)

    one = checker(PRODUCT, product)
    with pytest.raises(RejectionError) as caught:
        judged(one)
    assert caught.value.reason is Reason.PRECISION_DOWNGRADE
    assert one.bounds.has_tf32 is False


PERCEPTRON = task(
    "x, first, second, third = inputs; return torch.relu(x @ first) @ second + torch.einsum('bi,ij->bj', x, third)",
    "[torch.randn(32, 64), torch.randn(64, 96), torch.randn(96, 48), torch.randn(64, 48)]",
)


def perceptron(bits, **changes):
    """The task's module, and a candidate whose products lose all but so many bits of their factors' mantissas."""

    def product(x, y):
        return round_mantissa(x, bits) @ round_mantissa(y, bits)

    def answer(x, first, second, third):
        return product(torch.relu(product(x, first)), second) + product(x, third)

    return checker(PERCEPTRON, answer, **changes)


def test_products_may_use_tf32_where_the_settings_allow_it_and_that_is_said(tf32):
    one = perceptron(10, tf32_products=True)
    judged(one)
    assert one.trial.findings.labels == {Label.TF32}
    exact = perceptron(23, tf32_products=True)
    judged(exact)
    assert not exact.trial.findings.labels


def test_bfloat16_is_less_than_tf32_in_products_too(tf32):
    with pytest.raises(RejectionError) as caught:
        judged(perceptron(7, tf32_products=True))
    assert caught.value.reason is Reason.PRECISION_DOWNGRADE


@pytest.mark.parametrize("changes", [{}, {"strict_fp32": True}])
def test_without_that_setting_products_may_not_use_tf32(tf32, changes):
    with pytest.raises(RejectionError) as caught:
        judged(perceptron(10, **changes))
    assert caught.value.reason is Reason.PRECISION_DOWNGRADE


def test_on_a_device_without_tf32_the_setting_allows_nothing():
    with pytest.raises(RejectionError) as caught:
        judged(perceptron(10, tf32_products=True))
    assert caught.value.reason is Reason.PRECISION_DOWNGRADE


def test_where_products_may_use_tf32_convolutions_may_too(tf32):
    one = convolution(bits=10, tf32_products=True)
    judged(one)
    assert Label.TF32 in one.trial.findings.labels


def test_a_forbidden_label_rejects_tf32_in_convolutions_too(tf32):
    one = convolution(bits=10)
    one.trial = replace(one.trial, findings=CheckFindings(Demands(forbidden={Label.TF32})))
    with pytest.raises(RejectionError) as caught:
        judged(one)
    assert caught.value.reason is Reason.FORBIDDEN_LABEL


@pytest.mark.parametrize(
    ("device", "strict", "capability", "lets"),
    [
        ("cuda", False, (9, 0), True),
        ("cuda", True, (9, 0), False),
        ("cuda", False, (7, 5), False),
        ("cpu", False, (9, 0), False),
    ],
)
def test_tf32_is_what_ampere_and_later_have_and_strictness_takes_away(simulated_gpu, device, strict, capability, lets):
    simulated_gpu.capability = capability
    trial = convolution().trial
    settings = trial.settings.model_copy(update={"strict_fp32": strict})
    facts = replace(trial.facts, device=torch.device(device))
    assert replace(trial, settings=settings, facts=facts).lets_cudnn_use_tf32 is lets


def test_where_tf32_leads_out_of_the_domain_nothing_is_permitted(tf32):
    one = convolution(bits=10)

    def out(*given, **options):
        raise OutOfDomainError("so it is")

    one.trial.facts.oracle.with_tf32 = out
    with pytest.raises(RejectionError):
        judged(one)


@pytest.mark.parametrize(("ended", "error"), [(False, OutOfDomainError), (True, TaskError)])
def test_a_reference_that_is_gone_is_asked_nothing_more(ended, error):
    """A set is skipped on which it only raised."""

    def call(*given, **options):
        raise TaskError("so it is")

    examiner = SimpleNamespace(call=call, reference=SimpleNamespace(worker=SimpleNamespace(ended=ended)))
    with pytest.raises(error, match="so it is"):
        Examiner.reference_answer(examiner, INPUT_SETS[3], [])


# --- one draw is worse conditioned than another --------------------------------------------------------

SPARSE = task("return torch.relu(inputs[0] @ inputs[1] - 4)", "[torch.randn(64, 10), torch.randn(10, 5) / 3]")


def near_the_threshold():
    """Inputs whose one positive output is nearly all cancellation."""
    x, y = torch.zeros(64, 10), torch.zeros(10, 5)
    x[0], y[:, 0] = 1.0, 0.4
    x[0, 0] += 1e-5
    return [x, y]


def test_an_answer_far_from_the_references_may_be_right_by_the_truth_of_its_own_inputs():
    one = checker(SPARSE)
    bounds, inputs = one.bounds, near_the_threshold()
    judged(one)
    wanted = [torch.relu(inputs[0] @ inputs[1] - 4)]
    right = [torch.relu(inputs[0].double() @ inputs[1].double() - 4).float()]
    assert not apart(right, wanted).within(one.tolerances[OWN])
    assert bounds.settles(inputs, wanted, right)
    assert not bounds.settles(inputs, wanted, [right[0] * 30])
    one.bounds.has_float64 = False
    assert not bounds.settles(inputs, wanted, right), "there is no truth to ask"


def test_inputs_outside_the_domain_settle_nothing():
    one = checker(task("return inputs[0].sqrt()", "[torch.rand(8, 8) + 1]"))
    judged(one)
    assert not one.bounds.settles([-torch.ones(8, 8)], [torch.ones(8, 8)], [torch.ones(8, 8)])


# --- buffers after many calls -----------------------------------------------------------------------

BEFORE = torch.linspace(-1.0, 1.0, 64)
MOVED = BEFORE + torch.linspace(2.0, 3.0, 64)


@pytest.mark.parametrize(
    ("found", "wanted", "kept_up"),
    [
        (MOVED, MOVED, True),
        (MOVED * (1 + 1e-4), MOVED, True),  # rounding, of convolutions in TF32 say
        (BEFORE, MOVED, False),  # never updated
        (BEFORE + 0.95 * (MOVED - BEFORE), MOVED, False),  # some updates left out
        (MOVED * torch.nan, MOVED, False),
        (BEFORE, MOVED / 0.0, True),  # an input left it infinite: nothing to compare
        (BEFORE, BEFORE, True),  # a mask or a table stays
        (BEFORE + 1e-3, BEFORE, False),
        (torch.tensor(40), torch.tensor(40), True),
        (torch.tensor(39), torch.tensor(40), False),  # a counter
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_a_buffer_keeps_up_when_it_moves_as_the_references_does(found, wanted, kept_up):
    before = torch.empty(0) if not wanted.numel() else BEFORE if wanted.is_floating_point() else torch.tensor(0)
    assert buffer_has_kept_up(found, wanted, before) is kept_up


@pytest.mark.exhaustive
def test_a_default_that_the_reference_relies_on_stays(judge):
    made = task("assert self.flag == 0; return inputs[0] * 2", init="self.register_buffer('flag', torch.zeros(()))")
    copy = Candidate(source=made.source.replace("class Model(", "class ModelNew("))
    found = judge.evaluate(made, copy)
    assert found.accepted, found.detail
    assert "own-buffers" in found.checks["skipped"]


@pytest.mark.parametrize(
    ("forward", "words"),
    exhaustive_but(
        [("return torch.max(inputs[0], dim=1)", "torch.return_types.max"), ("return self.weight", "parameter.Parameter")],
        ("return self.weight", "parameter.Parameter"),
    ),
)
def test_a_reference_that_returns_more_than_plain_tensors_is_a_task_error(judge, forward, words):
    made = task(forward, init="self.weight = torch.nn.Parameter(torch.ones(3))")
    with pytest.raises(TaskError, match=words):
        judge.evaluate(made, Candidate(source=made.source.replace("class Model(", "class ModelNew(")))


# --- numbers among outputs -----------------------------------------------------------------------------

NUMBERS = task("return inputs[0], inputs[0].square().mean().item(), True", name="numbers")


@pytest.mark.parametrize(
    ("loss", "flag", "right"),
    [
        (lambda x: x.square().mean().item() * (1 + 1e-6), True, True),
        (lambda x: x.square().mean().item() * (1 + 2**-11), True, False),  # as bfloat16 and TF32 leave, but for luck
        (lambda x: math.nan, True, False),
        (lambda x: x.square().mean(), True, False),
        (lambda x: x.square().mean().item(), 1.0, False),
        (lambda x: x.square().mean().item(), 1, False),
    ],
)
def test_a_number_may_be_off_by_rounding_and_not_by_type(loss, flag, right):
    one = checker(NUMBERS, lambda x: (x.clone(), loss(x), flag))
    if right:
        judged(one)
        return
    with pytest.raises(RejectionError) as found:
        judged(one)
    assert found.value.reason is Reason.WRONG_TYPE


# --- several outputs -----------------------------------------------------------------------------------

SEVERAL = task("return inputs[0].bfloat16(), (inputs[0] + 2.0**12) - 2.0**12, inputs[0] * 3.0", name="several-outputs")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_output_has_its_own_tolerance(index):
    """The last one is exact: neither the first one's dtype nor the second one's cancellation excuses an error in it."""

    def answer(x):
        outputs = [x.bfloat16(), (x + 2.0**12) - 2.0**12, x * 3.0]
        outputs[index] = (outputs[index].double() * (1 + 3e-5)).to(outputs[index].dtype)
        return tuple(outputs)

    one = checker(SEVERAL, answer)
    if index < 2:
        judged(one)
        return
    with pytest.raises(RejectionError) as found:
        judged(one)
    assert "of output 3 of 3" in found.value.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_swapping_keeps_the_sum_and_the_zeros(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.tril(torch.randn(40, 30, generator=generator).to(dtype))
    swapped = _swap(x, generator)
    changed = (swapped != x).nonzero()
    assert len(changed) == 2
    assert torch.equal((swapped == 0), (x == 0))
    (i, j), (k, m) = changed.tolist()
    assert swapped[i, j] == x[k, m]
    assert swapped[k, m] == x[i, j]


ALIKE = [torch.ones(5), torch.zeros(3, 4), torch.ones(7, dtype=torch.bool), torch.ones(()), torch.ones(0, 3)]


@pytest.mark.parametrize("x", ALIKE, ids=lambda x: f"{x.dtype} {tuple(x.shape)}")
def test_what_is_alike_everywhere_cannot_be_swapped(x):
    assert torch.equal(_swap(x, torch.Generator().manual_seed(0)), x)


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_zeros_among_other_elements_stay_when_some_are_changed(share):
    generator = torch.Generator().manual_seed(0)
    x = torch.triu(torch.randn(40, 30, generator=generator))
    changed = _change(share, x, generator)
    assert torch.equal(torch.triu(changed), changed)
    count = int((changed != x).sum())
    assert count == 1 if share == 0 else 0 < count <= int((x != 0).sum())


@pytest.mark.parametrize(("x", "count"), [(torch.zeros(9), 1), (torch.ones(9, dtype=torch.bool), 1), (torch.zeros(0), 0)])
def test_of_what_is_alike_everywhere_one_element_is_changed(x, count):
    assert int((_change(0.0, x, torch.Generator().manual_seed(0)) != x).sum()) == count


# --- weights as training leaves them ------------------------------------------------------------------


class LoadedSide(LocalSide):
    """A side with weights: `answer(state, *inputs)`."""

    def __init__(self, answer):
        super().__init__(lambda *inputs: answer(self.state, *inputs))

    def load_state(self, state):
        self.state = state


def examined_with_weights(made, answer):
    """The sets that were left out after an examination of `answer(state, *inputs)` by weights of every structure."""
    one = checker(made, lambda: None)
    model = one.trial.facts.oracle.model
    one.reference = LoadedSide(lambda state, *inputs: torch.func.functional_call(model, state, inputs))
    one.candidate = LoadedSide(answer)
    one.sides = one.reference, one.candidate
    one.load(one.trial.facts.weights)
    with torch.no_grad():
        check_weight_structure(one, judged(one).tolerance.allowed)
    assert one.trial.findings.checks["sets"].keys() == {"own"} | {one.name for one in WEIGHT_SETS} - left_out(one)
    return left_out(one)


def left_out(one):
    return one.trial.findings.checks.get("skipped", {}).keys()


SLOPES = task(
    "return torch.nn.functional.prelu(inputs[0], self.a)", init="self.a = torch.nn.Parameter(torch.full((16,), 0.25))"
)


def test_slopes_above_one_are_right_only_where_they_are_not_assumed_away():
    assert not examined_with_weights(SLOPES, lambda state, x: torch.where(x > 0, x, x * state["a"]))
    with pytest.raises(RejectionError, match="on input set `weights-") as caught:
        examined_with_weights(SLOPES, lambda state, x: torch.maximum(x, x * state["a"]))
    assert caught.value.reason is Reason.WRONG_OUTPUT


def test_weights_that_make_a_task_chaotic_or_lie_outside_its_domain_are_left_out():
    chaotic = "x = inputs[0]\n        for _ in range(60): x = torch.sin(x * self.a)\n        return x"
    made = task(chaotic, init="self.a = torch.nn.Parameter(torch.full((16,), 0.5))")

    def steps(state, x):
        for _ in range(60):
            x = torch.sin(state["a"] * x)
        return x

    assert "weights-16-times" in examined_with_weights(made, steps)
    root = task("return inputs[0] * self.a.sqrt()", init="self.a = torch.nn.Parameter(torch.ones(16))")
    assert examined_with_weights(root, lambda state, x: x * state["a"].sqrt()) == {"weights-signs"}


def test_rows_of_weights_come_in_nearly_equal_groups():
    (groups,) = (one for one in WEIGHT_SETS if one.name == "weights-in-groups")
    sizes = set[int]()
    for seed in range(8):
        varied = groups.vary(torch.randn(64, 32), torch.Generator().manual_seed(seed))
        sizes.add(int((torch.cdist(varied, varied) < 0.05).sum(1).max()))
    assert min(sizes) < 64  # by lot four groups, or one
    assert max(sizes) == 64
    assert torch.equal(groups.vary(torch.tensor(3.0), torch.Generator()), torch.tensor(3.0))
