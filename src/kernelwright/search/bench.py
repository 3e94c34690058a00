"""Measures a suite, its baselines and given candidates in one run by one judge.

Candidates are judged in full, each paired with eager in fresh processes. Baselines are wrappers around the task's own
module; those of one task are measured together, in one rotation with eager on the same inputs, outputs compared. A
baseline that is not a drop-in (an aliased output, other strides) keeps its time, since a user could choose it; one that
is wrong or does not run has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernelwright
from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.execution.executor import LocalExecutor
from kernelwright.execution.work import Baselines, Evaluate, Executor
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Evaluation, RunDirectory
from kernelwright.records.decisions import TaskRecords
from kernelwright.records.models import Precision
from kernelwright.rewrites.baselines import ALL_BASELINES
from kernelwright.search.baselines import Unrecorded, baselines_of, pending_baselines, require_baselines
from kernelwright.search.bench_summary import BenchResult, summarise
from kernelwright.search.engine import Engine, EngineEvent, SearchPlan, SearchState, TaskState, WorkStep, file_records
from kernelwright.tasks.entries import Suite

SAME = ("kind", "suite", "settings", "tasks")
"""Keys in which a resumed run must agree with the earlier one."""


@dataclass(frozen=True, slots=True)
class BenchEvent:
    """Work that has just ended."""

    task: str
    what: str
    """Name of the baseline, or `candidate`."""
    outcome: Evaluation | KernelwrightError
    done: int
    total: int


def bench(
    suite: Suite,
    *,
    out: Path,
    baselines: Sequence[str] = (),
    device: str = "auto",
    settings: Settings | None = None,
    on_event: Callable[[BenchEvent], None] | None = None,
    strict_too: bool = False,
    tf32_products_too: bool = False,
    evaluator: Executor | None = None,
) -> BenchResult:
    """Measure a suite; resumes in `out`.

    Args:
        suite: Tasks, with candidates where it has them.
        out: The run directory.
        baselines: Names from `ALL_BASELINES`; `eager` is always measured, as the reference.
        device: `auto`, `cpu`, `cuda` (all GPUs) or `cuda:N` (that one).
        settings: Settings of the judge.
        on_event: Callback for each work that ends.
        strict_too: Judge each candidate a second time, with TF32 off on both sides; the table gets a column.
        tf32_products_too: Judge each candidate once more, with TF32 allowed in matrix products on both sides; the table gets
            a column.
        evaluator: Executor that judges, such as a `RayExecutor`; it stays open. It must do `Baselines` where baselines
            other than eager are wanted. By default judges on this machine.

    Raises:
        UsageError: an unknown baseline, nothing to measure, an evaluator that cannot, or `out` belongs to another run or to
            other texts of these tasks.
        InfrastructureError: this machine cannot judge.
    """
    settings = settings or Settings()
    precisions = _precisions(settings, strict_too, tf32_products_too)
    total = _require_measurable(suite, baselines, evaluator, len(precisions))
    devices = devices_of(device)
    require_baselines(baselines, devices)
    run = RunDirectory(out)
    claim_suite(run, suite, config_of(suite, baselines, devices, settings), SAME)
    state = state_of(run, suite, baselines, SearchPlan(settings=settings, device=devices[0]), precisions)
    counted = _Counted(on_event, total - len(state.given) - sum(len(task.baselines) for task in state.tasks), total)
    with nullcontext(evaluator) if evaluator is not None else LocalExecutor(devices, settings) as executor:
        engine = Engine(run, state, executor, counted)
        engine.run()
    return summarise(run, suite, engine.errors)


class _Counted:
    """Tells a caller of each evaluation that ends, with its number."""

    def __init__(self, on_event: Callable[[BenchEvent], None] | None, done: int, total: int) -> None:
        self._on_event, self._done, self._total = on_event, done, total

    def __call__(self, event: EngineEvent) -> None:
        outcome = event.outcome
        if isinstance(outcome, Evaluation | KernelwrightError):
            self._done += 1
            if self._on_event is not None:
                self._on_event(BenchEvent(event.task.task.id, event.what, outcome, self._done, self._total))


def state_of(
    run: RunDirectory, suite: Suite, baselines: Sequence[str], plan: SearchPlan, precisions: Sequence[Settings] = ()
) -> SearchState:
    """State of a run over a suite: what is on record, and what is pending in the suite's order.

    Candidates that come with the suite are judged in each precision. An error is no record; what failed before comes last:
    when it was others' memory that was missing, fewer are left.
    """
    tasks = [TaskState(entry.task, TaskRecords(schedule=plan.schedule)) for entry in suite.entries]
    file_records(tasks, run)
    failed = {name.rpartition(" ")[0] for name in run.read_json("errors.json") or {}}
    given = []
    for settings in precisions:
        for entry, task in zip(suite.entries, tasks, strict=True):
            if entry.candidate is not None and Unrecorded(task.records.own, settings)(entry.candidate):
                given.append(WorkStep(task, Evaluate(entry.task, entry.candidate, settings)))
    for task in tasks:
        task.baselines = pending_baselines(task, baselines, plan.settings)
    in_turn = sorted(tasks, key=lambda task: task.task.id in failed)
    return SearchState(plan, in_turn, sorted(given, key=lambda step: step.task.task.id in failed))


def claim_suite(run: RunDirectory, suite: Suite, config: dict[str, Any], same: Sequence[str]) -> None:
    """Take a run directory for a suite, and write its tasks, so that the report can show candidates against them.

    Raises:
        UsageError: it belongs to another run, or to other texts of these tasks.
    """
    if run.claim(config, same=same, device=config["devices"][0]):
        run.write_json("tasks.json", [entry.task.model_dump(mode="json") for entry in suite.entries])
    else:
        run.require_same_texts([entry.task for entry in suite.entries])


def config_of(suite: Suite, baselines: Sequence[str], devices: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Content of `config.json`."""
    return {
        "kind": "bench",
        "suite": suite.name,
        "tasks": [entry.task.id for entry in suite.entries],
        "devices": list(devices),
        "settings": settings.model_dump(mode="json"),
        "baselines": [name for name in ALL_BASELINES if name in ("eager", *baselines)],
        "kernelwright": kernelwright.__version__,
    }


def _require_measurable(suite: Suite, baselines: Sequence[str], evaluator: Executor | None, precisions: int) -> int:
    """Number of evaluations to make in all; refuses what cannot be measured."""
    require_baselines(baselines, [])
    if not suite.entries:
        raise UsageError(f"Wanted at least one task in the suite {suite.name}; found none.")
    measured = sum(len(baselines_of(entry.task, baselines)) for entry in suite.entries)
    total = precisions * sum(entry.candidate is not None for entry in suite.entries) + measured
    if not total:
        raise UsageError(
            f"Wanted something to measure: the suite {suite.name} brings no candidates. Name baselines beside eager."
        )
    if measured and evaluator is not None and Baselines not in evaluator.kinds:
        raise UsageError(
            f"Wanted an evaluator that measures baselines together, such as LocalExecutor; found "
            f"{type(evaluator).__name__}. Name no baselines beside eager, or leave the evaluator out."
        )
    return total


def _precisions(settings: Settings, strict_too: bool, tf32_products_too: bool) -> list[Settings]:
    """The settings, and those of further judgements."""
    wanted = [settings]
    for too, precision in ((strict_too, Precision.STRICT), (tf32_products_too, Precision.TF32_PRODUCTS)):
        if too and precision is not Precision.of(dict(settings)):
            flags = {"strict_fp32": precision is Precision.STRICT, "tf32_products": precision is Precision.TF32_PRODUCTS}
            wanted.append(settings.model_copy(update=flags))
    return wanted
