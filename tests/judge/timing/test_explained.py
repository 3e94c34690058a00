"""Outputs that are far from the reference's, and what may explain it: the truth of their inputs, or another precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernelwright.judge.check.compare import Distance
from kernelwright.judge.timing.rotation import LEGAL_ERRORS, TOLERANCE, RotatedCalls
from kernelwright.judge.timing.triple import ProcessTriple

TRUTH = [torch.ones(4, dtype=torch.float64)]


def explained(outputs, tf32=None):
    oracle = SimpleNamespace(
        training=False,
        truth=lambda inputs, state, training: TRUTH,
        with_tf32_in_cudnn=lambda inputs, state, training: tf32,
    )
    trial = SimpleNamespace(state={}, facts=SimpleNamespace(oracle=oracle), lets_cudnn_use_tf32=tf32 is not None)
    return RotatedCalls._explained(SimpleNamespace(_trial=trial), [], SimpleNamespace(outputs=outputs))


def test_a_baseline_may_be_as_far_as_several_times_eagers_own_rounding():
    allowed = explained([torch.full((4,), 1.001)])
    assert allowed.rms == pytest.approx(0.001 * LEGAL_ERRORS, rel=0.01)


def test_where_cudnn_may_use_tf32_its_rounding_counts_too():
    allowed = explained([torch.full((4,), 1.001)], tf32=[torch.full((4,), 1.01)])
    assert allowed.rms == pytest.approx(0.01 * LEGAL_ERRORS, rel=0.01)


@pytest.mark.parametrize("outputs", [[torch.ones(3)], [torch.full((4,), float("inf"))]], ids=["other shapes", "infinite"])
def test_what_cannot_be_compared_with_its_truth_keeps_the_usual_tolerance(outputs):
    assert explained(outputs) is TOLERANCE


@pytest.mark.parametrize(
    ("wanted", "found", "settled", "far"),
    [
        (1.0, 1.0, False, False),
        (1.0, 2.0, False, True),
        (1.0, 2.0, True, False),
        (float("nan"), 2.0, False, False),
    ],
    ids=["near", "far", "right by its truth", "outside the domain"],
)
def test_after_timing_an_output_is_far_unless_its_truth_or_its_domain_explains_it(wanted, found, settled, far):
    def side(value):
        answer = SimpleNamespace(outputs=[torch.full((4,), value)])
        return SimpleNamespace(read_state=dict, place=lambda inputs, slot: inputs, call=lambda placed, seed: answer)

    facts = SimpleNamespace(draw=list, call_seed=lambda: 1, oracle=SimpleNamespace(training=False))
    bounds = SimpleNamespace(settles=lambda *arguments, **named: settled)
    triple = SimpleNamespace(
        _trial=SimpleNamespace(facts=facts),
        _check=SimpleNamespace(timed_tolerance=Distance(1e-3, 1e-2), bounds=bounds),
        _sides={"reference": side(wanted), "candidate": side(found)},
    )
    assert (ProcessTriple._far_from_reference(triple) is not None) is far
