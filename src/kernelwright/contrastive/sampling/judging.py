"""Judges many candidates of a run, each once: what a run directory already holds is not judged again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kernelwright.contrastive.sampling.evaluation_cache import EvaluationCache
from kernelwright.errors import InfrastructureError, KernelwrightError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import Job
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task

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
