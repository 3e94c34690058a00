"""Measures a suite, its baselines and given candidates in one run by one judge.

Candidates are judged in full, each paired with eager in fresh processes. Baselines are wrappers around the task's own
module; those of one task are measured together, in one rotation with eager on the same inputs, outputs compared. A
baseline that is not a drop-in (an aliased output, other strides) keeps its time, since a user could choose it; one that
is wrong or does not run has none.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import kernelwright
from kernelwright.deploy.drop_in import drop_in
from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.execution.executor import LocalExecutor
from kernelwright.execution.work import Baselines, Evaluate, Executor
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.decisions import TaskRecords
from kernelwright.records.models import BASELINE_POLICY, Precision
from kernelwright.records.tables import (
    ENTRIES,
    BenchEntry,
    TableRow,
    Tally,
    bench_table,
    comparison_of_line,
    table_json,
    tally,
    task_results,
)
from kernelwright.report.page import write_bench_report
from kernelwright.rewrites.wrappers import ALL_BASELINES, BY_DEFAULT
from kernelwright.search.engine import (
    Engine,
    EngineEvent,
    SearchPlan,
    SearchState,
    TaskState,
    WorkStep,
    baseline_of,
    file_records,
)
from kernelwright.search.policies import require_baselines
from kernelwright.tasks.entries import Suite

SAME = ("kind", "suite", "settings", "tasks")
"""Keys in which a resumed run must agree with the earlier one."""
DROP_INS = "optimized"
"""Folder of a run directory with the drop-ins that are handed out."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Results of a bench run."""

    run: Path
    rows: list[TableRow]
    counts: Tally
    errors: dict[str, str]
    """Errors of the task or the machine, by task and baseline."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """Status of each task, as in `table.json`."""


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
    for task in tasks:
        task.stock = baselines_of(task.task, baselines)
        task.baselines = pending_baselines(task, plan.settings)
    for settings in precisions:
        for entry, task in zip(suite.entries, tasks, strict=True):
            if entry.candidate is not None and Unrecorded(task.records.own, settings)(entry.candidate):
                alongside = task.stock if settings is plan.settings else ()
                given.append(WorkStep(task, Evaluate(entry.task, entry.candidate, settings, alongside)))
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


def chosen_baselines(names: Sequence[str] | None, device: str, settings: Settings, evaluator: Executor | None) -> list[str]:
    """Baselines to measure: those that are named, else `BY_DEFAULT` where they can be measured.

    Raises:
        UsageError: there is no such baseline, or it cannot be measured with these settings or this evaluator.
        DeviceError: one needs a GPU.
    """
    able = settings.timed and (evaluator is None or Baselines in evaluator.kinds)
    if names is None:
        return list(BY_DEFAULT) if able and device.startswith("cuda") else []
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


def pending_baselines(state: TaskState, settings: Settings) -> tuple[Candidate, ...]:
    """Baselines of a task, all where one has no record yet: they are compared with the same calls of eager."""
    return state.stock if any(map(Unrecorded(state.records.baselines, settings), state.stock)) else ()


class Unrecorded:
    """Tells which candidates of a task have no evaluation in a precision yet.

    Candidates are known by their hash and policy, so that records without sources count, and baselines by their names: what
    is on record stands, whatever text a later version writes.
    """

    def __init__(self, evaluations: Iterable[Evaluation], settings: Settings) -> None:
        precision = Precision.of(dict(settings))
        self._done = {
            _key(found, found.candidate_sha256) for found in evaluations if Precision.of(found.checks) is precision
        }

    def __call__(self, candidate: Candidate) -> bool:
        """True where a candidate has none."""
        return _key(candidate, candidate.sha256) not in self._done


def _key(one: Candidate | Evaluation, sha256: str) -> tuple[str, str]:
    return ("-".join(one.techniques) if one.policy == BASELINE_POLICY else sha256), one.policy


def summarise(run: RunDirectory, suite: Suite, errors: dict[str, str]) -> BenchResult:
    """The table from what is on disk; also written to `table.json`, `table.md` and `report.html`."""
    entries = [
        BenchEntry(entry.task.id, entry.task.sha256, entry.level, entry.candidate.sha256 if entry.candidate else None)
        for entry in suite.entries
    ]
    run.write_json(ENTRIES, [asdict(entry) for entry in entries])
    results = task_results(run, entries, errors)
    table = table_json(run, results)
    run.write_json("table.json", table)
    write_bench_report(run, results, table["tasks"])
    return BenchResult(run.path, bench_table(results), tally(results), errors, table["tasks"])


def with_winners(suite: Suite, winners: Mapping[str, Evaluation]) -> Suite:
    """The suite with the winner of each task as its candidate, by the task's id; the others have none."""
    entries = []
    for entry in suite.entries:
        best = winners.get(entry.task.id)
        won = Candidate(source=best.source, policy=best.policy, techniques=best.techniques) if best else None
        entries.append(replace(entry, candidate=won))
    return replace(suite, entries=tuple(entries))


def hand_out(run: RunDirectory, suite: Suite, winners: Mapping[str, Evaluation], lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a drop-in for each task whose winner is certainly ahead of the best baseline that was measured.

    Args:
        run: The run directory.
        suite: Tasks.
        winners: Confirmed winners by the task's id.
        lines: Status of each task, as in `table.json`.
    """
    shutil.rmtree(run.path / DROP_INS, ignore_errors=True)  # another look may have found some to be no faster
    tasks = {entry.task.id: entry.task for entry in suite.entries}
    for line in lines:
        best, comparison = winners.get(line["task"]), comparison_of_line(line)
        if best is not None and comparison is not None and comparison.is_ahead:
            (run.path / DROP_INS).mkdir(exist_ok=True)
            name = re.sub(r"\W+", "_", line["task"])
            text = drop_in(tasks[line["task"]], best, run, module=name, comparison=comparison)
            run.write_text(f"{DROP_INS}/{name}.py", text)
