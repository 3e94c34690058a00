"""Sides that start before they are asked for, and end while others are measured."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelwright.errors import DeviceError
from kernelwright.judge import Settings
from kernelwright.judge import judge as judging
from kernelwright.judge.check.findings import CheckFindings, Demands, RejectionError
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.isolation.side import LARGE_BYTES
from kernelwright.judge.timing import pairs
from kernelwright.judge.timing.pairs import SidesAhead
from kernelwright.judge.timing.triple import SIDES
from kernelwright.records import Reason
from tests.judge.isolation.test_folder import children_of
from tests.judge.snippets import ANY_WAIT, RELU, candidate


@dataclass
class FakeTrial:
    gate: Any = "own"
    findings: CheckFindings = field(default_factory=lambda: CheckFindings(Demands()))
    facts: Any = field(
        default_factory=lambda: SimpleNamespace(
            device=torch.device("cpu"), shapes=SimpleNamespace(is_large=False, state_bytes=4)
        )
    )


@dataclass
class FakeSide:
    gate: Any
    closed: int = 0

    def serve(self, gate):
        self.gate = gate

    def close(self):
        self.closed += 1


@pytest.fixture
def starts(monkeypatch):
    """What was started under which gate, in order; the next start raises the first of `failures`."""
    seen = SimpleNamespace(names=[], sides=[], failures=[])

    def start_sides(trial, names):
        seen.names.append([*names])
        if seen.failures and (failure := seen.failures.pop(0)) is not None:
            raise failure
        seen.sides.append({name: FakeSide(trial.gate) for name in names})
        return dict(seen.sides[-1])

    monkeypatch.setattr(pairs, "start_sides", start_sides)
    return seen


def test_what_has_begun_is_taken_and_serves_the_evaluations_gate(starts):
    ahead = SidesAhead(FakeTrial(), is_on=True)
    ahead.begin()
    ahead.begin()
    taken = ahead.take(FakeTrial(), [*SIDES[1:], "rival"])
    assert starts.names == [[*SIDES], ["rival"]]
    assert set(taken) == {*SIDES[1:], "rival"}
    assert {side.gate for side in taken.values()} == {"own"}
    ahead.close()
    assert [starts.sides[0][name].closed for name in SIDES] == [1, 0, 0], "what nobody wants is ended"


def test_two_triples_start_ahead_at_most_and_one_where_the_weights_are_large(starts):
    ahead, heavy = SidesAhead(FakeTrial(), is_on=True), FakeTrial()
    ahead.begin(3)
    assert ahead.take(FakeTrial(), SIDES)["null"] is starts.sides[0]["null"], "in their order"
    ahead.begin(1)
    ahead.close()
    assert [len(starts.names), *(side.closed for side in starts.sides[1].values())] == [2, 1, 1, 1]
    heavy.facts.shapes.state_bytes = LARGE_BYTES // 2 + 1
    ahead = SidesAhead(heavy, is_on=True)
    ahead.begin(3)
    ahead.close()
    assert len(starts.names) == 3


def test_a_candidate_has_ended_once_the_findings_by_its_last_question_are_told(starts):
    ahead, told = SidesAhead(FakeTrial(), is_on=True), threading.Event()
    reference, mine = FakeSide("own"), FakeSide("own")
    ahead.end_after(lambda *sides: [(told.wait(), mine.closed, mine.gate == "own")], reference, mine)
    assert reference.closed == mine.closed == 0
    told.set()
    assert ahead.last_findings() == [(True, 0, False)]
    assert mine.closed == 1
    assert ahead.last_findings() == []
    ahead.close()
    assert reference.closed == 1


def test_what_nobody_took_is_ended(starts):
    ahead = SidesAhead(trial := FakeTrial(), is_on=True)
    ahead.begin()
    ahead.close()
    assert [side.closed for side in starts.sides[0].values()] == [1, 1, 1]
    assert "ends" in trial.findings.phases_s


@pytest.mark.parametrize("failure", [DeviceError("Wanted memory."), WorkerError(Reason.OUT_OF_MEMORY, "full")])
def test_without_memory_for_two_triples_the_next_one_starts_in_its_turn(starts, failure):
    starts.failures = [failure]
    ahead = SidesAhead(FakeTrial(), is_on=True)
    ahead.begin()
    assert set(ahead.take(FakeTrial(), SIDES)) == {*SIDES}
    ahead.close()


def test_a_candidate_that_does_not_start_is_told_when_it_is_asked_for_and_not_afterwards(starts):
    starts.failures = [RejectionError(Reason.NO_MODEL_NEW, "none"), WorkerError(Reason.CRASHED, "gone")]
    ahead = SidesAhead(FakeTrial(), is_on=True)
    ahead.begin()
    with pytest.raises(RejectionError):
        ahead.take(FakeTrial(), SIDES)
    ahead.begin()
    ahead.close()


def test_what_has_begun_is_ended_where_the_rest_does_not_start(starts):
    starts.failures = [None, WorkerError(Reason.CRASHED, "gone")]
    ahead = SidesAhead(FakeTrial(), is_on=True)
    ahead.begin()
    with pytest.raises(WorkerError):
        ahead.take(FakeTrial(), [*SIDES, "rival"])
    ahead.close()
    assert [side.closed for side in starts.sides[0].values()] == [1, 1, 1]


def test_a_large_task_and_a_processor_start_and_end_all_in_turn(starts):
    large, heavy = FakeTrial(), FakeTrial()
    large.facts.shapes.is_large, heavy.facts.shapes.state_bytes = True, LARGE_BYTES + 1
    for ahead in (SidesAhead(large, is_on=True), SidesAhead(heavy, is_on=True), SidesAhead(FakeTrial(), is_on=False)):
        ahead.begin()
        assert ahead.take(FakeTrial(), SIDES[:1])
        ahead.end(side := FakeSide("own"))
        assert (side.closed, side.gate) == (1, "own")
        ahead.close()
    assert starts.names == [[SIDES[0]]] * 3


def test_a_candidate_that_still_starts_when_all_is_over_is_not_waited_for(judge, monkeypatch):
    # The second process finds what the first one has left.
    slow = candidate(
        top="import os, time\ntry: os.mkdir(os.environ['TRITON_CACHE_DIR'])\nexcept FileExistsError: time.sleep(50)"
    )
    monkeypatch.setattr(judging, "SidesAhead", lambda trial, is_on: SidesAhead(trial, is_on=True))
    monkeypatch.setattr(judging, "check_candidate", lambda examiner, promising: promising() or _rejected())
    found = judge.evaluate(RELU, slow, settings=Settings.quick(threads=1))
    assert (found.reason, children_of(judge.fork_server.process.pid)) == (Reason.WRONG_OUTPUT, [])


def _rejected():
    raise RejectionError(Reason.WRONG_OUTPUT, "as it happens")


def test_processes_that_started_ahead_are_timed_and_none_is_left(judge, monkeypatch):
    monkeypatch.setattr(judging, "SidesAhead", lambda trial, is_on: SidesAhead(trial, is_on=True))
    found = judge.evaluate(RELU, candidate(), settings=Settings.quick(threads=1, **ANY_WAIT))
    assert found.speedup is not None
    assert children_of(judge.fork_server.process.pid) == []
