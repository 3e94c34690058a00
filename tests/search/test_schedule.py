"""The order of screening: what compiles nothing first, autotuners last and only where they can still win."""

from __future__ import annotations

import pytest

from kernelwright.pools.compiling import Compiles, compiles, uses_inductor
from kernelwright.records import Candidate
from kernelwright.records.screened import screened_of
from kernelwright.rewrites.wrappers import WRAPPERS, wrap
from kernelwright.search.proposals import Proposals
from kernelwright.search.schedule import next_of, tuning_pays
from tests.samples import TASK, module

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
        ("compile", Compiles.CODE),
        ("compile-reduce-overhead", Compiles.CODE),
        ("compile-max-autotune", Compiles.VARIANTS),
    ],
)
def test_the_text_tells_what_is_compiled(name, kind):
    assert name in WRAPPERS
    source = wrap(TASK.source, name, (name,))
    assert compiles(source) is kind
    assert uses_inductor(source) == (kind is not Compiles.NOTHING)


def test_what_compiles_nothing_comes_first_and_waits_for_its_own_process():
    waiting = [Candidate(source=text) for text in (TUNED, TRITON, PLAIN)]
    assert next_of(waiting, [], [], lambda kind: True) is waiting[2]
    assert next_of(waiting, [], [], lambda kind: kind is not Compiles.NOTHING) is waiting[1]
    assert next_of(waiting, [], [], lambda kind: False) is None
    assert next_of(waiting[:1], waiting[1:2], [], lambda kind: True) is None, "its estimate may tell that it is not worth it"
    assert next_of(waiting[:1], [], [], lambda kind: True) is waiting[0]


def test_an_autotuner_must_be_able_to_win():
    assert tuning_pays([]), "nothing is known"
    assert tuning_pays([screened(PLAIN, 1.5), screened(COMPILED, 1.3)])
    assert not tuning_pays([screened(PLAIN, 2.0), screened(COMPILED, 1.3)]), "torch.compile is too far behind"
    assert tuning_pays([screened(PLAIN, 2.0), screened(TRITON, 1.3)]), "nothing tells how torch.compile does"
    assert not tuning_pays([screened(COMPILED, 0.5)]), "the reference itself is ahead"
    at_the_roofline = screened(COMPILED, 2.0, candidate_us=10.5, least_us=10.0)
    assert not tuning_pays([at_the_roofline])


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
