"""Measures stock baselines beside the search of one task, and chooses the one that a winner has to beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import Job
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.improvement import AUDITS_MAX, FEWEST
from kernelwright.records.screened import OWN_POLICY, confirmed_best
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.report.table import OVERWRITING, STOCK
from kernelwright.rewrites.baselines import baseline_source
from kernelwright.search.bench import RotatingEvaluator, baseline_of, owed_in, require_baselines
from kernelwright.search.schedule import SETTLING_SERIES, TaskState
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


def best_measured(task: Task, found: Iterable[Evaluation]) -> tuple[str, float] | None:
    """Name and speedup of a task's fastest measured baseline that keeps a drop-in's contract; None where none is faster than
    eager."""
    gains = {
        one.techniques[0]: one.speedup
        for one in found
        if one.policy == BASELINE_POLICY and one.task_sha256 == task.sha256 and one.speedup is not None
    }
    able = [name for name, gain in gains.items() if gain > 1.0 and name not in OVERWRITING]
    name = max(able, key=gains.__getitem__, default=None)
    return None if name is None else (name, gains[name])


def rival_of(task: Task, found: Iterable[Evaluation]) -> Candidate | None:
    """The choice of `best_measured`: a measurement in full times it beside the candidate, since ratios of numbers from
    different minutes are loose."""
    best = best_measured(task, found)
    return None if best is None else baseline_of(task, best[0])


def floor_of(state: TaskState, known: Iterable[Evaluation]) -> Candidate | None:
    """The choice of `best_measured` as a candidate, unless the judge has seen it or the winner is as fast.

    Its proposal may have failed when it was screened, for want of memory beside others, say. The baseline was measured
    apart from this candidate, so that one clear verdict is its confirmation.
    """
    best, winner = best_measured(state.task, known), confirmed_best(state.confirmed.values())
    if best is None or (winner is not None and (winner.speedup or 0.0) >= best[1]):
        return None
    technique = next((technique for technique, stock in STOCK.items() if stock == best[0]), best[0])
    floor = Candidate(source=baseline_source(state.task, best[0]), policy=OWN_POLICY, techniques=(technique,))
    return floor if floor.sha256 not in state.judged | state.confirmed else None


def settling_of(state: TaskState, known: Iterable[Evaluation], settings: Settings) -> Job | None:
    """A task's near miss once more, with as many series as are likely to settle it, beside the best of the baselines.

    Half of the processes that would settle it make `SETTLING_SERIES` times as many each. That measurement alone decides, and
    there is one for each task: of several the luckiest would count.
    """
    if (miss := state.near_miss) is None or (needed := miss.processes_to_settle) is None:
        return None
    count = max(FEWEST, math.ceil(needed / 2))
    audits = min(AUDITS_MAX, SETTLING_SERIES * settings.audits)
    settings = settings.model_copy(update={"processes_min": count, "processes_max": count, "audits": audits})
    return Job(state.task, miss.candidate(), settings, rival_of(state.task, known))


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
