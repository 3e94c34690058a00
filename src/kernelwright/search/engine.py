"""Searches tasks: chooses the next work from the records, has an executor do it, and takes in what comes of it.

`next_step` is pure: state in, work out. `Engine.run` is the one loop behind `optimize`, `bench` and `search_suite`. Every
record is on disk before a policy or a caller hears of it, and what is pending follows from the records, so that a run that
was killed at any moment goes on with nothing screened or judged twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kernelwright.errors import KernelwrightError
from kernelwright.execution.screener import Proposals
from kernelwright.execution.work import Baselines, Evaluate, Executor, Progress, Result, Screen, Work
from kernelwright.judge.settings import Settings
from kernelwright.records import Candidate, Evaluation, Reason, RunDirectory, Task
from kernelwright.records.decisions import (
    JUDGED,
    OWN_POLICY,
    SCHEDULE,
    STOCK,
    Effort,
    MeasurementPlan,
    SchedulePolicy,
    TaskRecords,
    is_composed,
    judging_bytes,
    next_to_judge,
    ranked,
    stock_of,
)
from kernelwright.records.improvement import AUDITS_MAX
from kernelwright.records.models import BASELINE_POLICY
from kernelwright.records.policy import Look, Policy
from kernelwright.records.scoring import alongside_record
from kernelwright.records.screened import Compiles, Screened
from kernelwright.rewrites.wrappers import baseline_source

CANDIDATE, SEARCH = "candidate", "search"
"""Names of work in `errors.json`, apart from those of baselines."""
_ASK_AGAIN_S = 1.0
"""Time after which the loop looks again at what may begin, seconds: that may depend on the time alone."""
_KINDS: tuple[type[Work], ...] = (Screen, Evaluate, Baselines)


class Clock(Protocol):
    """Tells the time."""

    def now_s(self) -> float:
        """Seconds since some moment."""
        ...


class MonotonicClock:
    """The clock of this machine."""

    def now_s(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()


class Composer(Protocol):
    """Lets a winner carry tuned machine code."""

    def compose(self, task: Task, winner: Candidate, log: Callable[[str], None]) -> Candidate | None:
        """The winner with its tuned kernels; None where none got faster."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """Arguments of a search."""

    settings: Settings
    device: str = "cpu"
    """Resolved name of the first device."""
    policy: Policy | None = None
    """Proposer of candidates; None where all are given."""
    budget: int = 0
    """Proposals for each task."""
    judged: int = JUDGED
    """Screened candidates of each task that the judge takes."""
    seed: int = 0
    limit_s: float | None = None
    """Time of the whole run, seconds; None without a limit."""
    raises: bool = False
    """True where an error of the task or the machine ends the search; else it is noted, and other tasks go on."""
    composer: Composer | None = None
    schedule: SchedulePolicy = SCHEDULE

    @property
    def is_limited(self) -> bool:
        """True with a limit of time: settled tasks get no more proposals."""
        return self.limit_s is not None

    @property
    def is_on_gpu(self) -> bool:
        """True on GPUs, where baselines are measured while the judge works."""
        return self.device.startswith("cuda")


@dataclass(slots=True, eq=False)
class WorkStep:
    """Work for one task, and what its outcome means."""

    task: TaskState
    work: Work
    plan: MeasurementPlan | None = None
    """Measurement of the search; None for a candidate that was given, and for other kinds of work."""
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class TaskState:
    """State of one task."""

    task: Task
    records: TaskRecords = field(default_factory=TaskRecords)
    look: Look | None = None
    """Look at its proposals: `screened`, of which the judge takes the best few, or `judged`, one by one; None without."""
    stock: tuple[Candidate, ...] = ()
    """Stock configurations that finals time beside the candidate."""
    baselines: tuple[Candidate, ...] = ()
    """Those that no final has measured yet."""
    proposed: list[Candidate] = field(default_factory=list)
    """Proposals that the judge takes one by one, and has not begun."""
    has_proposed_all: bool = False
    running: list[WorkStep] = field(default_factory=list)
    left: Compiles | None = None
    """Quickest compiler among proposals that are still to be screened; None where that is not known."""
    has_begun: bool = False
    """True once the judge has taken one of its candidates in this run."""
    is_failed: bool = False
    """True once the judge failed for want of the task or the machine: what is pending is left to another run."""
    is_stopped: bool = False
    """True once its screening was ended early: it has an improvement, and only autotuners were left."""
    is_cut_short: bool = False
    """True where the end of the time has ended its screening."""
    history: list[Evaluation] = field(default_factory=list)
    """First verdicts in order, for the policy, which sees what is added."""
    compositions: list[Candidate] | None = None
    """Winner with tuned kernels that is to be judged, if any; None until its kernels are tuned."""

    def runs(self, kind: type[Work]) -> bool:
        """True while work of a kind is running."""
        return any(isinstance(step.work, kind) for step in self.running)

    @property
    def number(self) -> int:
        """Proposals that were looked at."""
        looks = {look.candidate_sha256 for look in self.records.screened}
        return len(looks | {found.candidate_sha256 for found in self.history})

    @property
    def fallback(self) -> Candidate | None:
        """The best baseline as a candidate, unless the judge has seen it or the winner is as fast.

        Its proposal may have failed when it was screened, for want of memory, say. The baseline was measured apart from
        this candidate, so that one clear verdict is its confirmation.
        """
        best = self.records.best_baseline
        if best is None or not self.records.needs_fallback:
            return None
        technique = next((technique for technique, stock in STOCK.items() if stock == best[0]), best[0])
        candidate = Candidate(source=baseline_source(self.task, best[0]), policy=OWN_POLICY, techniques=(technique,))
        return None if candidate.sha256 in self.records.verdicts else candidate


@dataclass(slots=True)
class SearchState:
    """State of a search: its tasks, its phase, and the room that the executor has."""

    plan: SearchPlan
    tasks: list[TaskState]
    given: list[WorkStep] = field(default_factory=list)
    """Candidates that come with the suite, in turn."""
    elapsed_s: float = 0.0
    slots: dict[type[Work], int] = field(default_factory=dict)
    """Works of each kind that the executor does at once."""
    free: dict[type[Work], int] = field(default_factory=dict)
    """Works of each kind that could begin now."""
    wants_device: bool = False
    """True while a large task waits until judges leave a device to it."""
    judging_begins: bool = False
    """True once the judge may begin; it stays true."""

    def is_late(self, share: float = 1.0) -> bool:
        """True when a share of the time is over."""
        return self.plan.limit_s is not None and self.elapsed_s > self.plan.limit_s * share

    def is_screened(self, task: TaskState) -> bool:
        """True when a task needs no more proposals."""
        if task.look != "screened" or task.is_stopped:
            return True
        return task.records.is_screened(self.plan.budget, self.plan.is_limited)

    def is_settled(self, task: TaskState) -> bool:
        """True when a task needs nothing more but baselines."""
        return self.is_screened(task) and task.records.pending(self.plan.judged) is None

    @property
    def stops_screening(self) -> bool:
        """True when the rest of the time is the judge's: a first look at a task is worth more than a further winner."""
        unseen = any(task.look == "screened" and task.records.is_unseen for task in self.tasks)
        return self.is_late(self.plan.schedule.first_looks_share if unseen else self.plan.schedule.screening_share)

    @property
    def is_screening_over(self) -> bool:
        """True when no estimate will come any more."""
        if any(task.runs(Screen) for task in self.tasks):
            return False
        return self.stops_screening or next(to_screen(self), None) is None

    @property
    def makes_room(self) -> bool:
        """True while work that is not urgent waits, so that a large task gets a device to be screened on.

        Of ten such tasks none was screened in 26 minutes of two H200s whose judges took further candidates of tasks with a
        winner (results/kernelbench-h200/today-left-2-h200).
        """
        return self.wants_device and not self.is_screening_over and not self.stops_screening

    def may_begin_judging(self) -> bool:
        """True once nearly all tasks are screened, and at once for a single task.

        Sixteen tasks that were screened while six judges worked kept an H200 and its processor so busy that 28 candidates
        were judged in 12.7 minutes (results/2026-11-24-search-h200).
        """
        left = sum(not self.is_screened(task) for task in self.tasks)
        most = self.plan.schedule.screened_when_judging_begins * self.slots.get(Screen, 1) if self.plan.is_on_gpu else 0
        return len(self.tasks) == 1 or left <= most or self.is_screening_over


def baseline_of(task: Task, name: str) -> Candidate:
    """A stock baseline of a task, by its name in the tables."""
    return Candidate(source=baseline_source(task, name), policy=BASELINE_POLICY, techniques=(name,))


def settings_for(plan: MeasurementPlan, settings: Settings, schedule: SchedulePolicy = SCHEDULE) -> Settings:
    """The judge's settings for a measurement, from those of the run."""
    match plan.effort:
        case Effort.FIRST_OF_TWO:
            return settings.model_copy(update={"until_certain": True})
        case Effort.EARLY:
            least = max(settings.processes_min, min(schedule.least_to_stand, settings.processes_max))
            return settings.model_copy(update={"until_certain": True, "processes_min": least})
        case Effort.SETTLING:
            audits = min(AUDITS_MAX, schedule.settling_series * settings.audits)
            processes = {"processes_min": plan.processes, "processes_max": plan.processes}
            return settings.model_copy(update=processes | {"audits": audits})
        case Effort.FULL:
            return settings


# --- the next work -----------------------------------------------------------------------------------------------------


def next_step(state: SearchState) -> WorkStep | None:
    """The work to begin now; None where nothing can begin before something ends."""
    return _next_judgement(state) or _next_screening(state) or _next_baselines(state)


def to_cancel(state: SearchState) -> Iterator[WorkStep]:
    """Screening to end now: the time for it is over, or only autotuners are left and the task has an improvement."""
    for task in state.tasks:
        for step in task.running:
            if not isinstance(step.work, Screen) or step.is_cancelled:
                continue
            if state.stops_screening or _has_enough(task, state.plan):
                yield step


def _has_enough(task: TaskState, plan: SearchPlan) -> bool:
    """True where only autotuners are left to be screened, and a task has an improvement and nothing better to judge."""
    if plan.is_limited or not _waits_for_autotuners(task) or task.runs(Evaluate):
        return False
    if next_to_judge(task.records.screened, task.records.verdicts, plan.judged, plan.schedule) is not None:
        return False
    return any(found.is_improvement for found in task.records.own)


def to_screen(state: SearchState) -> Iterator[TaskState]:
    """Tasks that need another round of screening and are in none. Once half of the time is over only first looks count."""
    is_late = state.is_late(state.plan.schedule.screening_share)
    for task in state.tasks:
        if not (task.runs(Screen) or state.is_screened(task)) and (task.records.is_unseen or not is_late):
            yield task


def _next_screening(state: SearchState) -> WorkStep | None:
    """The next round of the task whose turn it is.

    A task does not wait for others to end a round: two H200s were idle for a third of the screening of 50 tasks when it did
    (results/kernelbench-h200).
    """
    plan = state.plan
    if not state.free.get(Screen) or state.stops_screening:
        return None
    task = min(
        to_screen(state),
        key=lambda task: task.records.screening_turn(plan.budget, plan.is_limited, task.task.source),
        default=None,
    )
    if task is None:
        return None
    limit, tunes = task.records.next_round(plan.budget, plan.is_limited)
    work = Screen(
        task.task,
        policy=plan.policy,
        budget=limit,
        seed=plan.seed,
        earlier=tuple(task.records.screened),
        history=task.history,
        tunes=tunes,
        settings=plan.settings,
    )
    return WorkStep(task, work)


def _next_judgement(state: SearchState) -> WorkStep | None:
    if state.free.get(Evaluate, 0) <= 0:
        return None
    if state.given:
        return state.given[0]
    if (task := open_task(state)) is not None:
        if task.proposed:
            first = task.proposed[0]
            return WorkStep(task, Evaluate(task.task, first, state.plan.settings), MeasurementPlan(first, is_final=False))
        if not task.has_proposed_all or task.runs(Evaluate):
            return None
    if not state.judging_begins:
        return None
    is_over, room = state.is_screening_over, state.makes_room
    # Each task that is screened takes the place of a judge.
    busy = state.slots.get(Evaluate, 1) - state.free[Evaluate]
    screening = sum(task.runs(Screen) for task in state.tasks)
    most = max(
        state.plan.schedule.judges_while_screening * state.slots.get(Evaluate, 1), state.slots.get(Evaluate, 1) - screening
    )
    if busy and not is_over and busy >= most:
        return None
    able = [task for task in state.tasks if _may_be_judged(task, state, is_over)]
    for task in sorted(able, key=lambda task: task.records.judging_turn):
        if (plan := plan_for(task, state)) is not None:
            # Tasks without a winner come first.
            return None if room and task.records.winner is not None else judgement(task, plan, state)
    return None


def judgement(task: TaskState, plan: MeasurementPlan, state: SearchState) -> WorkStep:
    """The step that carries out a measurement."""
    stock = task.stock if plan.is_final else ()
    # A finalist that is a stock configuration is timed as one, such as an autotuner, which no default has.
    names = [stock_of(other) if stock else None for other in plan.alongside]
    others = [baseline_of(task.task, name) if name else other for name, other in zip(names, plan.alongside, strict=True)]
    alongside = tuple({other.name_alongside: other for other in (*stock, *others)}.values())
    work = Evaluate(
        task.task,
        plan.candidate,
        settings=settings_for(plan, state.plan.settings, state.plan.schedule),
        alongside=alongside,
        memory_bytes=judging_bytes(task.records.screened, len(alongside)),
    )
    return WorkStep(task, work, plan)


def plan_for(task: TaskState, state: SearchState) -> MeasurementPlan | None:
    """The measurement that a task needs next: of the candidate that is pending, else of the best baseline, since nobody
    should get less than that gives, else of its near miss once more, else of the winner with tuned kernels."""
    records, count = task.records, state.plan.judged
    if task.runs(Screen):
        look = next_to_judge(records.screened, records.verdicts, count, state.plan.schedule)
        return None if look is None else records.measure(look.candidate(), count, limited=state.plan.is_limited)
    if (candidate := records.pending(count)) is not None:
        return records.measure(candidate, count, limited=state.plan.is_limited)
    if (fallback := task.fallback) is not None:
        winner = () if records.winner is None else (records.winner.candidate(),)
        return MeasurementPlan(fallback, may_stand=True, is_final=False, alongside=winner)
    if task.baselines or task.runs(Baselines):
        return None
    if (settling := records.settle()) is not None:
        return settling
    if task.compositions:
        return MeasurementPlan(task.compositions[0], is_final=False)
    return records.composed_again if state.plan.composer is not None else None


def open_task(state: SearchState) -> TaskState | None:
    """The first task whose proposals are judged one by one and which is not done."""
    for task in state.tasks:
        if task.look != "judged" or task.is_failed:
            continue
        if not task.has_proposed_all or task.proposed or task.running or plan_for(task, state) is not None:
            return task
    return None


def _may_be_judged(task: TaskState, state: SearchState, is_over: bool) -> bool:
    """True where the judge may take a candidate of a task: one at a time, once it is screened.

    It begins with the best one while only candidates of torch.compile and autotuners are left to be screened, and takes
    others while only autotuners are.
    """
    if task.look is None or task.is_failed or task.runs(Evaluate) or (task.look == "judged" and not task.has_proposed_all):
        return False
    if is_over or state.is_screened(task):
        return True
    first = task.left is not None and task.left >= Compiles.INDUCTOR and not task.has_begun
    return task.runs(Screen) and (first or _waits_for_autotuners(task))


def _waits_for_autotuners(task: TaskState) -> bool:
    return task.left is Compiles.VARIANTS


def _next_baselines(state: SearchState) -> WorkStep | None:
    """The baselines of a task that no final has measured, once none will: of winners first.

    On a processor they wait for all candidates: there judges that run at the same time only wait.
    """
    if state.free.get(Baselines, 0) <= 0:
        return None
    if any(task.look for task in state.tasks) and not state.plan.is_on_gpu:
        others = any(task.runs(Evaluate) or task.runs(Screen) for task in state.tasks)
        if others or not state.is_screening_over or open_task(state) is not None:
            return None
    pending = [task for task in state.tasks if task.baselines and not task.runs(Baselines) and _has_no_final(task, state)]
    task = min(pending, key=lambda task: task.records.baselines_turn, default=None)
    if task is None or (task.records.winner is None and state.makes_room):
        return None
    memory_bytes = judging_bytes(task.records.screened)
    return WorkStep(task, Baselines(task.task, task.baselines, state.plan.settings, memory_bytes))


def _has_no_final(task: TaskState, state: SearchState) -> bool:
    """True where no measurement is at work or to come that would time a task's baselines."""
    if task.runs(Evaluate) or any(step.task is task for step in state.given):
        return False
    if task.look == "judged" and (task.proposed or not task.has_proposed_all):
        return task.is_failed
    return task.look is None or task.is_failed or state.is_settled(task)


# --- the loop ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something that a search has just found, or begins."""

    task: TaskState
    outcome: Screened | Evaluation | KernelwrightError | None = None
    what: str = SEARCH
    """Name of the baseline, `candidate` or `search`."""
    plan: MeasurementPlan | None = None
    """Plan of the measurement that has ended, where the search made one."""
    message: str = ""
    lasting: bool = False
    """True when the message matters after the next one."""


class Engine:
    """Runs a search on an executor.

    Args:
        run: Directory of the records.
        state: Tasks with what is on record.
        executor: Runs the work; the caller closes it.
        listen: Callback for what happens.
        clock: Tells the time.
        notes_exhausted: True keeps `exhausted.json`, which spares a resumed suite the asking.
    """

    def __init__(
        self,
        run: RunDirectory,
        state: SearchState,
        executor: Executor,
        listen: Callable[[EngineEvent], None],
        clock: Clock | None = None,
        *,
        notes_exhausted: bool = False,
    ) -> None:
        self.state = state
        self.errors: dict[str, str] = dict(run.read_json("errors.json") or {})
        """Errors by task and name of the work."""
        self._run, self._executor, self._listen, self._clock = run, executor, listen, clock or MonotonicClock()
        self._notes_exhausted = notes_exhausted
        self._running: dict[Work, WorkStep] = {}
        self._proposals: dict[int, Iterator[Candidate | None]] = {}
        """Proposals of tasks that are judged one by one."""

    def run(self) -> None:
        """Do all that is pending, until nothing is or the time is over.

        Raises:
            KernelwrightError: the task or the machine is at fault, where the plan says that this ends the search.
        """
        state, began_s = self.state, self._clock.now_s()
        state.slots = {kind: self._executor.free(kind) for kind in _KINDS if kind in self._executor.kinds}
        while True:
            state.elapsed_s = self._clock.now_s() - began_s
            if state.is_late():
                break
            state.free = {kind: self._executor.free(kind) for kind in state.slots}
            state.wants_device = self._executor.wants_device
            state.judging_begins |= state.may_begin_judging()
            for ended in list(to_cancel(state)):
                ended.is_cancelled = True
                self._executor.cancel(ended.work)
            if self._propose():
                continue
            if (step := next_step(state)) is not None:
                self._begin(step)
            elif self._running:
                if (result := self._executor.next_result(_ASK_AGAIN_S)) is not None:
                    self._take(result)
            elif not self._compose():
                break
        for step in self._running.values():
            step.task.is_cut_short |= isinstance(step.work, Screen)

    def cut_short(self) -> list[str]:
        """Hashes of the tasks whose first look the end of the time has cut short: they may have a faster candidate."""
        return sorted(task.task.sha256 for task in self.state.tasks if task.is_cut_short and not task.records.looked_at)

    # --- work that begins

    def _begin(self, step: WorkStep) -> None:
        task, work = step.task, step.work
        if self.state.given and step is self.state.given[0]:
            del self.state.given[0]
        if task.proposed and step.plan is not None and step.plan.candidate is task.proposed[0]:
            del task.proposed[0]
        if isinstance(work, Evaluate):
            task.has_begun = True
            if step.plan is not None:
                self._log(task, self._beginning(task, step.plan))
        elif isinstance(work, Baselines):
            task.baselines = ()
            self._log(task, "measuring baselines")
        task.running.append(step)
        self._running[work] = step
        self._executor.submit(work)

    @staticmethod
    def _beginning(task: TaskState, plan: MeasurementPlan) -> str:
        name = ", ".join(plan.candidate.techniques) or plan.candidate.policy
        if plan.candidate in (task.compositions or ()):
            return "judging the winner with its tuned kernels"
        return f"confirming {name} in fresh processes" if plan.is_repeated else f"judging {name}"

    def _propose(self) -> bool:
        """Ask the policy for what the judge takes next of the task whose proposals it takes one by one; True where it gave
        something, or has no more."""
        task = open_task(self.state)
        if task is None or task.proposed or task.has_proposed_all or self.state.free.get(Evaluate, 0) <= 0:
            return False
        key = id(task)
        if key not in self._proposals:
            plan = self.state.plan
            assert plan.policy is not None
            proposals = Proposals(
                task.task, plan.policy, plan.device, plan.budget, plan.seed, task.history, task.records.screened,
                partial(self._log, task),
            )  # fmt: skip
            self._proposals[key] = proposals.candidates(self.state.slots[Evaluate])
        try:
            candidate = next(self._proposals[key])
        except StopIteration:
            task.has_proposed_all = True
        except KernelwrightError as error:
            task.has_proposed_all = task.is_failed = True
            self._fail(task, SEARCH, error)
        else:
            task.proposed += [] if candidate is None else [candidate]
            return candidate is not None
        return True

    def _compose(self) -> bool:
        """Have the kernels of a winner tuned; False where there is nothing left to tune."""
        composer = self.state.plan.composer
        for task in self.state.tasks:
            winner = task.records.winner
            if composer is None or winner is None or task.compositions is not None:
                continue
            task.compositions = []
            if not task.records.composed:
                try:
                    composed = composer.compose(task.task, winner.candidate(), partial(self._log, task))
                    task.compositions += [] if composed is None else [composed]
                except KernelwrightError as error:
                    self._fail(task, SEARCH, error)
            return True
        return False

    # --- results

    def _take(self, result: Result) -> None:
        step = self._running[result.work]
        if result.is_last:
            del self._running[result.work]
            step.task.running.remove(step)
        task, outcome = step.task, result.outcome
        if isinstance(outcome, Progress):
            self._log(task, outcome.message, lasting=outcome.lasting)
        elif isinstance(outcome, Screened):
            task.left = result.left
            self._keep(task, SEARCH, outcome)
        elif isinstance(outcome, KernelwrightError):
            self._take_error(step, outcome)
        elif isinstance(outcome, Evaluation):
            self._take_verdict(step, outcome)
        elif isinstance(step.work, Baselines):
            for baseline, found in zip(step.work.baselines, outcome or (), strict=True):
                self._keep(task, baseline.techniques[0], found)
        elif isinstance(step.work, Screen):
            self._end_round(step, step.work)

    def _end_round(self, step: WorkStep, work: Screen) -> None:
        task = step.task
        task.left = None
        if step.is_cancelled:
            self._stop_screening(task)
        else:
            task.records.end_round(work.budget, work.tunes)
        if self._notes_exhausted and len(task.records.screened) < work.budget and not step.is_cancelled:
            done = sorted(one.task.sha256 for one in self.state.tasks if one.records.exhausted)
            self._run.write_json("exhausted.json", done)
        if self.state.is_screened(task) and not ranked(task.records.screened):
            self._log(task, "no candidate was right when it was screened", lasting=True)

    def _stop_screening(self, task: TaskState) -> None:
        if self.state.stops_screening:
            task.is_cut_short = True
        else:
            task.is_stopped = True

    def _take_verdict(self, step: WorkStep, found: Evaluation) -> None:
        task, plan = step.task, step.plan
        if plan is None:
            self._keep(task, CANDIDATE, found)
            self._take_alongside(step, found)
            return
        if plan.candidate in (task.compositions or ()):
            task.compositions = []
        found = found.model_copy(update={"confirms": plan.confirms(found, self.state.plan.schedule)})
        if not (plan.is_repeated or is_composed(found)):
            task.history.append(found)
        self._keep(task, SEARCH, found, plan)
        self._take_alongside(step, found)
        if not found.accepted and task.records.pending(self.state.plan.judged) is None and task.records.alike_in_words:
            self._log(task, task.records.alike_in_words, lasting=True)
        if is_composed(found):
            if not plan.is_repeated and not found.is_improvement:
                self._log(task, f"with tuned kernels: {found.reason or 'no improvement'}; the winner stays as it was")
            elif plan.is_repeated and task.records.best is not found:
                self._log(task, "the tuned kernels did not make the whole faster; the winner stays as it was")
        elif plan.is_repeated and not found.is_improvement:
            name = ", ".join(found.techniques) or found.policy
            self._log(task, f"the improvement of {name} did not hold when measured again", lasting=True)

    def _take_alongside(self, step: WorkStep, found: Evaluation) -> None:
        """Keep a record of each stock configuration that was timed beside a candidate."""
        assert isinstance(step.work, Evaluate)
        for other in step.work.alongside:
            record = alongside_record(found, other) if other.policy == BASELINE_POLICY else None
            if record is not None and record.reason is not Reason.OUT_OF_MEMORY:  # it may fit where less is beside it
                self._keep(step.task, other.techniques[0], record)
        known = {record.techniques for record in step.task.records.baselines}
        step.task.baselines = tuple(one for one in step.task.baselines if one.techniques not in known)

    def _take_error(self, step: WorkStep, error: KernelwrightError) -> None:
        task, work = step.task, step.work
        if step.is_cancelled:
            self._stop_screening(task)
            return
        if isinstance(work, Baselines):
            if self.state.plan.raises:
                self._log(task, f"baselines could not be measured: {error}", lasting=True)
                return
            for baseline in work.baselines:
                self._fail(task, baseline.techniques[0], error)
        elif isinstance(work, Screen) and self.state.plan.raises and self.state.plan.judged:
            self._log(task, f"cannot be screened, so all are judged: {error}", lasting=True)
            task.look = "judged"
        elif isinstance(work, Screen):
            task.records.exhausted = True
            self._fail(task, SEARCH, error)
        else:
            task.is_failed = step.plan is not None
            self._fail(task, CANDIDATE if step.plan is None else SEARCH, error)

    def _fail(self, task: TaskState, what: str, error: KernelwrightError) -> None:
        if self.state.plan.raises:
            raise error
        self.errors[f"{task.task.id} {what}"] = str(error)
        self._run.write_json("errors.json", self.errors)
        self._listen(EngineEvent(task, error, what))

    def _keep(self, task: TaskState, what: str, record: Screened | Evaluation, plan: MeasurementPlan | None = None) -> None:
        self._run.append(record)
        task.records.add(record)
        if self.errors.pop(f"{task.task.id} {what}", None) is not None:
            self._run.write_json("errors.json", self.errors)
        self._listen(EngineEvent(task, record, what, plan))

    def _log(self, task: TaskState, message: str, lasting: bool = False) -> None:
        self._listen(EngineEvent(task, message=message, lasting=lasting))


def file_records(tasks: Sequence[TaskState], run: RunDirectory) -> None:
    """Give each task its records in a run directory."""
    by_hash: dict[str, list[TaskState]] = {}
    for task in tasks:
        by_hash.setdefault(task.task.sha256, []).append(task)
    records: Sequence[Screened | Evaluation] = [*run.screened(), *run.evaluations()]
    for record in records:
        for task in by_hash.get(record.task_sha256, ()):
            task.records.add(record)
    for task in tasks:
        task.history = [*task.records.history]
