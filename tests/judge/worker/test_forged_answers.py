"""A candidate that has the harness in its hands: whatever answers it makes up, the judge gives a verdict."""

from __future__ import annotations

import pytest

from kernelwright.judge import Settings
from kernelwright.records import Evaluation, Reason
from tests.judge.snippets import RELU, candidate
from tests.quick import exhaustive_but

SETTINGS = Settings.quick(threads=1, timed=False)

DELIVERED = "_described = lambda *a: {{'strange': [], 'skeleton': {{'tensor': 0}}, 'outputs': {}}}"
FORGED = {
    "strides of another length": (
        "_described = lambda *a: {'strange': [], 'skeleton': {'tensor': 0}, 'outputs': ["
        "{'dtype': 'float32', 'shape': [32, 16], 'stride': [1], 'device': 'cpu', 'aliases': []}]}"
    ),
    "no description": "op_call = lambda self, message: {}",
    "no outputs": DELIVERED.format("[]"),
    "an output of nothing": DELIVERED.format("[{}]"),
    "an output that is a number": DELIVERED.format("[1]"),
    "an error that is text": "op_call = lambda self, message: {'error': 'x'}",
    "an error that is nothing": "op_call = lambda self, message: {'error': None}",
    "no interface": "interface = lambda self: {}",
    "state of numbers": "interface = lambda self: {'training': True, 'state': [1]}",
    "a list for a name": "interface = lambda self: {'training': True, 'state': [[[], 'float32', []]]}",
    "no mode": "op_mode = lambda self, message: {}",
    "no inspection": "op_inspect = lambda self, message: {}",
    "an inspection of numbers": (
        "op_inspect = lambda self, message: {'before': 1, 'after': [], 'patched': [], 'training': True}"
    ),
    "no trace": "op_trace = lambda self, message: {}",
    "a trace that is a number": "op_trace = lambda self, message: {'operators': 3}",
    "a trace of numbers": "op_trace = lambda self, message: {'operators': [1, {}]}",
}


@pytest.mark.parametrize(
    "what",
    exhaustive_but(
        FORGED,
        "strides of another length",
        "an output of nothing",
        "an error that is text",
        "state of numbers",
        "no mode",
        "an inspection of numbers",
        "a trace of numbers",
    ),
)
def test_an_answer_of_another_form_is_a_rejection(judge, what):
    forger = candidate(top=f"from kernelwright.judge.worker import harness\nharness.Harness.{FORGED[what]}")
    found = judge.evaluate(RELU, forger, settings=SETTINGS)
    usual = {
        "strides of another length": Reason.WRONG_STRIDES,
        "no outputs": Reason.WRONG_TYPE,
        "no interface": Reason.STATE_MISMATCH,
    }
    usual |= dict.fromkeys(("an error that is text", "an error that is nothing"), Reason.RUNTIME_ERROR)
    assert found.reason is usual.get(what, Reason.PROTOCOL_VIOLATION), found.detail


@pytest.mark.parametrize("answers", exhaustive_but(["[]", "3", "[{}]"], "[]"))
def test_a_series_must_be_answered_call_by_call(judge, answers):
    forger = candidate(
        top="from kernelwright.judge.worker import harness\n"
        f"harness.Harness.op_series = lambda self, message: {{'inner_us': 1.0, 'answers': {answers}}}"
    )
    found = judge.evaluate(RELU, forger, settings=Settings.quick(threads=1, processes_min=1, processes_max=1))
    assert found.reason is Reason.PROTOCOL_VIOLATION, found.detail


@pytest.mark.parametrize(
    "proposed",
    [
        candidate("raise ValueError('\\ud800')"),
        candidate(
            top="from kernelwright.judge.worker import harness\n"
            "harness.Harness.op_trace = lambda self, message: {'operators': ['aten::\\ud800']}"
        ),
    ],
    ids=["an exception", "a trace"],
)
def test_text_that_no_file_can_hold_does_not_spoil_the_record(judge, proposed):
    found = judge.evaluate(RELU, proposed, settings=SETTINGS)
    assert Evaluation.model_validate_json(found.model_dump_json()) == found


LIES = {
    "in every call": "harness.HostClock.elapsed_us = lambda self: 0.001",
    "in single calls": (
        "call = harness.Harness.op_call\n"
        "harness.Harness.op_call = lambda self, message: {**call(self, message), 'inner_us': 0.01}"
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", LIES)
def test_a_clock_that_lies_wins_nothing_on_a_short_task(judge, where):
    liar = candidate(top=f"from kernelwright.judge.worker import harness\n{LIES[where]}")
    found = judge.evaluate(RELU, liar, settings=Settings.quick(threads=1, processes_max=3))
    assert not found.is_improvement, (found.speedup, found.speedup_low, found.checks["clocks"])
