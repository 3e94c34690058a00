"""Measures stock baselines beside the search of one task, and says how a winner stands against the best of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.judge import Settings
from kernelwright.pools.evaluator import Evaluator
from kernelwright.records import Evaluation, RunDirectory, Task
from kernelwright.report.bench_table import BenchEntry, task_results
from kernelwright.report.standing import standings
from kernelwright.search.bench import RotatingEvaluator, owed_in, require_baselines
from kernelwright.tasks.entries import Suite, SuiteEntry

ON_GPUS = ("compile", "cudagraph-fresh")
"""Baselines of a search on a GPU where none are named: those that keep a drop-in's contract for any program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """How a winner stands against the baselines that were measured beside it."""

    baselines: dict[str, float]
    """Speedup of each over eager; without those that failed."""
    best: str
    """The fastest of them that keeps a drop-in's contract; `eager` where none is faster."""
    speedup: float
    """Of the winner over that baseline."""
    low: float
    high: float
    """Ends of its 95 % interval."""
    is_ahead: bool
    """Whether the whole interval lies above 1."""

    def __str__(self) -> str:
        others = ", ".join(f"{name} {speedup:.3f}x" for name, speedup in self.baselines.items())
        return (
            f"Baselines over eager: {others or 'none measured'}. Over the best of them, {self.best}, this is "
            f"{self.speedup:.3f}x ({self.low:.3f} to {self.high:.3f})."
        )


def beside_of(line: Mapping[str, Any]) -> Beside | None:
    """From one task's line of `table.json`; None without a winner, or where baselines that were asked for are missing."""
    if line["vs_best_baseline_interval"] is None or not line["baselines_measured"]:
        return None
    low, high = line["vs_best_baseline_interval"]
    return Beside(
        baselines=line["baselines"],
        best=line["best_baseline"],
        speedup=line["vs_best_baseline"],
        low=low,
        high=high,
        is_ahead=line["ahead"],
    )


def standing(run: RunDirectory, task: Task, winner: Evaluation) -> Beside | None:
    """How a search's winner stands against the baselines of its run; None where none but eager was measured."""
    results = task_results(run, [BenchEntry(task.id, task.sha256, None, winner.candidate_sha256)], {})
    (line,) = standings(run, results)
    return beside_of(line) if line["baselines"] else None


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


class BaselinesBeside:
    """Baselines of one task that have no record yet, measured while the search goes on."""

    def __init__(self, run: RunDirectory, task: Task, names: Sequence[str], settings: Settings) -> None:
        self._run = run
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
