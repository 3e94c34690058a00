"""Chooses the stock baselines that a run measures, and tells which of its evaluations are pending."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernelwright.errors import DeviceError, UsageError
from kernelwright.execution.work import Baselines, Executor
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.models import Precision
from kernelwright.rewrites.baselines import ALL_BASELINES
from kernelwright.search.engine import TaskState, baseline_of

ON_GPUS = ("compile", "cudagraph-fresh")
"""Baselines of a search on a GPU where none are named: those that keep a drop-in's contract for any program."""
_GPU_ALONE = ("cudagraph", "cudagraph-fresh", "cudnn")


def require_baselines(baselines: Sequence[str], devices: Sequence[str]) -> None:
    """Refuse baselines that there are not, and those that mean nothing on these devices.

    Raises:
        UsageError: there is no such baseline.
        DeviceError: one needs a GPU.
    """
    unknown = [name for name in baselines if name not in ALL_BASELINES]
    if unknown:
        raise UsageError(
            f"Wanted baselines from {', '.join(ALL_BASELINES)}; found {', '.join(unknown)}. Correct --baselines."
        )
    for name in _GPU_ALONE:
        if name in baselines and list(devices) == ["cpu"]:
            # Without a GPU their wrappers change nothing: eager would stand under another name.
            raise DeviceError(f"Wanted a GPU for the baseline {name}; found the CPU alone. Leave that baseline out.")


def chosen_baselines(names: Sequence[str] | None, device: str, settings: Settings, evaluator: Executor | None) -> list[str]:
    """Baselines to measure: those that are named, else `ON_GPUS` where they can be measured.

    Raises:
        UsageError: there is no such baseline, or it cannot be measured with these settings or this evaluator.
        DeviceError: one needs a GPU.
    """
    able = settings.timed and (evaluator is None or Baselines in evaluator.kinds)
    if names is None:
        return list(ON_GPUS) if able and device.startswith("cuda") else []
    require_baselines(names, [device])
    wanted = [name for name in names if name != "eager"]
    if wanted and not able:
        raise UsageError(
            "Wanted to measure baselines beside eager, which takes settings with times, and an evaluator such as "
            "LocalExecutor; found others. Name eager alone."
        )
    return wanted


def baselines_of(task: Task, names: Sequence[str]) -> tuple[Candidate, ...]:
    """Stock baselines of a task by their names, without eager, which is the reference."""
    return tuple(baseline_of(task, name) for name in names if name != "eager")


def pending_baselines(state: TaskState, names: Sequence[str], settings: Settings) -> tuple[Candidate, ...]:
    """Baselines of a task, all where one has no record yet: they are compared with the same calls of eager."""
    wanted = baselines_of(state.task, names)
    return wanted if any(map(Unrecorded(state.records.baselines, settings), wanted)) else ()


class Unrecorded:
    """Tells which candidates of a task have no evaluation in a precision yet.

    Candidates are known by their hash and policy, so that records without sources count.
    """

    def __init__(self, evaluations: Iterable[Evaluation], settings: Settings) -> None:
        precision = Precision.of(dict(settings))
        self._done = {
            (found.candidate_sha256, found.policy) for found in evaluations if Precision.of(found.checks) is precision
        }

    def __call__(self, candidate: Candidate) -> bool:
        """True where a candidate has none."""
        return (candidate.sha256, candidate.policy) not in self._done
