"""Tolerances where there is no float64 truth."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kernelwright.judge.check.bounds import _loose
from kernelwright.judge.check.compare import INFINITELY_FAR, Distance, distance
from kernelwright.judge.check.weights import _rounding_of_buffers


def test_without_a_truth_integers_must_be_equal_and_numbers_nearly():
    assert _loose(torch.int64) == Distance(0.0, 0.0)
    assert 0 < _loose(torch.float32).rms < _loose(torch.bfloat16).rms


def test_without_a_truth_no_rounding_of_buffers_is_excused():
    examiner = SimpleNamespace(
        trial=SimpleNamespace(facts=SimpleNamespace(oracle=None)), bounds=SimpleNamespace(has_float64=False)
    )
    assert _rounding_of_buffers(examiner, [], {}) == {}


def test_from_a_truth_that_is_not_a_number_everything_is_infinitely_far():
    assert distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")], dtype=torch.float64)) == INFINITELY_FAR
