"""The order in which a policy's proposals are looked at."""

from __future__ import annotations

from kernelwright.execution.screener import Proposals
from kernelwright.records import Candidate
from kernelwright.records.screened import Compiles, screened_of
from kernelwright.rewrites.wrappers import wrap
from tests.samples import TASK, module

PLAIN, SCALED, TRITON = module(), module("b * a[:, None]"), module(note="triton")
COMPILED, TUNED = (wrap(TASK.source, name, (name,)) for name in ("compile", "compile-max-autotune"))


class Proposes:
    name, look = "scripted", "screened"

    def __init__(self, *sources):
        self.sources = sources

    def propose(self, context, count):
        return [one for text in self.sources if (one := Candidate(source=text)).sha256 not in context.seen][:count]


def screened(source, estimate):
    return screened_of(TASK, Candidate(source=source), correct=True, estimate=estimate, spread=0.0)


def order_of(estimates, budget=10):
    found = []
    search = Proposals(TASK, Proposes(*estimates), "cpu", budget, 0, [], found)
    for candidate in search.candidates(1, lambda kind: True):
        assert candidate is not None
        found.append(screened(candidate.source, estimates[candidate.source]))
    return [one.source for one in found]


def test_slow_compilers_come_last_and_an_autotuner_is_left_out_where_it_cannot_win():
    close = {TUNED: 1.4, COMPILED: 1.3, SCALED: 1.2, PLAIN: 1.1}
    assert order_of(close) == [SCALED, PLAIN, COMPILED, TUNED]
    assert order_of(close | {PLAIN: 1.9}) == [SCALED, PLAIN, COMPILED]
    assert order_of(close, budget=2) == [COMPILED, SCALED], "the policy's next takes the autotuner's place in the budget"


def test_only_slow_compilers_are_left_once_all_others_have_been_looked_at():
    found = []
    search = Proposals(TASK, Proposes(COMPILED, TRITON, PLAIN), "cpu", 10, 0, [], found)
    assert search.left is None, "nothing was proposed yet"
    given = search.candidates(3, lambda kind: True)
    plain, triton = next(given), next(given)
    found.append(screened(plain.source, 1.1))
    assert next(given).source == COMPILED
    assert search.left is Compiles.CODE, "one is being looked at"
    found.append(screened(triton.source, 1.2))
    assert search.left is Compiles.INDUCTOR


def test_remarks_on_what_could_not_be_tried_are_told_once():
    class Remarks(Proposes):
        def propose(self, context, count):
            return [one.model_copy(update={"note": "No operator graph."}) for one in super().propose(context, count)]

    found, told = [], []
    search = Proposals(TASK, Remarks(SCALED, PLAIN), "cpu", 2, 0, [], found, lambda *said: told.append(said))
    for candidate in search.candidates(1):
        found.append(screened(candidate.source, 1.1))
    assert told == [("proposing", False), ("No operator graph.", True), ("proposing", False)]
