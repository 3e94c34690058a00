"""Searches for a faster drop-in of one task: a suite of one, with what was confirmed handed out as a file."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kernelwright
from kernelwright.deploy.drop_in import drop_in
from kernelwright.errors import InfrastructureError
from kernelwright.execution.executor import LocalExecutor, judges_per_device
from kernelwright.execution.fork_servers import ForkServers
from kernelwright.execution.work import Executor, Result, Screen, Work
from kernelwright.judge import Settings, resolve_device
from kernelwright.records import Evaluation, RunDirectory, Task
from kernelwright.records.decisions import JUDGED, BaselineComparison, gains_in_words, interval_in_words
from kernelwright.records.policy import Policy, look_of
from kernelwright.records.screened import Screened
from kernelwright.records.tables import comparison_of
from kernelwright.report.page import write_report
from kernelwright.search.bench import baselines_of, chosen_baselines, pending_baselines
from kernelwright.search.engine import Composer, Engine, EngineEvent, SearchPlan, SearchState, TaskState, file_records
from kernelwright.search.then_sass import needs_gpu

DROP_IN = "optimized.py"
"""File of a run directory with the drop-in that is handed out."""
NEAR_MISS = "near_miss.py"
"""File of a run directory with the source of what was nearly an improvement."""

_TURN_S = 0.1
"""Time for which one of several executors is asked for a result, seconds."""


@dataclass(frozen=True, slots=True)
class SearchEvent:
    """Progress of a search."""

    message: str
    evaluation: Evaluation | None = None
    """Evaluation that has just finished, if any."""
    number: int = 0
    """Proposals looked at, confirmations left out."""
    lasting: bool = False
    """True when the message matters after the next one."""
    screened: Screened | None = None
    """Estimate that has just been made, if any."""

    def __str__(self) -> str:
        """One line for people: `on_event=print` shows how a search goes."""
        found = self.screened or self.evaluation
        if found is None:
            return self.message
        outcome = f"{found.reason}: {found.detail.partition(chr(10))[0]}" if found.reason else "right"
        if self.screened is not None and self.screened.estimate is not None:
            outcome = f"about {self.screened.estimate:.2f}x"
        elif self.evaluation is not None and self.evaluation.accepted and self.evaluation.speedup is not None:
            outcome = f"{'' if self.evaluation.is_improvement else 'no '}improvement, {interval_in_words(self.evaluation)}"
            if self.evaluation.noise_floor is not None:
                outcome += f", noise floor {self.evaluation.noise_floor:.2%}"
        return f"{self.message} {', '.join(found.techniques) or found.policy}: {outcome}"


@dataclass(frozen=True, slots=True)
class OptimizeResult:
    """Result of a search."""

    run: Path
    best: Evaluation | None
    """The confirming evaluation of the best candidate; None when nothing was confirmed to be faster."""
    evaluations: int
    """Finished evaluations in the run directory, confirmations left out."""
    screened: int = 0
    """Estimates in the run directory."""
    near_miss: Evaluation | None = None
    """The nearest candidate where nothing was confirmed, with its source in `near_miss.py`."""
    beside: BaselineComparison | None = None
    """The best against the best baseline; None where nothing was confirmed, or eager alone was measured."""
    drop_in: Path | None = None
    """File of the confirmed code, the fastest of what was judged, stock configurations included."""
    why: str = ""
    """Reason why nothing was confirmed."""

    def __str__(self) -> str:
        """One line: what is handed out and what is gained, or why nothing is."""
        if self.best is None:
            return f"nothing was confirmed to be faster: {self.why}" if self.why else "nothing was confirmed to be faster"
        return gains_in_words(self.best, self.beside)


def optimize(
    task: Task,
    *,
    policy: Policy,
    device: str = "auto",
    budget: int = 24,
    judged: int = JUDGED,
    out: Path,
    settings: Settings | None = None,
    on_event: Callable[[SearchEvent], None] | None = None,
    seed: int = 0,
    composer: Composer | None = None,
    evaluator: Executor | None = None,
    servers: ForkServers | None = None,
    baselines: Sequence[str] | None = None,
) -> OptimizeResult:
    """Search for a faster drop-in for a task and confirm it by an independent re-measurement.

    Writes `screened.jsonl`, `evaluations.jsonl`, `config.json`, `environment.json`, `report.html` and, where an improvement
    was confirmed, `optimized.py` into `out`: the fastest of what was judged, stock configurations included. Run again with
    the same `out`, it goes on where it was.

    Args:
        task: Task to speed up.
        policy: Proposer of candidates.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        budget: Proposals to look at, those already in `out` included.
        judged: Screened candidates that the judge takes at most; those that look too good come on top. Means nothing for a
            policy that has all its proposals judged.
        out: The run directory.
        settings: Settings of the judge.
        on_event: Callback for progress.
        seed: Seed of the policy.
        composer: Player of the assembly game on the winner's Triton kernels (`then_sass.KernelTuner`); None leaves them.
        evaluator: Executor that judges, such as a `RayExecutor` with these settings; it stays open. By default judges on
            this machine.
        servers: Fork servers for screening, which stay open; by default it starts its own.
        baselines: Names from `ALL_BASELINES` to measure as well; by default `BY_DEFAULT` on a GPU, and none on a CPU.

    Raises:
        UsageError: `out` belongs to another task, device, policy or other settings; an unknown baseline.
        TaskError, InfrastructureError: the task does not work, or this machine cannot judge it.
    """
    settings = settings or Settings()
    resolved = resolve_device(device)
    where = str(resolved)
    if composer is not None:
        needs_gpu(where)
    wanted = chosen_baselines(baselines, where, settings, evaluator)
    run = RunDirectory(out)
    asked = {"policy": policy.name, "device": where, "seed": seed, "baselines": ["eager", *wanted]}
    _claim(run, task, asked | {"settings": settings.model_dump(mode="json")})
    # Without times there is nothing to choose the best few by.
    state = TaskState(task, look="screened" if look_of(policy) == "screened" and settings.timed else "judged")
    file_records([state], run)
    state.stock = baselines_of(task, wanted)
    state.baselines = pending_baselines(state, settings)
    plan = SearchPlan(
        settings=settings,
        device=where,
        policy=policy,
        budget=budget,
        judged=judged,
        seed=seed,
        raises=True,
        composer=composer,
    )
    show = _TaskProgress(on_event)
    if state.number:
        show(EngineEvent(state, message=f"resuming after {state.number} proposals", lasting=True))
    with contextlib.ExitStack() as stack:
        executors = [evaluator] if evaluator is not None else []
        judges = 0 if evaluator is not None else judges_per_device(where)
        if evaluator is None or (state.look == "screened" and Screen not in evaluator.kinds):
            # A judge starts while candidates are screened: it takes seconds to import torch and to make a context.
            ready = min(judges, int(state.number < budget), judged)
            rounds = int(state.look == "screened")
            local = LocalExecutor([where], settings, judges=judges, rounds=rounds, ready=ready, servers=servers)
            executors.append(stack.enter_context(local))
        Engine(run, SearchState(plan, [state]), Executors(executors), show).run()
    return _hand_out(run, state, judged)


class _TaskProgress:
    """Tells a caller what the engine finds, as events of one search."""

    def __init__(self, on_event: Callable[[SearchEvent], None] | None) -> None:
        self._on_event = on_event

    def __call__(self, event: EngineEvent) -> None:
        if self._on_event is None:
            return
        number, outcome = event.task.number, event.outcome
        if isinstance(outcome, Screened):
            self._on_event(SearchEvent("screened", screened=outcome, number=number))
        elif isinstance(outcome, Evaluation):
            if event.plan is not None and not event.plan.is_repeated:
                self._on_event(SearchEvent("judged", outcome, number=number))
        elif event.message:
            self._on_event(SearchEvent(event.message, number=number, lasting=event.lasting))


def _claim(run: RunDirectory, task: Task, asked: dict[str, Any]) -> None:
    """Take a run directory for this search; raises UsageError where it belongs to another."""
    config = {
        "kind": "optimize",
        "task": task.id,
        "task_sha256": task.sha256,
        "task_source": task.source,
        **asked,
        "kernelwright": kernelwright.__version__,
    }
    run.claim(config, same=("kind", "task_sha256", "policy", "device", "seed", "settings"), device=asked["device"])


def _hand_out(run: RunDirectory, state: TaskState, judged: int) -> OptimizeResult:
    """Write what was confirmed, or what came nearest, and the report; files of an earlier end go."""
    for name in (DROP_IN, NEAR_MISS):
        (run.path / name).unlink(missing_ok=True)
    records, best = state.records, state.records.best
    comparison = comparison_of(run, best) if best is not None else None
    if best is not None:
        run.write_text(DROP_IN, drop_in(state.task, best, run, comparison=comparison))
    nearest = records.nearest_miss if best is None else None
    if nearest is not None:
        run.write_text(NEAR_MISS, nearest.source)
    result = OptimizeResult(
        run.path,
        best,
        len(records.history),
        len(records.screened),
        nearest,
        beside=comparison,
        drop_in=run.path / DROP_IN if best is not None else None,
        why=records.status(judged)[1],
    )
    try:
        write_report(run, run.path / "report.html")
    except InfrastructureError as error:
        raise InfrastructureError(f"{error} The result is there: {result}; see {result.drop_in or run.path}.") from error
    return result


class Executors:
    """Executors that share the work: each kind goes to the first that can do it. The caller closes them."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._by_kind: dict[type[Work], Executor] = {}
        for executor in executors:
            for kind in executor.kinds:
                self._by_kind.setdefault(kind, executor)

    @property
    def kinds(self) -> frozenset[type[Work]]:
        """Kinds of work that one of them can do."""
        return frozenset(self._by_kind)

    @property
    def wants_device(self) -> bool:
        """True while a round of screening waits until judges leave a device to it."""
        return any(executor.wants_device for executor in self._executors)

    def submit(self, work: Work) -> None:
        """Give work to the one that does its kind."""
        self._by_kind[type(work)].submit(work)

    def free(self, kind: type[Work]) -> int:
        """Number of works of a kind that could begin soon."""
        return self._by_kind[kind].free(kind)

    def next_result(self, timeout_s: float | None = None) -> Result | None:
        """The next result of any of them, asked in turn."""
        if len(self._executors) == 1:
            return self._executors[0].next_result(timeout_s)
        turns = itertools.count() if timeout_s is None else range(max(1, round(timeout_s / _TURN_S / len(self._executors))))
        for _ in turns:
            for executor in self._executors:
                if (result := executor.next_result(_TURN_S)) is not None:
                    return result
        return None

    def cancel(self, work: Work) -> None:
        """End work now."""
        self._by_kind[type(work)].cancel(work)

    def close(self, *, at_once: bool = False) -> None:
        """Close all of them."""
        for executor in self._executors:
            executor.close(at_once=at_once)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=kind is not None)
