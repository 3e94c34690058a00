"""Turns answers into rewards: parse, judge, measure the suspicious again, smooth, keep exemplars, record every rollout."""

from __future__ import annotations

import ast
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kernelwright.contrastive.evaluations import (
    SUSPICIOUS_LEAP,
    SUSPICIOUS_SPEEDUP,
    BestBaselines,
    Estimator,
    JudgedRun,
    Key,
    Proposal,
    Reverification,
    is_suspicious,
    reverify,
)
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.hacks import HackChecker, HackDatabase, deeper
from kernelwright.contrastive.metrics import CHEATING, rollout_metrics
from kernelwright.contrastive.prompts import AnswerForm, Prompt
from kernelwright.contrastive.samples import Rollout, RolloutLog
from kernelwright.execution.evaluator import Evaluator
from kernelwright.judge import Settings
from kernelwright.models.chat import Completion, Sampling
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.rewards import Reward
from kernelwright.records.screened import Screened


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One answer to be scored, and where it belongs."""

    task: Task
    prompt: Prompt
    completion: Completion
    step: int
    sample: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored attempt."""

    attempt: Attempt
    rollout: Rollout
    evaluation: Evaluation | None
    """None for an answer without a candidate, and for one that was not or could not be judged."""
    reward: float | None
    """Value that training maximises; None for what could not be judged, which must not count either way."""
    copied: bool = False
    """Whether the candidate is one of those that the prompt showed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The second look at suspicious candidates."""

    pools: Mapping[str, Evaluator]
    """One for each device, by its name."""
    checker: HackChecker | None = None
    """Reads suspicious improvements that stood a second measurement; its vote leads to deeper checks, which decide."""
    settings: Settings | None = None
    """Settings of the run's judges: deeper checks are stricter than these."""
    above: float = SUSPICIOUS_SPEEDUP
    """Speedups above it are looked at again,"""
    leap: float = SUSPICIOUS_LEAP
    """and those that are so many times the best so far."""


class Scorer:
    """Scores the answers of one run.

    Args:
        stage, model, sampling: As rollouts name them.
        database: Takes judged candidates, to be shown in later prompts.
        smoother: Normalises rewards; None leaves them as they are.
        copies: Reward of an answer that repeats an exemplar of its prompt: its `score`, or the reward's `floor`. The
            rollout's own `reward` is its score either way.
        verification: For candidates too good to be believed at once; None believes the judge's first word.
        estimator: Lets estimates stand for a share of the verdicts; None has every candidate judged.
        baselines: Those that the reward is a ratio to, for the record; None for the reference.
    """

    def __init__(
        self,
        judged: JudgedRun,
        reward: Reward,
        *,
        form: AnswerForm,
        stage: str,
        model: str,
        sampling: Sampling,
        database: ExemplarDatabase | None = None,
        smoother: RewardSmoother | None = None,
        copies: Literal["score", "floor"] = "score",
        verification: Verification | None = None,
        estimator: Estimator | None = None,
        baselines: BestBaselines | None = None,
    ) -> None:
        self.judged = judged
        self._estimator = estimator
        self._baselines = baselines
        self.smoother = smoother
        self._reward = reward
        self._form = form
        self._stage = stage
        self._model = model
        self._sampling = sampling
        self._database = database
        self._copies = copies
        self._verification = verification
        self._log = RolloutLog(judged.run.path)
        self._logged = {_identity(rollout) for rollout in self._log.rollouts()}
        self._trusted: set[Key] = set()
        self._hacks = HackDatabase.packaged(judged.run.path / "hacks.jsonl")

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Start what will score answers to these tasks, which may load while a model writes them."""
        if self._estimator is not None:
            self._estimator.prepare(tasks)

    def score(self, attempts: Sequence[Attempt]) -> list[Scored]:
        """Score a batch of answers; the same candidate gets the same reward each time.

        Raises:
            InfrastructureError: most of the batch could not be judged.
        """
        rollouts = [self._rollout(attempt) for attempt in attempts]
        proposals = [self._proposal(attempt, rollout) for attempt, rollout in zip(attempts, rollouts, strict=True)]
        given = [proposal for proposal in proposals if proposal is not None]
        best = {proposal.task.sha256: self._best(proposal.task) for proposal in given}
        estimates = {} if self._estimator is None else self._estimator.estimate(given, best)
        found = self.judged.judge([proposal for proposal in given if proposal.key not in estimates])
        settled = self._settle({proposal.key: proposal for proposal in given}, found, best)
        if self._database is not None:
            self._database.add_all(settled.values())
        self._note_hacks(settled.values())
        evaluations = [settled.get(proposal.key) if proposal is not None else None for proposal in proposals]
        guessed = [None if proposal is None else estimates.get(proposal.key) for proposal in proposals]
        # A candidate without an evaluation met a fault of the machine: it earns nothing, neither good nor bad.
        plain = [
            None if proposal is not None and evaluation is None and guess is None else self._reward_of(evaluation, guess)
            for proposal, evaluation, guess in zip(proposals, evaluations, guessed, strict=True)
        ]
        copied = [is_copy(attempt, proposal) for attempt, proposal in zip(attempts, proposals, strict=True)]
        smoothed = self._smoothed(
            [
                self._reward.floor if reward is not None and self._copies == "floor" and copy else reward
                for reward, copy in zip(plain, copied, strict=True)
            ]
        )
        scored = []
        for attempt, rollout, evaluation, guess, raw, value, copy in zip(
            attempts, rollouts, evaluations, guessed, plain, smoothed, copied, strict=True
        ):
            shown = value if self.smoother else None
            if guess is not None:
                kept = rollout.screened(guess, self._reward, shown)
            else:
                kept = rollout if raw is None else rollout.judged(evaluation, self._reward, shown)
            if self._baselines is not None:
                name, speedup = self._baselines.of(attempt.task.sha256)
                kept = kept.model_copy(update={"baseline": name, "baseline_speedup": speedup})
            scored.append(Scored(attempt, kept, evaluation, value, copy))
        self._write([item.rollout for item in scored])
        return scored

    def _reward_of(self, evaluation: Evaluation | None, guess: Screened | None) -> float:
        return self._reward(evaluation) if guess is None else self._reward.estimated(guess)

    def metrics(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Metrics of a batch that was scored."""
        found = {(each.task_sha256, each.candidate_sha256): each for each in self.judged.evaluations()}
        values = rollout_metrics([item.rollout for item in scored], found)
        if self._estimator is not None:
            rollouts = [item.rollout for item in scored]
            values |= self._estimator.metrics((one.task_sha256, one.candidate_sha256 or "") for one in rollouts)
        return values

    def _rollout(self, attempt: Attempt) -> Rollout:
        return Rollout.of(
            attempt.task,
            attempt.prompt,
            attempt.completion,
            stage=self._stage,
            step=attempt.step,
            sample=attempt.sample,
            model=self._model,
            sampling=self._sampling,
            form=self._form,
        )

    def _proposal(self, attempt: Attempt, rollout: Rollout) -> Proposal | None:
        source = rollout.source(attempt.task)
        if source is None:
            return None
        parent = rollout.exemplars[-1] if rollout.exemplars else None
        return Proposal(attempt.task, Candidate(source=source, policy=self._model, parent=parent))

    def _best(self, task: Task) -> float | None:
        """The highest speedup of a task that counts so far."""
        speedups = [found.speedup for found in self.judged.history(task) if found.accepted and found.speedup is not None]
        return max(speedups, default=None)

    def _settle(
        self, proposals: Mapping[Key, Proposal], found: Mapping[Key, Evaluation], best: Mapping[str, float | None]
    ) -> dict[Key, Evaluation]:
        """Evaluations that count, by candidate: the first or, where that was doubted, the outcome of a second look."""
        settled = dict(found)
        for key, evaluation in found.items():
            again = self.judged.confirmed.get(key)
            if again is not None:
                settled[key] = Reverification(proposals[key].task, evaluation, again).settled
        if self._verification is None:
            return settled
        fresh = [key for key in found if key not in self._trusted and key not in self.judged.confirmed]
        limits = {"above": self._verification.above, "leap": self._verification.leap}
        doubtful = [key for key in fresh if is_suspicious(found[key], best[key[0]], **limits)]
        for case in reverify([(proposals[key].task, found[key]) for key in doubtful], self._verification.pools):
            self.judged.keep(case.second)
            settled[case.first.task_sha256, case.first.candidate_sha256] = case.settled
        left = [key for key in doubtful if settled[key].is_improvement]
        for key, evaluation in self._checked([proposals[key] for key in left], [settled[key] for key in left]):
            self.judged.keep(evaluation)
            settled[key] = evaluation
        self._trusted |= set(fresh)
        return settled

    def _checked(self, proposals: Sequence[Proposal], evaluations: Sequence[Evaluation]) -> list[tuple[Key, Evaluation]]:
        """The deciding evaluations of candidates that the checker does not call clean."""
        verification = self._verification
        if verification is None or verification.checker is None or not proposals:
            return []
        pool = next(iter(verification.pools.values()))
        reviews = verification.checker.review_all(
            [(proposal.task, evaluation) for proposal, evaluation in zip(proposals, evaluations, strict=True)]
        )
        decided = []
        for proposal, review in zip(proposals, reviews, strict=True):
            deciding = deeper(pool, proposal.task, proposal.candidate, review, settings=verification.settings)
            if deciding is not None:
                decided.append((proposal.key, deciding))
        return decided

    def _note_hacks(self, evaluations: Iterable[Evaluation]) -> None:
        """Keep what the judge caught cheating in `hacks.jsonl`, for a later run's checker to know."""
        for evaluation in evaluations:
            reason = evaluation.reason
            if reason is not None and reason in CHEATING and evaluation.source:
                name = f"{reason} on {evaluation.task}"
                self._hacks.add_confirmed(evaluation, CHEATING[reason], name=name, what=evaluation.detail or str(reason))

    def _smoothed(self, rewards: Sequence[float | None]) -> list[float | None]:
        known = [reward for reward in rewards if reward is not None]
        if self.smoother is None or not known:
            return list(rewards)
        values = iter(self.smoother.smooth(known))
        return [None if reward is None else next(values) for reward in rewards]

    def _write(self, rollouts: Sequence[Rollout]) -> None:
        """Append what is not there yet: a batch that is scored again after a kill was written once."""
        new = [rollout for rollout in rollouts if _identity(rollout) not in self._logged]
        self._logged |= {_identity(rollout) for rollout in new}
        self._log.append(new)


def is_copy(attempt: Attempt, proposal: Proposal | None) -> bool:
    """Whether an answer's candidate is one of those that its prompt showed, but for comments and layout."""
    if proposal is None or not attempt.prompt.shown:
        return False
    said = _structure(proposal.candidate.source)
    return any(_structure(shown.source) == said for shown in attempt.prompt.shown)


def _structure(source: str) -> str:
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def _identity(rollout: Rollout) -> tuple[str, int, str, str, int, str]:
    return rollout.stage, rollout.step, rollout.model, rollout.prompt_sha256, rollout.sample, rollout.completion


CLIP = 1.5
"""k of CUDA-L1's equation 6."""

UPDATE_EVERY = 100
"""Rewards between updates of the statistics. CUDA-L1 says 100 iterations; that one is a reward is our reading."""

WINDOW = 1000
"""Latest rewards that the statistics are of. CUDA-L1 says "rolling"; our choice."""

LEAST_DEVIATION = 0.01
"""Rewards are rounded to hundredths, so a smaller spread is none. Our choice."""


class RewardSmoother:
    """clip((reward - mean) / deviation, -k, k) over the latest rewards, as in CUDA-L1 (section 3.2, equation 6).

    Until the first `update_every` rewards have been seen the statistics follow every batch: there is nothing better yet.
    `clip` is k; `window` is the number of latest rewards that count.
    """

    def __init__(self, *, clip: float = CLIP, update_every: int = UPDATE_EVERY, window: int = WINDOW) -> None:
        self.clip = clip
        self.update_every = update_every
        self.window = window
        self.mean = 0.0
        self.deviation = 1.0
        self._latest: deque[float] = deque(maxlen=window)
        self._seen = 0
        self._updated_at = 0

    def smooth(self, rewards: Sequence[float]) -> list[float]:
        """Take note of a batch and return it normalised; all of a batch by the same statistics, so its order stays."""
        self._latest.extend(rewards)
        self._seen += len(rewards)
        due = self._seen <= self.update_every or self._seen - self._updated_at >= self.update_every
        if due and self._latest:
            self.mean = statistics.fmean(self._latest)
            self.deviation = max(LEAST_DEVIATION, statistics.pstdev(self._latest))
            self._updated_at = self._seen
        return [max(-self.clip, min(self.clip, (reward - self.mean) / self.deviation)) for reward in rewards]

    def state(self) -> dict[str, Any]:
        """Everything needed to go on later, as JSON."""
        return {
            "clip": self.clip,
            "update_every": self.update_every,
            "window": self.window,
            "mean": self.mean,
            "deviation": self.deviation,
            "latest": list(self._latest),
            "seen": self._seen,
            "updated_at": self._updated_at,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RewardSmoother:
        """The smoother that `state` was taken from."""
        smoother = cls(clip=state["clip"], update_every=state["update_every"], window=state["window"])
        smoother.mean, smoother.deviation = state["mean"], state["deviation"]
        smoother._latest.extend(state["latest"])
        smoother._seen, smoother._updated_at = state["seen"], state["updated_at"]
        return smoother
