"""Baselines of one task in one rotation: each has a time or a reason, and one that fails costs the others nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kernelwright.errors import CrowdedError, DeviceError, TaskError
from kernelwright.judge import Judge, Settings
from kernelwright.judge.check.compare import LEGAL_ERRORS
from kernelwright.judge.timing import rotation
from kernelwright.judge.timing.answers import TOLERANCE, LooseAnswers
from kernelwright.judge.timing.rotation import rotate
from kernelwright.records import Candidate, Reason, Task, TimingBlock, Verdict
from tests.judge.snippets import RELU, baseline, task

SETTINGS = Settings.quick(threads=1, blocks=3)
SAME = baseline("return super().forward(x)", name="same")


@pytest.fixture(scope="module")
def judge(_one_fork_server: type) -> Iterator[Judge]:
    with Judge("cpu", SETTINGS, fork_server=_one_fork_server()) as made:
        yield made


def test_each_baseline_is_paired_with_the_same_reference_calls(judge: Judge):
    other = baseline("y = super().forward(x)\n        return y.clone()", name="clone")
    first, second = rotate(judge, RELU, [SAME, other], settings=SETTINGS)
    assert (first.verdict, second.verdict) == (Verdict.ACCEPTED, Verdict.ACCEPTED)
    assert (first.techniques, second.techniques) == (("same",), ("clone",))
    assert len(first.blocks) == SETTINGS.blocks
    assert [block.reference_us for block in first.blocks] == [block.reference_us for block in second.blocks]
    assert [block.candidate_us for block in first.blocks] != [block.candidate_us for block in second.blocks]
    assert first.reference_us is not None
    assert first.speedup_low <= first.speedup <= first.speedup_high
    assert first.noise_floor is not None
    assert first.checks["rotation"] == 2
    assert 0.0 < first.checks["device_s"] < first.elapsed_s
    assert first.checks["device_s"] == second.checks["device_s"], "one rotation has the device for both"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (baseline("return super().forward(x) + 1"), Reason.WRONG_OUTPUT),
        pytest.param(
            baseline("return super().forward(x)", init="raise ValueError('no')"),
            Reason.BUILD_FAILED,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(baseline("raise ValueError('no')"), Reason.RUNTIME_ERROR, marks=pytest.mark.exhaustive),
        (baseline("return super().forward(x) if self.calls < 3 else 1 / 0"), Reason.RUNTIME_ERROR),
        pytest.param(
            baseline("return super().forward(x) * (1 if self.calls < 4 else 2)"),
            Reason.WRONG_OUTPUT,
            marks=pytest.mark.exhaustive,
        ),
        (baseline("return super().forward(x) if self.calls < 4 else os._exit(3)"), Reason.EXITED),
        (baseline("return super().forward(x)", init="self.more = torch.nn.Parameter(torch.ones(1))"), Reason.STATE_MISMATCH),
    ],
    ids=["wrong", "no constructor", "raises", "raises later", "wrong later", "leaves", "other state"],
)  # fmt: skip
def test_one_that_fails_has_a_reason_and_the_others_their_times(judge: Judge, bad, reason):
    gc.collect()
    before = sum(type(one) is torch.Tensor for one in gc.get_objects())
    gc.disable()
    try:
        failed, fine = rotate(judge, RELU, [bad, SAME], settings=SETTINGS)
        # A collection may be minutes away, and other judges need the GPU's memory at once.
        assert sum(type(one) is torch.Tensor for one in gc.get_objects()) == before
    finally:
        gc.enable()
    assert (failed.verdict, failed.reason) == (Verdict.REJECTED, reason), failed.detail
    assert failed.speedup is None
    assert fine.accepted
    assert len(fine.blocks) == SETTINGS.blocks


ILL = task("return (inputs[0] + 2.0**20) - 2.0**20", name="ill-conditioned")
"""Eager's own answer is 4 % off."""


def of_the_ill_conditioned(answer: str, name: str) -> Candidate:
    source = f"{ILL.source}\nclass ModelNew(Model):\n    def forward(self, x):\n        return {answer}\n"
    return Candidate(source=source, policy="baseline", techniques=(name,))


def test_a_baseline_may_be_as_far_from_eager_as_eager_is_from_the_truth(judge: Judge):
    better, wrong = of_the_ill_conditioned("x.clone()", "better"), of_the_ill_conditioned("x * 1.3", "wrong")
    right, other = rotate(judge, ILL, [better, wrong], settings=SETTINGS)
    assert right.accepted, right.detail
    assert (other.verdict, other.reason) == (Verdict.REJECTED, Reason.WRONG_OUTPUT)


def test_where_rounding_explains_nothing_the_tolerance_stays(judge: Judge):
    (found,) = rotate(judge, RELU, [baseline("return super().forward(x) * 1.03")], settings=SETTINGS)
    assert found.reason is Reason.WRONG_OUTPUT
    assert "allowed 1.00e-02 rms, 1.00e-01 worst" in found.detail


def test_short_rounds_go_on_for_a_while_and_not_for_ever(judge: Judge, monkeypatch):
    monkeypatch.setattr("kernelwright.judge.timing.triple.BLOCKS_MAX", SETTINGS.blocks + 2)
    found = rotate(judge, RELU, [SAME], settings=SETTINGS.model_copy(update={"triple_s": 60.0}))
    assert [len(one.blocks) for one in found] == [SETTINGS.blocks + 2]


def test_brief_calls_of_every_side_are_repeated_on_a_gpu(judge: Judge, warm_up_each_call, monkeypatch):
    from kernelwright.judge.isolation import side as stage

    warmed = []
    monkeypatch.setattr(stage.Side, "repeat", lambda self, calls: warmed.append(self.role))
    rotate(judge, RELU, [SAME], settings=SETTINGS)
    assert warmed == []
    warm_up_each_call()
    rotate(judge, RELU, [SAME], settings=SETTINGS)
    rounds = 2 * (SETTINGS.warmup_calls + SETTINGS.blocks)
    # Of the first input it is not known yet how long it takes.
    assert len(warmed) >= 2 * (rounds - 1)
    assert set(warmed) == {"reference", "baseline"}


def test_nothing_is_left_when_all_fail(judge: Judge):
    found = rotate(judge, RELU, [baseline("return x"), baseline("raise ValueError")], settings=SETTINGS)
    assert [one.accepted for one in found] == [False, False]


def test_a_reference_that_fails_is_the_tasks_fault(judge: Judge):
    broken = task("return inputs[0] @ inputs[0]")
    with pytest.raises(TaskError):
        rotate(judge, broken, [SAME], settings=SETTINGS)


def test_a_reference_that_draws_is_not_compared(judge: Judge):
    noisy = task("return inputs[0] + torch.rand_like(inputs[0])", name="noisy")
    forward = "def forward(self, x):\n        return x + torch.rand_like(x) * 0.5 * 2\n"
    other = Candidate(source=f"{noisy.source}\n\nclass ModelNew(Model):\n    {forward}")
    assert rotate(judge, noisy, [other], settings=SETTINGS)[0].accepted


KEEPS_STATE = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(1)

    def forward(self, x):
        self.hidden = self.hidden + 0.1  # one that settles looks like none, and is compared with the truth
        return x * 0.1 + self.hidden


def get_inputs():
    return [torch.randn(8)]


def get_init_inputs():
    return []
"""


def test_one_that_does_not_move_the_state_of_the_reference_is_wrong(judge: Judge):
    keeps = Task(id="keeps-state", source=KEEPS_STATE)
    moves, stays = (
        Candidate(
            source=f"{KEEPS_STATE}\n\nclass ModelNew(Model):\n    def forward(self, x):\n        {body}\n",
            techniques=(name,),
        )
        for name, body in (
            ("moves", "return super().forward(x)"),
            (
                "stays",
                "before = self.hidden\n        y = super().forward(x)\n        self.hidden = before\n        return y",
            ),
        )
    )
    right, wrong = rotate(judge, keeps, [moves, stays], settings=SETTINGS)
    assert right.accepted
    assert wrong.reason is Reason.WRONG_OUTPUT


# --- memory that does not suffice -----------------------------------------------------------------


FULL = {"reason": "out-of-memory", "detail": "no memory"}


def timed(trial):
    alongside_us = {name: (5.0,) for name in trial.alongside}
    return (TimingBlock(process=0, reference_us=(5.0,), candidate_us=(5.0,), alongside_us=alongside_us),)


def full(trial):
    trial.findings.checks["alongside"] = dict.fromkeys(trial.alongside, FULL)
    return ()


@pytest.fixture
def rotate_by(gpu_judge, monkeypatch):
    """A rotation of RELU's baselines on a simulated GPU, where a given function measures them, without a trial."""

    def rotate_by(measure, *baselines, **options):
        def trial(task, first, directory, settings, findings, alongside):
            by_name = {one.name_alongside: one for one in alongside}
            return SimpleNamespace(gate=SimpleNamespace(held_s=0.0, waited_s=0.0), findings=findings, alongside=by_name)

        monkeypatch.setattr(rotation, "measure", lambda trial, flush: measure(trial))
        monkeypatch.setattr(gpu_judge, "trial", trial)
        return rotate(gpu_judge, RELU, baselines, **options)

    return rotate_by


def test_a_rotation_that_finds_too_little_memory_says_so_before_it_is_halved(gpu_judge, rotate_by):
    with pytest.raises(CrowdedError):
        rotate_by(full, baseline("pass", name="one"), baseline("pass", name="two"), alone=False)
    assert gpu_judge.memory.ways == [False]


@pytest.mark.parametrize("what", ["reference", "baseline"])
def test_a_rotation_whose_memory_ran_out_is_made_once_more_alone(gpu_judge, rotate_by, what):
    made = []

    def measure(trial):
        made.append(trial)
        if len(made) == 1 and what == "reference":
            raise DeviceError("no memory")
        return full(trial) if len(made) == 1 else timed(trial)

    (found,) = rotate_by(measure, SAME)
    assert found.speedup == 1.0
    assert gpu_judge.memory.ways == [False, True]


@pytest.mark.parametrize("how", ["error", "verdict"])
@pytest.mark.parametrize("fitting", [5, 2, 1, 0])
def test_baselines_that_do_not_fit_together_are_measured_by_halves(rotate_by, simulated_gpu, fitting, how):
    def measure(trial):
        if len(trial.alongside) > fitting and how == "error":
            raise DeviceError("no memory")
        return full(trial) if len(trial.alongside) > fitting else timed(trial)

    simulated_gpu.reserved_gib, simulated_gpu.allocated_gib = 5, 3
    baselines = [baseline("pass", name=str(number)) for number in range(5)]
    if not fitting and how == "error":
        with pytest.raises(DeviceError, match=r"no memory The judge's own tensors took 3\.0 GiB at most, of 5\.0 reserved"):
            rotate_by(measure, *baselines)
        return
    found = rotate_by(measure, *baselines)
    assert [one.techniques for one in found] == [one.techniques for one in baselines]
    assert all(one.accepted is (fitting > 0) for one in found)
    assert max(one.checks["rotation"] for one in found) == max(fitting, 1)


# --- what explains a distance from eager ----------------------------------------------------------

TRUTH = [torch.ones(4, dtype=torch.float64)]


def explained(outputs, tf32=None, settings=SETTINGS):
    oracle = SimpleNamespace(
        training=False,
        truth=lambda inputs, state, training: TRUTH,
        with_tf32=lambda inputs, state, training, products: tf32 if products is settings.tf32_products else TRUTH,
    )
    facts = SimpleNamespace(oracle=oracle)
    trial = SimpleNamespace(state={}, facts=facts, settings=settings, lets_cudnn_use_tf32=tf32 is not None)
    return LooseAnswers._explained(SimpleNamespace(_trial=trial), [], SimpleNamespace(outputs=outputs))


def test_a_baseline_may_be_as_far_as_several_times_eagers_own_rounding():
    allowed = explained([torch.full((4,), 1.001)])
    assert allowed.rms == pytest.approx(0.001 * LEGAL_ERRORS, rel=0.01)


def test_where_cudnn_may_use_tf32_its_rounding_counts_too():
    allowed = explained([torch.full((4,), 1.001)], tf32=[torch.full((4,), 1.01)])
    assert allowed.rms == pytest.approx(0.01 * LEGAL_ERRORS, rel=0.01)


def test_where_products_may_use_tf32_theirs_counts():
    allowed = explained(TRUTH, tf32=[torch.full((4,), 1.01)], settings=Settings(tf32_products=True))
    assert allowed.rms == pytest.approx(0.01 * LEGAL_ERRORS, rel=0.01)


@pytest.mark.parametrize("outputs", [[torch.ones(3)], [torch.full((4,), float("inf"))]], ids=["other shapes", "infinite"])
def test_what_cannot_be_compared_with_its_truth_keeps_the_usual_tolerance(outputs):
    assert explained(outputs) is TOLERANCE
