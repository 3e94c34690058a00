"""Memory that the judge and screening take for a task with large tensors, in multiples of its input's size N. Its output is
as large, and a truth in float64 twice that."""

from __future__ import annotations

import pytest

from kernelwright.judge import Judge, Settings
from kernelwright.judge.check import compare
from kernelwright.judge.isolation import side
from kernelwright.judge.isolation.workers import Workers
from kernelwright.judge.timing.triple import ProcessTriple
from kernelwright.judge.worker.screening import ScreeningHarness
from kernelwright.records import Candidate, Task
from tests.judge.memory import PeakBytes

SOURCE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.rand(64, 1024)]

def get_init_inputs():
    return []
"""
TASK = Task(id="relu", source=SOURCE)
CANDIDATE = SOURCE.replace("Model", "ModelNew")
N = 64 * 1024 * 4
ROOM = N / 2
"""For what is done in pieces, and for masks of single bytes."""


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    """A small task is taken for a large one."""
    monkeypatch.setattr(compare, "_PART", 4096)
    monkeypatch.setattr(side, "SERIES_BYTES_MAX", 1)


def test_a_check_holds_no_truth_but_that_of_the_present_question():
    with Judge("cpu", Settings.quick(threads=1, timed=False)) as judge, PeakBytes() as held:
        assert judge.evaluate(TASK, Candidate(source=CANDIDATE)).verdict == "accepted"
    # Two held questions' inputs, those of the question before, and of this one with its truth; lower precision on float64
    # inputs and outputs. It was 25.
    assert held.peak < 12 * N


def test_timing_holds_what_it_compares_and_what_lies_in_the_slots(monkeypatch):
    peaks = {}
    held = PeakBytes()

    def measured(name):
        step = getattr(ProcessTriple, name)

        def measure(self, *given):
            held.peak = 0
            step(self, *given)
            peaks[name] = max(held.peak, peaks.get(name, 0))

        monkeypatch.setattr(ProcessTriple, name, measure)

    for name in ("block", "odd_inputs", "audit", "verify_process"):
        measured(name)
    with Judge("cpu", Settings.quick(threads=1, thorough=False)) as judge, held:
        assert judge.evaluate(TASK, Candidate(source=CANDIDATE)).verdict == "accepted"
    # The last with a truth in float64. It was 12.5, 14, 14 and 18.
    assert max(peaks.values()) < 11 * N, peaks


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_the_checked_reference_gives_its_memory_back_where_that_is_scarce(monkeypatch, alone):
    started, ended = [], []

    def timed(self, trial, check, checked, time=Judge._time):
        ended.append([worker.ended for worker in started])
        return time(self, trial, check, checked)

    def start(self, spec, settings, begin=Workers.start):
        started.append(begin(self, spec, settings))
        return started[-1]

    monkeypatch.setattr(Judge, "_time", timed)
    monkeypatch.setattr(Workers, "start", start)
    with Judge("cpu", Settings.quick(threads=1)) as judge:
        judge._memory.alone = alone
        assert judge.evaluate(TASK, Candidate(source=CANDIDATE)).verdict == "accepted"
    # Reference and candidate. The late check has a new reference.
    assert ended == [[alone, False]]


def test_screening_holds_two_questions_and_what_the_reference_takes_in_float64(tmp_path):
    settings = Settings.quick(threads=1).model_dump_json()
    config = {"device": "cpu", "threads": 1, "strict_fp32": False, "arenas": {}, "private": str(tmp_path)}
    harness = ScreeningHarness(config, [])
    with PeakBytes() as held:
        harness.op_task({"task": TASK.model_dump_json(), "settings": settings})
        harness.op_truth({})
        # Two inputs with their truths; in float64 an input and an output for lower precision. It was 14.
        assert held.peak < 10 * N + ROOM
        harness._timed = harness._timed[:1]  # as of an input beyond `TIMED_BYTES_MAX`
        held.peak = 0
        assert not harness.op_build({"source": CANDIDATE})
        harness.op_call({})
        assert not harness.op_check({})
        harness.op_time({})
        # The questions, a copy of an input, and an output.
        assert held.peak < 8 * N + ROOM
