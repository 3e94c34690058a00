"""Measures stock baselines beside the search of one task, and chooses the one that a winner has to beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import Job
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.decisions import OWN_POLICY, STOCK, TaskRecords
from kernelwright.rewrites.baselines import baseline_source
from kernelwright.search.bench import RotatingEvaluator, baseline_of, owed_in, require_baselines
from kernelwright.search.schedule import TaskState, settings_for
from kernelwright.tasks.entries import Suite, SuiteEntry

ON_GPUS = ("compile", "cudagraph-fresh")
"""Baselines of a search on a GPU where none are named: those that keep a drop-in's contract for any program."""


def chosen_baselines(names: Sequence[str] | None, device: str, settings: Settings, evaluator: Evaluator | None) -> list[str]:
    """Baselines to measure: those that are named, else `ON_GPUS` where they can be measured.

    Raises:
        UsageError: there is no such baseline, or it cannot be measured with these settings or this evaluator.
        DeviceError: one needs a GPU.
    """
    able = settings.timed and (evaluator is None or isinstance(evaluator, RotatingEvaluator))
    if names is None:
        return list(ON_GPUS) if able and device.startswith("cuda") else []
    require_baselines(names, [device])
    wanted = [name for name in names if name != "eager"]
    if wanted and not able:
        raise UsageError(
            "Wanted to measure baselines beside eager, which takes settings with times, and an evaluator such as JudgePool; "
            "found others. Name eager alone."
        )
    return wanted


def rival_of(task: Task, found: Iterable[Evaluation]) -> Candidate | None:
    """The fastest measured baseline of a task that keeps a drop-in's contract; None where none is faster than eager.

    A measurement in full times it in the candidate's processes, since ratios of numbers from different minutes are loose.
    """
    best = TaskRecords.of(one for one in found if one.task_sha256 == task.sha256).best_baseline
    return None if best is None else baseline_of(task, best[0])


def floor_of(state: TaskState) -> Candidate | None:
    """The best baseline as a candidate, unless the judge has seen it or the winner is as fast.

    Its proposal may have failed when it was screened, for want of memory, say. The baseline was measured apart from this
    candidate, so that one clear verdict is its confirmation.
    """
    best = state.best_baseline
    if best is None or not state.needs_fallback:
        return None
    technique = next((technique for technique, stock in STOCK.items() if stock == best[0]), best[0])
    floor = Candidate(source=baseline_source(state.task, best[0]), policy=OWN_POLICY, techniques=(technique,))
    return floor if floor.sha256 not in state.verdicts else None


def settling_of(state: TaskState, settings: Settings) -> Job | None:
    """A task's near miss once more, in the same processes as the best of the baselines."""
    if (measurement := state.settle()) is None:
        return None
    rival = rival_of(state.task, state.baselines)
    return Job(state.task, measurement.candidate, settings_for(measurement, settings), rival)


class BaselinesBeside:
    """Baselines of one task that have no record yet, measured while the search goes on."""

    def __init__(self, run: RunDirectory, task: Task, names: Sequence[str], settings: Settings) -> None:
        self._run, self._task = run, task
        self._owed = owed_in(run, Suite(task.id, (SuiteEntry(task),)), names, settings).rotations
        self._thread = ThreadPoolExecutor(1)
        self._found: Future[list[list[Evaluation] | KernelwrightError]] | None = None

    @property
    def are_owed(self) -> bool:
        """Whether anything is to be measured."""
        return bool(self._owed)

    def begin(self, pool: Evaluator) -> None:
        """Have a pool measure them; does nothing where that was begun or nothing is owed."""
        if self._owed and self._found is None and isinstance(pool, RotatingEvaluator):
            self._found = self._thread.submit(lambda: [found for _, found in pool.rotate(self._owed)])

    def rival(self) -> Candidate | None:
        """The choice of `rival_of` among the baselines that are measured by now; waits for none."""
        found = [*self._run.evaluations()]
        if self._found is not None and self._found.done() and not self._found.exception():
            found += [one for part in self._found.result() if isinstance(part, list) for one in part]
        return rival_of(self._task, found)

    def end(self, pool: Evaluator, tell: Callable[[str, bool], None]) -> None:
        """Have a pool measure what is owed, unless that was begun, wait for it, and write the records.

        `tell` hears what goes on, and whether that lasts: that they could not be measured does.
        """
        self.begin(pool)
        if self._found is None:
            return
        tell("measuring baselines", False)
        for found in self._found.result():
            if isinstance(found, KernelwrightError):
                tell(f"baselines could not be measured: {found}", True)
                continue
            for one in found:
                self._run.append(one)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Whoever owns the pool ends its work.
        self._thread.shutdown(wait=False, cancel_futures=True)
