"""Which candidate of a search is the result."""

from __future__ import annotations

import pytest

from kernelwright.records import RunDirectory
from kernelwright.records.screened import CONFIRMATIONS_TRIED, Screened
from kernelwright.search import optimize as search
from tests.samples import TASK, accepted, rejected


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
    for number in range(CONFIRMATIONS_TRIED):
        run.append(accepted(5.0 + number))
    best = search.confirm(run, Doubting(), TASK, lambda event: None)
    assert (best and best.speedup) == (1.9 if confirmed else None)


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
