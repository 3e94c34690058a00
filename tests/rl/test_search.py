"""Which candidate of a search is the result."""

from __future__ import annotations

import pytest

from kernelwright.records import Evaluation, Reason, RunDirectory, Task, Verdict
from kernelwright.rl import search

TASK = Task(id="t", source="class Model: ...")


def record(number: int, speedup: float, *, confirms: bool = False, accepted: bool = True) -> Evaluation:
    times = {"speedup": speedup, "speedup_low": speedup * 0.95, "speedup_high": speedup * 1.05, "noise_floor": 0.01}
    return Evaluation(
        task=TASK.id,
        task_sha256=TASK.sha256,
        candidate_sha256=f"{number:064x}",
        verdict=Verdict.ACCEPTED if accepted else Verdict.REJECTED,
        reason=None if accepted else Reason.WRONG_OUTPUT,
        source=f"# {number}",
        device="cpu",
        confirms=confirms,
        **(times if accepted else {}),
    )


class Doubting:
    """An evaluator by which nothing holds."""

    def evaluate(self, jobs):
        for job in jobs:
            yield job, record(int(job.candidate.source[2:]), 1.0, accepted=False)


@pytest.mark.parametrize("confirmed", [True, False])
def test_what_was_confirmed_before_stands_though_others_seemed_better_since(tmp_path, confirmed):
    run = RunDirectory(tmp_path)
    run.append(record(1, 2.0))
    if confirmed:
        run.append(record(1, 1.9, confirms=True))
    for number in range(2, 2 + search.CONFIRMATIONS_TRIED):
        run.append(record(number, 3.0 + number))
    best = search._confirm(run, Doubting(), TASK, lambda event: None)
    assert (best and best.speedup) == (1.9 if confirmed else None)
