"""Searches every task of a suite for a faster drop-in, and hands out the winners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelwright.errors import KernelwrightError
from kernelwright.execution.executor import LocalExecutor, judges_per_device, rounds_per_device
from kernelwright.execution.work import Executor
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Evaluation, RunDirectory
from kernelwright.records.decisions import CUT_SHORT, JUDGED, SCHEDULE, SchedulePolicy
from kernelwright.records.policy import Policy, look_of
from kernelwright.records.screened import Screened
from kernelwright.search.bench import (
    SAME,
    BenchResult,
    claim_suite,
    config_of,
    hand_out,
    state_of,
    summarise,
    with_winners,
)
from kernelwright.search.engine import Clock, Composer, Engine, EngineEvent, SearchPlan, SearchState
from kernelwright.search.policies import require_baselines
from kernelwright.tasks.entries import Suite


@dataclass(frozen=True, slots=True)
class SuiteEvent:
    """A record that has just been made, and the progress of the run."""

    task: str
    outcome: Screened | Evaluation | KernelwrightError
    screened: int
    judged: int
    settled: int
    """Tasks that need nothing more but baselines."""
    tasks: int
    best: tuple[str, float] | None
    """Task with the largest confirmed speedup so far, and that speedup."""
    errors: int
    left_s: float | None
    """Time left, seconds: until the deadline, or as the settled tasks so far suggest; None before the first."""


def search_suite(
    suite: Suite,
    *,
    policy: Policy,
    out: Path,
    budget: int = 24,
    judged: int = JUDGED,
    minutes: float | None = None,
    baselines: Sequence[str] = (),
    device: str = "auto",
    settings: Settings | None = None,
    on_event: Callable[[SuiteEvent], None] | None = None,
    composer: Composer | None = None,
    schedule: SchedulePolicy = SCHEDULE,
    executor: Executor | None = None,
    clock: Clock | None = None,
) -> BenchResult:
    """Search every task of a suite for a faster drop-in, and measure baselines; resumes in `out`.

    Args:
        suite: Tasks. Candidates that it brings are not judged.
        policy: Proposer of candidates.
        out: The run directory.
        budget: Proposals for each task.
        judged: Screened candidates of each task that the judge takes.
        minutes: Limit of the whole run, spent where it still pays: settled tasks get no more proposals. By default none.
        baselines: Names from `ALL_BASELINES`.
        device: `auto`, `cpu`, `cuda` (all GPUs) or `cuda:N`.
        settings: Settings of the judge.
        on_event: Callback for each record.
        composer: Player of the assembly game on the winners' Triton kernels.
        schedule: Numbers of the search's schedule.
        executor: Runs all the work, and is closed in the end; by default processes of this machine.
        clock: Tells the time; by default that of this machine.

    Raises:
        UsageError: an unknown baseline, or `out` belongs to another run.
        InfrastructureError: this machine cannot judge.
    """
    settings = settings or Settings()
    require_baselines(baselines, devices := devices_of(device))
    run = RunDirectory(out)
    config = {**config_of(suite, baselines, devices, settings), "policy": policy.name, "budget": budget, "judge": judged}
    claim_suite(run, suite, config, (*SAME, "policy"))
    plan = SearchPlan(
        settings=settings,
        device=devices[0],
        policy=policy,
        budget=budget,
        judged=judged,
        limit_s=None if minutes is None else 60 * minutes,
        composer=composer,
        schedule=schedule,
    )
    state = searched_state(run, suite, baselines, plan)
    screens, judges = state.tasks[0].look == "screened", judges_per_device(devices[0])
    with executor or LocalExecutor(
        devices,
        settings,
        judges=judges,
        # On a processor baselines wait for the candidates: judges at the same time only wait for one another.
        baselines=max(1, judges // 3) if plan.is_on_gpu else 0,
        rounds=rounds_per_device(devices) if screens else 0,
        apart=True,
    ) as pool:
        shown = _SuiteProgress(on_event, state)
        engine = Engine(run, state, pool, shown, clock, notes_exhausted=True)
        shown.errors = engine.errors
        engine.run()
        if state.is_late():
            pool.close(at_once=True)
    run.write_json(CUT_SHORT, engine.cut_short())
    winners = {task.task.id: best for task in state.tasks if (best := task.records.best) is not None}
    result = summarise(run, with_winners(suite, winners), engine.errors)
    hand_out(run, suite, winners, result.tasks)
    return result


def searched_state(run: RunDirectory, suite: Suite, baselines: Sequence[str], plan: SearchPlan) -> SearchState:
    """State of a search over a suite from what is on record."""
    state = state_of(run, suite, baselines, plan)
    exhausted = set(run.read_json("exhausted.json") or [])
    by_id = {task.task.id: task for task in state.tasks}
    state.tasks = [by_id[entry.task.id] for entry in suite.entries]
    screens = plan.policy is not None and look_of(plan.policy) == "screened" and plan.settings.timed
    for task in state.tasks:
        task.look = "screened" if screens else "judged"
        task.records.exhausted = task.task.sha256 in exhausted
    return state


class _SuiteProgress:
    """Tells a caller of each record, with the progress of the whole run."""

    def __init__(self, on_event: Callable[[SuiteEvent], None] | None, state: SearchState) -> None:
        self._on_event, self._state = on_event, state
        self._settled_before = sum(map(state.is_settled, state.tasks))
        self.errors: dict[str, str] = {}

    def __call__(self, event: EngineEvent) -> None:
        if self._on_event is None or event.outcome is None:
            return
        state = self._state
        records = [task.records for task in state.tasks]
        held = [
            (found.task, found.speedup or 0.0)
            for task in records
            for found in task.confirmed.values()
            if found.is_improvement
        ]
        settled = sum(map(state.is_settled, state.tasks))
        self._on_event(
            SuiteEvent(
                task=event.task.task.id,
                outcome=event.outcome,
                screened=sum(len(task.screened) for task in records),
                judged=sum(len(task.judged) + len(task.confirmed) for task in records),
                settled=settled,
                tasks=len(records),
                best=max(held, key=lambda best: best[1], default=None),
                errors=len(self.errors),
                left_s=self._left_s(settled),
            )
        )

    def _left_s(self, settled: int) -> float | None:
        state = self._state
        if state.plan.limit_s is not None:
            return max(0.0, state.plan.limit_s - state.elapsed_s)
        new = settled - self._settled_before
        return state.elapsed_s / new * (len(state.tasks) - settled) if new > 0 else None
