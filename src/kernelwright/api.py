"""Offers the command line's verbs as functions that take names, paths or records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack, overload

import torch

from kernelwright.deploy import placement
from kernelwright.errors import CandidateError, TaskError, UsageError
from kernelwright.execution.work import Executor
from kernelwright.judge import Judge, Settings
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.decisions import JUDGED, OWN_POLICY
from kernelwright.records.policy import Policy
from kernelwright.search.bench import BenchEvent, BenchResult
from kernelwright.search.bench import bench as run_bench
from kernelwright.search.compiled import ModeVerdict, judge_modes
from kernelwright.search.in_memory import ModelResult, optimize_model
from kernelwright.search.optimize import OptimizeResult, SearchEvent
from kernelwright.search.optimize import optimize as run_search
from kernelwright.search.policies import policy_named
from kernelwright.tasks import load_task, read_source
from kernelwright.tasks.entries import Suite, chosen_tasks, with_candidates
from kernelwright.tasks.in_memory import check_model, device_of, folder_on_path, sets_of, task_of, tried
from kernelwright.tasks.suites import load_suite


def evaluate(
    task: Task | str | Path, candidate: Candidate | str | Path, *, device: str = "auto", settings: Settings | None = None
) -> Evaluation:
    """Judge one candidate; nothing is written.

        found = kernelwright.evaluate("scale.py", "faster.py")
        print(found.verdict, found.reason, found.speedup, found.speedup_low, found.is_improvement)

    A candidate that fails is no error: it has the verdict `rejected` and a reason. For many candidates keep one
    `kernelwright.judge.Judge` or `LocalExecutor`, which spares each the start.

    Args:
        task: A record, a Python file in KernelBench's format or the id of a built-in task.
        candidate: A record or a Python file that defines `ModelNew`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        settings: Of the judge.

    Returns:
        The record: verdict, reason, speedup (reference latency / candidate latency) with its 95 % interval, labels, raw
        timings and checks.

    Raises:
        UsageError: the task or the candidate cannot be read, or the reference does not work.
        InfrastructureError: this machine cannot judge it.
    """
    if not isinstance(candidate, Candidate):
        _refuse_text(candidate, CandidateError, "Candidate(source=text)")
        candidate = Candidate(source=read_source(Path(candidate), "a candidate", CandidateError))
    with Judge(device, settings) as judge:
        loaded = _task(task)
        return judge.evaluate(loaded, candidate)


def evaluate_compiled(
    task: Task | torch.nn.Module | str | Path,
    example_inputs: Any = None,
    *,
    device: str = "auto",
    settings: Settings | None = None,
) -> list[ModeVerdict]:
    """Judge torch.compile of a model or a task in each of its modes: which is right, eager or compiled?

        for mode in kernelwright.evaluate_compiled(model, example_inputs=(x,)):
            print(mode.mode, mode.evaluation.verdict, *mode.findings(), sep="\\n")

    Args:
        task: A model in memory, or as of `evaluate`.
        example_inputs: Of a model, as of `optimize`; one set.
        device: `auto` (for a model where it is), `cpu`, `cuda` or `cuda:N`.
        settings: Of the judge.

    Returns:
        The verdict on each mode, with both errors against float64 and its findings in words.

    Raises:
        UsageError, InfrastructureError: as `evaluate`.
    """
    if not isinstance(task, torch.nn.Module):
        with Judge(device, settings) as judge:
            return list(judge_modes(judge, _task(task)))
    model = check_model(task)
    if len(calls := tried(model, sets_of(example_inputs))) != 1:
        raise UsageError(f"Wanted example inputs of one form; found {len(calls)}. Judge each on its own.")
    where = str(device_of(model, calls[0].examples)) if device == "auto" else device
    with TemporaryDirectory() as folder, folder_on_path(Path(folder)), Judge(where, settings) as judge:
        return list(judge_modes(judge, task_of(model, calls[0], Path(folder))))


class SearchOptions(TypedDict, total=False):
    """Options of `optimize` beside its task and its run directory."""

    policy: Policy | str
    device: str
    budget: int
    judged: int
    settings: Settings | None
    on_event: Callable[[SearchEvent], None] | None
    seed: int
    evaluator: Executor | None
    baselines: Sequence[str] | None


@overload
def optimize(task: Task | str | Path, *, out: str | Path, **options: Unpack[SearchOptions]) -> OptimizeResult: ...


@overload
def optimize(
    task: torch.nn.Module, example_inputs: Any, *, out: str | Path, **options: Unpack[SearchOptions]
) -> ModelResult: ...


def optimize(
    task: Task | torch.nn.Module | str | Path,
    example_inputs: Any = None,
    *,
    out: str | Path,
    policy: Policy | str = "builtin",
    device: str = "auto",
    budget: int = 24,
    judged: int = JUDGED,
    settings: Settings | None = None,
    on_event: Callable[[SearchEvent], None] | None = None,
    seed: int = 0,
    evaluator: Executor | None = None,
    baselines: Sequence[str] | None = None,
) -> OptimizeResult | ModelResult:
    """Search for a verified faster version of a model or a task, and confirm it by an independent re-measurement.

        result = kernelwright.optimize(model, example_inputs=(x,), out="model-run", budget=12)
        print(result)
        faster = result.module  # `model` itself where nothing was confirmed to be faster

        result = kernelwright.optimize("scale.py", out="scale-run", budget=12)
        if result.best is not None:
            print(result.best.speedup_low, result.beside, result.drop_in)

    Writes records, `report.html` and, where an improvement was confirmed, `optimized.py` into `out`: the fastest of what was
    judged, stock configurations included. Every record is on disk before its policy hears of it: killed at any moment and
    called again with the same arguments, it goes on where it was.

    Args:
        task: A model in memory, a record, a Python file in KernelBench's format or the id of a built-in task.
        example_inputs: Of a model: the arguments of one call as a tuple, keyword arguments as a dict, both as
            `kernelwright.Inputs(x, mask=m)`, or a list of such sets. Each form (shapes, types, plain values) is searched.
        out: The run directory.
        policy: Who proposes candidates: `builtin`, or a policy such as one of `contrastive.model_policy.policy_for_run`.
        device: `auto` (for a model where it is), `cpu`, `cuda` or `cuda:N`.
        budget: Proposals to look at for each form of inputs, those already in `out` included. Where a model's layers are
            equal, for one of them, which is searched for all, and then for the whole.
        judged: Candidates of `builtin` that the judge takes, screened ones; those that look too good come on top.
        settings: Of the judge.
        on_event: Told about progress.
        seed: Of the policy.
        evaluator: Who judges, such as a `RayExecutor` with these settings; it stays open. By default judges on this machine.
        baselines: Names as of `bench`, to measure beside. By default
            `kernelwright.rewrites.wrappers.BY_DEFAULT` on a GPU, none on a CPU.

    Returns:
        The run directory, the confirming evaluation of the best candidate (None when nothing was confirmed to be faster)
        and the numbers of evaluations and of estimates. For a model its `module` and `save`, and one search for each form.

    Raises:
        UsageError: the task or the model cannot be used, there is no such policy, another process is at work in `out`, or it
            belongs to another task, device, policy or other settings.
        InfrastructureError: this machine cannot judge, or the policy gave nothing usable.
    """
    if budget < 1:
        raise UsageError(f"Wanted a budget of at least one proposal; found {budget}.")
    if judged < 1:
        raise UsageError(f"Wanted at least one candidate for the judge; found {judged}.")
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    search = partial(
        run_search,
        policy=chosen,
        budget=budget,
        judged=judged,
        settings=settings,
        on_event=on_event,
        seed=seed,
        evaluator=evaluator,
        baselines=baselines,
    )
    if not isinstance(task, Task | str | Path):
        splits = chosen.name == OWN_POLICY and (settings is None or settings.timed)

        def tell(message: str) -> None:
            if on_event is not None:
                on_event(SearchEvent(message, lasting=True))

        return optimize_model(task, example_inputs, device=device, out=Path(out), search=search, splits=splits, tell=tell)
    if example_inputs is not None:
        raise UsageError("Wanted a model beside example_inputs; found a task, which draws its own. Leave them out.")
    return search(_task(task), device=device, out=Path(out))


def load(model: torch.nn.Module, folder: str | Path) -> torch.nn.Module:
    """Put into a model what the `save` of its result wrote, without searching: in another process, say.

        faster = kernelwright.load(model, "model-optimized")

    Args:
        model: The model, with any weights, on the kind of device on which it was optimized.
        folder: What was given to `save`.

    Returns:
        The model with the code in place; the model itself where nothing had been confirmed.

    Raises:
        ModelError: it computes something else than the model that was optimized, or is on another kind of device.
        UsageError: there is nothing that was saved.
    """
    return placement.load(model, Path(folder))


def bench(
    suite: Suite | str,
    *,
    out: str | Path,
    path: str | Path | None = None,
    levels: Sequence[int] = (1, 2, 3),
    only: Sequence[str] = (),
    candidates: str | Path | None = None,
    baselines: Sequence[str] = ("compile",),
    device: str = "auto",
    settings: Settings | None = None,
    on_event: Callable[[BenchEvent], None] | None = None,
    strict_too: bool = False,
    tf32_products_too: bool = False,
    evaluator: Executor | None = None,
) -> BenchResult:
    """Judge a suite's candidates and time its baselines, in one run that resumes in `out`.

    `kernelwright.search.suite.search_suite` searches every task of a suite instead.

        result = kernelwright.bench("cuda-l1", path="h100.json", out="cuda-l1-run", baselines=["compile", "cudagraph"])
        print((result.run / "table.md").read_text())

    Writes `evaluations.jsonl`, `table.json`, `table.md`, `report.html` and what could not be measured, `errors.json`.

    Args:
        suite: A record, or a name: `builtin`, `modules`, `kernelbench`, `cuda-l1` or `robust-kbench`.
        out: The run directory.
        path: Of a suite given by name: a checkout of KernelBench or robust-kbench, or a JSON lines file of CUDA-L1's
            release.
        levels: Of a suite given by name: the levels to keep.
        only: Names of the tasks to keep, such as `level1/1`; by default all.
        candidates: Your own candidates in place of the suite's: a folder of files named as the tasks, or a file of JSON
            lines. Tasks without one are left out.
        baselines: Of `eager`, `compile`, `reduce-overhead`, `max-autotune`, `cudagraph`, `cudagraph-fresh`,
            `reduce-overhead-fresh`, `cudnn`, `max-autotune-fresh`, `channels-last`; `eager` is always measured, as the
            reference.
        device: `auto`, `cpu`, `cuda` (all GPUs) or `cuda:N` (that one).
        settings: Of the judge.
        on_event: Told of each job that ends.
        strict_too: Judge each candidate a second time, with TF32 off on both sides; the table gets a column.
        tf32_products_too: Judge each candidate once more, with TF32 allowed in matrix products on both sides; the table gets
            a column.
        evaluator: Who judges, such as a `RayExecutor` with these settings; it stays open. Where baselines beside eager are
            wanted it must measure them together, as a `LocalExecutor` does and a `RayExecutor` does not. By default it
            judges on this machine.

    Returns:
        The run directory, the rows of the table, counts and errors.

    Raises:
        UsageError: the suite cannot be read, there is nothing to measure or no such baseline, the evaluator cannot, another
            process is at work in `out`, or it belongs to another run.
        InfrastructureError: this machine cannot judge.
    """
    if isinstance(suite, str):
        suite = load_suite(suite, path=Path(path) if path is not None else None, levels=levels)
    if only:
        suite = chosen_tasks(suite, only)
    if candidates is not None:
        suite = with_candidates(suite, Path(candidates)).suite
    return run_bench(
        suite,
        baselines=baselines,
        device=device,
        out=Path(out),
        settings=settings,
        on_event=on_event,
        strict_too=strict_too,
        tf32_products_too=tf32_products_too,
        evaluator=evaluator,
    )


def _task(task: Task | str | Path) -> Task:
    if isinstance(task, Task):
        return task
    _refuse_text(task, TaskError, "Task(id=NAME, source=text)")
    return load_task(str(task))


def _refuse_text(given: str | Path, error: type[UsageError], record: str) -> None:
    """Raise an error where the text of a program is given for its path."""
    if "\n" in str(given):
        raise error(f"Wanted a Python file; found the text of one. Give kernelwright.records.{record}.")
