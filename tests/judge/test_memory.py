"""Memory that the judge and screening take for a task with large tensors, in multiples of its input's size N. Its output is
as large, and a truth in float64 twice that."""

from __future__ import annotations

import math

import pytest
import torch

from kernelwright.judge import Judge, Settings
from kernelwright.judge.check import check, oracle
from kernelwright.judge.check.examiner import Examiner
from kernelwright.judge.check.facts import measure_task
from kernelwright.judge.check.oracle import disturbed
from kernelwright.judge.isolation import side
from kernelwright.judge.isolation.workers import Workers
from kernelwright.judge.timing.triple import ProcessTriple
from kernelwright.judge.worker.screening import ScreeningHarness
from kernelwright.records import Candidate, Task
from kernelwright.tasks import INPUT_SETS, bring_to_life, input_sets
from kernelwright.tasks.invariants import TensorForm
from tests.judge.memory import PeakBytes
from tests.judge.snippets import ANY_WAIT

SOURCE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.rand(64, 256)]

def get_init_inputs():
    return []
"""
TASK = Task(id="relu", source=SOURCE)
CANDIDATE = SOURCE.replace("Model", "ModelNew")
SMALL_SOURCE = SOURCE.replace("64, 256", "8, 64")
N = 64 * 256 * 4
FORM = TensorForm.of(torch.ones(64, 256), torch.ones(64, 256))
ROOM = N / 8
"""For what is done in pieces."""


@pytest.fixture(autouse=True)
def _large(monkeypatch, one_fork_server):
    """A small task is taken for a large one."""
    monkeypatch.setattr(input_sets, "PART", 1024)
    monkeypatch.setattr(check, "_SWAP_TRIES", 64)
    monkeypatch.setattr(oracle, "COPIED_BYTES", 1)
    monkeypatch.setattr(side, "SERIES_BYTES_MAX", 1)
    monkeypatch.setattr(side, "LARGE_BYTES", 1)
    monkeypatch.setattr(side, "_SHIFT_BYTES", 384)


def facts_of(source=SOURCE):
    return measure_task(bring_to_life(Task(id="relu", source=source)), torch.device("cpu"))


def arenas():
    """Memory that a worker and the judge share."""
    return sum(facts_of().shapes.arena_bytes.values())


def peaks_of(monkeypatch, held, owner, *names):
    """The most bytes in each call of these methods."""
    peaks = {name: [] for name in names}

    def measured(name, step):
        def measure(self, *given, **named):
            held.peak = 0
            try:
                return step(self, *given, **named)
            finally:
                peaks[name].append(held.peak)

        return measure

    for name in names:
        monkeypatch.setattr(owner, name, measured(name, getattr(owner, name)))
    return peaks


def test_a_check_holds_one_question_and_what_the_reference_takes_in_float64(monkeypatch):
    held = PeakBytes()
    peaks = peaks_of(monkeypatch, held, Examiner, "ask")["ask"]
    with Judge("cpu", Settings.quick(threads=1, timed=False)) as judge, held:
        assert judge.evaluate(TASK, Candidate(source=CANDIDATE)).verdict == "accepted"
    # An input and its truth; lower precision on float64 inputs and outputs. The second has the first one's as a candidate
    # would return it, to see whether it would pass.
    assert max(peaks[2:]) < 7 * N + ROOM
    assert peaks[1] < 8 * N + ROOM
    # On a GPU the candidate holds two outputs and the latest, and until the second one each side holds one.
    assert 2 * arenas() + 3 * N + max(peaks[2:]) < 15 * N
    assert 2 * (arenas() + N) + N + peaks[1] < 16 * N


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_noise_takes_no_more_than_its_result(dtype):
    x = torch.randn(64, 256, dtype=dtype)
    x[0, 0], x[1, 1] = math.inf, math.nan
    with PeakBytes() as held:
        noisy = disturbed(x, 1e-3)
    assert held.peak < 1.25 * x.nbytes
    finite = torch.isfinite(x)
    assert torch.equal(torch.isfinite(noisy), finite)
    apart = ((noisy - x)[finite].abs().square().mean() / x[finite].abs().square().mean()).sqrt()
    assert 0.5e-3 < apart < 3e-3


@pytest.mark.exhaustive
def test_timing_holds_what_it_compares_and_one_output_of_the_candidate(monkeypatch):
    held = PeakBytes()
    timed, last = ("block", "odd_inputs", "audit", "verify_held"), "verify_weights"
    peaks = peaks_of(monkeypatch, held, ProcessTriple, *timed, last)
    with Judge("cpu", Settings.quick(threads=1, processes_min=1, processes_max=1, audits=2, **ANY_WAIT)) as judge, held:
        assert judge.evaluate(TASK, Candidate(source=CANDIDATE)).verdict == "accepted"
    most = max(max(peaks[name]) for name in timed)
    # An input, the candidate's output, and one of an earlier call; or an input before and after it was varied.
    assert most < 3.5 * N + ROOM, peaks
    # On a GPU three sides have their latest output and the candidate holds one, and the checked candidate rests.
    assert 3 * (arenas() + N) + N + arenas() + most < 17 * N
    # An input with its truth, in float64 as well, and both outputs. The sides have let go of theirs, and one has ended.
    assert max(peaks[last]) < 8 * N + ROOM
    assert 3 * arenas() + max(peaks[last]) < 15 * N


@pytest.mark.parametrize("inputs", [one for one in INPUT_SETS if one.varies(FORM)], ids=lambda one: one.name)
def test_inputs_that_are_drawn_again_are_the_same(inputs):
    facts = facts_of()
    assert facts.redraws
    (first,), again = facts.drawing(inputs)
    (second,) = again()
    assert second.data_ptr() != first.data_ptr()
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert (first.stride(), first.storage_offset()) == (second.stride(), second.storage_offset())
    (varied,), anew = facts.drawing(inputs, again)
    assert torch.equal(varied.nan_to_num(), anew()[0].nan_to_num())
    assert not torch.equal(facts.drawing(inputs)[0][0].nan_to_num(), first.nan_to_num()) or inputs.name == "constant"


@pytest.mark.parametrize(
    "drawn",
    ["[torch.rand(64, 256) + random.random()]", "[torch.rand(64, 256), random.random()]"],
    ids=["tensors", "numbers"],
)
def test_inputs_that_a_seed_does_not_decide_are_kept(drawn):
    source = SOURCE.replace("import torch", "import random, torch").replace("[torch.rand(64, 256)]", drawn)
    facts = facts_of(source.replace("self, x", "self, x, y=0"))
    assert not facts.redraws
    (first, *_), again = facts.drawing()
    assert again()[0] is first


def test_inputs_of_a_small_task_are_kept(set_large_bytes):
    set_large_bytes(1 << 30)
    (first,), again = facts_of().drawing()
    assert again()[0] is first


@pytest.mark.parametrize(
    ("alone", "large"), [(True, False), (False, True), pytest.param(False, False, marks=pytest.mark.exhaustive)]
)
def test_the_checked_reference_gives_its_memory_back_where_that_is_scarce(set_large_bytes, monkeypatch, alone, large):
    started, ended = {}, []
    set_large_bytes(1 if large else 1 << 30)

    def progress(text):
        if text == "timing":
            ended.append({role: worker.ended for role, worker in started.items()})

    def start(self, spec, settings, begin=Workers.start):
        started[spec.role] = begin(self, spec, settings)
        return started[spec.role]

    monkeypatch.setattr(Workers, "start", start)
    with Judge("cpu", Settings.quick(threads=1, processes_min=1, processes_max=1, **ANY_WAIT), progress) as judge:
        judge.memory.alone = alone
        small = Task(id="small", source=SMALL_SOURCE)
        assert judge.evaluate(small, Candidate(source=SMALL_SOURCE.replace("Model", "ModelNew"))).verdict == "accepted"
    # The late check has a new reference.
    assert ended == [{"reference": alone or large, "candidate": False}]


def test_screening_holds_two_questions_and_what_the_reference_takes_in_float64(tmp_path):
    settings = Settings.quick(threads=1).model_dump_json()
    config = {"device": "cpu", "threads": 1, "strict_fp32": False, "arenas": {}, "private": str(tmp_path)}
    harness = ScreeningHarness(config, [])
    with PeakBytes() as held:
        harness.op_task({"task": TASK.model_dump_json(), "settings": settings})
        harness.op_truth({})
        # Two inputs with their truths; in float64 an input and an output for lower precision. It was 14.
        assert held.peak < 10 * N + ROOM
        harness.timed = harness.timed[:1]  # as of an input beyond `TIMED_BYTES_MAX`
        held.peak = 0
        assert not harness.op_build({"source": CANDIDATE})
        harness.op_call({})
        assert not harness.op_check({})
        harness.op_time({})
        # The questions, a copy of an input, an output, and a mask of single bytes.
        assert held.peak < 8.25 * N + 2 * ROOM
