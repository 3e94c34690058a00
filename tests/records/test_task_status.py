"""Where a task without a winner stands, in words."""

from __future__ import annotations

import pytest

from kernelwright.records import Candidate
from kernelwright.records.decisions import TaskRecords, TaskStatus
from kernelwright.records.screened import Screened, screened_of
from kernelwright.records.tables import TaskResult, _shares
from tests.report.test_table import accepted
from tests.samples import TASK


@pytest.mark.parametrize(
    ("speedups", "said"),
    [([None], "1 accepted, not timed"), ([None, 1.5, 1.2], "3 judged, none an improvement: at best 1.50 from 0.90")],
)
def test_of_accepted_candidates_that_are_no_improvement_the_fastest_timed_one_is_told(speedups, said) -> None:
    judged = [
        accepted(speedup, low=None if speedup is None else 0.9).model_copy(update={"candidate_sha256": str(index)})
        for index, speedup in enumerate(speedups)
    ]
    assert TaskRecords.of(judged).status(3) == (TaskStatus.NONE, said)


@pytest.mark.parametrize(
    ("operations_us", "kept_us", "longer_us"),
    [
        ([None, None, None], None, 10.0),
        ([20.0, 30.0, 80.0], 30.0, 30.0),
        ([2.0, 3.0, 4.0], 3.0, 10.0),
        ([0.0, 0.0, 0.0], 0.0, 10.0),
        ([None, 40.0, None], 40.0, 40.0),
        ([300.0, 300.0, 300.0], 300.0, 300.0),
    ],
)
def test_the_roofline_is_the_longer_of_the_times_of_bytes_and_operations(operations_us, kept_us, longer_us) -> None:
    looks = [
        screened_of(TASK, Candidate(source="#"), correct=True, least_us=least_us, operations_us=one)
        for least_us, one in zip([8.0, 10.0, 11.0], operations_us, strict=True)
    ]
    result = TaskResult(TASK.id, 1, {"eager": 100.0}, accepted(2.0, reference_us=100.0))
    shares = {"reference": longer_us / 100.0, "winner": longer_us / result.evaluation.paired_us}
    assert _shares(result, looks) == {"least_us": 10.0, "operations_us": kept_us, **shares}
    assert _shares(result, [one.model_copy(update={"least_us": None}) for one in looks]) is None


def test_estimates_from_before_operations_were_recorded_still_load() -> None:
    look = screened_of(TASK, Candidate(source="#"), correct=True, candidate_us=5.0, least_us=10.0, operations_us=3.0)
    old = look.model_dump_json(exclude={"operations_us"})
    assert "operations_us" not in old
    assert Screened.model_validate_json(old) == look.model_copy(update={"operations_us": None})
    avoids = look.model_copy(update={"candidate_us": 12.0, "operations_us": 30.0})
    assert look.is_beyond_roofline
    assert not avoids.is_beyond_roofline, "operations may be avoided, bytes may not"
