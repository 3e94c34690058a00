"""Searches every task of a suite: screens proposals, judges the best few of each task, confirms winners, measures baselines.

All of it goes on at once, each kind in processes of its own. Every record is on disk when it is made, and what is owed
follows from the records, so that a run that was killed goes on with nothing screened or judged twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kernelwright.cores import cores_of_each
from kernelwright.errors import KernelwrightError
from kernelwright.execution.local import JUDGES_PER_GPU, Job, JudgePool, RotationJob
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Evaluation, RunDirectory, Task
from kernelwright.records.decisions import CUT_SHORT, JUDGED, SCHEDULE, MeasurementPlan
from kernelwright.records.policy import Policy, look_of
from kernelwright.records.screened import Screened
from kernelwright.search.bench import SAME, config_of, owed_in, require_baselines, write_tasks
from kernelwright.search.bench_summary import BenchResult, hand_out, summarise, with_winners
from kernelwright.search.beside import floor_of, rival_of, settling_of
from kernelwright.search.optimize import SearchEvent, TaskSearch, confirm
from kernelwright.search.schedule import TaskState, settings_for
from kernelwright.search.searchers import ScreenJob, Searchers
from kernelwright.tasks.entries import Suite

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class SuiteEvent:
    """A record that has just been made, and how far the run is."""

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
    """Time left: until the deadline, or as the settled tasks so far suggest; None before the first."""


class SuiteSearch:
    """One run over a suite; its threads share the records."""

    def __init__(
        self,
        run: RunDirectory,
        suite: Suite,
        policy: Policy,
        devices: Sequence[str],
        settings: Settings,
        budget: int,
        judged: int,
        minutes: float | None,
        on_event: Callable[[SuiteEvent], None] | None,
    ) -> None:
        self._run, self._policy, self._devices, self._settings = run, policy, list(devices), settings
        self._budget, self._count, self._minutes, self._on_event = budget, judged, minutes, on_event
        self._began_s = time.monotonic()
        self._states = {entry.task.sha256: TaskState(task=entry.task) for entry in suite.entries}
        self.errors: dict[str, str] = dict(run.read_json("errors.json") or {})
        exhausted = set(run.read_json("exhausted.json") or [])
        for state in self._states.values():
            state.exhausted = state.task.sha256 in exhausted
        for one in run.screened():
            if one.task_sha256 in self._states:
                self._states[one.task_sha256].screened.append(one)
        for found in run.evaluations():
            if found.task_sha256 in self._states:
                self._file(found)
        self._settled_before = sum(map(self._is_done, self._states.values()))
        self._keeping = threading.RLock()
        self._ended = threading.Event()
        self._screening_over = threading.Event()
        self._judging_begins = threading.Event()
        self._baselines_over = threading.Event()
        self._baselines_over.set()
        self._searchers: Searchers | None = None

    # --- time -----------------------------------------------------------------------------------------------------

    def _is_late(self, share: float = 1.0) -> bool:
        return self._ended.is_set() or (
            self._minutes is not None and time.monotonic() - self._began_s > 60 * self._minutes * share
        )

    def _left_s(self, settled: int) -> float | None:
        spent_s = time.monotonic() - self._began_s
        if self._minutes is not None:
            return max(0.0, 60 * self._minutes - spent_s)
        new = settled - self._settled_before
        return spent_s / new * (len(self._states) - settled) if new > 0 else None

    # --- records --------------------------------------------------------------------------------------------------

    def _file(self, found: Evaluation | Screened) -> None:
        self._states[found.task_sha256].add(found)

    def _keep(self, task: Task, outcome: Screened | Evaluation | KernelwrightError, what: str = "search") -> None:
        with self._keeping:
            if self._ended.is_set():
                return  # processes that were ended in the middle of their work find nothing out
            if isinstance(outcome, KernelwrightError):
                self.errors[f"{task.id} {what}"] = str(outcome)
                self._run.write_json("errors.json", self.errors)
            else:
                self._run.append(outcome)
                self._file(outcome)
                if isinstance(outcome, Screened):
                    self._note_screened()
                if self.errors.pop(f"{task.id} {what}", None) is not None:
                    self._run.write_json("errors.json", self.errors)
            if self._on_event is not None:
                self._on_event(self._event(task, outcome))

    def _event(self, task: Task, outcome: Screened | Evaluation | KernelwrightError) -> SuiteEvent:
        states = self._states.values()
        held = [
            (found.task, found.speedup or 0.0)
            for state in states
            for found in state.confirmed.values()
            if found.is_improvement
        ]
        settled = sum(map(self._is_done, states))
        return SuiteEvent(
            task=task.id,
            outcome=outcome,
            screened=sum(len(state.screened) for state in states),
            judged=sum(len(state.judged) + len(state.confirmed) for state in states),
            settled=settled,
            tasks=len(self._states),
            best=max(held, key=lambda one: one[1], default=None),
            errors=len(self.errors),
            left_s=self._left_s(settled),
        )

    def _is_done(self, state: TaskState) -> bool:
        return self._is_screened(state) and state.pending(self._count) is None

    def _is_screened(self, state: TaskState) -> bool:
        return state.is_screened(self._budget, self._minutes is not None)

    @property
    def _stops_screening(self) -> bool:
        """Whether the rest of the time is the judge's: a first look at a task is worth more than a further winner."""
        unseen = any(state.is_unseen for state in self._states.values())
        return self._is_late(SCHEDULE.first_looks_share if unseen else SCHEDULE.screening_share)

    def _note_screened(self) -> None:
        """Let the judge begin on a GPU once many of the processes that screen have nothing left to do."""
        left = sum(not self._is_screened(state) for state in self._states.values())
        at_once = self._searchers.at_once if self._searchers is not None else 1
        if left == 0 or (left <= SCHEDULE.screened_when_judging_begins * at_once and self._devices[0].startswith("cuda")):
            self._judging_begins.set()

    # --- screening ------------------------------------------------------------------------------------------------

    def screen(self, searchers: Searchers) -> None:
        """Screen a first few proposals of every task, then more for those with the most room, autotuners last of all."""
        self._note_screened()
        try:
            for job, found in searchers.screen(self._jobs(), lambda: self._stops_screening):
                if found is None:
                    self._end_round(self._states[job.task.sha256], job)
                    continue
                self._keep(job.task, found)
                if self._stops_screening:
                    searchers.close()  # in the middle of tasks, too: the judge needs the rest of the time
                    return
                if isinstance(found, KernelwrightError):
                    with self._keeping:
                        state = self._states[job.task.sha256]
                        state.exhausted, state.at_work = True, False
                    self._note_screened()
        except BaseException:
            self._ended.set()  # before the judge takes what was screened so far for all there is
            raise
        finally:
            self._screening_over.set()
            self._judging_begins.set()

    def _jobs(self) -> Iterator[ScreenJob | None]:
        """The next round of the task that has had the fewest, and of those the one with the most room; None while all that
        need more are at work.

        A task does not wait for others to end a round: two H200s were idle for a third of the screening of 50 tasks when it
        did (results/kernelbench-h200).
        """

        def turn(state: TaskState) -> tuple[bool, int, float, int]:
            return state.screening_turn(self._budget, self._minutes is not None, state.task.source)

        while True:
            job = None
            with self._keeping:
                states = self._states.values()
                waiting = [state for state in states if not state.at_work and not self._is_screened(state)]
                if self._is_late(SCHEDULE.screening_share):
                    waiting = [state for state in waiting if state.is_unseen]
                if waiting:
                    state = min(waiting, key=turn)
                    tunes, limit, *_ = turn(state)
                    state.at_work = True
                    job = ScreenJob(state.task, limit, tuple(state.screened), tunes=tunes)
                elif not any(state.at_work for state in states):
                    return
            yield job

    def _end_round(self, state: TaskState, job: ScreenJob) -> None:
        with self._keeping:
            state.at_work = False
            if self._ended.is_set():
                return
            state.end_round(job.budget, job.tunes)
            if len(state.screened) < job.budget:
                done = sorted(one.task.sha256 for one in self._states.values() if one.exhausted)
                self._run.write_json("exhausted.json", done)
            self._note_screened()

    @property
    def _makes_room(self) -> bool:
        """Whether what is not urgent waits, so that a large task gets a device to be screened on: of ten such tasks none was
        screened in 26 minutes of two H200s whose judges took further candidates of tasks with a winner
        (results/kernelbench-h200/today-left-2-h200)."""
        is_over = self._screening_over.is_set() or self._stops_screening
        return not is_over and self._searchers is not None and self._searchers.want_a_device

    # --- judging --------------------------------------------------------------------------------------------------

    def judge(self, pool: JudgePool) -> None:
        """Judge what screened tasks are owed, those without a winner and the most promising first, until nothing is owed.

        A task that is owed nothing else may be owed its best baseline, since nobody should get less than that gives, or
        its near miss once more.

        It waits until nearly all are screened. Sixteen tasks that were screened beside six judges kept an H200 and its
        processor so busy that 28 candidates were judged in 12.7 minutes (results/2026-11-24-search-h200).
        """
        self._judging_begins.wait()
        at_work: set[tuple[str, str]] = set()
        failed: set[str] = set()

        def key_of(job: Job) -> tuple[str, str]:
            return job.task.sha256, job.candidate.sha256

        def owed() -> Iterator[Job | None]:
            while not self._ended.is_set():
                with self._keeping:
                    is_over = self._screening_over.is_set()
                    states = sorted(self._states.values(), key=lambda state: state.judging_turn)
                    able = [one for one in states if one.task.sha256 not in failed and (is_over or self._is_screened(one))]
                    jobs = map(self._job_for, able)
                    job = next((one for one in jobs if one and key_of(one) not in at_work), None)
                    screened = sum(state.at_work for state in states)
                    if job is not None and self._states[job.task.sha256].winner is not None and self._makes_room:
                        job = None  # tasks without one come first
                busy = len(at_work) - pool.waiting
                if busy and not is_over and busy >= max(SCHEDULE.judges_while_screening * pool.slots, pool.slots - screened):
                    yield None
                elif job is not None:
                    at_work.add(key_of(job))
                    yield replace(job, memory_bytes=self._states[job.task.sha256].judging_bytes)
                elif at_work:
                    yield None
                elif (is_over and self._baselines_over.is_set()) or self._is_late():
                    return
                else:
                    self._ended.wait(_POLL_S)

        for job, found in pool.evaluate(owed(), self._is_late):
            at_work.discard(key_of(job))
            if isinstance(found, KernelwrightError):
                failed.add(job.task.sha256)
                self._keep(job.task, found)
            else:
                state = self._states[job.task.sha256]
                measurement = state.measure(job.candidate)
                if job.candidate == floor_of(state):
                    measurement = MeasurementPlan(job.candidate, may_stand=True)
                self._keep(job.task, found.model_copy(update={"confirms": measurement.confirms(found)}))

    def _job_for(self, state: TaskState) -> Job | None:
        """A measurement that may stand, beside the best baseline where one is known by now, or the first of two; the best
        baseline or a near miss where nothing else is owed."""
        if (one := state.pending(self._count)) is None:
            if (floor := floor_of(state)) is not None:
                return Job(state.task, floor, self._settings)
            return settling_of(state, self._settings) if self._baselines_over.is_set() or state.has_baselines else None
        measurement = state.measure(one, limited=self._minutes is not None)
        rival = rival_of(state.task, state.baselines) if measurement.is_paired else None
        return Job(state.task, one, settings_for(measurement, self._settings), rival)

    def judge_all(self, pool: JudgePool) -> None:
        """Have the judge take every proposal, task by task: for a policy that learns from verdicts."""

        def hear(event: SearchEvent) -> None:
            if event.evaluation is not None:
                self._file(event.evaluation)
                if self._on_event is not None:
                    self._on_event(self._event(state.task, event.evaluation))

        for state in self._states.values():
            if self._is_late():
                return
            try:
                search = TaskSearch(self._run, state.task, self._policy, self._devices[0], self._budget, 0, hear)
                search.judge_all(pool, self._is_late)
                if not self._is_late():
                    confirm(self._run, pool, state.task, lambda _: None, partial(rival_of, state.task, state.baselines))
            except KernelwrightError as error:
                self._keep(state.task, error)

    def measure(self, suite: Suite, baselines: Sequence[str], pool: JudgePool) -> None:
        """Measure the baselines that are owed, once nearly all tasks are screened: those of winners first, which count for
        nothing without them, then those of the tasks that the judge takes next."""
        self._judging_begins.wait()
        owed = owed_in(self._run, with_winners(suite, {}), baselines, self._settings).rotations

        def turn(rotation: RotationJob) -> tuple[bool, float]:
            state = self._states[rotation.task.sha256]
            return state.baselines_turn

        at_work: set[str] = set()

        def in_turn() -> Iterator[RotationJob | None]:
            left = [*owed]
            while left and not self._ended.is_set():
                with self._keeping:
                    first = min(left, key=turn)
                    state = self._states[first.task.sha256]
                if state.winner is not None or not self._makes_room:
                    left.remove(first)
                    at_work.add(state.task.sha256)
                    yield replace(first, memory_bytes=state.judging_bytes)
                elif at_work:
                    yield None
                else:
                    self._ended.wait(_POLL_S)

        for rotation, found in pool.rotate(in_turn(), self._is_late):
            at_work.discard(rotation.task.sha256)
            with self._keeping:  # all of a task's at once: the best of some is no rival
                self._states[rotation.task.sha256].has_baselines = True
                for index, baseline in enumerate(rotation.baselines):
                    outcome = found if isinstance(found, KernelwrightError) else found[index]
                    self._keep(rotation.task, outcome, baseline.techniques[0])
        self._baselines_over.set()

    def work(self, suite: Suite, baselines: Sequence[str]) -> None:
        """Do all of it until nothing is owed, or the minutes are over; a failure of one part ends the others."""
        on_gpu = self._devices[0].startswith("cuda")
        count = JUDGES_PER_GPU if on_gpu else 1
        cores = cores_of_each(self._devices)
        pools = [JudgePool(self._devices, self._settings, count, cores)]
        searchers = Searchers(self._devices, self._settings, policy=self._policy.name, cores=cores, judges=pools[0])
        self._searchers = searchers
        # On a processor baselines wait for the candidates: judges beside one another only wait.
        if on_gpu:
            pools.append(JudgePool(self._devices, self._settings, max(1, count // 3), cores, beside=pools[0]))
        screens = look_of(self._policy) == "screened" and self._settings.timed

        def judge_then_measure() -> None:
            if screens:
                self.judge(pools[0])
            else:
                self.judge_all(pools[0])
            if not on_gpu:
                self.measure(suite, baselines, pools[0])
                if screens:
                    self.judge(pools[0])  # baselines that are faster

        parts: list[Callable[[], None]] = [judge_then_measure]
        if screens:
            parts.append(lambda: self.screen(searchers))
        else:
            self._screening_over.set()
            self._judging_begins.set()
        if on_gpu:
            self._baselines_over.clear()
            parts.append(lambda: self.measure(suite, baselines, pools[1]))
        with ThreadPoolExecutor(len(parts)) as threads:
            running = [threads.submit(part) for part in parts]
            try:
                while not all(one.done() for one in running) and not self._is_late():
                    if any(one.done() and one.exception() for one in running):
                        break
                    wait(running, timeout=_POLL_S)
            finally:
                self._ended.set()
                searchers.close()
                for pool in pools:
                    pool.close(at_once=True)
            for one in running:
                one.result()

    def cut_short(self) -> list[str]:
        """Hashes of the tasks whose first look the end of the minutes has cut short: what was not screened may be faster."""
        return sorted(sha256 for sha256, state in self._states.items() if state.at_work and not state.looked_at)

    def winners(self) -> dict[str, Evaluation]:
        """The confirmed winner of each task that has one, by the task's id."""
        found = {state.task.id: state.winner for state in self._states.values()}
        return {name: best for name, best in found.items() if best is not None}


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
) -> BenchResult:
    """Search every task of a suite for a faster drop-in, with baselines beside; resumes in `out`.

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

    Raises:
        UsageError: an unknown baseline, or `out` belongs to another run.
        InfrastructureError: this machine cannot judge.
    """
    settings = settings or Settings()
    require_baselines(baselines, devices := devices_of(device))
    run = RunDirectory(out)
    config = {**config_of(suite, baselines, devices, settings), "policy": policy.name, "budget": budget, "judge": judged}
    if run.claim(config, same=(*SAME, "policy"), device=devices[0]):
        write_tasks(run, suite)
    else:
        run.require_same_texts([entry.task for entry in suite.entries])
    search = SuiteSearch(run, suite, policy, devices, settings, budget, judged, minutes, on_event)
    search.work(suite, baselines)
    run.write_json(CUT_SHORT, search.cut_short())
    winners = search.winners()
    result = summarise(run, with_winners(suite, winners), search.errors)
    hand_out(run, suite, winners, result.tasks)
    return result
