"""Gets evaluations of a run's candidates, each made once: first measurements, baselines, estimates and second looks.

What a run directory holds is not judged again, nor what another run on this machine shares with it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernelwright.errors import InfrastructureError, KernelwrightError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import Job
from kernelwright.execution.screens import Screens
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task, sha256_of
from kernelwright.records.screened import Screened
from kernelwright.rewrites.baselines import baseline_source

Say = Callable[[str], None]
"""Told one line about progress."""

FAULTS_TOLERATED = 0.5
"""A batch of which more than this share could not be judged for the machine's fault ends the run. Our choice."""


Key = tuple[str, str]
"""A candidate of a task: the task's hash and the candidate's."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate for a task."""

    task: Task
    candidate: Candidate

    @property
    def key(self) -> Key:
        """Hashes of task and candidate."""
        return self.task.sha256, self.candidate.sha256


class JudgedRun:
    """Evaluations of a run directory, and a way to get more of them.

    Every evaluation is on disk before `judge` goes on, so a killed run finds them again; the same candidate of the same task
    is never judged twice, whoever proposes it.

    `say` is told about candidates that could not be judged. Settings of None are left to the judges. What the cache has of
    other runs on this machine is not judged again.
    """

    def __init__(
        self,
        run: RunDirectory,
        judges: Evaluator,
        say: Say = lambda line: None,
        *,
        settings: Settings | None = None,
        cache: EvaluationCache | None = None,
    ) -> None:
        self.run = run
        self._judges = judges
        self._say = say
        self._settings = settings
        self._cache = cache
        self._known: dict[Key, Evaluation] = {}
        self.confirmed: dict[Key, Evaluation] = {}
        """Re-measurements by task and candidate."""
        for evaluation in run.evaluations():
            self._note(evaluation)

    def _note(self, evaluation: Evaluation) -> None:
        key = (evaluation.task_sha256, evaluation.candidate_sha256)
        (self.confirmed if evaluation.confirms else self._known)[key] = evaluation

    def history(self, task: Task) -> tuple[Evaluation, ...]:
        """First measurements of a task's candidates, oldest first."""
        return tuple(found for (task_sha256, _), found in self._known.items() if task_sha256 == task.sha256)

    def evaluations(self) -> Iterator[Evaluation]:
        """First measurements of all candidates, oldest first."""
        yield from self._known.values()

    def known(self, proposal: Proposal) -> Evaluation | None:
        """The first measurement of a candidate, if it has been judged."""
        return self._known.get(proposal.key)

    def of(self, key: Key) -> Evaluation | None:
        """The same by hashes."""
        return self._known.get(key)

    def keep(self, evaluation: Evaluation) -> None:
        """Write an evaluation that was made elsewhere, such as a re-measurement."""
        self.run.append(evaluation)
        self._note(evaluation)

    def judge(self, proposals: Iterable[Proposal], stop: Callable[[], bool] | None = None) -> dict[Key, Evaluation]:
        """Evaluations of proposals by key, known and new; those that `stop` or a fault left out are missing.

        Proposals are taken one by one, as judges become free, so that making them costs no time in which nobody judges.
        `stop` is asked before each new one; True leaves it and all that follow.

        Raises:
            InfrastructureError: most of a batch could not be judged.
        """
        asked: list[Key] = []
        fresh: set[Key] = set()

        def jobs() -> Iterator[Job]:
            for proposal in proposals:
                asked.append(proposal.key)
                if proposal.key not in self._known and proposal.key not in fresh:
                    fresh.add(proposal.key)
                    elsewhere = self._cache.find(proposal.task, proposal.candidate) if self._cache else None
                    if elsewhere is None:
                        yield Job(proposal.task, proposal.candidate, self._settings)
                    else:
                        self.keep(elsewhere)

        faults: list[KernelwrightError] = []
        for job, outcome in self._judges.evaluate(jobs(), stop):
            if isinstance(outcome, KernelwrightError):
                faults.append(outcome)
                self._say(f"not judged: a candidate of {job.task.id}: {outcome}")
            else:
                self.keep(outcome)
                if self._cache is not None:
                    self._cache.add(outcome)
        if len(faults) > FAULTS_TOLERATED * len(fresh):
            raise InfrastructureError(
                f"Wanted {len(fresh)} candidates judged; {len(faults)} of them could not be, the last because: {faults[-1]} "
                "Everything judged so far is kept; run again to go on."
            ) from faults[-1]
        return {key: self._known[key] for key in asked if key in self._known}


BUSY_TIMEOUT_S = 60.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS evaluations (kind TEXT, task TEXT, candidate TEXT, record TEXT, "
    "PRIMARY KEY (kind, task, candidate)) WITHOUT ROWID"
)


class EvaluationCache:
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
        told = candidate.model_dump(include={"policy", "techniques", "passes", "parent"})
        return Evaluation.model_validate_json(row[0]).model_copy(update=told)

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
EAGER = "eager"


class BestBaselines:
    """Speedups of best baselines over the reference.

    Args:
        judged: Measurements of graphs, in a run directory of their own.
        device: Kind of device. On a CPU there are no graphs, and eager is the best baseline.
    """

    def __init__(self, judged: JudgedRun, device: str) -> None:
        self._judged, self._has_graphs = judged, device.startswith("cuda")
        self.speedups: dict[str, float] = {}
        """By the task's hash; 1.0 where the reference itself is the best."""

    def measure(self, tasks: Iterable[Task], stop: Callable[[], bool] | None = None) -> bool:
        """Measure the tasks that are not known yet; False where `stop` left some out. A graph that fails is no baseline.

        What the run directory holds of a task stands, even if a later version writes another graph: all steps of a run are
        rewarded against the same measurement.
        """
        unknown = [task for task in dict.fromkeys(tasks) if task.sha256 not in self.speedups]
        if not self._has_graphs:
            self.speedups |= {task.sha256: 1.0 for task in unknown}
            return True
        for task in unknown:
            if history := self._judged.history(task):
                self._note(history[0])
        wanted = [
            Proposal(task, Candidate(source=baseline_source(task, GRAPH), policy="baseline", techniques=(GRAPH,)))
            for task in unknown
            if task.sha256 not in self.speedups
        ]
        found = self._judged.judge(wanted, stop)
        stopped = stop is not None and stop()
        for one in wanted:
            evaluation = found.get(one.key)
            if evaluation is not None:
                self._note(evaluation)
            elif not stopped:
                self.speedups[one.task.sha256] = 1.0  # the machine could not measure it
        return all(one.task.sha256 in self.speedups for one in wanted)

    def _note(self, graph: Evaluation) -> None:
        self.speedups[graph.task_sha256] = max(1.0, (graph.accepted and graph.speedup) or 1.0)

    def of(self, task_sha256: str) -> tuple[str, float]:
        """Name of a task's best baseline, and its speedup over the reference."""
        speedup = self.speedups.get(task_sha256, 1.0)
        return (GRAPH if speedup > 1 else EAGER), speedup


ESTIMATE_AGREEMENT = 1.10
"""Largest factor between an estimate and the judge's interval that still counts as agreement. Our choice, after the 10 % of
CUDA-L1's second measurement (section 2.4.4)."""


class Estimator:
    """Estimates candidates of a run, and chooses those that the judge must take in spite of it.

    Args:
        judged: Evaluations of the run, in whose directory estimates are kept.
        screens: Makes estimates.
        share: Share of candidates whose reward may be an estimate.
        above: Estimate above which the judge takes a candidate,
        leap: and multiple of the task's best speedup so far above which it does.
    """

    def __init__(self, judged: JudgedRun, screens: Screens, share: float, above: float, leap: float) -> None:
        self._judged, self._screens, self._share, self._above, self._leap = judged, screens, share, above, leap
        self._known: dict[Key, Screened] = {(one.task_sha256, one.candidate_sha256): one for one in judged.run.screened()}

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Start what will make estimates of these tasks' candidates."""
        self._screens.prepare(tasks)

    def estimate(self, proposals: Sequence[Proposal], best: Mapping[str, float | None]) -> dict[Key, Screened]:
        """Estimates that stand for a verdict; candidates that are missing must be judged."""
        unseen = {one.key: one for one in proposals if self._judged.known(one) is None}
        for job, found in self._screens.look(
            Job(one.task, one.candidate) for key, one in unseen.items() if key not in self._known
        ):
            self._judged.run.append(found)
            self._known[job.task.sha256, job.candidate.sha256] = found
        return {
            key: self._known[key]
            for key in unseen
            if key in self._known and self._is_let_off(key) and not self._is_outlier(self._known[key], best[key[0]])
        }

    def _is_let_off(self, key: Key) -> bool:
        """Whether the draw spares the judge a candidate. A run that was killed draws the same again."""
        return int(sha256_of("".join(key))[:8], 16) < self._share * 2**32

    def _is_outlier(self, found: Screened, best: float | None) -> bool:
        if not found.correct:
            return False
        estimate = found.estimate
        too_fast = estimate is None or estimate > self._above or estimate > self._leap * (best or 1.0)
        return too_fast or found.is_beyond_roofline

    def metrics(self, keys: Iterable[Key]) -> dict[str, float]:
        """Two shares of different candidates: `screened_share`, of those with an estimate, that the judge did not take; and
        `screen_disagreement`, of those that both looked at, on which they disagree."""
        both = [(self._known[key], self._judged.of(key)) for key in dict.fromkeys(keys) if key in self._known]
        checked = [(one, verdict) for one, verdict in both if verdict is not None]
        values = {"screened_share": 1 - len(checked) / len(both)} if both else {}
        if checked:
            values["screen_disagreement"] = sum(disagree(one, verdict) for one, verdict in checked) / len(checked)
        return values


def disagree(estimate: Screened, verdict: Evaluation) -> bool:
    """Whether an estimate and a verdict contradict each other: in what is right, or in how fast it is."""
    if not (estimate.correct and verdict.accepted):
        return estimate.correct != verdict.accepted
    if estimate.estimate is None or verdict.speedup_low is None or verdict.speedup_high is None:
        return False
    return not verdict.speedup_low / ESTIMATE_AGREEMENT <= estimate.estimate <= verdict.speedup_high * ESTIMATE_AGREEMENT


SUSPICIOUS_SPEEDUP = 3.0
"""CUDA-L1, section 2.4.4: verify again above 3x ..."""

SUSPICIOUS_LEAP = 2.0
"""... or above twice the best so far."""

AGREEMENT = 0.10
"""CUDA-L1, section 2.4.4: two measurements agree when they are less than 10 % apart."""


def is_suspicious(
    evaluation: Evaluation, best_so_far: float | None, *, above: float = SUSPICIOUS_SPEEDUP, leap: float = SUSPICIOUS_LEAP
) -> bool:
    """Whether a speedup must be measured again: above `above`, or more than `leap` times the task's best that counts."""
    if not evaluation.accepted or evaluation.speedup is None or evaluation.confirms:
        return False
    leapt = best_so_far is not None and evaluation.speedup > leap * best_so_far
    return evaluation.speedup > above or leapt


@dataclass(frozen=True, slots=True)
class Reverification:
    """A suspicious evaluation and its independent re-measurement."""

    task: Task
    first: Evaluation
    second: Evaluation
    """The re-measurement; `confirms` is set."""

    @property
    def agrees(self) -> bool:
        """Whether both were accepted and their speedups are less than 10 % apart, measured by the smaller."""
        first, second = self.first.speedup, self.second.speedup
        if first is None or second is None:
            return False
        return max(first, second) < (1 + AGREEMENT) * min(first, second)

    @property
    def settled(self) -> Evaluation:
        """The evaluation that counts: the re-measurement where they agree, otherwise the worse of the two.

        The paper says only what is accepted; that a disagreement leaves the worse of the two is our choice.
        """
        # A rejected evaluation has no speedup, and is the worse one.
        return self.second if self.agrees else min(self.second, self.first, key=lambda found: found.speedup or 0.0)


def reverify(cases: Sequence[tuple[Task, Evaluation]], judges: Mapping[str, Evaluator]) -> list[Reverification]:
    """Measure suspicious candidates again, each in fresh processes on another device than before where there is one.

    `judges` holds a pool for each device by its name; those of one kind take turns.

    Raises:
        KernelwrightError: a judge failed.
    """
    queues: dict[str, list[Job]] = {device: [] for device in judges}
    jobs = [Job(task, evaluation.candidate()) for task, evaluation in cases]
    for job, (_, evaluation) in zip(jobs, cases, strict=True):
        kind = evaluation.device.partition(":")[0]
        same = [device for device in judges if device.partition(":")[0] == kind]
        others = [device for device in same if device != evaluation.device] or same
        if not others:
            raise InfrastructureError(
                f"Wanted a judge of the kind of {evaluation.device}; there are judges for {', '.join(judges) or 'nothing'}."
            )
        queues[min(others, key=lambda device: len(queues[device]))].append(job)
    found: dict[int, Evaluation] = {}
    for device, queue in queues.items():
        for job, outcome in judges[device].evaluate(queue):
            if isinstance(outcome, KernelwrightError):
                raise outcome
            found[id(job)] = outcome.model_copy(update={"confirms": True})
    return [Reverification(task, first, found[id(job)]) for job, (task, first) in zip(jobs, cases, strict=True)]
