"""The search over knobs: a sample, then neighbours of the best, and the judge sees the winner with its knobs fixed."""

from __future__ import annotations

from kernelwright.execution.screener import Proposals
from kernelwright.records import Candidate
from kernelwright.records.decisions import next_to_judge, ranked
from kernelwright.records.knobs import knobs_of
from kernelwright.records.screened import screened_of
from kernelwright.records.variants import SAMPLED, variants
from tests.samples import TASK

CHOICES = {"block": (16, 32, 64, 128, 256), "stages": (1, 2, 3, 4)}
SOURCE = f"KNOBS = {CHOICES!r}\n"
BEST = {"KNOBS.block": 128, "KNOBS.stages": 3}


class Declares:
    """Proposes one candidate with knobs and one without."""

    name, look = "declares", "screened"

    def propose(self, context, count):
        both = [Candidate(source=text, policy=self.name) for text in (SOURCE, "# plain\n")]
        return [one for one in both if one.sha256 not in context.seen][:count]


def estimate_of(source: str) -> float:
    """Higher the nearer to the best values."""
    values = {name: choices[0] for name, choices in knobs_of(source).items()}
    if not values:
        return 1.1
    off = sum(
        abs(choices.index(values[f"KNOBS.{name}"]) - choices.index(BEST[f"KNOBS.{name}"]))
        for name, choices in CHOICES.items()
    )
    return 2.0 - 0.2 * off


def test_the_best_of_twenty_combinations_is_found_in_fifteen_looks_and_its_knobs_are_fixed():
    found = []
    search = Proposals(TASK, Declares(), "cpu", 16, 0, [], found)
    for candidate in search.candidates(2):
        assert candidate is not None
        estimate = estimate_of(candidate.source)
        found.append(screened_of(TASK, candidate, correct=True, estimate=estimate, spread=0.0))
    assert len(found) == 16
    assert len({one.candidate_sha256 for one in found}) == 16
    winner = next_to_judge(found, {}, 1)
    assert knobs_of(winner.source) == {name: (value,) for name, value in BEST.items()}
    assert winner.knobs == {name: str(value) for name, value in BEST.items()}
    assert winner.parent == Candidate(source=SOURCE).sha256
    again = Proposals(TASK, Declares(), "cpu", 17, 0, [], list(found))
    assert next(again.candidates(2)).sha256 not in {one.candidate_sha256 for one in found}


def test_knobs_of_a_candidate_that_is_far_behind_are_left_alone():
    slow = screened_of(TASK, Candidate(source=SOURCE), correct=True, estimate=0.5)
    fast = screened_of(TASK, Candidate(source="# plain"), correct=True, estimate=1.5)
    assert variants([slow, fast], set(), 4) == []
    assert len(variants([slow], set(), SAMPLED)) == SAMPLED
    wrong = screened_of(TASK, Candidate(source=SOURCE), correct=False)
    assert variants([wrong], set(), 4) == []
    assert ranked([wrong]) == []
