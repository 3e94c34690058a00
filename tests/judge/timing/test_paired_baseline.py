"""A stock baseline timed in the same process triples as the candidate decides nothing."""

from __future__ import annotations

import pytest

from kernelwright.judge import Judge, Settings
from kernelwright.records import Evaluation
from tests.judge.snippets import RELU, baseline, candidate

SAME = baseline("return super().forward(x)", name="same")

TRIPLES = Settings.quick(threads=1, thorough=False, target_half_width=1e-9)


def test_a_paired_baseline_is_timed_in_the_same_process_triples_as_the_candidate(shared_judge: Judge):
    slow = baseline("time.sleep(0.004); return super().forward(x)", name="slow")
    found = shared_judge.evaluate(RELU, candidate(), settings=TRIPLES, paired_baseline=slow)
    assert found.accepted, found.detail
    assert {block.process for block in found.blocks} >= {0, 1}  # a busy machine has a third
    assert all(len(block.paired_baseline_us) == len(block.candidate_us) == 2 for block in found.blocks)
    assert min(value for block in found.blocks for value in block.paired_baseline_us) > 4000
    assert found.paired_baseline == "slow"
    assert found.vs_paired_baseline_low <= found.vs_paired_baseline <= found.vs_paired_baseline_high
    assert found.vs_paired_baseline > 4 * found.speedup
    assert "rival" not in found.checks
    assert "baseline call" in found.checks["spent_s"]
    assert Evaluation.model_validate_json(found.model_dump_json()) == found
    once = TRIPLES.model_copy(update={"processes_min": 1, "processes_max": 1})
    again = shared_judge.evaluate(RELU, candidate(), settings=once)
    assert (again.paired_baseline, again.vs_paired_baseline, again.blocks[0].paired_baseline_us) == (None, None, ())


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
        pytest.param(
            "return super().forward(x) if self.calls < 5 else os._exit(3)", "pass", "exited", marks=pytest.mark.exhaustive
        ),
    ],
    ids=["no constructor", "other state", "raises", "raises in a block", "leaves"],
)  # fmt: skip
def test_a_paired_baseline_that_fails_is_noted_and_decides_nothing(shared_judge: Judge, forward, init, why):
    bad = baseline(forward, init, name="bad")
    found = shared_judge.evaluate(RELU, candidate(), settings=TRIPLES, paired_baseline=bad)
    assert found.accepted, found.detail
    assert why in found.checks["rival"]
    assert (
        found.paired_baseline,
        found.vs_paired_baseline,
        found.vs_paired_baseline_low,
        found.vs_paired_baseline_high,
    ) == (None, None, None, None)
    assert not any(block.paired_baseline_us for block in found.blocks)
    assert {block.process for block in found.blocks} >= {0, 1}


def test_where_memory_did_not_suffice_beside_others_there_is_no_paired_baseline(shared_judge: Judge, monkeypatch):
    monkeypatch.setattr(shared_judge.memory, "alone", True)
    once = TRIPLES.model_copy(update={"processes_min": 1, "processes_max": 1})
    found = shared_judge.evaluate(RELU, candidate(), settings=once, paired_baseline=SAME)
    assert (found.accepted, found.paired_baseline) == (True, None)
    assert "memory" in found.checks["rival"]
