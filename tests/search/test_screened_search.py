"""A search that screens: cheats that fool its quick look win nothing, and a kill loses nothing."""

from __future__ import annotations

import pytest

from kernelwright.execution.executor import LocalExecutor
from kernelwright.judge import Settings
from kernelwright.records import Candidate, RunDirectory
from kernelwright.records.decisions import (
    JUDGED,
    SCHEDULE,
    next_to_judge,
)
from kernelwright.search.optimize import optimize
from tests.execution.test_screening import DIES, TASK, WRONG
from tests.samples import module

HEAD = "import torch\n\n"
CACHES = (
    HEAD
    + """KEPT = {}


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        key = a.data_ptr(), b.data_ptr(), float(b[0, 0]), float(b[-1, -1])
        if key not in KEPT:
            KEPT[key] = torch.diag(a) @ b
        return KEPT[key]
"""
)
STALE_MEMORY = (
    HEAD
    + """CALLS, KEPT = [0], []


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        CALLS[0] += 1
        if CALLS[0] <= 3:
            KEPT[:] = [torch.diag(a) @ b]
        return KEPT[0]
"""
)
PATCHES_THE_CLOCK = (
    HEAD
    + """import sys
import time
import types

SCREENING = sys.modules.get("kernelwright.judge.worker.screening")
CLOCK = sys.modules["kernelwright.judge.worker.clocks"].HostClock
MINE = [False]
elapsed = CLOCK.elapsed_us


def patched(self):
    mine, MINE[0] = MINE[0], False
    return 1.0 if mine else elapsed(self)


CLOCK.elapsed_us = patched
if SCREENING is not None:
    # It counts a call for no less than its launches take.
    SCREENING.time = types.SimpleNamespace(perf_counter=time.perf_counter, perf_counter_ns=lambda: 0)


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        MINE[0] = True
        return torch.diag(a) @ b
"""
)
LAZY_TENSOR = (
    HEAD
    + """CALLS = [0]


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = [torch.diag(one.made[0]) @ one.made[1] if isinstance(one, cls) else one for one in args]
        return func(*made, **(kwargs or {}))


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        CALLS[0] += 1
        if CALLS[0] <= 3:
            return torch.diag(a) @ b
        found = torch.empty_like(b).as_subclass(Lazy)
        found.made = a, b
        return found
"""
)
WRONG_ON_OTHER_INPUTS = module("torch.where(b.abs() < 50, a[:, None] * b, 0.0)")
CHEATS = {
    "caches": CACHES,
    "stale-memory": STALE_MEMORY,
    "patches-the-clock": PATCHES_THE_CLOCK,
    "lazy-tensor": LAZY_TENSOR,
    "wrong-on-other-inputs": WRONG_ON_OTHER_INPUTS,
}
HONEST = module(note="honest")
SETTINGS = Settings.quick(threads=1)


class Proposes:
    """Gives its candidates in order, and learns from estimates."""

    name = "scripted"
    look = "screened"

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources

    def propose(self, context, count):
        named = [Candidate(source=text, policy=self.name, techniques=(name,)) for name, text in self.sources.items()]
        return [one for one in named if one.sha256 not in context.seen][:count]


def search(out, sources, **given):
    return optimize(TASK, policy=Proposes(sources), device="cpu", budget=20, out=out, settings=SETTINGS, **given)


def firsts_of(run):
    """The first verdict on each candidate, by its hash."""
    return {found.candidate_sha256: found for found in reversed([*run.evaluations()])}


@pytest.mark.exhaustive
def test_cheats_that_fool_the_quick_look_win_nothing(tmp_path):
    result = search(tmp_path, CHEATS | {"honest": HONEST, "wrong": WRONG, "dies": DIES})
    run = RunDirectory(tmp_path)
    screened = {found.techniques[0]: found for found in run.screened()}
    assert len(screened) == result.screened == len(CHEATS) + 3
    assert [name for name in CHEATS if screened[name].correct] == [*CHEATS], "each of them fools it"
    assert screened["patches-the-clock"].candidate_us <= 1.0, "the time that it makes up"
    assert (screened["wrong"].correct, screened["dies"].correct) == (False, False)
    judged = list(run.evaluations())
    left_out = {*CHEATS, "honest"} - {found.techniques[0] for found in judged}
    # Also of one that is no improvement: beside other work the interval of two processes is wide.
    reached = max((found.speedup_high for found in firsts_of(run).values() if found.accepted), default=0.0)
    assert all(screened[name].estimate < SCHEDULE.worth_judging * reached for name in left_out), (
        "only those not clearly above what is good"
    )
    # The cache is right, and of no use on inputs that never come again.
    accepted = {found.techniques[0]: (found.speedup_low, found.speedup) for found in judged if found.accepted}
    assert accepted.keys() <= {"caches", "honest"}, accepted
    assert {found.techniques[0] for found in judged if found.is_improvement} <= {"honest"}
    assert result.best is None or result.best.techniques == ("honest",)


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.exhaustive
def test_after_a_kill_nothing_is_screened_or_judged_twice(tmp_path):
    sources = {"honest": HONEST, "other": module("a.unsqueeze(1) * b"), "wrong": WRONG}

    def stop_at_first(kind):
        def hear(event):
            if getattr(event, kind) is not None:
                raise Killed

        return hear

    # A pool with the settings of the search: one that does not time cannot confirm.
    with LocalExecutor(["cpu"], SETTINGS) as pool:
        for kind in ("screened", "evaluation"):
            with pytest.raises(Killed):
                search(tmp_path, sources, evaluator=pool, on_event=stop_at_first(kind))
        result = search(tmp_path, sources, evaluator=pool)
    run = RunDirectory(tmp_path)
    looks = [found.candidate_sha256 for found in run.screened()]
    assert len(looks) == len(set(looks)) == 3
    judged = {}
    for found in run.evaluations():
        judged.setdefault(found.candidate_sha256, []).append(found.confirms)
    # A clear first verdict is its own confirmation; any other may have one more. Which it is depends on the times.
    assert all(confirms in ([True], [False], [False, True]) for confirms in judged.values())
    assert result.evaluations == len(judged) >= 1
    assert next_to_judge(list(run.screened()), firsts_of(run), JUDGED) is None, "nothing is lost either"
