"""Outputs that are far from the reference's after timing, and what may explain it: the truth of their inputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernelwright.judge.check.compare import Distance
from kernelwright.judge.timing.triple import ProcessTriple


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
