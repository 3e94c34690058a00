"""What is timed in the same process triples as the candidate decides no verdict."""

from __future__ import annotations

import pytest

from kernelwright.judge import Judge, Settings
from kernelwright.judge.timing.pairs import near_the_front
from kernelwright.records import Evaluation, Reason, TimingBlock
from kernelwright.records.scoring import alongside_record
from tests.judge.snippets import ANY_WAIT, RELU, baseline, candidate

SAME = baseline("return super().forward(x)", name="same")

TRIPLES = Settings.quick(threads=1, thorough=False, target_half_width=1e-9, **ANY_WAIT)


def test_stock_configurations_and_finalists_are_timed_in_the_candidates_processes(shared_judge: Judge):
    slow, other = (
        baseline("time.sleep(0.01); return super().forward(x)", name="slow"),
        candidate("return torch.relu(self.linear(x)) + 0.0"),
    )
    found = shared_judge.evaluate(RELU, candidate(), settings=TRIPLES, alongside=[slow, SAME, other])
    assert found.accepted, found.detail
    assert {block.process for block in found.blocks} >= {0, 1}  # a busy machine has a third
    assert set(found.versus) == {"slow", "same", other.sha256}
    assert {block.process for block in found.blocks if "slow" in block.alongside_us} == {0}, "it is far behind the other"
    assert {block.process for block in found.blocks if "same" in block.alongside_us} >= {0, 1}
    assert all(min(block.alongside_us["slow"]) > 10_000 for block in found.blocks if block.process == 0)
    assert all(low <= ratio <= high for ratio, low, high in found.versus.values())
    assert found.versus["slow"][0] > 4 * found.speedup
    assert "alongside" not in found.checks
    assert "baseline call" in found.checks["spent_s"]
    assert Evaluation.model_validate_json(found.model_dump_json()) == found
    record = alongside_record(found, slow)
    assert (record.policy, record.techniques, record.accepted) == ("baseline", ("slow",), True)
    assert record.speedup_low <= record.speedup <= record.speedup_high < 1
    assert len(record.blocks) == sum("slow" in block.alongside_us for block in found.blocks)
    once = TRIPLES.model_copy(update={"processes_min": 1, "processes_max": 1})
    again = shared_judge.evaluate(RELU, candidate(), settings=once)
    assert (again.versus, again.blocks[0].alongside_us, alongside_record(again, slow)) == ({}, {}, None)


def test_after_the_first_processes_only_what_is_near_the_front_is_timed():
    mine = candidate()
    alongside = {
        one.name_alongside: one for one in (baseline("pass", name=name) for name in ("fast", "near", "far", "cudagraph"))
    }
    alongside |= {"rival": mine, "slower": mine, "failed": SAME}
    us = {"fast": 50.0, "near": 54.0, "far": 60.0, "cudagraph": 20.0, "rival": 32.0, "slower": 40.0}
    blocks = [
        TimingBlock(
            process=0, reference_us=(100.0,), candidate_us=(30.0,), alongside_us={name: (one,) for name, one in us.items()}
        )
    ]
    assert near_the_front(blocks, alongside) == ["fast", "near", "cudagraph", "rival"]


@pytest.mark.parametrize(
    ("forward", "init", "why"),
    [
        pytest.param(
            "return super().forward(x)",
            "raise ValueError('no')",
            "build-failed: ValueError: no",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "return super().forward(x)",
            "self.more = torch.nn.Parameter(torch.ones(1))",
            "unexpected 'more'; other",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "raise ValueError('first')", "pass", "runtime-error: ValueError: first", marks=pytest.mark.exhaustive
        ),
        ("return super().forward(x) if self.calls < 5 else 1 / 0", "pass", "runtime-error: ZeroDivisionError"),
        ("return super().forward(x) + 1", "pass", "wrong-output: the output is"),
        pytest.param(
            "return super().forward(x) if self.calls < 5 else os._exit(3)", "pass", "exited", marks=pytest.mark.exhaustive
        ),
    ],
    ids=["no constructor", "other state", "raises", "raises in a block", "wrong", "leaves"],
)  # fmt: skip
def test_what_fails_beside_a_candidate_is_noted_and_decides_nothing(shared_judge: Judge, forward, init, why):
    bad = baseline(forward, init, name="bad")
    found = shared_judge.evaluate(RELU, candidate(), settings=TRIPLES, alongside=[bad])
    assert found.accepted, found.detail
    failed = found.checks["alongside"]["bad"]
    assert why in f"{failed['reason']}: {failed['detail']}"
    assert found.versus == {}
    assert not any(block.alongside_us for block in found.blocks)
    assert {block.process for block in found.blocks} >= {0, 1}
    record = alongside_record(found, bad)
    assert (record.accepted, record.reason, record.speedup) == (False, failed["reason"], None)


def test_where_memory_did_not_suffice_beside_others_the_candidate_is_timed_without(shared_judge: Judge, monkeypatch):
    monkeypatch.setattr(shared_judge.memory, "alone", True)
    once = TRIPLES.model_copy(update={"processes_min": 1, "processes_max": 1})
    found = shared_judge.evaluate(RELU, candidate(), settings=once, alongside=[SAME])
    assert (found.accepted, found.versus) == (True, {})
    assert "memory" in found.checks["alongside"]["same"]["detail"]
    assert alongside_record(found, SAME).reason is Reason.OUT_OF_MEMORY
