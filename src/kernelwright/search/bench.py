"""A suite, its baselines and given candidates, measured in one run by one judge.

Candidates are judged in full, each paired with eager in fresh processes. Baselines are wrappers around the task's own
module; those of one task are measured together, in one rotation with eager on the same inputs, outputs compared. A
baseline that is not a drop-in (an aliased output, other strides) keeps its time, since a user could choose it; one that
is wrong or does not run has none.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar, runtime_checkable

import kernelwright
from kernelwright.errors import DeviceError, KernelwrightError, UsageError
from kernelwright.judge import Settings, devices_of
from kernelwright.pools.evaluator import Evaluator
from kernelwright.pools.local import JUDGES_PER_GPU, Job, JudgePool, Outcome, RotationJob
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.report.page import write_report
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.report.table import CANDIDATE, Row, Tally, TaskResult, baseline_table, bench_table, render_markdown, tally
from kernelwright.rewrites.baselines import ALL_BASELINES, baseline_source
from kernelwright.tasks.suites import Suite, SuiteEntry

W = TypeVar("W")
J = TypeVar("J", Job, RotationJob)

SAME = ("kind", "suite", "settings", "tasks")
"""In what a run that is resumed must agree with the earlier one."""

_CORES_WORTH_SHARING = 4
"""With fewer for each device, sharing costs more than it protects. Our choice."""


@runtime_checkable
class RotatingEvaluator(Evaluator, Protocol):
    """An evaluator that also measures the baselines of a task together, as `JudgePool` does."""

    def rotate(
        self, rotations: Iterable[RotationJob], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[RotationJob, list[Evaluation] | KernelwrightError]]:
        """As `evaluate`, one evaluation for each baseline of a rotation."""
        ...


@dataclass(frozen=True, slots=True)
class Owed:
    """Work that has no record yet, in the suite's order."""

    jobs: list[Job]
    rotations: list[RotationJob]
    """Each is measured whole or not at all: its baselines are compared with the same calls of eager."""


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
    baselines_per_device: int | None = None,
    baselines_beside: bool = False,
    retry: Callable[[Evaluation], bool] | None = None,
    order: Callable[[Sequence[Task]], Iterable[Task]] | None = None,
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
        baselines_per_device: Tasks whose baselines are measured at once on each device; by default `per_device`. Their
            compilers work while nobody measures on the device, so that a few tasks more than candidates keep it busy.
        baselines_beside: On several devices, measure baselines on the last of them while candidates are judged on the
            others; whoever is done helps the others. A run that is cut short has both of the first tasks. With judges on
            this machine only.
        retry: Whether an earlier evaluation is to be made once more, whereupon the later one counts: where others on the
            machine may be to blame for its rejection.
        order: In which order tasks are taken that are owed something, asked for candidates and for baselines; by default
            the suite's. Tasks that it leaves out are not done. A resumed run may have another one.

    Raises:
        UsageError: an unknown baseline, nothing to measure, an evaluator that cannot, or `out` belongs to another run or to
            other texts of these tasks.
        InfrastructureError: this machine cannot judge.
    """
    unknown = [name for name in baselines if name not in ALL_BASELINES]
    if unknown:
        raise UsageError(f"Wanted baselines from {', '.join(ALL_BASELINES)}; found {', '.join(unknown)}.")
    if not suite.entries:
        raise UsageError(f"Wanted at least one task in the suite {suite.name}; found none.")
    settings = settings or Settings()
    jobs, rotations = _jobs(suite, settings, strict_too), _rotations(suite, baselines, settings)
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
    for name in ("cudagraph", "cudnn"):
        if name in baselines and devices == ["cpu"]:
            # Without a GPU their wrappers change nothing: eager would stand under another name.
            raise DeviceError(f"Wanted a GPU for the baseline {name}; found the CPU alone. Leave that baseline out.")
    run = RunDirectory(out)
    if run.claim(config_of(suite, baselines, devices, settings), same=SAME, device=devices[0]):
        write_tasks(run, suite)
    else:
        run.require_same_texts([entry.task for entry in suite.entries])
    errors: dict[str, str] = dict(run.read_json("errors.json") or {})
    left = owed_in(run, suite, baselines, settings, strict_too=strict_too, retry=retry)
    owed, turns = _in_turn(left.jobs, order, errors), _in_turn(left.rotations, order, errors)
    finished = total - len(owed) - sum(len(rotation.baselines) for rotation in turns)

    one_at_a_time, broken_off = threading.Lock(), threading.Event()

    def keep(task: Task, what: str, outcome: Outcome) -> None:
        nonlocal finished
        with one_at_a_time:
            if broken_off.is_set():
                return  # a pool that was closed in the middle of its work finds nothing out
            finished += 1
            if isinstance(outcome, KernelwrightError):
                errors[f"{task.id} {what}"] = str(outcome)
                run.write_json("errors.json", errors)
            else:
                run.append(outcome)
                if errors.pop(f"{task.id} {what}", None) is not None:
                    run.write_json("errors.json", errors)
            if on_event is not None:
                on_event(BenchEvent(task.id, what, outcome, finished, total))

    def stop() -> bool:
        return broken_off.is_set() or (deadline is not None and deadline())

    jobs_left, turns_left = _Shared(owed), _Shared(turns)

    def judge(pool: Evaluator) -> None:
        for job, outcome in pool.evaluate(jobs_left, stop=stop):
            keep(job.task, CANDIDATE, outcome)

    def measure(pool: RotatingEvaluator) -> None:
        for rotation, found in pool.rotate(turns_left, stop=stop):
            for index, baseline in enumerate(rotation.baselines):
                outcome = found if isinstance(found, KernelwrightError) else found[index]
                keep(rotation.task, baseline.techniques[0], outcome)

    count = per_device or (JUDGES_PER_GPU if devices[0].startswith("cuda") else 1)
    turns_count = baselines_per_device or count
    cores = _cores_of_each(devices)

    def judge_on(some: Sequence[str]) -> None:
        with JudgePool(some, settings, count, cores) as pool:
            judge(pool)

    def measure_on(some: Sequence[str]) -> None:
        with JudgePool(some, settings, turns_count, cores) as pool:
            measure(pool)

    def measure_then_judge_on(some: Sequence[str]) -> None:
        measure_on(some)
        judge_on(some)

    if evaluator is not None:
        judge(evaluator)
        if isinstance(evaluator, RotatingEvaluator):
            measure(evaluator)
    elif baselines_beside and len(devices) > 1:
        with ThreadPoolExecutor(1) as thread:
            beside = thread.submit(measure_then_judge_on, devices[-1:])
            try:
                judge_on(devices[:-1])
                measure_on(devices[:-1])
                beside.result()
            except BaseException:
                broken_off.set()
                raise
    elif turns_count != count:
        judge_on(devices)
        measure_on(devices)
    else:
        with JudgePool(devices, settings, count, cores) as pool:
            judge(pool)
            measure(pool)
    return summarise(run, suite, errors)


def _cores_of_each(devices: Sequence[str]) -> dict[str, frozenset[int]]:
    """An equal share of the processor's cores for each of several devices; nothing where there are too few."""
    mine = sorted(os.sched_getaffinity(0))
    share = len(mine) // len(devices)
    if len(devices) < 2 or share < _CORES_WORTH_SHARING:
        return {}
    return {device: frozenset(mine[index * share : (index + 1) * share]) for index, device in enumerate(devices)}


class _Shared(Iterator[W]):
    """Work that several pools take from."""

    def __init__(self, work: Iterable[W]) -> None:
        self._work = iter(work)
        self._lock = threading.Lock()

    def __next__(self) -> W:
        with self._lock:
            return next(self._work)


def config_of(suite: Suite, baselines: Sequence[str], devices: Sequence[str], settings: Settings) -> dict[str, Any]:
    """What `config.json` of a bench run says."""
    return {
        "kind": "bench",
        "suite": suite.name,
        "tasks": [entry.task.id for entry in suite.entries],
        "devices": list(devices),
        "settings": settings.model_dump(mode="json"),
        "baselines": [name for name in ALL_BASELINES if name in ("eager", *baselines)],
        "kernelwright": kernelwright.__version__,
    }


def write_tasks(run: RunDirectory, suite: Suite) -> None:
    """The tasks, so that the report can show candidates against them."""
    run.write_json("tasks.json", [entry.task.model_dump(mode="json") for entry in suite.entries])


def owed_in(
    run: RunDirectory,
    suite: Suite,
    baselines: Sequence[str],
    settings: Settings,
    *,
    strict_too: bool = False,
    retry: Callable[[Evaluation], bool] | None = None,
) -> Owed:
    """What `bench` with the same arguments would do in a run directory; an error is no record.

    Work is known by the hashes of its task and its candidate, so that records without sources count.
    """
    recorded = list(run.evaluations())
    made = Counter(map(_key, recorded))
    done = {_key(found) for found in recorded if made[_key(found)] > 1 or retry is None or not retry(found)}

    def is_owed(work: Job | RotationJob, candidate: Candidate) -> bool:
        strict = (work.settings or settings).strict_fp32
        return (work.task.sha256, candidate.sha256, candidate.policy, strict) not in done

    return Owed(
        [job for job in _jobs(suite, settings, strict_too) if is_owed(job, job.candidate)],
        [one for one in _rotations(suite, baselines, settings) if any(is_owed(one, each) for each in one.baselines)],
    )


def _in_turn(owed: Sequence[J], order: Callable[[Sequence[Task]], Iterable[Task]] | None, errors: Iterable[str]) -> list[J]:
    if order is not None:
        place = {task.sha256: number for number, task in enumerate(order([work.task for work in owed]))}
        owed = sorted((work for work in owed if work.task.sha256 in place), key=lambda work: place[work.task.sha256])
    # What failed before comes last: when it was the others' memory that was missing, fewer are left.
    failed = {name.rpartition(" ")[0] for name in errors}
    return sorted(owed, key=lambda work: work.task.id in failed)


def _jobs(suite: Suite, settings: Settings, strict_too: bool) -> list[Job]:
    jobs = [Job(entry.task, entry.candidate, settings) for entry in suite.entries if entry.candidate is not None]
    if not strict_too:
        return jobs
    strict = settings.model_copy(update={"strict_fp32": True})
    return jobs + [Job(job.task, job.candidate, strict) for job in jobs]


def _rotations(suite: Suite, baselines: Sequence[str], settings: Settings) -> list[RotationJob]:
    names = [name for name in baselines if name != "eager"]
    return [
        RotationJob(
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


def _key(found: Evaluation) -> tuple[str, str, str, bool]:
    return (found.task_sha256, found.candidate_sha256, found.policy, _is_strict(found))


def _is_strict(found: Evaluation) -> bool:
    return bool(found.checks.get("strict_fp32"))


def summarise(run: RunDirectory, suite: Suite, errors: dict[str, str]) -> BenchResult:
    """The table from what is on disk; also written to `table.json`, `table.md` and `report.html`."""
    found: dict[str, list[Evaluation]] = {}
    for evaluation in run.evaluations():
        found.setdefault(evaluation.task_sha256, []).append(evaluation)
    run_is_strict = bool((run.read_json("config.json") or {}).get("settings", {}).get("strict_fp32"))
    failed: dict[str, list[str]] = {}
    for name in errors:
        task, _, what = name.rpartition(" ")
        failed.setdefault(task, []).append(what)
    results = [
        _result(entry, found.get(entry.task.sha256, []), run_is_strict, failed.get(entry.task.id, ()))
        for entry in suite.entries
    ]
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


def _result(entry: SuiteEntry, found: Sequence[Evaluation], run_is_strict: bool, failed: Sequence[str]) -> TaskResult:
    """Baselines' latencies relative to eager's, which is the median over all of the task's evaluations.

    Two entries may have one task and different candidates.
    """
    mine = entry.candidate.sha256 if entry.candidate else None
    judged = [one for one in found if one.policy != BASELINE_POLICY and one.candidate_sha256 == mine]
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
        next((one for one in reversed(judged) if _is_strict(one) == run_is_strict), None),
        next((one for one in reversed(judged) if _is_strict(one) != run_is_strict), None),
        has_candidate=entry.candidate is not None,
        failed=tuple(failed),
    )
