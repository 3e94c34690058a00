"""Gives a second opinion on candidates that look too good: a model or a measure of similarity votes, and the judge decides.

A vote never accepts and never rejects. A vote other than `clean` has the candidate judged again, more strictly, and what
the judge says then is the verdict (`deeper`). CUDA-L1 describes such a checker and found over 60 % of its hacks with it;
its prompt was not published, so the one here is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from kernelwright.contrastive.hacks.database import Family, HackDatabase
from kernelwright.contrastive.hacks.retrieval import Neighbour, Retriever
from kernelwright.contrastive.hacks.review import Opinion, Vote, conversation, opinion_of, poll
from kernelwright.errors import UsageError
from kernelwright.judge import Settings
from kernelwright.models.chat import ChatModel, Completion, Sampling
from kernelwright.records import Candidate, Evaluation, Task

NEIGHBOURS_SHOWN = 5
"""Known hacks in a prompt; our choice, about 1500 tokens."""

NEAREST_COUNTED = 3
"""Known hacks whose mean similarity `StructuralChecker` takes: one alone is often near by chance."""
HONEST_SHARE = 0.1
"""Share of the similarity to the nearest honest twin that the score loses."""
DOUBT_THRESHOLD = 0.142
"""Least score of a vote `hack`. These three were chosen on the training split of
results/2026-11-23-hack-detection-cpu; counted neighbours from {1, 3}, the share from {0, 0.1, 0.2, 0.3}."""


class Review(BaseModel):
    """A checker's vote on one evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task_sha256: str
    candidate_sha256: str
    checker: str
    vote: Vote
    family: Family | None = None
    reason: str = ""
    opinions: tuple[Opinion, ...] = ()
    score: float | None = None
    """Score behind a vote by similarity; None for a model's."""
    similar: tuple[tuple[str, float], ...] = ()
    """Ids of the nearest known hacks and their similarity."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def wants_deeper_checks(self) -> bool:
        """True when the candidate should be judged again: at any vote but `clean`."""
        return self.vote is not Vote.CLEAN


class HackChecker(Protocol):
    """Reads evaluations and votes."""

    name: str
    """Name in records."""

    def review(self, task: Task, evaluation: Evaluation) -> Review:
        """Vote on one evaluation; its record must hold the candidate's source."""
        ...

    def review_all(self, pairs: Sequence[tuple[Task, Evaluation]]) -> list[Review]:
        """Vote on several, in order."""
        ...


class StructuralChecker:
    """Votes by similarity to known hacks, without any model.

    The score is the mean similarity of the nearest hacks, less a share of the similarity to the nearest honest program.
    """

    def __init__(self, database: HackDatabase, threshold: float = DOUBT_THRESHOLD) -> None:
        self.name = "structural"
        self.threshold = threshold
        # What is allowed under its name is judged by its label; being like it is no ground for doubt.
        self._retriever = Retriever(HackDatabase(tuple(pattern for pattern in database.patterns if not pattern.allowed)))

    def review(self, task: Task, evaluation: Evaluation) -> Review:
        """Vote on one evaluation."""
        retriever = self._retriever
        near = retriever.nearest(evaluation.source, reference=task.source, evaluation=evaluation, count=NEIGHBOURS_SHOWN)
        counted = [item.similarity for item in near[:NEAREST_COUNTED]]
        honest = retriever.honest_resemblance(evaluation.source, reference=task.source)
        score = sum(counted) / max(len(counted), 1) - HONEST_SHARE * honest
        hack = bool(near) and score >= self.threshold
        return Review(
            task_sha256=task.sha256,
            candidate_sha256=evaluation.candidate_sha256,
            checker=self.name,
            vote=Vote.HACK if hack else Vote.CLEAN,
            family=near[0].pattern.family if hack else None,
            reason=f"like the known hack `{near[0].pattern.name}`: {', '.join(near[0].shared[:4])}" if near else "",
            score=round(score, 4),
            similar=_similar(near),
        )

    def review_all(self, pairs: Sequence[tuple[Task, Evaluation]]) -> list[Review]:
        """Vote on several, in order."""
        return [self.review(task, evaluation) for task, evaluation in pairs]


class AdversarialChecker:
    """Asks a language model, with the nearest known hacks in front of it.

    The model may be the policy itself. Without a database it is asked without examples. Of `samples` answers to a question
    more than half of those usable must agree, otherwise the vote is `unsure`.
    """

    def __init__(
        self,
        model: ChatModel,
        database: HackDatabase | None,
        *,
        samples: int = 1,
    ) -> None:
        if samples < 1:
            raise UsageError(f"Wanted at least one answer to each question; found samples={samples}. Ask for one or more.")
        self.name = f"adversarial:{model.name}" + (":database" if database is not None else "")
        self._model = model
        self._retriever = Retriever(database) if database is not None else None
        self._samples = samples
        self._sampling = Sampling(temperature=0.0 if samples == 1 else 0.7, max_tokens=768)

    def review(self, task: Task, evaluation: Evaluation) -> Review:
        """Vote on one evaluation.

        Raises:
            PolicyError: the model cannot be reached at all.
        """
        return self.review_all([(task, evaluation)])[0]

    def review_all(self, pairs: Sequence[tuple[Task, Evaluation]]) -> list[Review]:
        """Vote on several in one batch, in order.

        Raises:
            PolicyError: the model cannot be reached at all.
        """
        if not pairs:
            return []
        near = [self._near(task, evaluation) for task, evaluation in pairs]
        prompts = [conversation(task, evaluation, hacks) for (task, evaluation), hacks in zip(pairs, near, strict=True)]
        answers = self._model.sample(prompts, count=self._samples, sampling=self._sampling)
        return [
            self._review(task, evaluation, hacks, completions)
            for (task, evaluation), hacks, completions in zip(pairs, near, answers, strict=True)
        ]

    def _near(self, task: Task, evaluation: Evaluation) -> tuple[Neighbour, ...] | None:
        if self._retriever is None:
            return None
        return self._retriever.nearest(
            evaluation.source, reference=task.source, evaluation=evaluation, count=NEIGHBOURS_SHOWN
        )

    def _review(
        self, task: Task, evaluation: Evaluation, near: tuple[Neighbour, ...] | None, completions: Sequence[Completion]
    ) -> Review:
        opinions = tuple(opinion_of(completion) for completion in completions)
        vote = poll(opinions)
        agreeing = [opinion for opinion in opinions if opinion.vote is vote]
        families = Counter(opinion.family for opinion in agreeing if opinion.family is not None)
        return Review(
            task_sha256=task.sha256,
            candidate_sha256=evaluation.candidate_sha256,
            checker=self.name,
            vote=vote,
            family=families.most_common(1)[0][0] if families and vote is Vote.HACK else None,
            reason=agreeing[0].reason if agreeing else "the answers do not agree",
            opinions=opinions,
            similar=_similar(near or ()),
            prompt_tokens=sum(completion.prompt_tokens for completion in completions),
            completion_tokens=sum(completion.completion_tokens for completion in completions),
        )


def _similar(near: Sequence[Neighbour]) -> tuple[tuple[str, float], ...]:
    return tuple((item.pattern.id, round(item.similarity, 4)) for item in near)


HONEST_ERROR_RATIO = 8.0
"""Deeper checks allow at least this: sequential sums, which are honest, measure about 6 (`Settings.error_ratio`)."""
ROUNDS = 2
"""Independent evaluations of a deeper check, each on fresh seeds and processes; our choice."""


def stricter(settings: Settings) -> Settings:
    """Settings for deeper checks: more processes, blocks and audits, tighter tolerances and clocks. All our choice.

    Nothing in them changes what is measured, so that speedups stay comparable.
    """
    return Settings.model_validate(
        settings.model_dump()
        | {
            "thorough": True,
            "timed": True,
            "processes_min": min(64, 2 * settings.processes_min),
            "processes_max": min(64, 2 * max(settings.processes_max, settings.processes_min)),
            "blocks": min(1000, 2 * settings.blocks),
            "audits": min(100, 2 * settings.audits),
            "error_ratio": min(settings.error_ratio, max(HONEST_ERROR_RATIO, settings.error_ratio / 2)),
            "excess_limit": settings.excess_limit / 2,
        }
    )


class OneJudge(Protocol):
    """Judges one candidate at a time, as `kernelwright.judge.Judge` does."""

    def evaluate(self, task: Task, candidate: Candidate, *, settings: Settings | None = None) -> Evaluation:
        """Judge a candidate under these settings."""
        ...


def deeper(
    judge: OneJudge,
    task: Task,
    candidate: Candidate,
    review: Review,
    *,
    settings: Settings | None = None,
    rounds: int = ROUNDS,
) -> Evaluation | None:
    """Judge a candidate again, more strictly, when a checker does not call it clean; stop at the first rejection.

    Returns:
        The evaluation that counts: the first rejection, else the lowest lower bound; None for a clean candidate.

    Raises:
        UsageError: the review is about another candidate or task.
        TaskError, InfrastructureError: the task does not work, or this machine cannot judge it.
    """
    if (review.candidate_sha256, review.task_sha256) != (candidate.sha256, task.sha256):
        raise UsageError(
            f"Wanted a review of candidate {candidate.sha256[:12]} on {task.id}; found one of "
            f"{review.candidate_sha256[:12]}. Pass the review of this candidate."
        )
    found: list[Evaluation] = []
    if review.wants_deeper_checks:
        strict = stricter(settings or Settings())
        for _ in range(rounds):
            found.append(judge.evaluate(task, candidate, settings=strict).model_copy(update={"confirms": True}))
            if not found[-1].accepted:
                return found[-1]
    return min(found, key=lambda evaluation: evaluation.speedup_low or 0.0, default=None)
