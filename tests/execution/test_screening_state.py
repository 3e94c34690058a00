"""Screening of tasks whose calls depend on the calls before them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest

from kernelwright.execution.screener import Screener
from kernelwright.judge import Settings
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.records import Candidate, Contract, Reason, Task
from tests.execution.fakes import shared_by_all
from tests.quick import exhaustive_but

SETTINGS = Settings.quick(threads=1, timed=False)
KERNELBENCH = Settings.quick(threads=1, timed=False, contract=Contract.KERNELBENCH)


@dataclass(frozen=True)
class Kept:
    """A module that keeps a state: its constructor, its call, and a call by which the state moves otherwise."""

    init: str
    forward: str
    otherwise: str
    draw: str = "torch.randn(32, 16)"

    def source(self, name: str, forward: str) -> str:
        body = forward.replace("; ", "\n        ")
        return f"""import torch

calls = 0


class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        {self.init}

    def forward(self, x):
        {body}


def get_inputs():
    return [{self.draw}]


def get_init_inputs():
    return []
"""

    @property
    def task(self) -> Task:
        return Task(id="kept", source=self.source("Model", self.forward))

    @property
    def copy(self) -> str:
        return self.source("ModelNew", self.forward)

    @property
    def wrong(self) -> str:
        return self.source("ModelNew", self.otherwise)


MEAN = "self.mean.mul_(0.5).add_(x.mean(0) + 0.5); return self.linear(x) - self.mean"
CALLS = "self.calls += 1; return self.linear(x) * self.calls"
KEPT = {
    "an attribute": Kept(
        "self.state = torch.randn(32, 16)",
        "self.state = torch.tanh(self.linear(x) + self.state); return self.state * 2",
        "state = torch.tanh(self.linear(x) + self.state); return state * 2",
    ),
    "a number": Kept("self.calls = 0", CALLS, "return self.linear(x)"),
    "a global": Kept(
        "pass",
        "global calls; calls += 1; return self.linear(x) * calls",
        "global calls; calls += 2; return self.linear(x) * calls",
    ),
    "a buffer": Kept(
        "self.register_buffer('mean', torch.zeros(16))",
        MEAN,
        "mean = 0.5 * self.mean + x.mean(0) + 0.5; return self.linear(x) - mean",
    ),
    "a buffer outside the state_dict": Kept(
        "self.register_buffer('mean', torch.zeros(16), persistent=False)", MEAN, MEAN.replace("+ 0.5", "+ 0.25")
    ),
    "an integer buffer": Kept("self.register_buffer('calls', torch.tensor(0))", CALLS, "return self.linear(x)"),
    "random numbers": Kept(
        "self.sum = 0",
        "self.sum = 0.5 * self.sum + torch.rand_like(x); return self.linear(x) + self.sum",
        "self.sum = 0.25 * self.sum + torch.rand_like(x); return self.linear(x) + self.sum",
    ),
    "a limited domain": Kept(
        "self.calls = 0",
        f"self.calls += 1; assert (x >= 0).all(); {CALLS}",
        f"self.calls += 2; assert (x >= 0).all(); {CALLS}",
        "torch.rand(32, 16)",
    ),
}


@pytest.fixture
def looks(_one_fork_server):
    """Screens in processes of the task's own; all of them fork from one process that has imported torch."""
    return partial(looked, _one_fork_server())


def looked(server: ForkServer, kept: Kept, settings: Settings, *sources: str):
    with Screener(kept.task, "cpu", settings, shared_by_all(server), slots=1) as screener:
        found = {candidate.source: one for candidate, one in screener.screen(Candidate(source=source) for source in sources)}
    return [found[source] for source in sources]


@pytest.mark.parametrize("what", exhaustive_but(KEPT, "an attribute", "a buffer", "a limited domain"))
def test_each_copy_of_a_module_that_keeps_a_state_is_right_and_one_whose_state_moves_otherwise_is_wrong(what, looks):
    kept = KEPT[what]
    first, wrong, second = looks(kept, SETTINGS, kept.copy, kept.wrong, kept.copy + "# again\n")
    assert (first.correct, first.reason) == (True, None), first.detail
    assert (wrong.correct, wrong.reason) == (False, Reason.WRONG_OUTPUT), wrong.detail
    assert (second.correct, second.reason) == (True, None), second.detail


def test_a_state_that_never_moves_is_wrong_though_each_first_call_is_right(looks):
    """A buffer that stays is at each of the candidate's calls where the reference's is at its first."""
    (found,) = looks(KEPT["a buffer"], SETTINGS, KEPT["a buffer"].wrong)
    assert (found.correct, found.reason) == (False, Reason.WRONG_OUTPUT), found.detail


def test_a_state_may_have_another_name_under_the_contract_kernelbench(looks):
    kept = KEPT["a buffer"]
    renamed = kept.copy.replace("'mean'", "'average'").replace("self.mean", "self.average")
    right, wrong = looks(kept, KERNELBENCH, renamed, kept.wrong)
    assert (right.correct, right.reason) == (True, None), right.detail
    assert (wrong.correct, wrong.reason) == (False, Reason.WRONG_OUTPUT), wrong.detail
