"""A search that screens: cheats that fool its quick look win nothing, and a kill loses nothing."""

from __future__ import annotations

import pytest

from kernelwright.judge import Settings
from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.records.screened import is_clear, is_named, next_to_confirm, next_to_judge, ranked, screened_of, too_good
from kernelwright.rewrites.wrappers import WRAPPERS
from kernelwright.search.optimize import optimize
from tests.pools.test_screening import DIES, TASK, WRONG
from tests.samples import accepted, module, rejected

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

CLOCK = sys.modules["kernelwright.judge.worker.clocks"].HostClock
MINE = [False]
elapsed = CLOCK.elapsed_us


def patched(self):
    mine, MINE[0] = MINE[0], False
    return 1.0 if mine else elapsed(self)


CLOCK.elapsed_us = patched


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
    settings = Settings.quick(threads=1)
    return optimize(TASK, policy=Proposes(sources), device="cpu", budget=20, out=out, settings=settings, **given)


@pytest.mark.exhaustive
def test_cheats_that_fool_the_quick_look_win_nothing(tmp_path):
    result = search(tmp_path, CHEATS | {"honest": HONEST, "wrong": WRONG, "dies": DIES})
    run = RunDirectory(tmp_path)
    screened = {found.techniques[0]: found for found in run.screened()}
    assert len(screened) == result.screened == len(CHEATS) + 3
    assert [name for name in CHEATS if screened[name].correct] == [*CHEATS], "each of them fools it"
    assert (screened["wrong"].correct, screened["dies"].correct) == (False, False)
    judged = list(run.evaluations())
    left_out = {*CHEATS, "honest"} - {found.techniques[0] for found in judged}
    won = max((found.speedup for found in judged if found.is_improvement), default=0.0)
    assert all(screened[name].estimate <= won for name in left_out), "only those that an improvement had beaten already"
    # The cache is right, and of no use on inputs that never come again.
    assert {found.techniques[0] for found in judged if found.accepted} <= {"caches", "honest"}
    assert {found.techniques[0] for found in judged if found.is_improvement} <= {"honest"}
    assert result.best is None or result.best.techniques == ("honest",)


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.exhaustive
def test_after_a_kill_nothing_is_screened_or_judged_twice(tmp_path, judge_pool):
    sources = {"honest": HONEST, "other": module("a.unsqueeze(1) * b"), "wrong": WRONG}

    def stop_at_first(kind):
        def hear(event):
            if getattr(event, kind) is not None:
                raise Killed

        return hear

    for kind in ("screened", "evaluation"):
        with pytest.raises(Killed):
            search(tmp_path, sources, evaluator=judge_pool, on_event=stop_at_first(kind))
    result = search(tmp_path, sources, evaluator=judge_pool)
    run = RunDirectory(tmp_path)
    looks = [found.candidate_sha256 for found in run.screened()]
    # A clear first verdict is its own confirmation; any other may have one more. How many are owed depends on the times.
    verdicts = [(found.candidate_sha256, found.confirms) for found in run.evaluations()]
    judged = {found.candidate_sha256: found for found in run.evaluations()}
    assert len(looks) == len(set(looks)) == 3
    assert len(verdicts) == len(set(verdicts))
    assert len(judged) == result.evaluations >= 1
    assert next_to_judge(list(run.screened()), judged, 3) is None, "nothing is lost either"


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
    assert is_named(found[0].candidate_sha256, found, {})
    assert not is_named(found[1].candidate_sha256, found, {})
    assert is_named(found[1].candidate_sha256, found, verdicts(found[:1], rejected))
    assert not is_named(found[1].candidate_sha256, found, verdicts(found[:1], accepted))
    doubted, small = estimates(9.0, 1.5), estimates(1.09)
    assert not any(is_named(one.candidate_sha256, several, {}) for several in (doubted, small) for one in several)
    assert is_clear(accepted(1.5, found[0].source))
    assert not is_clear(accepted(1.15, found[0].source))


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
