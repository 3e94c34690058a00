"""A search that screens: cheats that fool its quick look win nothing, and a kill loses nothing."""

from __future__ import annotations

import pytest

from kernelwright.execution.local import JudgePool
from kernelwright.judge import Settings
from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.records.decisions import (
    JUDGED,
    SCHEDULE,
    is_top_ranked,
    needs_no_rerun,
    next_to_confirm,
    next_to_judge,
    ranked,
    too_good,
)
from kernelwright.records.screened import screened_of
from kernelwright.rewrites.wrappers import WRAPPERS
from kernelwright.search import optimize as searching
from tests.execution.test_screening import DIES, TASK, WRONG
from tests.quick import exhaustive_but
from tests.samples import BarePool, accepted, module, rejected

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
    return searching.optimize(TASK, policy=Proposes(sources), device="cpu", budget=20, out=out, settings=SETTINGS, **given)


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
    with JudgePool(["cpu"], SETTINGS) as pool:
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


SCRIPT = {"lies": (2.0, None), "clear": (1.9, 1.5), "better": (1.8, 1.7), "slower": (0.9, None), "wrong": (None, None)}
"""For each candidate its estimate, None where it is wrong at the quick look, and the speedup that the judge measures, None
where it rejects it."""
OWED_LOOKS = sorted(SCRIPT)
OWED_VERDICTS = [("lies", False), ("clear", True), ("better", False), ("better", True)]
"""Each verdict on record, and whether it confirms: the clear one of what screening put first is its own confirmation."""
AFTER_THE_CLEAR_ONE = len(OWED_LOOKS) + 2
AFTER_THE_LAST = len(OWED_LOOKS) + len(OWED_VERDICTS)


class Scripted(BarePool):
    """Screens and judges by the script, and notes what it was asked for."""

    def __init__(self):
        self.looks, self.verdicts = [], []

    def takes(self, kind):
        return True

    def screen(self, candidates):
        for one in filter(None, candidates):
            (name,) = one.techniques
            self.looks.append(name)
            estimate, _ = SCRIPT[name]
            yield one, screened_of(TASK, one, correct=estimate is not None, estimate=estimate, spread=0.01)

    def evaluate(self, jobs, stop=None):
        for job in jobs:
            one = job.candidate
            (name,) = one.techniques
            self.verdicts.append(name)
            _, speedup = SCRIPT[name]
            common = {"task_sha256": TASK.sha256, "techniques": one.techniques}
            yield job, rejected(source=one.source, **common) if speedup is None else accepted(speedup, one.source, **common)


@pytest.mark.parametrize("records", exhaustive_but(range(1, AFTER_THE_LAST + 1), AFTER_THE_CLEAR_ONE))
def test_a_search_killed_after_any_record_asks_for_no_look_and_no_verdict_twice(tmp_path, monkeypatch, records):
    pool, sources = Scripted(), {name: module(note=name) for name in SCRIPT}
    monkeypatch.setattr(searching, "ScreeningPool", lambda *given, **named: pool)
    with monkeypatch.context() as patch:
        written, append = [], RunDirectory.append

        def killed_at_last(run, record):
            append(run, record)
            written.append(record)
            if len(written) == records:
                raise Killed

        patch.setattr(RunDirectory, "append", killed_at_last)
        with pytest.raises(Killed):
            search(tmp_path, sources, evaluator=pool)
    result = search(tmp_path, sources, evaluator=pool)
    assert sorted(pool.looks) == OWED_LOOKS
    assert pool.verdicts == [name for name, _ in OWED_VERDICTS]
    run = RunDirectory(tmp_path)
    assert sorted(found.techniques[0] for found in run.screened()) == OWED_LOOKS
    assert [(found.techniques[0], found.confirms) for found in run.evaluations()] == OWED_VERDICTS
    assert result.best.techniques == ("better",)


def estimates(*speedups, **changes):
    return [
        screened_of(TASK, Candidate(source=f"# {number}"), correct=True, estimate=speedup, spread=0.01, **changes)
        for number, speedup in enumerate(speedups)
    ]


def verdicts(screened, make):
    return {one.candidate_sha256: make(source=one.source) for one in screened}


def test_the_judge_takes_what_looks_too_good_and_then_the_best():
    found = estimates(1.2, 9.0, 1.3, 0.8, 1.5, 1.4)
    assert next_to_judge(found, {}, 2) == found[1]
    assert too_good(ranked(found)) == {found[1].candidate_sha256}
    beyond = estimates(1.2, candidate_us=1.0, least_us=2.0)
    assert too_good(beyond) == {beyond[0].candidate_sha256}


def test_a_wide_interval_of_what_is_no_improvement_keeps_nobody_out():
    found = estimates(1.8, 1.4)
    wide = accepted(1.2, found[0].source).model_copy(update={"speedup_low": 0.3, "speedup_high": 26.0})
    assert not wide.is_improvement
    judged = {found[0].candidate_sha256: wide}
    assert next_to_judge(found, judged, 2) == found[1]
    assert next_to_judge(estimates(1.8, 1.25), judged, 2) is None, "less than 5 % above the speedup"
    good = wide.model_copy(update={"speedup_low": 1.15})
    assert good.is_improvement
    assert next_to_judge(found, {found[0].candidate_sha256: good}, 2) is None


def test_where_what_looked_too_good_is_good_the_others_have_lost():
    found = estimates(1.2, 9.0, 1.3)
    honest = {found[1].candidate_sha256: accepted(8.0, found[1].source)}
    assert next_to_judge(found, honest, 2) is None
    cheat = {found[1].candidate_sha256: rejected(source=found[1].source)}
    assert next_to_judge(found, cheat, 2) == found[2]


def test_the_next_best_is_judged_only_where_its_estimate_is_clearly_above_what_was_measured():
    found = estimates(1.6, 1.5, 1.4, 1.3)
    measured = accepted(1.38, found[0].source, speedup_high=1.42)
    assert next_to_judge(found, {found[0].candidate_sha256: measured}, 3) == found[1]
    wide = accepted(1.38, found[0].source, speedup_high=1.44)
    assert next_to_judge(found, {found[0].candidate_sha256: wide}, 3) is None


@pytest.mark.parametrize(("text", "first"), [("torch.cuda.CUDAGraph()", 1), ("torch.compile(f)", 0)])
def test_a_graph_is_not_put_first_for_a_host_that_was_busy_while_it_was_timed(text, first):
    """The reference took twice its usual time beside the first candidate, whose estimate that raised if it is a graph."""
    looks = [(2.0, 200.0), (1.75, 100.0), (1.4, 100.0)]
    found = [
        screened_of(
            TASK, Candidate(source=f"{text}  # {number}"), correct=True, estimate=estimate, reference_us=reference_us
        )
        for number, (estimate, reference_us) in enumerate(looks)
    ]
    assert ranked(found)[0] == next_to_judge(found, {}, 1) == found[first]
    measured = {found[first].candidate_sha256: accepted(1.4, found[first].source, speedup_high=1.42)}
    assert next_to_judge(found, measured, 3) == (None if first else found[1])


def test_what_the_judge_rejects_is_replaced_until_it_has_seen_enough():
    found = estimates(*[1.1 + number / 100 for number in range(20)])
    best = found[::-1]
    assert next_to_judge(found, verdicts(best[:2], rejected), 2) == best[2]
    assert next_to_judge(found, {one.candidate_sha256: accepted(1.0, one.source) for one in best[:2]}, 2) is None
    assert next_to_judge(found, verdicts(best[:6], rejected), 2) is None


def test_one_clear_measurement_of_what_screening_put_first_stands():
    found = estimates(1.5, 1.4)
    assert is_top_ranked(found[0].candidate_sha256, found, {})
    assert not is_top_ranked(found[1].candidate_sha256, found, {})
    assert is_top_ranked(found[1].candidate_sha256, found, verdicts(found[:1], rejected))
    assert not is_top_ranked(found[1].candidate_sha256, found, verdicts(found[:1], accepted))
    doubted, small = estimates(9.0, 1.5), estimates(1.09)
    assert not any(is_top_ranked(one.candidate_sha256, several, {}) for several in (doubted, small) for one in several)
    own = [one.model_copy(update={"policy": "builtin"}) for one in doubted]
    assert [is_top_ranked(one.candidate_sha256, own, {}) for one in own] == [True, False]
    beyond = [one.model_copy(update={"candidate_us": 1.0, "least_us": 2.0}) for one in own]
    assert not is_top_ranked(beyond[0].candidate_sha256, beyond, {})
    assert needs_no_rerun(accepted(1.5, found[0].source))
    assert not needs_no_rerun(accepted(1.15, found[0].source))


def test_a_winner_is_measured_again_unless_something_better_stands():
    winner, named = accepted(1.5, "# a"), accepted(1.6, "# b")
    judged, stands = {winner.candidate_sha256: winner}, {named.candidate_sha256: named}
    assert next_to_confirm(judged, {}) == winner
    assert next_to_confirm(judged, stands) is None
    assert next_to_confirm({named.candidate_sha256: named}, {winner.candidate_sha256: winner}) == named


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_a_graph_is_known_by_its_technique_where_the_text_was_not_published(name):
    parts, _ = WRAPPERS[name]
    task = Task(id="t", source="#")
    published = screened_of(task, Candidate(source="", techniques=(name,)), correct=True)
    assert published.replays_graph == any("CUDAGraph(" in part for part in parts)
