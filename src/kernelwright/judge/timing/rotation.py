"""Measures the baselines of a task that no candidate's final has measured: one process triple with eager as the candidate.

No candidate's code runs here, and no candidate is accepted by it. It belongs to the trusted part all the same: the ratios
to stock baselines that a run publishes are its numbers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from kernelwright.errors import CrowdedError, DeviceError
from kernelwright.judge.check.bounds import Bounds
from kernelwright.judge.check.check import CheckResult
from kernelwright.judge.check.findings import CheckFinding, CheckFindings, Demands
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation.side import Side
from kernelwright.judge.judge import Judge
from kernelwright.judge.settings import Settings
from kernelwright.judge.timing import clocks
from kernelwright.judge.timing.answers import TOLERANCE
from kernelwright.judge.timing.clocks import CacheFlush, TripleClocks
from kernelwright.judge.timing.pairs import PairedTiming
from kernelwright.judge.timing.triple import ProcessTriple
from kernelwright.records import Candidate, Evaluation, Reason, Scoring, Task, TimingBlock, Verdict
from kernelwright.records.intervals import MISS_PROBABILITY
from kernelwright.records.scoring import alongside_record
from kernelwright.seconds import utc_now


def rotate(
    judge: Judge,
    task: Task,
    baselines: Sequence[Candidate],
    *,
    settings: Settings | None = None,
    alone: bool | None = None,
) -> list[Evaluation]:
    """Measure wrappers of the task's own module in the same processes; none of them is checked as a drop-in.

    Where a GPU's memory does not suffice for all of them they are measured in two rotations, and so on; each record says
    how many were in its own.

    Args:
        judge: Whose device, workers and settings are used.
        task: The task whose module they wrap.
        baselines: At least one, of the policy `baseline`. Those with the same techniques are of one kind: on a GPU a process
            that has served one of them may serve another.
        settings: Settings in place of the judge's own.
        alone: As for `Judge.evaluate`.

    Raises:
        TaskError: the reference itself does not work.
        CrowdedError: as `Judge.evaluate`.
        InfrastructureError: this machine failed.
    """
    wanted = settings or judge.settings

    def attempt() -> list[Evaluation]:
        began, started = utc_now(), time.monotonic()
        with judge.evaluation_folder(task) as directory:
            trial = judge.trial(task, baselines[0], directory, wanted, CheckFindings(Demands()), baselines)
            found = Evaluation(
                task=task.id,
                task_sha256=task.sha256,
                candidate_sha256="",
                verdict=Verdict.ACCEPTED,
                device=str(judge.device),
                blocks=measure(trial, judge.flush),
                scoring=Scoring(miss_probability=MISS_PROBABILITY),
                checks=trial.findings.checks | wanted.model_dump(include={"strict_fp32", "tf32_products"}),
                started=began,
            )
        about = {"rotation": len(baselines), "device_s": trial.gate.held_s, "waited_s": trial.gate.waited_s}
        records = [record for one in baselines if (record := alongside_record(found, one)) is not None]
        elapsed_s = round(time.monotonic() - started, 3)
        return [record.model_copy(update={"elapsed_s": elapsed_s, "checks": record.checks | about}) for record in records]

    found: list[Evaluation] = []
    try:
        found = judge.with_memory(attempt, _ran_out, alone)
    except CrowdedError:
        raise
    except DeviceError:
        if len(baselines) == 1:
            raise
    if len(baselines) == 1 or (found and not _ran_out(found)):
        return found
    middle = len(baselines) // 2  # six modules of one task may not fit where three do
    halves = (baselines[:middle], baselines[middle:])
    return [record for half in halves for record in rotate(judge, task, half, settings=settings, alone=alone)]


def _ran_out(found: Sequence[Evaluation]) -> bool:
    return any(record.reason is Reason.OUT_OF_MEMORY for record in found)


def measure(trial: Trial, flush: CacheFlush) -> tuple[TimingBlock, ...]:
    """Time all that is beside in the trial, whose candidate is not used.

    Raises:
        TaskError: the reference failed.
    """
    nothing = CheckResult(bounds=Bounds(trial), tolerances={}, timed_tolerance=TOLERANCE, output_follows_input=True)
    timing = PairedTiming(trial, nothing, flush, triple_kind=_WithoutCandidate)
    with contextlib.ExitStack() as stack:
        eager = {
            role: stack.enter_context(contextlib.closing(trial.start("reference"))) for role in ("reference", "candidate")
        }
        eager["candidate"].is_read, eager["reference"].is_read_in_place = False, trial.facts.shapes.is_large
        return timing.triple(0, eager, against_truth=False).blocks


class _WithoutCandidate(ProcessTriple):
    """A process triple whose candidate is eager, which nobody needs to check."""

    def _compare(self, *calls: Any, **how: Any) -> None:
        pass

    def _reject_idle_work(self, ran_us: float) -> None:
        pass

    def verify_held(self) -> None:
        """Eager's earlier outputs are its own affair."""

    def verify_buffers(self) -> None:
        """Eager's buffers are right."""

    def verify_weights(self, against_truth: bool) -> None:
        """Eager uses its weights."""

    def process_findings(self, reference: Side, candidate: Side) -> list[CheckFinding]:
        """None: eager's process is as it should be."""
        return []

    def finish(self, process: int) -> TripleClocks:
        """Clocks of all calls."""
        return clocks.cross_examine(process, {name: self.samples[name] for name in self._names}, self._series_calls())
