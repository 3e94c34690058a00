"""Baselines of one task in one rotation: each has a time or a reason, and one that fails costs the others nothing."""

from __future__ import annotations

import pytest

from kernelwright.errors import TaskError
from kernelwright.judge import Judge, Settings
from kernelwright.judge.timing.rotation import TOLERANCE
from kernelwright.records import Candidate, Evaluation, Reason, Verdict
from tests.judge.snippets import RELU, candidate, task

SETTINGS = Settings.quick(threads=1, blocks=3)

MODEL = RELU.source


def baseline(forward: str, init: str = "pass", name: str = "x") -> Candidate:
    source = f"""{MODEL}

class ModelNew(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = 0
        {init}

    def forward(self, x):
        self.calls += 1
        {forward}
"""
    return Candidate(source=source, policy="baseline", techniques=(name,))


SAME = baseline("return super().forward(x)", name="same")

TRIPLES = Settings.quick(threads=1, thorough=False, target_half_width=1e-9)


def test_a_rival_is_timed_in_the_same_process_triples_as_the_candidate(shared_judge: Judge):
    slow = baseline("time.sleep(0.004); return super().forward(x)", name="slow")
    found = shared_judge.evaluate(RELU, candidate(), settings=TRIPLES, rival=slow)
    assert found.accepted, found.detail
    assert {block.process for block in found.blocks} >= {0, 1}  # a busy machine has a third
    assert all(len(block.rival_us) == len(block.candidate_us) == 2 for block in found.blocks)
    assert min(value for block in found.blocks for value in block.rival_us) > 4000
    assert found.rival == "slow"
    assert found.vs_rival_low <= found.vs_rival <= found.vs_rival_high
    assert found.vs_rival > 4 * found.speedup
    assert "rival" not in found.checks
    assert "baseline call" in found.checks["spent_s"]
    assert Evaluation.model_validate_json(found.model_dump_json()) == found
    again = shared_judge.evaluate(RELU, candidate(), settings=TRIPLES)
    assert (again.rival, again.vs_rival, again.blocks[0].rival_us) == (None, None, ())


@pytest.mark.parametrize(
    ("forward", "init", "why"),
    [
        ("return super().forward(x)", "raise ValueError('no')", "build-failed: ValueError: no"),
        ("return super().forward(x)", "self.more = torch.nn.Parameter(torch.ones(1))", "unexpected 'more'; other"),
        ("raise ValueError('first')", "pass", "runtime-error: ValueError: first"),
        ("return super().forward(x) if self.calls < 8 else 1 / 0", "pass", "runtime-error: ZeroDivisionError"),
        ("return super().forward(x) if self.calls < 9 else os._exit(3)", "pass", "exited"),
    ],
    ids=["no constructor", "other state", "raises", "raises in a block", "leaves"],
)  # fmt: skip
def test_a_rival_that_fails_is_noted_and_decides_nothing(shared_judge: Judge, forward, init, why):
    bad = baseline(forward, init, name="bad")
    found = shared_judge.evaluate(RELU, candidate(), settings=TRIPLES, rival=bad)
    assert found.accepted, found.detail
    assert why in found.checks["rival"]
    assert (found.rival, found.vs_rival, found.vs_rival_low, found.vs_rival_high) == (None, None, None, None)
    assert not any(block.rival_us for block in found.blocks)
    assert {block.process for block in found.blocks} >= {0, 1}


def test_where_memory_did_not_suffice_beside_others_there_is_no_rival(shared_judge: Judge, monkeypatch):
    monkeypatch.setattr(shared_judge._memory, "alone", True)
    once = TRIPLES.model_copy(update={"processes_min": 1, "processes_max": 1})
    found = shared_judge.evaluate(RELU, candidate(), settings=once, rival=SAME)
    assert (found.accepted, found.rival) == (True, None)
    assert "memory" in found.checks["rival"]


def test_each_baseline_is_paired_with_the_same_reference_calls(shared_judge: Judge):
    other = baseline("y = super().forward(x)\n        return y.clone()", name="clone")
    first, second = shared_judge.rotate(RELU, [SAME, other], settings=SETTINGS)
    assert (first.verdict, second.verdict) == (Verdict.ACCEPTED, Verdict.ACCEPTED)
    assert (first.techniques, second.techniques) == (("same",), ("clone",))
    assert len(first.blocks) == SETTINGS.blocks
    assert [block.reference_us for block in first.blocks] == [block.reference_us for block in second.blocks]
    assert [block.candidate_us for block in first.blocks] != [block.candidate_us for block in second.blocks]
    assert first.reference_us is not None
    assert first.speedup_low <= first.speedup <= first.speedup_high
    assert first.noise_floor is None
    assert first.checks["rotation"] == 2
    assert first.checks["allowed"] == TOLERANCE.to_json()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (baseline("return super().forward(x) + 1"), Reason.WRONG_OUTPUT),
        (baseline("return super().forward(x)", init="raise ValueError('no')"), Reason.BUILD_FAILED),
        (baseline("raise ValueError('no')"), Reason.RUNTIME_ERROR),
        (baseline("return super().forward(x) if self.calls < 3 else 1 / 0"), Reason.RUNTIME_ERROR),
        (baseline("return super().forward(x) * (1 if self.calls < 4 else 2)"), Reason.WRONG_OUTPUT),
        (baseline("return super().forward(x) if self.calls < 4 else os._exit(3)"), Reason.EXITED),
        (baseline("return super().forward(x)", init="self.more = torch.nn.Parameter(torch.ones(1))"), Reason.STATE_MISMATCH),
    ],
    ids=["wrong", "no constructor", "raises", "raises later", "wrong later", "leaves", "other state"],
)  # fmt: skip
def test_one_that_fails_has_a_reason_and_the_others_their_times(shared_judge: Judge, bad, reason):
    failed, fine = shared_judge.rotate(RELU, [bad, SAME], settings=SETTINGS)
    assert (failed.verdict, failed.reason) == (Verdict.REJECTED, reason), failed.detail
    assert failed.speedup is None
    assert fine.accepted
    assert len(fine.blocks) == SETTINGS.blocks


ILL = task("return (inputs[0] + 2.0**20) - 2.0**20", name="ill-conditioned")
"""Eager's own answer is 4 % off."""


def of_the_ill_conditioned(answer: str, name: str) -> Candidate:
    source = f"{ILL.source}\nclass ModelNew(Model):\n    def forward(self, x):\n        return {answer}\n"
    return Candidate(source=source, policy="baseline", techniques=(name,))


def test_a_baseline_may_be_as_far_from_eager_as_eager_is_from_the_truth(shared_judge: Judge):
    better, wrong = of_the_ill_conditioned("x.clone()", "better"), of_the_ill_conditioned("x * 1.3", "wrong")
    right, other = shared_judge.rotate(ILL, [better, wrong], settings=SETTINGS)
    assert right.accepted, right.detail
    assert right.checks["allowed"]["rms"] > TOLERANCE.rms
    assert (other.verdict, other.reason) == (Verdict.REJECTED, Reason.WRONG_OUTPUT)


def test_where_rounding_explains_nothing_the_tolerance_stays(shared_judge: Judge):
    (found,) = shared_judge.rotate(RELU, [baseline("return super().forward(x) * 1.03")], settings=SETTINGS)
    assert found.reason is Reason.WRONG_OUTPUT
    assert "allowed 1.00e-02 rms, 1.00e-01 worst" in found.detail


def test_short_rounds_go_on_for_a_while_and_not_for_ever(shared_judge: Judge, monkeypatch):
    monkeypatch.setattr("kernelwright.judge.timing.rotation.BLOCKS_MAX", SETTINGS.blocks + 2)
    found = shared_judge.rotate(RELU, [SAME], settings=SETTINGS.model_copy(update={"triple_s": 60.0}))
    assert [len(one.blocks) for one in found] == [SETTINGS.blocks + 2]


def test_brief_calls_of_every_side_are_repeated_on_a_gpu(shared_judge: Judge, monkeypatch):
    from kernelwright.judge.isolation import side as stage
    from kernelwright.judge.timing import triple as timing

    warmed = []
    monkeypatch.setattr(stage.Side, "repeat", lambda self, calls: warmed.append(self.role))
    shared_judge.rotate(RELU, [SAME], settings=SETTINGS)
    assert warmed == []
    monkeypatch.setattr(timing, "_WARMED", ("cpu",))
    monkeypatch.setattr(timing, "_BRIEF_US", 1e9)
    shared_judge.rotate(RELU, [SAME], settings=SETTINGS)
    rounds = 2 * (SETTINGS.warmup_calls + SETTINGS.blocks)
    # Of the first input it is not known yet how long it takes.
    assert len(warmed) >= 2 * (rounds - 1)
    assert set(warmed) == {"reference", "baseline"}


def test_nothing_is_left_when_all_fail(shared_judge: Judge):
    found = shared_judge.rotate(RELU, [baseline("return x"), baseline("raise ValueError")], settings=SETTINGS)
    assert [one.accepted for one in found] == [False, False]


def test_a_reference_that_fails_is_the_tasks_fault(shared_judge: Judge):
    broken = task("return inputs[0] @ inputs[0]")
    with pytest.raises(TaskError):
        shared_judge.rotate(broken, [SAME], settings=SETTINGS)


def test_every_side_meets_every_input_once_and_in_both_orders(shared_judge: Judge, monkeypatch):
    from kernelwright.judge.timing import rotation

    orders = []
    input_of = rotation.RotatedCalls._input
    monkeypatch.setattr(
        rotation.RotatedCalls, "_input", lambda self, order: orders.append(list(order)) or input_of(self, order)
    )
    shared_judge.rotate(RELU, [SAME, baseline("return super().forward(x) * 1")], settings=SETTINGS)
    for first, second in zip(orders[::2], orders[1::2], strict=True):
        assert first == second[::-1]
        assert len(set(first)) == 3


def test_a_reference_that_draws_is_not_compared(shared_judge: Judge):
    noisy = task("return inputs[0] + torch.rand_like(inputs[0])", name="noisy")
    forward = "def forward(self, x):\n        return x + torch.rand_like(x) * 0.5 * 2\n"
    other = Candidate(source=f"{noisy.source}\n\nclass ModelNew(Model):\n    {forward}")
    assert shared_judge.rotate(noisy, [other], settings=SETTINGS)[0].accepted
