"""Measures suspicious speedups again before they count (CUDA-L1, section 2.4.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelwright.errors import InfrastructureError, KernelwrightError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import Job
from kernelwright.records import Evaluation, Task

SUSPICIOUS_SPEEDUP = 3.0
"""CUDA-L1, section 2.4.4: verify again above 3x ..."""

SUSPICIOUS_LEAP = 2.0
"""... or above twice the best so far."""

AGREEMENT = 0.10
"""CUDA-L1, section 2.4.4: two measurements agree when they are less than 10 % apart."""


def is_suspicious(
    evaluation: Evaluation, best_so_far: float | None, *, above: float = SUSPICIOUS_SPEEDUP, leap: float = SUSPICIOUS_LEAP
) -> bool:
    """Whether a speedup must be measured again: above `above`, or more than `leap` times the task's best that counts."""
    if not evaluation.accepted or evaluation.speedup is None or evaluation.confirms:
        return False
    leapt = best_so_far is not None and evaluation.speedup > leap * best_so_far
    return evaluation.speedup > above or leapt


@dataclass(frozen=True, slots=True)
class Reverification:
    """A suspicious evaluation and its independent re-measurement."""

    task: Task
    first: Evaluation
    second: Evaluation
    """The re-measurement; `confirms` is set."""

    @property
    def agrees(self) -> bool:
        """Whether both were accepted and their speedups are less than 10 % apart, measured by the smaller."""
        first, second = self.first.speedup, self.second.speedup
        if first is None or second is None:
            return False
        return max(first, second) < (1 + AGREEMENT) * min(first, second)

    @property
    def settled(self) -> Evaluation:
        """The evaluation that counts: the re-measurement where they agree, otherwise the worse of the two.

        The paper says only what is accepted; that a disagreement leaves the worse of the two is our choice.
        """
        # A rejected evaluation has no speedup, and is the worse one.
        return self.second if self.agrees else min(self.second, self.first, key=lambda found: found.speedup or 0.0)


def reverify(cases: Sequence[tuple[Task, Evaluation]], judges: Mapping[str, Evaluator]) -> list[Reverification]:
    """Measure suspicious candidates again, each in fresh processes on another device than before where there is one.

    `judges` holds a pool for each device by its name; those of one kind take turns.

    Raises:
        KernelwrightError: a judge failed.
    """
    queues: dict[str, list[Job]] = {device: [] for device in judges}
    jobs = [Job(task, evaluation.candidate()) for task, evaluation in cases]
    for job, (_, evaluation) in zip(jobs, cases, strict=True):
        kind = evaluation.device.partition(":")[0]
        same = [device for device in judges if device.partition(":")[0] == kind]
        others = [device for device in same if device != evaluation.device] or same
        if not others:
            raise InfrastructureError(
                f"Wanted a judge of the kind of {evaluation.device}; there are judges for {', '.join(judges) or 'nothing'}."
            )
        queues[min(others, key=lambda device: len(queues[device]))].append(job)
    found: dict[int, Evaluation] = {}
    for device, queue in queues.items():
        for job, outcome in judges[device].evaluate(queue):
            if isinstance(outcome, KernelwrightError):
                raise outcome
            found[id(job)] = outcome.model_copy(update={"confirms": True})
    return [Reverification(task, first, found[id(job)]) for job, (task, first) in zip(jobs, cases, strict=True)]
