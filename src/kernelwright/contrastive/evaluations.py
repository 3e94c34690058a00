"""Gets evaluations of a run's candidates, each made once: first measurements, baselines, estimates and second looks.

An evaluation that a run directory holds is not made again, nor what another run on this machine shares with it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernelwright.contrastive.samples import Key
from kernelwright.errors import InfrastructureError, KernelwrightError
from kernelwright.execution.executor import LocalExecutor
from kernelwright.execution.work import Evaluate, Executor, Screen, run_all
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task, sha256_of
from kernelwright.records.screened import Screened
from kernelwright.rewrites.wrappers import baseline_source

Log = Callable[[str], None]
"""Takes one line about progress."""

FAULTS_TOLERATED = 0.5
"""A batch of which more than this share could not be judged for the machine's fault ends the run. Our choice."""


class Deadline:
    """The time by which a stage saves what it has and returns unfinished: seconds from now; None sets no limit."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    def passed(self) -> bool:
        """True when the time is up."""
        return self.comes_within(0.0)

    def comes_within(self, seconds: float) -> bool:
        """True when work that takes so long would end after the deadline."""
        return self._end_s is not None and time.monotonic() + seconds >= self._end_s


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate for a task."""

    task: Task
    candidate: Candidate

    @property
    def key(self) -> Key:
        """Hashes of task and candidate."""
        return self.task.sha256, self.candidate.sha256


class RunEvaluations:
    """Everything that was measured of a run's candidates, and a way to get more of it.

    Every evaluation is on disk before `judge` goes on, so a killed run finds them again; the same candidate of the same task
    is never judged twice, whoever proposes it.

    `log` takes lines about candidates that could not be judged. Settings of None are left to the judges. What the shared
    evaluations have of other runs on this machine is not judged again.
    """

    def __init__(
        self,
        run: RunDirectory,
        judges: Executor,
        log: Log = lambda line: None,
        *,
        settings: Settings | None = None,
        shared: SharedEvaluations | None = None,
    ) -> None:
        self.run = run
        self._judges = judges
        self._log = log
        self._settings = settings
        self._shared = shared
        self._first: dict[Key, Evaluation] = {}
        self.confirmed: dict[Key, Evaluation] = {}
        """Re-measurements by task and candidate."""
        self.estimates: dict[Key, Screened] = {(one.task_sha256, one.candidate_sha256): one for one in run.screened()}
        """Screening's estimates by task and candidate."""
        for evaluation in run.evaluations():
            self._note(evaluation)

    def _note(self, evaluation: Evaluation) -> None:
        key = (evaluation.task_sha256, evaluation.candidate_sha256)
        (self.confirmed if evaluation.confirms else self._first)[key] = evaluation

    def evaluations(self) -> Iterator[Evaluation]:
        """First measurements of all candidates, oldest first."""
        yield from self._first.values()

    def history(self, task: Task) -> tuple[Evaluation, ...]:
        """First measurements of a task's candidates, oldest first."""
        return tuple(found for (task_sha256, _), found in self._first.items() if task_sha256 == task.sha256)

    def best(self, task: Task) -> float | None:
        """The highest speedup of a task's first measurements so far."""
        speedups = [found.speedup for found in self.history(task) if found.accepted and found.speedup is not None]
        return max(speedups, default=None)

    def first(self, key: Key) -> Evaluation | None:
        """The first measurement of a candidate, if it has been judged."""
        return self._first.get(key)

    def add(self, evaluation: Evaluation) -> None:
        """Write an evaluation that was made elsewhere, such as a re-measurement."""
        self.run.append(evaluation)
        self._note(evaluation)

    def add_estimate(self, estimate: Screened) -> None:
        """Write screening's estimate of a candidate."""
        self.run.append(estimate)
        self.estimates[estimate.task_sha256, estimate.candidate_sha256] = estimate

    def judge(self, proposals: Iterable[Proposal], stops: Callable[[], bool] | None = None) -> dict[Key, Evaluation]:
        """Evaluations of proposals by key, known and new; those that `stops` or a fault left out are missing.

        Proposals are taken one by one, as judges become free, so that making them costs no time in which nobody judges.

        Raises:
            InfrastructureError: most of a batch could not be judged.
        """
        asked: list[Key] = []
        fresh: set[Key] = set()
        faults: list[KernelwrightError] = []
        work = self._work(proposals, asked, fresh)
        for result in run_all(self._judges, work, stops):
            outcome = result.outcome
            if isinstance(outcome, KernelwrightError):
                faults.append(outcome)
                self._log(f"not judged: a candidate of {result.work.task.id}: {outcome}")
            elif isinstance(outcome, Evaluation):
                self.add(outcome)
                if self._shared is not None:
                    self._shared.add(outcome)
        if len(faults) > FAULTS_TOLERATED * len(fresh):
            raise InfrastructureError(
                f"Wanted {len(fresh)} candidates judged; {len(faults)} of them could not be, the last because: {faults[-1]} "
                "Everything judged so far is kept; run again to go on."
            ) from faults[-1]
        return {key: self._first[key] for key in asked if key in self._first}

    def _work(self, proposals: Iterable[Proposal], asked: list[Key], fresh: set[Key]) -> Iterator[Evaluate]:
        """Work for proposals that neither this run nor the shared evaluations know; notes all keys, and the new ones."""
        for proposal in proposals:
            key = proposal.key
            asked.append(key)
            if key not in self._first and key not in fresh:
                fresh.add(key)
                elsewhere = self._shared.find(proposal.task, proposal.candidate) if self._shared is not None else None
                if elsewhere is None:
                    yield Evaluate(proposal.task, proposal.candidate, self._settings)
                else:
                    self.add(elsewhere)


BUSY_TIMEOUT_S = 60.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS evaluations (kind TEXT, task TEXT, candidate TEXT, record TEXT, "
    "PRIMARY KEY (kind, task, candidate)) WITHOUT ROWID"
)


class SharedEvaluations:
    """A file of evaluations by task, candidate and how they were made. Several processes may use it at once.

    A program has one speed, whoever wrote it: runs that are compared with each other see the same measurement of the same
    program. Use a file for each kind of machine.

    `label` and `settings` tell measurements apart that must not stand for one another, such as first ones and confirming
    ones. The SQLite file is made at the first use.
    """

    def __init__(self, path: Path, label: str, settings: Settings | None) -> None:
        self._path = path
        self._kind = sha256_of(f"{label} {settings.model_dump_json() if settings is not None else ''}")

    def find(self, task: Task, candidate: Candidate) -> Evaluation | None:
        """The evaluation of a candidate, in this candidate's name; None when there is none.

        Raises:
            InfrastructureError: the file cannot be used.
        """
        with self._connection() as connection:
            row = connection.execute(
                "SELECT record FROM evaluations WHERE kind = ? AND task = ? AND candidate = ?",
                (self._kind, task.sha256, candidate.sha256),
            ).fetchone()
        if row is None:
            return None
        # Who proposed it, and from what, differs from run to run; what was measured does not.
        proposer = candidate.model_dump(include={"policy", "techniques", "passes", "parent"})
        return Evaluation.model_validate_json(row[0]).model_copy(update=proposer)

    def add(self, evaluation: Evaluation) -> None:
        """Keep an evaluation; the first of a candidate stays.

        Raises:
            InfrastructureError: the file cannot be used.
        """
        key = (self._kind, evaluation.task_sha256, evaluation.candidate_sha256)
        with self._connection() as connection:
            connection.execute("INSERT OR IGNORE INTO evaluations VALUES (?, ?, ?, ?)", (*key, evaluation.model_dump_json()))

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(_TABLE)
                yield connection
        except sqlite3.Error as error:
            raise InfrastructureError(
                f"Wanted to use the shared evaluations at {self._path}; SQLite says: {error}. Give another judge.shared."
            ) from error


GRAPH = "cudagraph-fresh"
"""The graph that keeps a drop-in's contract, as an answer must."""
COMPILE = "compile"
"""torch.compile with its default options."""
EAGER = "eager"


class TaskBaselines:
    """Speedups over the reference of one baseline, `GRAPH` or `COMPILE`, measured once for each task.

    A reward against the best of the reference and its graph pays nothing for a graph around the reference.

    Args:
        store: Measurements of baselines, in a run directory of their own.
        device: Kind of device. On a CPU there are no graphs.
    """

    def __init__(self, store: RunEvaluations, device: str, name: str = GRAPH) -> None:
        self._store, self._name = store, name
        self._is_possible = name != GRAPH or device.startswith("cuda")
        self.speedups: dict[str, float] = {}
        """By the task's hash; at least 1.0, that of the reference itself."""

    def measure(self, tasks: Iterable[Task], deadline: Deadline | None = None) -> bool:
        """Measure the tasks that are not known yet; False where the deadline left some out. One that fails is no baseline.

        What the run directory holds of a task stands, even if a later version writes another baseline: all steps of a run
        are rewarded against the same measurement.
        """
        unknown = [task for task in dict.fromkeys(tasks) if task.sha256 not in self.speedups]
        if not self._is_possible:
            self.speedups |= {task.sha256: 1.0 for task in unknown}
            return True
        for task in unknown:
            for evaluation in self._store.history(task):
                if self._name in evaluation.techniques and task.sha256 not in self.speedups:
                    self._note(evaluation)
        wanted = [
            Proposal(task, Candidate(source=baseline_source(task, self._name), policy="baseline", techniques=(self._name,)))
            for task in unknown
            if task.sha256 not in self.speedups
        ]
        measured = self._store.judge(wanted, None if deadline is None else deadline.passed)
        is_late = deadline is not None and deadline.passed()
        for proposal in wanted:
            if proposal.key in measured:
                self._note(measured[proposal.key])
            elif not is_late:
                self.speedups[proposal.task.sha256] = 1.0  # the machine could not measure it
        return all(proposal.task.sha256 in self.speedups for proposal in wanted)

    def _note(self, evaluation: Evaluation) -> None:
        self.speedups[evaluation.task_sha256] = max(1.0, (evaluation.accepted and evaluation.speedup) or 1.0)

    def best(self, task_sha256: str) -> tuple[str, float]:
        """Name of the faster of the reference and this baseline, and its speedup over the reference."""
        speedup = self.speedups.get(task_sha256, 1.0)
        return (self._name if speedup > 1 else EAGER), speedup


ESTIMATE_AGREEMENT = 1.10
"""Largest factor between an estimate and the judge's interval that still counts as agreement. Our choice, after the 10 % of
CUDA-L1's second measurement (section 2.4.4)."""


class Estimator:
    """Estimates candidates of a run, and chooses those that the judge must take in spite of it.

    An estimate comes from a process that the candidate ran in, and could have forged. So it is no verdict: such a candidate
    never becomes an exemplar, and how often estimates and verdicts disagree is a metric of training.

    Args:
        store: Evaluations and estimates of the run.
        executor: Makes estimates.
        share: Share of candidates whose reward may be an estimate.
        above: Estimate above which the judge takes a candidate,
        leap: and multiple of the task's best speedup so far above which it does.
    """

    def __init__(self, store: RunEvaluations, executor: LocalExecutor, share: float, above: float, leap: float) -> None:
        self._store, self._executor, self._share, self._above, self._leap = store, executor, share, above, leap

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Start what will make estimates of these tasks' candidates."""
        self._executor.prepare(tasks)

    def estimate(self, proposals: Sequence[Proposal], best: Mapping[str, float | None]) -> dict[Key, Screened]:
        """Estimates that stand for a verdict; candidates that are missing must be judged."""
        known = self._store.estimates
        unseen = {proposal.key: proposal for proposal in proposals if self._store.first(proposal.key) is None}
        by_task: dict[str, list[Proposal]] = {}
        for key, proposal in unseen.items():
            if key not in known:
                by_task.setdefault(key[0], []).append(proposal)
        rounds = [
            Screen(proposals[0].task, candidates=tuple(proposal.candidate for proposal in proposals))
            for proposals in by_task.values()
        ]
        for result in run_all(self._executor, rounds):
            if isinstance(result.outcome, Screened):
                self._store.add_estimate(result.outcome)
        return {
            key: known[key]
            for key in unseen
            if key in known and self.is_let_off(key) and not self._is_outlier(known[key], best[key[0]])
        }

    def is_let_off(self, key: Key) -> bool:
        """True when the draw spares the judge a candidate. A run that was killed draws the same again."""
        return int(sha256_of("".join(key))[:8], 16) < self._share * 2**32

    def _is_outlier(self, screened: Screened, best: float | None) -> bool:
        if not screened.correct:
            return False
        estimate = screened.estimate
        too_fast = estimate is None or estimate > self._above or estimate > self._leap * (best or 1.0)
        return too_fast or screened.is_beyond_roofline

    def metrics(self, keys: Iterable[Key]) -> dict[str, float]:
        """Two shares of different candidates: `screened_share`, of those with an estimate, that the judge did not take; and
        `screen_disagreement`, of those that both looked at, on which they disagree."""
        known = self._store.estimates
        both = [(known[key], self._store.first(key)) for key in dict.fromkeys(keys) if key in known]
        checked = [(estimate, verdict) for estimate, verdict in both if verdict is not None]
        values = {"screened_share": 1 - len(checked) / len(both)} if both else {}
        if checked:
            values["screen_disagreement"] = sum(disagree(*pair) for pair in checked) / len(checked)
        return values


def disagree(estimate: Screened, verdict: Evaluation) -> bool:
    """True when an estimate and a verdict contradict each other: in what is right, or in how fast it is."""
    if not (estimate.correct and verdict.accepted):
        return estimate.correct != verdict.accepted
    if estimate.estimate is None or verdict.speedup_low is None or verdict.speedup_high is None:
        return False
    low, high = verdict.speedup_low / ESTIMATE_AGREEMENT, verdict.speedup_high * ESTIMATE_AGREEMENT
    return not low <= estimate.estimate <= high


SUSPICIOUS_SPEEDUP = 3.0
"""CUDA-L1, section 2.4.4: verify again above 3x ..."""
SUSPICIOUS_LEAP = 2.0
"""... or above twice the best so far."""
AGREEMENT = 0.10
"""CUDA-L1, section 2.4.4: two measurements agree when they are less than 10 % apart."""


def is_suspicious(
    evaluation: Evaluation, best_so_far: float | None, *, above: float = SUSPICIOUS_SPEEDUP, leap: float = SUSPICIOUS_LEAP
) -> bool:
    """True for a speedup that must be measured again: above `above`, or above `leap` times the task's best that counts."""
    if not evaluation.accepted or evaluation.speedup is None or evaluation.confirms:
        return False
    leapt = best_so_far is not None and evaluation.speedup > leap * best_so_far
    return evaluation.speedup > above or leapt


def agree(first: Evaluation, second: Evaluation) -> bool:
    """True when both were accepted and their speedups are less than 10 % apart, measured by the smaller."""
    if first.speedup is None or second.speedup is None:
        return False
    return max(first.speedup, second.speedup) < (1 + AGREEMENT) * min(first.speedup, second.speedup)


def settled(first: Evaluation, second: Evaluation) -> Evaluation:
    """The evaluation that counts: the re-measurement where they agree, otherwise the worse of the two.

    The paper says only what is accepted; that a disagreement leaves the worse of the two is our choice.
    """
    # A rejected evaluation has no speedup, and is the worse one.
    return second if agree(first, second) else min(second, first, key=lambda found: found.speedup or 0.0)


def reverify(cases: Sequence[tuple[Task, Evaluation]], executor: Executor) -> list[Evaluation]:
    """Measure suspicious candidates again, each in fresh processes on another device than before where there is one.

    Returns the re-measurements in the order of the cases; `confirms` is set.

    Raises:
        KernelwrightError: a judge failed.
    """
    work = [Evaluate(task, found.candidate(), elsewhere_than=found.device) for task, found in cases]
    seconds: dict[object, Evaluation] = {}
    for result in run_all(executor, work):
        if not result.is_last:
            continue
        if isinstance(result.outcome, KernelwrightError):
            raise result.outcome
        assert isinstance(result.outcome, Evaluation)
        seconds[result.work] = result.outcome.model_copy(update={"confirms": True})
    return [seconds[one] for one in work]
