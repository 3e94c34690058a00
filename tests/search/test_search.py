"""Which candidate of a search is the result."""

from __future__ import annotations

import pytest

from kernelwright.judge import Settings
from kernelwright.records import RunDirectory
from kernelwright.records.decisions import SCHEDULE
from kernelwright.records.screened import Screened
from kernelwright.search import optimize as search
from kernelwright.search.beside import BaselinesBeside
from tests.samples import TASK, BarePool, accepted, rejected


class Doubting:
    """An evaluator by which nothing holds."""

    def evaluate(self, jobs, stop=None):
        for job in jobs:
            yield job, rejected(source=job.candidate.source)


@pytest.mark.parametrize("confirmed", [True, False])
def test_what_was_confirmed_before_stands_though_others_seemed_better_since(tmp_path, confirmed):
    run = RunDirectory(tmp_path)
    run.append(accepted(2.0, "# first"))
    if confirmed:
        run.append(accepted(1.9, "# first", confirms=True))
    for number in range(SCHEDULE.confirmations_tried):
        run.append(accepted(5.0 + number))
    best = search.confirm(run, Doubting(), TASK, lambda event: None)
    assert (best and best.speedup) == (1.9 if confirmed else None)


class Rotates(BarePool):
    """Measures baselines, and judges what it is asked to."""

    def __init__(self, compiled):
        self.compiled, self.rivals = compiled, []

    def evaluate(self, jobs, stop=None):
        for job in jobs:
            self.rivals.append(job.rival and job.rival.techniques[0])
            yield job, accepted(2.0, job.candidate.source)

    def rotate(self, rotations, stop=None):
        for one in rotations:
            if isinstance(self.compiled, Exception):
                raise self.compiled
            yield one, [accepted(self.compiled, policy="baseline", techniques=("compile",))]


@pytest.mark.parametrize(
    ("compiled", "begun", "rival"),
    [(1.5, True, "compile"), (1.5, False, None), (0.8, True, None), (ValueError("lost"), True, None)],
)
def test_a_winner_is_confirmed_beside_the_best_baseline_that_is_known_by_then(tmp_path, compiled, begun, rival):
    run, pool = RunDirectory(tmp_path), Rotates(compiled)
    run.append(accepted(2.0, "# first"))
    with BaselinesBeside(run, TASK, ["compile"], Settings()) as beside:
        if begun:
            beside.begin(pool)
            beside._thread.shutdown(wait=True)
        best = search.confirm(run, pool, TASK, lambda event: None, beside.rival)
    assert best.confirms
    assert pool.rivals == [rival]


SCREENED = Screened(task="", task_sha256="", candidate_sha256="", correct=True, estimate=1.5)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (search.SearchEvent("confirming"), "confirming"),
        (search.SearchEvent("judged", accepted(2.0, noise_floor=0.05)), ": improvement, 2.000x ("),
        (search.SearchEvent("judged", accepted(1.1, speedup_low=1.01, noise_floor=0.05)), "x (1.010 to "),
        (search.SearchEvent("judged", accepted(1.1, speedup_low=1.01, noise_floor=0.05)), "), noise floor 5.00%"),
        (search.SearchEvent("judged", rejected(detail="far off\nchange it")), "far off"),
        (search.SearchEvent("screened", screened=SCREENED), "about 1.50x"),
    ],
)
def test_an_event_is_one_line_for_people(event, said):
    assert said in str(event)
    assert "\n" not in str(event)
