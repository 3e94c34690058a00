"""The command line's verbs as functions that take names, paths or records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernelwright.evaluation import Judge, Settings
from kernelwright.policies import Policy, policy_named
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.rl.bench import BenchResult
from kernelwright.rl.bench import bench as run_bench
from kernelwright.rl.search import OptimizeResult
from kernelwright.rl.search import optimize as run_search
from kernelwright.tasks import load_task, read_source
from kernelwright.tasks.suites import Suite, load_suite


def evaluate(
    task: Task | str | Path, candidate: Candidate | str | Path, *, device: str = "auto", settings: Settings | None = None
) -> Evaluation:
    """Judge one candidate.

    Args:
        task: A record, a Python file or the id of a built-in task.
        candidate: A record or a Python file that defines `ModelNew`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        settings: Of the judge.

    Raises:
        UsageError: the task or the candidate cannot be read, or the reference does not work.
        InfrastructureError: this machine cannot judge it.
    """
    tried = candidate if isinstance(candidate, Candidate) else Candidate(source=read_source(Path(candidate), "a candidate"))
    with Judge(device, settings) as judge:
        return judge.evaluate(_task(task), tried)


def optimize(
    task: Task | str | Path,
    *,
    out: str | Path,
    policy: Policy | str = "builtin",
    device: str = "auto",
    budget: int = 24,
    settings: Settings | None = None,
) -> OptimizeResult:
    """Search for a verified faster drop-in; see `kernelwright.rl.search.optimize`."""
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    return run_search(_task(task), policy=chosen, device=device, budget=budget, out=Path(out), settings=settings)


def bench(
    suite: Suite | str,
    *,
    out: str | Path,
    path: str | Path | None = None,
    baselines: Sequence[str] = ("compile",),
    device: str = "auto",
    settings: Settings | None = None,
) -> BenchResult:
    """Measure a suite against its baselines; see `kernelwright.rl.bench.bench`."""
    loaded = load_suite(suite, path=Path(path) if path is not None else None) if isinstance(suite, str) else suite
    return run_bench(loaded, baselines=baselines, device=device, out=Path(out), settings=settings)


def _task(task: Task | str | Path) -> Task:
    return task if isinstance(task, Task) else load_task(str(task))
