"""Draws answers from the model in training, and turns them into rewards: parse, judge, smooth, keep exemplars, record.

A drawn batch is on disk before it is judged. A suspicious speedup is measured again.
"""

from __future__ import annotations

import ast
import gc
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelwright.contrastive.context import StageContext
from kernelwright.contrastive.evaluations import (
    COMPILE,
    Proposal,
    is_suspicious,
    reverify,
    settled,
)
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.families import CHEATING
from kernelwright.contrastive.hacks import HackChecker, HackDatabase, deeper
from kernelwright.contrastive.metrics import rollout_metrics
from kernelwright.contrastive.prompts import Prompt
from kernelwright.contrastive.samples import (
    Key,
    Origin,
    Rollout,
    RolloutLog,
    Sample,
    TokenizedSample,
    read_drawn,
    write_drawn,
)
from kernelwright.contrastive.settings import RewardSection, SamplingSection
from kernelwright.errors import KernelwrightError
from kernelwright.execution.work import Evaluate, Executor, run_all
from kernelwright.judge import Settings
from kernelwright.models.chat import ChatModel, Completion
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.rewards import reward_named


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """An executor as one judge."""

    executor: Executor

    def evaluate(self, task: Task, candidate: Candidate, *, settings: Settings | None = None) -> Evaluation:
        """Judge one candidate; raises what kept it from being judged."""
        *_, result = run_all(self.executor, [Evaluate(task, candidate, settings)])
        if isinstance(result.outcome, KernelwrightError):
            raise result.outcome
        assert isinstance(result.outcome, Evaluation)
        return result.outcome


class Scorer:
    """Scores the samples of one run: each step of `score` fills in fields of its samples.

    Args:
        context: Judges, and what looks at suspicious candidates again.
        run: Takes evaluations, estimates, rollouts and cheats.
        origin: Stage, model and sampling of the answers.
        section: Reward, smoothing, second looks and estimates.
        exemplars: Takes judged candidates, to be shown in later prompts.
        timed: False checks candidates without timing them.
    """

    def __init__(
        self,
        context: StageContext,
        run: RunDirectory,
        origin: Origin,
        section: RewardSection,
        exemplars: ExemplarDatabase | None = None,
        *,
        timed: bool = True,
    ) -> None:
        self.store = context.store(run, timed=timed)
        self.smoother = RewardSmoother() if section.smoothing else None
        """Normalises rewards; None leaves them as they are."""
        self.baselines = context.baselines(run) if section.baseline == "best" else None
        """Best baselines, which rewards are ratios to; None for the reference."""
        self._compiled = context.baselines(run, COMPILE) if section.name == "milestone" else None
        self._reward = reward_named(
            section.name,
            floor=section.floor,
            baselines=self.ratios,
            compile_speedups=None if self._compiled is None else self._compiled.speedups,
        )
        self._context, self._origin, self._section, self._exemplars = context, origin, section, exemplars
        self._estimator = context.estimator(section, self.store)
        self._log = RolloutLog(run.path)
        self._logged = {_identity(rollout) for rollout in self._log.rollouts()}
        self._trusted: set[Key] = set()
        self._hacks: HackDatabase | None = None

    @property
    def ratios(self) -> Mapping[str, float]:
        """Speedup of the best baseline by the task's hash; empty where the reference is the baseline."""
        return self.baselines.speedups if self.baselines is not None else {}

    def measure_baselines(self, tasks: Sequence[Task]) -> bool:
        """Measure what the reward compares with; False where the time was up."""
        wanted = [baselines for baselines in (self.baselines, self._compiled) if baselines is not None]
        return all([baselines.measure(tasks, self._context.deadline) for baselines in wanted])

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Start what will score answers to these tasks, which may load while a model writes them."""
        if self._estimator is not None:
            self._estimator.prepare(tasks)

    def score(self, samples: Sequence[Sample]) -> None:
        """Score a batch of answers; the same candidate gets the same reward each time.

        Raises:
            InfrastructureError: most of the batch could not be judged.
        """
        for sample in samples:
            sample.parse(self._origin.form, self._origin.model)
        self._judge(samples)
        self._set_rewards(samples)
        self._record(samples)

    def _judge(self, samples: Sequence[Sample]) -> None:
        """Set evaluations, those of second looks where the first were doubted, and estimates of those that are let off."""
        proposals = {
            sample.key: Proposal(sample.task, sample.candidate)
            for sample in samples
            if sample.candidate is not None and sample.key is not None
        }
        best = {proposal.task.sha256: self.store.best(proposal.task) for proposal in proposals.values()}
        estimates = {} if self._estimator is None else self._estimator.estimate(list(proposals.values()), best)
        first = self.store.judge(proposal for key, proposal in proposals.items() if key not in estimates)
        counted = self._looked_at_again(proposals, first, best)
        if self._exemplars is not None:
            self._exemplars.add_all(counted.values())
        self._note_hacks(counted.values())
        for sample in samples:
            if sample.key is not None:
                sample.evaluation, sample.estimate = counted.get(sample.key), estimates.get(sample.key)

    def _looked_at_again(
        self, proposals: Mapping[Key, Proposal], first: Mapping[Key, Evaluation], best: Mapping[str, float | None]
    ) -> dict[Key, Evaluation]:
        """Evaluations that count, by candidate: the first or, where that was doubted, the outcome of a second look."""
        confirmed = self.store.confirmed
        counted = {key: settled(found, confirmed[key]) if key in confirmed else found for key, found in first.items()}
        verifier = self._context.judging.verifier
        if verifier is None or not self._section.reverify:
            return counted
        fresh = [key for key in first if key not in self._trusted and key not in confirmed]
        limits = {"above": self._section.suspicious_speedup, "leap": self._section.suspicious_leap}
        doubtful = [key for key in fresh if is_suspicious(first[key], best[key[0]], **limits)]
        for key, second in zip(
            doubtful, reverify([(proposals[key].task, first[key]) for key in doubtful], verifier), strict=True
        ):
            self.store.add(second)
            counted[key] = settled(first[key], second)
        left = {key: counted[key] for key in doubtful if counted[key].is_improvement}
        checker = self._context.judging.checker
        if checker is not None and left:
            counted |= self._checked(checker, verifier, proposals, left)
        self._trusted |= set(fresh)
        return counted

    def _checked(
        self, checker: HackChecker, executor: Executor, proposals: Mapping[Key, Proposal], left: Mapping[Key, Evaluation]
    ) -> dict[Key, Evaluation]:
        """The deciding evaluations of candidates that the checker does not call clean."""
        reviews = checker.review_all([(proposals[key].task, evaluation) for key, evaluation in left.items()])
        deciding: dict[Key, Evaluation] = {}
        for key, review in zip(left, reviews, strict=True):
            task, candidate = proposals[key].task, proposals[key].candidate
            stricter = deeper(_OneByOne(executor), task, candidate, review, settings=self._context.judging.rewards.settings)
            if stricter is not None:
                self.store.add(stricter)
                deciding[key] = stricter
        return deciding

    def _note_hacks(self, evaluations: Iterable[Evaluation]) -> None:
        """Keep what the judge caught cheating in `hacks.jsonl`, for a later run's checker to know."""
        for evaluation in evaluations:
            reason = evaluation.reason
            if reason is not None and reason in CHEATING and evaluation.source:
                if self._hacks is None:
                    self._hacks = HackDatabase.packaged(self.store.run.path / "hacks.jsonl")
                name = f"{reason} on {evaluation.task}"
                self._hacks.add_confirmed(evaluation, CHEATING[reason], name=name, what=evaluation.detail or str(reason))

    def _set_rewards(self, samples: Sequence[Sample]) -> None:
        """Set scores by the named reward, and from them the rewards that training maximises."""
        for sample in samples:
            sample.is_copy = is_copy(sample)
            if sample.estimate is not None:
                sample.score = self._reward.estimated(sample.estimate)
            elif sample.candidate is None or sample.evaluation is not None:
                sample.score = self._reward(sample.evaluation)
            # Any other candidate met a fault of the machine: it earns nothing, neither good nor bad.
            worthless = sample.score is not None and sample.is_copy and self._section.copies == "floor"
            sample.reward = self._reward.floor if worthless else sample.score
        rewarded = [(sample, sample.reward) for sample in samples if sample.reward is not None]
        if self.smoother is not None and rewarded:
            smoothed = self.smoother.smooth([reward for _, reward in rewarded])
            for (sample, _), value in zip(rewarded, smoothed, strict=True):
                sample.reward = value

    def _record(self, samples: Sequence[Sample]) -> None:
        """Set rollouts, and append those that are not there yet: a batch may be scored again after a kill."""
        for sample in samples:
            rollout = Rollout.of(sample, self._origin, smoothed=sample.reward if self.smoother is not None else None)
            if self.baselines is not None:
                name, speedup = self.baselines.best(sample.task.sha256)
                rollout = rollout.model_copy(update={"baseline": name, "baseline_speedup": speedup})
            sample.rollout = rollout
        rollouts = [sample.rollout for sample in samples if sample.rollout is not None]
        new = [rollout for rollout in rollouts if _identity(rollout) not in self._logged]
        self._logged |= {_identity(rollout) for rollout in new}
        self._log.append(new)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Metrics of a batch that was scored."""
        first = {(found.task_sha256, found.candidate_sha256): found for found in self.store.evaluations()}
        values = rollout_metrics([sample.rollout for sample in samples if sample.rollout is not None], first)
        if self._estimator is not None:
            values |= self._estimator.metrics(sample.key or (sample.task.sha256, "") for sample in samples)
        return values


def is_copy(sample: Sample) -> bool:
    """True when an answer's candidate is one of those that its prompt showed, but for comments and layout."""
    if sample.candidate is None or not sample.prompt.shown:
        return False
    structure = _structure(sample.candidate.source)
    return any(_structure(shown.source) == structure for shown in sample.prompt.shown)


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

    Until the first `UPDATE_EVERY` rewards have been seen the statistics follow every batch: there is nothing better yet.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.deviation = 1.0
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._updated_at = 0

    def smooth(self, rewards: Sequence[float]) -> list[float]:
        """Take note of a batch and return it normalised; all of a batch by the same statistics, so its order stays."""
        self._latest.extend(rewards)
        self._seen += len(rewards)
        due = self._seen <= UPDATE_EVERY or self._seen - self._updated_at >= UPDATE_EVERY
        if due and self._latest:
            self.mean = statistics.fmean(self._latest)
            self.deviation = max(LEAST_DEVIATION, statistics.pstdev(self._latest))
            self._updated_at = self._seen
        return [max(-CLIP, min(CLIP, (reward - self.mean) / self.deviation)) for reward in rewards]

    def state(self) -> dict[str, Any]:
        """Everything needed to go on later, as JSON."""
        return {
            "mean": self.mean,
            "deviation": self.deviation,
            "latest": list(self._latest),
            "seen": self._seen,
            "updated_at": self._updated_at,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RewardSmoother:
        """The smoother that `state` was taken from."""
        smoother = cls()
        smoother.mean, smoother.deviation = state["mean"], state["deviation"]
        smoother._latest.extend(state["latest"])
        smoother._seen, smoother._updated_at = state["seen"], state["updated_at"]
        return smoother


Asked = Sequence[tuple[Task, Prompt]]
"""Tasks and the prompts to answer for them."""


def draw_once(
    path: Path, model: ChatModel, asked: Asked, count: int, section: SamplingSection, *, step: int, seed: int
) -> list[Sample]:
    """`count` answers to each prompt, kept at `path`; drawn and kept first when there are none yet."""
    if not path.exists():
        write_drawn(path, draw(model, asked, count, section, step=step, seed=seed))
    return read_drawn(path)


def draw(model: ChatModel, asked: Asked, count: int, section: SamplingSection, *, step: int, seed: int) -> list[Sample]:
    """Answer each prompt `count` times."""
    samples: list[Sample] = []
    at_once = max(1, section.batch // count)
    for start in range(0, len(asked), at_once):
        part = asked[start : start + at_once]
        sampling = section.of(seed * 1_000_003 + step * 1_009 + start)
        answers = model.sample([prompt.messages for _, prompt in part], count=count, sampling=sampling)
        samples += [
            Sample(task=task, prompt=prompt, completion=completion, step=step, sample=number)
            for (task, prompt), completions in zip(part, answers, strict=True)
            for number, completion in enumerate(completions)
        ]
    free_memory()
    return samples


def free_memory() -> None:
    """Give back what sampling held, since the judges' workers need the same GPU next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class TokenSampler:
    """Samples groups of answers by the weights as they are at each call; an answer includes the token that ended it."""

    def __init__(self, model: Any, tokenizer: Any, section: SamplingSection, seed: int) -> None:
        # Imported only now: judging teachers' answers needs no transformers.
        from kernelwright.models.local import LocalModel, LocalSettings
        from kernelwright.models.pretrained import stop_ids

        settings = LocalSettings(batch_size=section.batch)
        self.ends = frozenset(stop_ids(model, tokenizer))
        self._local = LocalModel(model, tokenizer, settings=settings)
        self._model = model
        self._tokenizer = tokenizer
        self._section = section
        self._seed = seed

    def sample(self, asked: Asked, count: int, step: int) -> list[Sample]:
        """Answer each prompt `count` times; answers to one prompt follow each other."""
        prompts = [self._local.prompt_ids(prompt.messages) for _, prompt in asked]
        seed = self._seed * 1_000_003 + step
        answers = self._sampled(prompts, count, seed)
        free_memory()
        samples = []
        for number, answer in enumerate(answers):
            task, prompt = asked[number // count]
            completion = Completion(
                text=self._tokenizer.decode(answer, skip_special_tokens=True),
                prompt_tokens=0,
                completion_tokens=len(answer),
                finish_reason="stop" if answer[-1] in self.ends else "length",
            )
            tokens = TokenizedSample(prompts[number // count], answer)
            samples.append(
                Sample(task=task, prompt=prompt, completion=completion, step=step, sample=number % count, tokens=tokens)
            )
        return samples

    def _sampled(self, asked: Sequence[list[int]], count: int, seed: int) -> list[list[int]]:
        # A prompt that leaves no room has no answer; a lone end token stands for it and earns the floor.
        answers = [[int(self._tokenizer.eos_token_id)]] * (len(asked) * count)
        for group, number, found in self._local.sample_ids(asked, count=count, sampling=self._section.of(seed)):
            # A model may end turns with another token than its tokenizer's end of sequence: what was sampled is kept.
            if found is not None and found.tokens:
                answers[group * count + number] = found.tokens if found.end is None else [*found.tokens, found.end]
        return answers
