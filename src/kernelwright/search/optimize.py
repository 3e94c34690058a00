"""Searches for a faster drop-in of one task: proposes, judges, keeps, and confirms the winner.

Everything judged is on disk before the next proposal, so the search can be killed at any moment and goes on where it
was: a policy's proposals follow from the task, the seed and the history alone.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kernelwright
from kernelwright.errors import KernelwrightError, NothingUsableError
from kernelwright.judge import Settings, resolve_device
from kernelwright.pools.evaluator import Evaluator
from kernelwright.pools.local import JUDGES_PER_GPU, Job, JudgePool
from kernelwright.records import Evaluation, RunDirectory, Task
from kernelwright.records.policy import Context, Policy
from kernelwright.report.page import write_report
from kernelwright.search import then_sass
from kernelwright.search.then_sass import Tune, is_composed

CONFIRMATIONS_TRIED = 3
"""Winners to re-measure, best first, until one holds. The best of many is partly the luckiest."""


@dataclass(frozen=True, slots=True)
class SearchEvent:
    """Progress of a search."""

    message: str
    evaluation: Evaluation | None = None
    """Evaluation that has just finished, if any."""
    number: int = 0
    """Evaluations finished, confirmations left out."""
    lasting: bool = False
    """True when the message matters after the next one."""


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """Result of a search."""

    run: Path
    best: Evaluation | None
    """The confirming evaluation of the best candidate; None when nothing was confirmed to be faster."""
    evaluations: int
    """Finished evaluations in the run directory, confirmations left out."""


def optimize(
    task: Task,
    *,
    policy: Policy,
    device: str = "auto",
    budget: int = 24,
    out: Path,
    settings: Settings | None = None,
    on_event: Callable[[SearchEvent], None] | None = None,
    seed: int = 0,
    tune: Tune | None = None,
    evaluator: Evaluator | None = None,
) -> OptimizeResult:
    """Search for a faster drop-in for a task and confirm it by an independent re-measurement.

    Writes `evaluations.jsonl`, `config.json`, `environment.json`, `report.html` and, where an improvement was
    confirmed, `optimized.py` into `out`. Run again with the same `out`, it goes on where it was.

    Args:
        task: Task to speed up.
        policy: Proposer of candidates.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        budget: Evaluations to spend, those already in `out` included; confirmations come on top.
        out: The run directory.
        settings: Settings of the judge.
        on_event: Callback for progress.
        seed: Seed of the policy.
        tune: Plays the assembly game on the winner's Triton kernels (`then_sass.play_with`); None leaves them as they are.
        evaluator: Pool of judges, such as a `RayPool` with these settings; it stays open. By default judges on this machine.

    Raises:
        UsageError: `out` belongs to another task, device, policy or other settings.
        TaskError, InfrastructureError: the task does not work, or this machine cannot judge it.
    """
    settings = settings or Settings()
    resolved = resolve_device(device)
    if tune is not None:
        then_sass.needs_gpu(str(resolved))
    run = RunDirectory(out)
    config = {
        "kind": "optimize",
        "task": task.id,
        "task_sha256": task.sha256,
        "task_source": task.source,
        "policy": policy.name,
        "device": str(resolved),
        "seed": seed,
        "settings": settings.model_dump(mode="json"),
        "kernelwright": kernelwright.__version__,
    }
    run.claim(config, same=("kind", "task_sha256", "policy", "device", "seed", "settings"), device=str(resolved))
    tell = on_event or (lambda event: None)
    policy_context = Context(task=task, device=str(resolved), history=_history(run, task), seed=seed)
    if policy_context.history:
        tell(SearchEvent(f"resuming after {len(policy_context.history)} evaluations", lasting=True))
    per_device = JUDGES_PER_GPU if resolved.type == "cuda" else 1
    with contextlib.ExitStack() as stack:
        pool = evaluator or stack.enter_context(JudgePool([str(resolved)], settings, per_device))
        _search(run, pool, policy, policy_context, budget, tell)
        best = _confirm(run, pool, task, tell)
        if best is not None and tune is not None:
            best = then_sass.tune_kernels(run, pool, task, best, tune=tune, tell=lambda text: tell(SearchEvent(text)))
    if best is not None:
        run.write_text("optimized.py", drop_in(task, best, run))
    write_report(run, run.path / "report.html")
    return OptimizeResult(run.path, best, len(_history(run, task)))


def _history(run: RunDirectory, task: Task) -> tuple[Evaluation, ...]:
    return tuple(
        found
        for found in run.evaluations()
        if found.task_sha256 == task.sha256 and not found.confirms and not is_composed(found)
    )


def _search(
    run: RunDirectory, pool: Evaluator, policy: Policy, context: Context, budget: int, tell: Callable[[SearchEvent], None]
) -> None:
    history = list(context.history)
    while len(history) < budget:
        tell(SearchEvent("proposing", number=len(history)))
        known = {found.candidate_sha256 for found in history}
        now = Context(task=context.task, device=context.device, history=tuple(history), seed=context.seed)
        try:
            proposed = policy.propose(now, min(pool.slots, budget - len(history)))
        except NothingUsableError as error:
            if not history:
                raise
            tell(SearchEvent(str(error), number=len(history), lasting=True))
            return
        fresh = [candidate for candidate in proposed if candidate.sha256 not in known]
        if not fresh:
            tell(SearchEvent("the policy has nothing more to try", number=len(history), lasting=True))
            return
        names = "; ".join(", ".join(candidate.techniques) or candidate.policy for candidate in fresh)
        tell(SearchEvent(f"judging {names}", number=len(history)))
        for _, outcome in pool.evaluate(Job(context.task, candidate) for candidate in fresh):
            if isinstance(outcome, KernelwrightError):
                raise outcome
            run.append(outcome)
            history.append(outcome)
            tell(SearchEvent("judged", outcome, len(history)))


def _confirm(run: RunDirectory, pool: Evaluator, task: Task, tell: Callable[[SearchEvent], None]) -> Evaluation | None:
    """Measure the best again, in fresh processes on fresh seeds; the first that holds is the result."""
    records = [found for found in run.evaluations() if found.task_sha256 == task.sha256 and not is_composed(found)]
    confirmed = {found.candidate_sha256: found for found in records if found.confirms}
    winners = sorted(
        (found for found in records if found.is_improvement and not found.confirms),
        key=lambda found: found.speedup_low or 0.0,
        reverse=True,
    )
    for winner in winners[:CONFIRMATIONS_TRIED]:
        again = confirmed.get(winner.candidate_sha256)
        if again is None:
            tell(SearchEvent(f"confirming {', '.join(winner.techniques) or winner.policy} in fresh processes"))
            again = then_sass.measured_again(run, pool, task, winner)
        if again.is_improvement:
            return again
        what = ", ".join(winner.techniques) or winner.policy
        tell(SearchEvent(f"the improvement of {what} did not hold when measured again", lasting=True))
    # What an earlier run of the same search confirmed stands, though others seemed better since.
    held = [found for found in confirmed.values() if found.is_improvement]
    return max(held, key=lambda found: found.speedup_low or 0.0, default=None)


def drop_in(task: Task, best: Evaluation, run: RunDirectory) -> str:
    """The winner's source under a header that says where it comes from and what was verified."""
    environment = run.read_json("environment.json") or {}
    gpus = environment.get("gpu") or []
    torch_version = environment.get("packages", {}).get("torch")
    where = gpus[0].get("name") if gpus else environment.get("processor")
    lines = [
        f"A drop-in for `Model` of the task {task.id}: the class `ModelNew`.",
        f"Verified speedup {best.speedup:.3f}x (95 % interval {best.speedup_low:.3f} to {best.speedup_high:.3f}; "
        f"A/A noise floor {best.noise_floor:.3f}) on {best.device}, {where}, torch {torch_version}.",
        f"Measured {best.started} by kernelwright {kernelwright.__version__}, re-measured independently of the search.",
        f"Policy {best.policy}; techniques: {', '.join(best.techniques) or 'none named'}; "
        f"labels: {', '.join(best.labels) or 'none'}.",
        f"task sha256 {best.task_sha256}",
        f"candidate sha256 {best.candidate_sha256}",
    ]
    wrapped = [piece for line in lines for piece in textwrap.wrap(line, 108, subsequent_indent="  ")]
    return "\n".join(f"# {piece}" for piece in wrapped) + "\n\n" + best.source
