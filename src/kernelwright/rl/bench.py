"""A suite, its baselines and given candidates, measured in one run by one judge.

Candidates are judged in full, each paired with eager in fresh processes. Baselines are wrappers around the task's own
module; those of one task are measured together, in one rotation with eager on the same inputs, outputs compared. A
baseline that is not a drop-in (an aliased output, other strides) keeps its time, since a user could choose it; one that
is wrong or does not run has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol, runtime_checkable

import kernelwright
from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.evaluation import JUDGES_PER_GPU, Evaluator, Job, JudgePool, Rotation, Settings, devices_of
from kernelwright.evaluation.pool import Outcome
from kernelwright.policies.baselines import ALL_BASELINES, baseline_source
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.report.page import write_report
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.report.table import Row, Tally, TaskResult, baseline_table, bench_table, render_markdown, tally
from kernelwright.tasks.suites import Suite, SuiteEntry


@runtime_checkable
class RotatingEvaluator(Evaluator, Protocol):
    """An evaluator that also measures the baselines of a task together, as `JudgePool` does."""

    def rotate(
        self, rotations: Iterable[Rotation], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[Rotation, list[Evaluation] | KernelwrightError]]:
        """As `evaluate`, one evaluation for each baseline of a rotation."""
        ...


@dataclass(frozen=True, slots=True)
class BenchEvent:
    """A job that has just ended."""

    task: str
    what: str
    """Name of the baseline, or `candidate`."""
    outcome: Evaluation | KernelwrightError
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What a bench run found."""

    run: Path
    rows: list[Row]
    counts: Tally
    errors: dict[str, str]
    """Per task and baseline, what kept it from being measured: the task's fault or the machine's."""


def bench(
    suite: Suite,
    *,
    baselines: Sequence[str] = (),
    device: str = "auto",
    out: Path,
    settings: Settings | None = None,
    on_event: Callable[[BenchEvent], None] | None = None,
    per_device: int | None = None,
    deadline: Callable[[], bool] | None = None,
    strict_too: bool = False,
    evaluator: Evaluator | None = None,
) -> BenchResult:
    """Measure a suite; resumes in `out`.

    Args:
        suite: Tasks, with candidates where it has them.
        baselines: Names from `ALL_BASELINES`; `eager` is always measured, as the reference.
        device: `auto`, `cpu`, `cuda` (all GPUs) or `cuda:N` (that one).
        out: The run directory.
        settings: Of the judge.
        on_event: Told of each job that ends.
        per_device: Judges at once on each device.
        deadline: Asked before each job; True leaves the rest for a later run in the same directory.
        strict_too: Judge each candidate a second time, with TF32 off on both sides; the table gets a column.
        evaluator: Who judges, such as a `RayPool`; it stays open. It must be a `RotatingEvaluator` where baselines beside
            eager are wanted, which a `RayPool` is not. By default judges on this machine.

    Raises:
        UsageError: an unknown baseline, nothing to measure, an evaluator that cannot, or `out` belongs to another run.
        InfrastructureError: this machine cannot judge.
    """
    unknown = [name for name in baselines if name not in ALL_BASELINES]
    if unknown:
        raise UsageError(f"Wanted baselines from {', '.join(ALL_BASELINES)}; found {', '.join(unknown)}.")
    if not suite.entries:
        raise UsageError(f"Wanted at least one task in the suite {suite.name}; found none.")
    settings = settings or Settings()
    jobs = [Job(entry.task, entry.candidate, settings) for entry in suite.entries if entry.candidate is not None]
    if strict_too:
        strict = settings.model_copy(update={"strict_fp32": True})
        jobs += [Job(job.task, job.candidate, strict) for job in jobs]
    rotations = _rotations(suite, baselines, settings)
    total = len(jobs) + sum(len(rotation.baselines) for rotation in rotations)
    if not total:
        raise UsageError(
            f"Wanted something to measure: the suite {suite.name} brings no candidates. Name baselines beside eager."
        )
    if rotations and evaluator is not None and not isinstance(evaluator, RotatingEvaluator):
        raise UsageError(
            f"Wanted an evaluator that measures baselines together, such as JudgePool; found {type(evaluator).__name__}. "
            "Name no baselines beside eager, or leave the evaluator out."
        )
    devices = devices_of(device)
    run = RunDirectory(out)
    config = {
        "kind": "bench",
        "suite": suite.name,
        "tasks": [entry.task.id for entry in suite.entries],
        "devices": list(devices),
        "settings": settings.model_dump(mode="json"),
        "kernelwright": kernelwright.__version__,
    }
    if run.claim(config, same=("kind", "suite", "tasks", "settings"), device=devices[0]):
        run.write_json("tasks.json", [entry.task.model_dump(mode="json") for entry in suite.entries])
    done = {
        (found.task_sha256, found.candidate_sha256, found.policy, _is_strict(found)) for found in run.evaluations()
    }

    def is_owed(work: Job | Rotation, candidate: Candidate) -> bool:
        strict = (work.settings or settings).strict_fp32
        return (work.task.sha256, candidate.sha256, candidate.policy, strict) not in done

    owed = [job for job in jobs if is_owed(job, job.candidate)]
    # A rotation is measured whole or not at all: its baselines are compared with the same calls of eager.
    turns = [one for one in rotations if any(is_owed(one, baseline) for baseline in one.baselines)]
    errors: dict[str, str] = dict(run.read_json("errors.json") or {})
    finished = total - len(owed) - sum(len(rotation.baselines) for rotation in turns)

    def keep(task: Task, what: str, outcome: Outcome) -> None:
        nonlocal finished
        finished += 1
        if isinstance(outcome, KernelwrightError):
            errors[f"{task.id} {what}"] = str(outcome)
            run.write_json("errors.json", errors)
        else:
            run.append(outcome)
        if on_event is not None:
            on_event(BenchEvent(task.id, what, outcome, finished, total))

    count = per_device or (JUDGES_PER_GPU if devices[0].startswith("cuda") else 1)
    with contextlib.ExitStack() as stack:
        pool = evaluator or stack.enter_context(JudgePool(devices, settings, count))
        for job, outcome in pool.evaluate(owed, stop=deadline):
            keep(job.task, "candidate", outcome)
        if isinstance(pool, RotatingEvaluator):
            for rotation, found in pool.rotate(turns, stop=deadline):
                for index, baseline in enumerate(rotation.baselines):
                    outcome = found if isinstance(found, KernelwrightError) else found[index]
                    keep(rotation.task, baseline.techniques[0], outcome)
    return summarise(run, suite, errors)


def _rotations(suite: Suite, baselines: Sequence[str], settings: Settings) -> list[Rotation]:
    names = [name for name in baselines if name != "eager"]
    return [
        Rotation(
            entry.task,
            tuple(
                Candidate(source=baseline_source(entry.task, name), policy=BASELINE_POLICY, techniques=(name,))
                for name in names
            ),
            settings,
        )
        for entry in suite.entries
        if names
    ]


def _is_strict(found: Evaluation) -> bool:
    return bool(found.checks.get("strict_fp32"))


def summarise(run: RunDirectory, suite: Suite, errors: dict[str, str]) -> BenchResult:
    """The table from what is on disk; also written to `table.json`, `table.md` and `report.html`."""
    found: dict[str, list[Evaluation]] = {}
    for evaluation in run.evaluations():
        found.setdefault(evaluation.task_sha256, []).append(evaluation)
    run_is_strict = bool((run.read_json("config.json") or {}).get("settings", {}).get("strict_fp32"))
    results = [_result(entry, found.get(entry.task.sha256, []), run_is_strict) for entry in suite.entries]
    rows, counts, own = bench_table(results), tally(results), baseline_table(results)
    table = {
        "rows": [_row_json(row) for row in rows],
        "tally": asdict(counts),
        "baselines": [asdict(row) for row in own],
    }
    run.write_json("table.json", table)
    run.write_text("table.md", render_markdown(rows, counts, own))
    write_report(run, run.path / "report.html")
    return BenchResult(run.path, rows, counts, errors)


def _row_json(row: Row) -> dict[str, Any]:
    values = asdict(row)
    values["fast_p"] = {str(p): share for p, share in row.fast_p.items()}
    return values


def _result(entry: SuiteEntry, found: Sequence[Evaluation], run_is_strict: bool) -> TaskResult:
    """Baselines' latencies relative to eager's, which is the median over all of the task's evaluations."""
    main = [evaluation for evaluation in found if _is_strict(evaluation) == run_is_strict]
    eager_us = [evaluation.reference_us for evaluation in main if evaluation.reference_us is not None]
    latencies_us: dict[str, float] = {}
    if eager_us:
        latencies_us["eager"] = median(eager_us)
        for evaluation in main:
            if evaluation.policy == BASELINE_POLICY and evaluation.speedup:
                latencies_us[evaluation.techniques[0]] = latencies_us["eager"] / evaluation.speedup
    return TaskResult(
        entry.task.id,
        entry.level,
        latencies_us,
        next((evaluation for evaluation in reversed(main) if evaluation.policy != BASELINE_POLICY), None),
        next((evaluation for evaluation in reversed(found) if evaluation not in main), None),
    )
