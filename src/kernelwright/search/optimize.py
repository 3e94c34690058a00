"""Searches for a faster drop-in of one task: proposes, screens, judges the best few, and confirms the winner.

A policy that learns from verdicts alone has each of its proposals judged. Every estimate and every verdict is on disk
before the policy hears of it, so the search can be killed at any moment and goes on where it was: a policy's proposals
follow from the task, the seed and the records alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelwright.deploy.drop_in import drop_in
from kernelwright.errors import KernelwrightError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import JUDGES_PER_GPU, Job, JudgePool
from kernelwright.execution.screening import ScreeningPool
from kernelwright.execution.zygotes import Zygotes
from kernelwright.judge import Settings, resolve_device
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.compiling import Compiles
from kernelwright.records.decisions import (
    BASELINE_POLICY,
    JUDGED,
    BaselineComparison,
    Effort,
    MeasurementPlan,
    TaskRecords,
    confirmed_best,
    is_composed,
    is_top_ranked,
    judging_bytes,
    needs_no_rerun,
    next_to_confirm,
    next_to_judge,
    ranked,
)
from kernelwright.records.policy import Policy, look_of
from kernelwright.records.screened import Screened
from kernelwright.records.tables import comparison_of
from kernelwright.report.page import write_report
from kernelwright.search import then_sass
from kernelwright.search.beside import BaselinesBeside, chosen_baselines
from kernelwright.search.proposals import Proposals
from kernelwright.search.schedule import settings_for
from kernelwright.search.then_sass import Tune
from kernelwright.version import __version__

DROP_IN = "optimized.py"
"""File of a run directory with the drop-in that is handed out."""
NOT_AHEAD = "not_ahead.py"
"""The same for a confirmed improvement over eager that is not certainly ahead of the best baseline."""
NEAR_MISS = "near_miss.py"
"""File of a run directory with the source of what was nearly an improvement."""
_POLL_S = 0.2


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


def interval_in_words(found: Evaluation) -> str:
    """A timed evaluation's speedup and its interval, such as `1.620x (1.590 to 1.650)`."""
    return f"{found.speedup:.3f}x ({found.speedup_low:.3f} to {found.speedup_high:.3f})"


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
    """Where nothing was confirmed: what came nearest, with its source in `near_miss.py`."""
    beside: BaselineComparison | None = None
    """How the best stands against the best baseline; None where nothing was confirmed, or eager alone was measured."""
    drop_in: Path | None = None
    """The confirmed code: `optimized.py`, or `not_ahead.py` where it is not certainly ahead of the baselines asked for."""

    @property
    def is_handed_out(self) -> bool:
        """Whether an improvement was confirmed that is certainly ahead of every baseline asked for."""
        return self.drop_in is not None and self.drop_in.name == DROP_IN


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
    tune: Tune | None = None,
    evaluator: Evaluator | None = None,
    zygotes: Zygotes | None = None,
    baselines: Sequence[str] | None = None,
) -> OptimizeResult:
    """Search for a faster drop-in for a task and confirm it by an independent re-measurement.

    Writes `screened.jsonl`, `evaluations.jsonl`, `config.json`, `environment.json`, `report.html` and, where an improvement
    was confirmed that is certainly ahead of the best baseline measured, `optimized.py` into `out`. Run again with the same
    `out`, it goes on where it was.

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
        tune: Plays the assembly game on the winner's Triton kernels (`then_sass.play_with`); None leaves them as they are.
        evaluator: Pool of judges, such as a `RayPool` with these settings; it stays open. By default judges on this machine.
        zygotes: What screening forks from, which stays open; by default it starts its own.
        baselines: Names from `ALL_BASELINES` to measure beside; by default `ON_GPUS` on a GPU, and none on a CPU.

    Raises:
        UsageError: `out` belongs to another task, device, policy or other settings; an unknown baseline.
        TaskError, InfrastructureError: the task does not work, or this machine cannot judge it.
    """
    settings = settings or Settings()
    resolved = resolve_device(device)
    if tune is not None:
        then_sass.needs_gpu(str(resolved))
    wanted = chosen_baselines(baselines, str(resolved), settings, evaluator)
    run = RunDirectory(out)
    asked = {"policy": policy.name, "device": str(resolved), "seed": seed, "baselines": ["eager", *wanted]}
    _claim(run, task, asked | {"settings": settings.model_dump(mode="json")})
    tell = on_event or (lambda event: None)
    search = TaskSearch(run, task, policy, str(resolved), budget, seed, tell)
    if search.done:
        tell(SearchEvent(f"resuming after {search.done} proposals", lasting=True))
    per_device = JUDGES_PER_GPU if resolved.type == "cuda" else 1
    with contextlib.ExitStack() as stack:
        beside = stack.enter_context(BaselinesBeside(run, task, wanted, settings))
        # Judges start while candidates are screened: each takes seconds to import torch and to make a context.
        ready = min(per_device, 1 + beside.are_owed)
        pool = evaluator or stack.enter_context(JudgePool([str(resolved)], settings, per_device, ready=ready))
        if per_device > 1:
            beside.begin(pool)
        # Without times there is nothing to choose the best few by.
        screens = look_of(policy) != "judged" and settings.timed
        if not screens or not search.judge_best(pool, settings, judged, zygotes, beside.rival):
            search.judge_all(pool)
        best = confirm(run, pool, task, tell, beside.rival)
        if best is not None and tune is not None:
            best = then_sass.tune_kernels(
                run, pool, task, best, tune=tune, tell=lambda text: tell(SearchEvent(text)), rival=beside.rival
            )
        beside.end(pool, lambda text, lasting: tell(SearchEvent(text, lasting=lasting)))
    return _hand_out(run, task, best, bool(wanted), len(search.screened))


def _claim(run: RunDirectory, task: Task, asked: dict[str, Any]) -> None:
    """Take a run directory for this search; raises UsageError where it belongs to another."""
    config = {
        "kind": "optimize",
        "task": task.id,
        "task_sha256": task.sha256,
        "task_source": task.source,
        **asked,
        "kernelwright": __version__,
    }
    run.claim(config, same=("kind", "task_sha256", "policy", "device", "seed", "settings"), device=asked["device"])


def _hand_out(run: RunDirectory, task: Task, best: Evaluation | None, has_baselines: bool, screened: int) -> OptimizeResult:
    """Write what was confirmed, or what came nearest, and the report; files of an earlier end go."""
    for name in (DROP_IN, NOT_AHEAD, NEAR_MISS):
        (run.path / name).unlink(missing_ok=True)
    found = comparison_of(run, best) if best is not None else None
    path: Path | None = None
    if best is not None:
        path = run.path / (DROP_IN if not has_baselines or (found is not None and found.is_ahead) else NOT_AHEAD)
        beside = str(found) if found is not None else ""
        run.write_text(path.name, drop_in(task, best, run, module=path.stem, beside=beside))
    nearest = nearest_miss(run, task) if best is None else None
    if nearest is not None:
        run.write_text(NEAR_MISS, nearest.source)
    write_report(run, run.path / "report.html")
    return OptimizeResult(
        run.path,
        best,
        len(history_of(run, task)),
        screened,
        nearest,
        beside=found,
        drop_in=path,
    )


def nearest_miss(run: RunDirectory, task: Task) -> Evaluation | None:
    """The near miss of a task with the highest lower bound."""
    return records_of(run, task).nearest_miss


def history_of(run: RunDirectory, task: Task) -> tuple[Evaluation, ...]:
    """First verdicts on a task's candidates, without winners with tuned kernels."""
    return records_of(run, task).history


def records_of(run: RunDirectory, task: Task) -> TaskRecords:
    """Verdicts of a run on one task."""
    return TaskRecords.of(found for found in run.evaluations() if found.task_sha256 == task.sha256)


class TaskSearch:
    """Search for one task: what was proposed, and what has been found of it.

    Args:
        run: Directory of the records.
        task: The task.
        policy: Proposer of candidates.
        device: Resolved name.
        budget: Proposals to look at, those on record included.
        seed: Seed of the policy.
        tell: Callback for progress.
    """

    def __init__(
        self,
        run: RunDirectory,
        task: Task,
        policy: Policy,
        device: str,
        budget: int,
        seed: int,
        tell: Callable[[SearchEvent], None],
    ) -> None:
        self._run, self._task, self._device, self._tell = run, task, device, tell
        self._lock = threading.RLock()
        """Guards the records: one thread screens while another waits for the judge."""
        self._is_judged = threading.Event()
        """Set once the judge has seen enough: what is still being screened is ended."""
        self._named: set[str] = set()
        """Hashes of candidates that screening put first when the judge took them, whose one measurement may stand."""
        self._proposals = Proposals(
            task,
            policy,
            device,
            budget,
            seed,
            list(history_of(run, task)),
            [found for found in run.screened() if found.task_sha256 == task.sha256],
            lambda text, lasting: tell(SearchEvent(text, number=self.done, lasting=lasting)),
        )

    @property
    def done(self) -> int:
        """Proposals that were looked at."""
        return self._proposals.done

    @property
    def judged(self) -> list[Evaluation]:
        """Verdicts so far, confirmations left out."""
        return self._proposals.judged

    @property
    def screened(self) -> list[Screened]:
        """Estimates so far."""
        return self._proposals.screened

    def judge_best(
        self,
        pool: Evaluator,
        settings: Settings,
        count: int,
        zygotes: Zygotes | None = None,
        rival: Callable[[], Candidate | None] = lambda: None,
    ) -> bool:
        """Screen every proposal; have the judge take the best few and what looks too good; False where none can be screened.

        The judge begins with the best one once only candidates of torch.compile and autotuners are left to be screened, and
        takes others once only autotuners are. Those are ended where something else is an improvement by then.
        """
        screens = ScreeningPool(self._task, self._device, settings, zygote=zygotes)
        with ThreadPoolExecutor(1) as thread:
            try:
                screening = thread.submit(self._screen, screens)
                self._judge(pool, self._owed(screening, count, settings, rival))
            finally:
                self._is_judged.set()
                screens.close()
        if not screening.result():
            return False
        if not ranked(self.screened):
            self._tell(SearchEvent("no candidate was right when it was screened", number=self.done, lasting=True))
        return True

    def _screen(self, screens: ScreeningPool) -> bool:
        """Estimate every proposal; False where this task cannot be screened here."""
        for _, outcome in screens.screen(self._proposals.candidates(screens.slots, screens.takes)):
            if self._is_judged.is_set():
                return True
            if isinstance(outcome, KernelwrightError):
                self._tell(SearchEvent(f"cannot be screened, so all are judged: {outcome}", lasting=True))
                return False
            with self._lock:
                self._run.append(outcome)
                self.screened.append(outcome)
                self._tell(SearchEvent("screened", screened=outcome, number=self.done))
        return True

    def _owed(
        self, screening: Future[bool], count: int, settings: Settings, rival: Callable[[], Candidate | None]
    ) -> Iterator[Job | None]:
        begun: set[str] = set()
        while not (over := screening.done()) or (screening.exception() is None and screening.result()):
            with self._lock:
                judged = {one.candidate_sha256: one for one in self.judged}
                ready = over or self._proposals.only_left(Compiles.VARIANTS)
                able = ready or (not begun and self._proposals.only_left(Compiles.INDUCTOR))
                chosen = next_to_judge(self.screened, judged, count) if able else None
                named = chosen is not None and is_top_ranked(chosen.candidate_sha256, self.screened, judged)
                memory_bytes = judging_bytes(self.screened)
            if chosen is not None and chosen.candidate_sha256 not in begun:
                begun.add(chosen.candidate_sha256)
                self._named |= {chosen.candidate_sha256} if named else set()
                if named:  # its one measurement may stand
                    yield Job(self._task, chosen.candidate(), settings, rival(), memory_bytes=memory_bytes)
                else:
                    yield Job(
                        self._task,
                        chosen.candidate(),
                        settings_for(MeasurementPlan(chosen.candidate(), Effort.FIRST_OF_TWO), settings),
                        memory_bytes=memory_bytes,
                    )
            elif begun - judged.keys():
                yield None
            elif over or (ready and any(one.is_improvement for one in self.judged)):
                return
            else:
                wait([screening], timeout=_POLL_S)

    def judge_all(self, pool: Evaluator, stop: Callable[[], bool] | None = None) -> None:
        """Have the judge take every proposal until `stop()`."""
        found = self._proposals.candidates(pool.slots)
        self._judge(pool, (None if one is None else Job(self._task, one) for one in found), stop)

    def _judge(self, pool: Evaluator, jobs: Iterator[Job | None], stop: Callable[[], bool] | None = None) -> None:
        def told() -> Iterator[Job | None]:
            for job in jobs:
                if job is not None:
                    self._tell(SearchEvent(f"judging {_named(job.candidate)}", number=self.done))
                yield job

        for job, outcome in pool.evaluate(told(), stop):
            if isinstance(outcome, KernelwrightError):
                raise outcome
            if job.candidate.sha256 in self._named and needs_no_rerun(outcome):
                outcome = outcome.model_copy(update={"confirms": True})
            with self._lock:
                self._run.append(outcome)
                self.judged.append(outcome)
                self._tell(SearchEvent("judged", outcome, number=self.done))


def confirm(
    run: RunDirectory,
    pool: Evaluator,
    task: Task,
    tell: Callable[[SearchEvent], None],
    rival: Callable[[], Candidate | None] = lambda: None,
) -> Evaluation | None:
    """Measure the best again, in fresh processes, unless its one measurement stands; the best that held is the result.

    `rival` names the baseline that is timed beside it, where one is known by then.
    """
    own = [found for found in run.evaluations() if found.task_sha256 == task.sha256 and found.policy != BASELINE_POLICY]
    records = [found for found in own if not is_composed(found)]
    judged = {found.candidate_sha256: found for found in records if not found.confirms}
    confirmed = {found.candidate_sha256: found for found in records if found.confirms}
    while (winner := next_to_confirm(judged, confirmed)) is not None:
        tell(SearchEvent(f"confirming {_named(winner)} in fresh processes"))
        again = then_sass.measured_again(run, pool, task, winner, rival())
        confirmed[again.candidate_sha256] = again
        if not again.is_improvement:
            tell(SearchEvent(f"the improvement of {_named(winner)} did not hold when measured again", lasting=True))
    return confirmed_best(confirmed.values())


def _named(one: Candidate | Evaluation) -> str:
    return ", ".join(one.techniques) or one.policy
