"""Measures a suite, its baselines and given candidates in one run by one judge.

Candidates are judged in full, each paired with eager in fresh processes. Baselines are wrappers around the task's own
module; those of one task are measured together, in one rotation with eager on the same inputs, outputs compared. A
baseline that is not a drop-in (an aliased output, other strides) keeps its time, since a user could choose it; one that
is wrong or does not run has none.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from kernelwright.cores import cores_of_each
from kernelwright.errors import DeviceError, KernelwrightError, UsageError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import JUDGES_PER_GPU, Job, JudgePool, Outcome, RotationJob
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.decisions import BASELINE_POLICY
from kernelwright.records.models import Precision
from kernelwright.records.tables import CANDIDATE
from kernelwright.rewrites.baselines import ALL_BASELINES, baseline_source
from kernelwright.search.bench_summary import BenchResult, summarise
from kernelwright.tasks.entries import Suite
from kernelwright.version import __version__

W = TypeVar("W")
J = TypeVar("J", Job, RotationJob)
Kind = Literal["candidates", "baselines"]

SAME = ("kind", "suite", "settings", "tasks")
"""Keys in which a resumed run must agree with the earlier one."""


@runtime_checkable
class RotatingEvaluator(Evaluator, Protocol):
    """An evaluator that also measures the baselines of a task together, as `JudgePool` does."""

    def rotate(
        self, rotations: Iterable[RotationJob], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[RotationJob, list[Evaluation] | KernelwrightError]]:
        """Measure rotations; yields one evaluation for each baseline of each."""
        ...


@dataclass(frozen=True, slots=True)
class Owed:
    """Work that has no record yet, in the suite's order."""

    jobs: list[Job]
    rotations: list[RotationJob]
    """Baselines by task, measured whole or not at all: they are compared with the same calls of eager."""


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
class Agenda:
    """Choice and order of the owed work."""

    deadline: Callable[[], bool] | None = None
    """Question before each job; True leaves the rest for a later run in the same directory."""
    retry: Callable[[Evaluation], bool] | None = None
    """Choice of earlier evaluations to make once more, such as rejections that others on the machine may have caused. The
    later one counts."""
    order: Callable[[Sequence[Task]], Iterable[Task]] | None = None
    """Order of the tasks that are owed candidates, or baselines; by default the suite's. Tasks that it leaves out are not
    done. A resumed run may have another one."""


@dataclass(frozen=True, slots=True)
class PoolStage:
    """Kinds of work that one pool of judges does on some devices, one kind after the other."""

    devices: tuple[str, ...]
    at_once: int
    """Judges on each device."""
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of the work over the devices."""

    per_device: int | None = None
    """Judges at once on each device; by default `JUDGES_PER_GPU` on GPUs and one on a CPU."""
    baselines_per_device: int | None = None
    """Tasks whose baselines are measured at once on each device; by default `per_device`. Compilers leave the device idle,
    so that a few more than `per_device` keep it busy."""
    baselines_beside: bool = False
    """The last of several devices measures baselines while the others judge candidates; whoever is done helps the others. A
    run that is cut short has both of the first tasks."""

    def plan(self, devices: Sequence[str]) -> list[list[PoolStage]]:
        """Stages on these devices: lists that run beside one another, each in order."""
        judges = self.per_device or (JUDGES_PER_GPU if devices[0].startswith("cuda") else 1)
        compilers = self.baselines_per_device or judges

        def judge(some: Sequence[str]) -> PoolStage:
            return PoolStage(tuple(some), judges, ("candidates",))

        def measure(some: Sequence[str]) -> PoolStage:
            return PoolStage(tuple(some), compilers, ("baselines",))

        if self.baselines_beside and len(devices) > 1:
            first, last = devices[:-1], devices[-1:]
            return [[judge(first), measure(first)], [measure(last), judge(last)]]
        if compilers != judges:
            return [[judge(devices), measure(devices)]]
        return [[PoolStage(tuple(devices), judges, ("candidates", "baselines"))]]


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
    evaluator: Evaluator | None = None,
    spread: Spread | None = None,
    agenda: Agenda | None = None,
) -> BenchResult:
    """Measure a suite; resumes in `out`.

    Args:
        suite: Tasks, with candidates where it has them.
        out: The run directory.
        baselines: Names from `ALL_BASELINES`; `eager` is always measured, as the reference.
        device: `auto`, `cpu`, `cuda` (all GPUs) or `cuda:N` (that one).
        settings: Settings of the judge.
        on_event: Callback for each job that ends.
        strict_too: Judge each candidate a second time, with TF32 off on both sides; the table gets a column.
        tf32_products_too: Judge each candidate once more, with TF32 allowed in matrix products on both sides; the table gets
            a column.
        evaluator: Pool of judges, such as a `RayPool`; it stays open. It must be a `RotatingEvaluator` where baselines
            beside eager are wanted, which a `RayPool` is not. By default judges on this machine.
        spread: Distribution of judges on this machine over its devices.
        agenda: Choice and order of the owed work.

    Raises:
        UsageError: an unknown baseline, nothing to measure, an evaluator that cannot, or `out` belongs to another run or to
            other texts of these tasks.
        InfrastructureError: this machine cannot judge.
    """
    settings, agenda, spread = settings or Settings(), agenda or Agenda(), spread or Spread()
    precisions = _precisions(settings, strict_too, tf32_products_too)
    total = _require_measurable(suite, baselines, settings, evaluator, precisions)
    devices = devices_of(device)
    require_baselines(baselines, devices)
    run = RunDirectory(out)
    if run.claim(config_of(suite, baselines, devices, settings), same=SAME, device=devices[0]):
        write_tasks(run, suite)
    else:
        run.require_same_texts([entry.task for entry in suite.entries])
    owed = owed_in(run, suite, baselines, settings, precisions=precisions, retry=agenda.retry)
    work = BenchRun(run, owed, total, agenda, on_event)
    if evaluator is not None:
        work.judge(evaluator)
        if isinstance(evaluator, RotatingEvaluator):
            work.measure(evaluator)
    else:
        work.on_devices(spread.plan(devices), settings, cores_of_each(devices))
    return summarise(run, suite, work.errors)


def require_baselines(baselines: Sequence[str], devices: Sequence[str]) -> None:
    """Refuse baselines that there are not, and those that mean nothing on these devices.

    Raises:
        UsageError: there is no such baseline.
        DeviceError: one needs a GPU.
    """
    _require_known(baselines)
    for name in ("cudagraph", "cudagraph-fresh", "cudnn"):
        if name in baselines and list(devices) == ["cpu"]:
            # Without a GPU their wrappers change nothing: eager would stand under another name.
            raise DeviceError(f"Wanted a GPU for the baseline {name}; found the CPU alone. Leave that baseline out.")


def _require_known(baselines: Sequence[str]) -> None:
    unknown = [name for name in baselines if name not in ALL_BASELINES]
    if unknown:
        raise UsageError(
            f"Wanted baselines from {', '.join(ALL_BASELINES)}; found {', '.join(unknown)}. Correct --baselines."
        )


def _require_measurable(
    suite: Suite,
    baselines: Sequence[str],
    settings: Settings,
    evaluator: Evaluator | None,
    precisions: Sequence[Settings],
) -> int:
    """Number of evaluations to make in all; refuses what cannot be measured."""
    _require_known(baselines)
    if not suite.entries:
        raise UsageError(f"Wanted at least one task in the suite {suite.name}; found none.")
    rotations = _rotations(suite, baselines, settings)
    total = len(_jobs(suite, precisions)) + _evaluations_in(rotations)
    if not total:
        raise UsageError(
            f"Wanted something to measure: the suite {suite.name} brings no candidates. Name baselines beside eager."
        )
    if rotations and evaluator is not None and not isinstance(evaluator, RotatingEvaluator):
        raise UsageError(
            f"Wanted an evaluator that measures baselines together, such as JudgePool; found {type(evaluator).__name__}. "
            "Name no baselines beside eager, or leave the evaluator out."
        )
    return total


class BenchRun:
    """Measures what a run directory still lacks; several pools may work on it, each in a thread of its own.

    `total` counts all evaluations, those on record included.
    """

    def __init__(
        self, run: RunDirectory, owed: Owed, total: int, agenda: Agenda, on_event: Callable[[BenchEvent], None] | None
    ) -> None:
        self.errors: dict[str, str] = dict(run.read_json("errors.json") or {})
        """Errors by task and baseline."""
        jobs = _in_turn(owed.jobs, agenda.order, self.errors)
        rotations = _in_turn(owed.rotations, agenda.order, self.errors)
        self._run, self._agenda, self._on_event = run, agenda, on_event
        self._total = total
        self._finished = total - len(jobs) - _evaluations_in(rotations)
        self._jobs, self._rotations = _Shared(jobs), _Shared(rotations)
        self._keeping, self._broken_off = threading.Lock(), threading.Event()

    def judge(self, pool: Evaluator) -> None:
        """Judge candidates until none is left."""
        for job, outcome in pool.evaluate(self._jobs, stop=self._stop):
            self._keep(job.task, CANDIDATE, outcome)

    def measure(self, pool: RotatingEvaluator) -> None:
        """Measure baselines until none is left."""
        for rotation, found in pool.rotate(self._rotations, stop=self._stop):
            for index, baseline in enumerate(rotation.baselines):
                outcome = found if isinstance(found, KernelwrightError) else found[index]
                self._keep(rotation.task, baseline.techniques[0], outcome)

    def on_devices(
        self, plan: Sequence[Sequence[PoolStage]], settings: Settings, cores: Mapping[str, frozenset[int]]
    ) -> None:
        """Do the stages of a plan, its lists beside one another; a failure of one ends them all."""

        def do(stages: Sequence[PoolStage]) -> None:
            for stage in stages:
                with JudgePool(stage.devices, settings, stage.at_once, cores) as pool:
                    for kind in stage.kinds:
                        if kind == "candidates":
                            self.judge(pool)
                        else:
                            self.measure(pool)

        here, *beside = plan
        with ThreadPoolExecutor(max(len(beside), 1)) as threads:
            others = [threads.submit(do, stages) for stages in beside]
            try:
                do(here)
                for other in others:
                    other.result()
            except BaseException:
                self._broken_off.set()
                raise

    def _stop(self) -> bool:
        return self._broken_off.is_set() or (self._agenda.deadline is not None and self._agenda.deadline())

    def _keep(self, task: Task, what: str, outcome: Outcome) -> None:
        with self._keeping:
            if self._broken_off.is_set():
                return  # a pool that was closed in the middle of its work finds nothing out
            self._finished += 1
            name = f"{task.id} {what}"
            if isinstance(outcome, KernelwrightError):
                self.errors[name] = str(outcome)
                self._run.write_json("errors.json", self.errors)
            else:
                self._run.append(outcome)
                if self.errors.pop(name, None) is not None:
                    self._run.write_json("errors.json", self.errors)
            if self._on_event is not None:
                self._on_event(BenchEvent(task.id, what, outcome, self._finished, self._total))


class _Shared(Iterator[W]):
    """Work that several pools take from."""

    def __init__(self, work: Iterable[W]) -> None:
        self._work = iter(work)
        self._lock = threading.Lock()

    def __next__(self) -> W:
        with self._lock:
            return next(self._work)


def config_of(suite: Suite, baselines: Sequence[str], devices: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Content of `config.json`."""
    return {
        "kind": "bench",
        "suite": suite.name,
        "tasks": [entry.task.id for entry in suite.entries],
        "devices": list(devices),
        "settings": settings.model_dump(mode="json"),
        "baselines": [name for name in ALL_BASELINES if name in ("eager", *baselines)],
        "kernelwright": __version__,
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
    precisions: Sequence[Settings] = (),
    retry: Callable[[Evaluation], bool] | None = None,
) -> Owed:
    """Work that `bench` with the same arguments would do in a run directory; an error is no record. Candidates are judged
    with each of `precisions`, by default with the settings alone.

    Work is known by the hashes of its task and its candidate, so that records without sources count.
    """
    recorded = list(run.evaluations())
    made = Counter(map(_key, recorded))
    done = {_key(found) for found in recorded if made[_key(found)] > 1 or retry is None or not retry(found)}

    def is_owed(work: Job | RotationJob, candidate: Candidate) -> bool:
        precision = Precision.of(dict(work.settings or settings))
        return (work.task.sha256, candidate.sha256, candidate.policy, precision) not in done

    return Owed(
        [job for job in _jobs(suite, precisions or [settings]) if is_owed(job, job.candidate)],
        [one for one in _rotations(suite, baselines, settings) if any(is_owed(one, each) for each in one.baselines)],
    )


def _in_turn(owed: Sequence[J], order: Callable[[Sequence[Task]], Iterable[Task]] | None, errors: Iterable[str]) -> list[J]:
    if order is not None:
        place = {task.sha256: number for number, task in enumerate(order([work.task for work in owed]))}
        owed = sorted((work for work in owed if work.task.sha256 in place), key=lambda work: place[work.task.sha256])
    # What failed before comes last: when it was the others' memory that was missing, fewer are left.
    failed = {name.rpartition(" ")[0] for name in errors}
    return sorted(owed, key=lambda work: work.task.id in failed)


def _precisions(settings: Settings, strict_too: bool, tf32_products_too: bool) -> list[Settings]:
    """The settings, and those of further judgements."""
    found = [settings]
    for too, precision in ((strict_too, Precision.STRICT), (tf32_products_too, Precision.TF32_PRODUCTS)):
        if too and precision is not Precision.of(dict(settings)):
            flags = {"strict_fp32": precision is Precision.STRICT, "tf32_products": precision is Precision.TF32_PRODUCTS}
            found.append(settings.model_copy(update=flags))
    return found


def _jobs(suite: Suite, precisions: Sequence[Settings]) -> list[Job]:
    return [
        Job(entry.task, entry.candidate, settings)
        for settings in precisions
        for entry in suite.entries
        if entry.candidate is not None
    ]


def _rotations(suite: Suite, baselines: Sequence[str], settings: Settings) -> list[RotationJob]:
    names = [name for name in baselines if name != "eager"]
    return [
        RotationJob(
            entry.task,
            tuple(baseline_of(entry.task, name) for name in names),
            settings,
        )
        for entry in suite.entries
        if names
    ]


def baseline_of(task: Task, name: str) -> Candidate:
    """A stock baseline of a task, by its name in the tables."""
    return Candidate(source=baseline_source(task, name), policy=BASELINE_POLICY, techniques=(name,))


def _evaluations_in(rotations: Iterable[RotationJob]) -> int:
    return sum(len(rotation.baselines) for rotation in rotations)


def _key(found: Evaluation) -> tuple[str, str, str, Precision]:
    return (found.task_sha256, found.candidate_sha256, found.policy, Precision.of(found.checks))
