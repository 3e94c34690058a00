"""Where a task without a winner stands, in words."""

from __future__ import annotations

import pytest

from kernelwright.report.standing import TaskOutcome, _searched
from tests.report.test_table import accepted


@pytest.mark.parametrize(
    ("speedups", "said"),
    [([None], "1 accepted, not timed"), ([None, 1.5, 1.2], "3 judged, none an improvement: at best 1.50 from 0.90")],
)
def test_of_accepted_candidates_that_are_no_improvement_the_fastest_timed_one_is_told(speedups, said) -> None:
    judged = [
        accepted(speedup, low=None if speedup is None else 0.9).model_copy(update={"candidate_sha256": str(index)})
        for index, speedup in enumerate(speedups)
    ]
    assert _searched([], judged, 3) == (TaskOutcome.NONE, said)
