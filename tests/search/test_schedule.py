"""The order of screening: what compiles nothing first, autotuners last and only where they can still win.

The judge begins before slow compilers are done.
"""

from __future__ import annotations

import threading

import pytest

from kernelwright.errors import InfrastructureError
from kernelwright.judge import Settings
from kernelwright.records import Candidate, RunDirectory
from kernelwright.records.compiling import Compiles, compiles, uses_inductor
from kernelwright.records.decisions import (
    Effort,
    MeasurementPlan,
    compiling_pays,
    gain_per_second,
    judging_bytes,
    next_of,
    tuning_pays,
)
from kernelwright.records.screened import screened_of
from kernelwright.rewrites.wrappers import WRAPPERS, wrap
from kernelwright.search import optimize
from kernelwright.search.proposals import Proposals
from kernelwright.search.schedule import settings_for
from tests.samples import TASK, accepted, module

PLAIN, SCALED = module(), module("b * a[:, None]")
COMPILED, TUNED = (wrap(TASK.source, name, (name,)) for name in ("compile", "compile-max-autotune"))
TRITON = module(note="triton")


def screened(source, estimate, **changes):
    return screened_of(TASK, Candidate(source=source), correct=True, estimate=estimate, spread=0.0, **changes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cuda-graph", Compiles.NOTHING),
        ("cudnn-benchmark", Compiles.NOTHING),
        ("channels-last", Compiles.NOTHING),
        ("compile", Compiles.INDUCTOR),
        ("compile-cuda-graph", Compiles.INDUCTOR),
        ("compile-max-autotune", Compiles.VARIANTS),
    ],
)
def test_the_text_tells_what_is_compiled(name, kind):
    assert name in WRAPPERS
    source = wrap(TASK.source, name, (name,))
    assert compiles(source) is kind
    assert uses_inductor(source) == (kind is not Compiles.NOTHING)


def test_what_compiles_nothing_comes_first_and_waits_for_its_own_process():
    waiting = [Candidate(source=text) for text in (TUNED, COMPILED, TRITON, PLAIN)]
    assert next_of(waiting, [], [], lambda kind: True) is waiting[3]
    assert next_of(waiting, [], [], lambda kind: kind is not Compiles.NOTHING) is waiting[2]
    assert next_of(waiting[:2], [], [], lambda kind: True) is waiting[1]
    assert next_of(waiting, [], [], lambda kind: False) is None
    assert next_of(waiting[:1], waiting[1:2], [], lambda kind: True) is None, "its estimate may tell that it is not worth it"
    assert next_of(waiting[:1], [], [], lambda kind: True) is waiting[0]


def test_the_judge_may_take_more_memory_than_screening_and_contexts_beside():
    large = [screened(PLAIN, 1.0, memory_bytes=20 << 30), screened(SCALED, 1.0, memory_bytes=12 << 30)]
    assert 31 << 30 < judging_bytes(large) < 50 << 30
    assert 0 < judging_bytes([screened(PLAIN, 1.0, memory_bytes=1 << 20)]) < 4 << 30
    assert judging_bytes([screened(PLAIN, 1.0)]) == judging_bytes([]) == 0, "on a processor"


def test_the_judge_takes_what_gains_most_for_each_second_that_it_costs():
    def task(estimate, *seconds):
        return [
            screened(PLAIN, 0.9, elapsed_s=max(seconds)),
            *(screened(SCALED, estimate, elapsed_s=one) for one in seconds),
        ]

    dear, cheap = task(4.0, 5.0, 80.0), task(2.0, 5.0, 8.0)
    assert gain_per_second(cheap) > gain_per_second(dear), "a look of 80 s is a judge's four minutes"
    assert gain_per_second(task(4.0, 8.0)) > gain_per_second(cheap)
    assert gain_per_second(task(4.0, 0.1)) == gain_per_second(task(4.0, 0.2)), "the judge has costs of its own"
    nothing = [screened(PLAIN, 0.9, elapsed_s=5.0)]
    assert gain_per_second(nothing) == gain_per_second(task(1.04, 5.0))
    assert gain_per_second(nothing) > gain_per_second([screened(PLAIN, 0.9, elapsed_s=9.0)])
    assert gain_per_second([]) > 0


def test_an_autotuner_must_be_able_to_win():
    assert tuning_pays([]), "nothing is known"
    assert tuning_pays([screened(PLAIN, 1.2), screened(COMPILED, 1.3)])
    assert not tuning_pays([screened(PLAIN, 1.2), screened(COMPILED, 1.3), screened(TUNED, 1.2)]), "one was tried"
    assert not tuning_pays([screened(PLAIN, 1.5), screened(COMPILED, 1.3)]), "torch.compile is behind"
    assert tuning_pays([screened(PLAIN, 2.0), screened(TRITON, 1.3)]), "nothing tells how torch.compile does"
    assert not tuning_pays([screened(COMPILED, 0.5)]), "the reference itself is ahead"
    at_the_roofline = screened(COMPILED, 2.0, candidate_us=10.5, least_us=10.0)
    assert not tuning_pays([at_the_roofline])


def test_torch_compile_is_not_asked_again_where_it_was_slow_and_far_behind():
    slow, quick = ({"elapsed_s": seconds} for seconds in (20.0, 19.0))
    assert compiling_pays([screened(PLAIN, 2.0)]), "nothing tells how torch.compile does"
    assert compiling_pays([screened(PLAIN, 2.0), screened(COMPILED, 1.0, **quick)])
    assert compiling_pays([screened(PLAIN, 2.0), screened(COMPILED, 1.4, **slow)])
    assert not compiling_pays([screened(PLAIN, 2.0), screened(COMPILED, 1.3, **slow)])
    assert not compiling_pays([screened(COMPILED, 0.6, **slow)]), "the reference itself is ahead"
    waiting = [Candidate(source=text) for text in (TUNED, COMPILED + "# another")]
    behind = [screened(PLAIN, 2.0), screened(COMPILED, 1.3, **slow)]
    assert next_of(waiting, [], behind[:1], lambda kind: True) is waiting[1]
    assert next_of(waiting, [], behind, lambda kind: True) is None
    assert next_of([*waiting, Candidate(source=TRITON)], [], behind, lambda kind: True).source == TRITON


class Proposes:
    name, look = "scripted", "screened"

    def __init__(self, *sources):
        self.sources = sources

    def propose(self, context, count):
        return [one for text in self.sources if (one := Candidate(source=text)).sha256 not in context.seen][:count]


def order_of(estimates, budget=10):
    found = []
    search = Proposals(TASK, Proposes(*estimates), "cpu", budget, 0, [], found)
    for candidate in search.candidates(1, lambda kind: True):
        assert candidate is not None
        found.append(screened(candidate.source, estimates[candidate.source]))
    return [one.source for one in found]


def test_proposals_are_taken_in_that_order_and_the_autotuner_is_left_out_where_it_cannot_win():
    close = {TUNED: 1.4, COMPILED: 1.3, SCALED: 1.2, PLAIN: 1.1}
    assert order_of(close) == [SCALED, PLAIN, COMPILED, TUNED]
    assert order_of(close | {PLAIN: 1.9}) == [SCALED, PLAIN, COMPILED]
    assert order_of(close, budget=2) == [COMPILED, SCALED], "the policy's next takes the autotuner's place in the budget"


LIMIT_S = 30
"""Time after which a test that waits for ever has failed."""


def test_only_slow_compilers_are_left_once_all_others_have_been_looked_at():
    found = []
    search = Proposals(TASK, Proposes(COMPILED, TRITON, PLAIN), "cpu", 10, 0, [], found)
    assert not search.only_left(Compiles.INDUCTOR), "nothing was proposed yet"
    given = search.candidates(3, lambda kind: True)
    plain, triton = next(given), next(given)
    found.append(screened(plain.source, 1.1))
    assert next(given).source == COMPILED
    assert not search.only_left(Compiles.INDUCTOR), "one is being looked at"
    found.append(screened(triton.source, 1.2))
    assert search.only_left(Compiles.INDUCTOR)
    assert not search.only_left(Compiles.VARIANTS)


class ScreensOneByOne:
    """Screens, but torch.compile only once the judge has been asked for a verdict."""

    slots = 1

    def __init__(self, *_, **__):
        pass

    def screen(self, candidates):
        estimates = {PLAIN: 1.5, TRITON: 1.2, COMPILED: 2.0}
        for candidate in candidates:
            assert candidate.source != COMPILED or JudgesAtOnce.asked.wait(LIMIT_S), "the judge waits for torch.compile"
            yield candidate, screened(candidate.source, estimates[candidate.source])

    def takes(self, kind):
        return True

    def close(self):
        pass


class JudgesAtOnce:
    slots = 1
    asked = threading.Event()

    def evaluate(self, jobs, stop=None):
        for job in jobs:
            if job is not None:
                self.asked.set()
                yield job, accepted(1.0, job.candidate.source)


def test_the_judge_does_not_wait_for_torch_compile_and_takes_it_where_it_is_better(tmp_path, monkeypatch):
    monkeypatch.setattr(optimize, "ScreeningPool", ScreensOneByOne)
    run, policy = RunDirectory(tmp_path), Proposes(COMPILED, TRITON, PLAIN)
    search = optimize.TaskSearch(run, TASK, policy, "cpu", 10, 0, lambda event: None)
    assert search.judge_best(JudgesAtOnce(), Settings.quick(), 1)
    assert [one.source for one in search.judged] == [PLAIN, COMPILED]


class ScreensForEver(ScreensOneByOne):
    """Screens; what needs an autotuner never ends, unless it is ended."""

    def __init__(self, *_, **__):
        self.closed = threading.Event()

    def screen(self, candidates):
        for candidate in candidates:
            if candidate.source == TUNED:
                assert self.closed.wait(LIMIT_S), "the search waits for an autotuner"
                yield candidate, InfrastructureError("its process is gone")
            else:
                yield candidate, screened(candidate.source, 1.5 if candidate.source == COMPILED else 1.2)

    def close(self):
        self.closed.set()


class JudgesFaster(JudgesAtOnce):
    def evaluate(self, jobs, stop=None):
        for job in jobs:
            if job is not None:
                yield job, accepted(1.5, job.candidate.source)


def test_an_autotuner_is_ended_once_something_else_is_an_improvement(tmp_path, monkeypatch):
    monkeypatch.setattr(optimize, "ScreeningPool", ScreensForEver)
    run, policy = RunDirectory(tmp_path), Proposes(TUNED, COMPILED, PLAIN)
    search = optimize.TaskSearch(run, TASK, policy, "cpu", 10, 0, lambda event: None)
    assert search.judge_best(JudgesFaster(), Settings.quick(), 3)
    assert {one.source for one in search.screened} == {PLAIN, COMPILED}
    assert search.judged
    assert {one.source for one in search.judged} <= {PLAIN, COMPILED}


@pytest.mark.parametrize(("least", "most", "early"), [(3, 6, 4), (2, 3, 3), (5, 6, 5), (1, 1, 1)])
def test_what_stands_early_has_four_process_triples_where_the_settings_allow_it(least, most, early):
    found = settings_for(
        MeasurementPlan(Candidate(source=PLAIN), Effort.EARLY), Settings(processes_min=least, processes_max=most)
    )
    assert (found.processes_min, found.processes_max, found.until_certain) == (early, most, True)
