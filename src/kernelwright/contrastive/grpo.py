"""Optimises a policy relative to groups of answers (GRPO, paper 2.4.5, Eq. 4-5), on PyTorch alone.

A group is the answers to one prompt. An answer's advantage is its reward less the mean of its group; each token is pushed by
its answer's advantage within PPO's clip, and held to the reference model by a KL term.

A policy gradient moves each token in proportion to 1 - p(token). The model is less sure of failed answers, also of the form
that they share with accepted ones, so that failed answers push that form down by more than accepted ones push it up. In one
run 15 of 15 CUDA graphs ended rightly, and after three updates none of 25 did, by one word that no sampled answer had ever
held (docs/training.md). `AcceptedLines` leaves lines of accepted answers out of what a failed answer teaches.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from kernelwright.contrastive.fitting import Optimiser, TokenScores, token_scores, weights_swapped
from kernelwright.contrastive.samples import Rollout, Sample, TokenizedSample
from kernelwright.contrastive.settings import GrpoSection
from kernelwright.records import Verdict

LEAST_DEVIATION = 1e-4
"""Added to the deviation that advantages are divided by; TRL's value."""


def set_advantages(samples: Sequence[Sample], settings: GrpoSection) -> None:
    """Set the advantages of samples whose groups follow each other, the same for all tokens of an answer."""
    advantages = group_advantages(rewards_of(samples), settings.group_size, settings.scale_rewards)
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage
        sample.token_advantages = [advantage] * len(sample.tokenized.answer)


def rewards_of(samples: Sequence[Sample]) -> torch.Tensor:
    """Rewards of samples; NaN for what could not be judged."""
    return torch.tensor([math.nan if sample.reward is None else sample.reward for sample in samples])


def group_advantages(rewards: torch.Tensor, size: int, scale: Literal["group", "batch", "none"]) -> torch.Tensor:
    """Advantages of answers, from rewards in which groups of `size` follow each other.

    An answer whose reward is NaN could not be judged: it has no part in the mean, and no advantage.
    """
    groups = rewards.view(-1, size)
    advantages = groups - groups.nanmean(1, keepdim=True)
    if scale != "none":
        spread = deviation(groups) if scale == "group" else deviation(rewards[None])
        advantages = advantages / (spread + LEAST_DEVIATION)
    return advantages.flatten().nan_to_num(0.0)


def deviation(rows: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation of each row as a column, NaN left out."""
    squares = (rows - rows.nanmean(1, keepdim=True)).square()
    return (squares.nansum(1, keepdim=True) / ((~squares.isnan()).sum(1, keepdim=True) - 1)).sqrt()


def grpo_loss(
    scores: TokenScores,
    old: torch.Tensor,
    reference: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    settings: GrpoSection,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of each answer (Eq. 4: the mean over its tokens), and metrics.

    `old` are log-probabilities when the answers were sampled, `reference` those under the reference model (None leaves the
    KL term out). `mask` is 1 for tokens that count.
    """
    ratio = torch.exp(scores.logps - old)
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon)
    bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    losses = -torch.min(bounded * advantages, clipped * advantages)
    low, high = (bounded < 1 - settings.epsilon) & (advantages < 0), (bounded > 1 + settings.epsilon) & (advantages > 0)
    clips = {"low": low.float() * mask, "high": high.float() * mask}
    counts, total = mask.sum(-1).clamp(min=1.0), mask.sum().clamp(min=1.0)
    metrics = {f"clip_ratio/{name}_mean": float(found.sum() / total) for name, found in clips.items()}
    metrics["clip_ratio/region_mean"] = sum(metrics.values())
    metrics["clip_ratio/low_min"] = float((clips["low"].sum(-1) / counts).min())
    metrics["clip_ratio/high_max"] = float((clips["high"].sum(-1) / counts).max())
    metrics["entropy"] = float((scores.entropy * mask).sum() / total)
    if reference is not None:
        # Schulman's estimator, never negative. Times the ratio its gradient is that of the KL (DeepSeek-V3.2, 2512.02556).
        away = reference - scores.logps
        divergence = (away.exp() - away - 1) * ratio
        losses = losses + settings.beta * divergence
        metrics["kl"] = float((divergence.detach() * mask).sum() / total)
    return (losses * mask).sum(-1) / counts, metrics


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Answers that are on the device at once; tensors have the shape (answers, tokens) unless they say otherwise."""

    answers: Sequence[TokenizedSample]
    advantages: torch.Tensor
    counted: torch.Tensor
    """1 for answers that have a part in the loss, shape (answers,)."""
    old: torch.Tensor | None
    """Log-probabilities when they were sampled; None where they are updated once, from those."""
    reference: torch.Tensor | None
    """Log-probabilities under the reference model; None without a KL term."""


class PolicyGradient:
    """Updates a model from batches of samples; the model as it is now is the reference of the KL.

    `micro_batch` answers are on the device at once; the seed is that of the order in which answers are learnt.
    """

    def __init__(
        self, model: Any, optimiser: Optimiser, settings: GrpoSection, *, micro_batch: int, temperature: float, seed: int
    ) -> None:
        self._model = model
        self._optimiser = optimiser
        self._settings = settings
        self._micro_batch = micro_batch
        self._temperature = temperature
        self._seed = seed
        self._reference = [weight.detach().clone() for weight in optimiser.weights] if settings.beta else None

    def learn(self, samples: Sequence[Sample]) -> Iterator[dict[str, float]]:
        """Make all updates of one batch sampled from the model as it is now; yields the metrics of each."""
        self._model.train()
        order = list(range(len(samples)))
        random.Random(self._seed * 1_000_003 + self._optimiser.done).shuffle(order)
        minibatches = []
        for part in np.array_split(order, self._settings.minibatches):
            rows = [samples[row] for row in part]
            starts = range(0, len(rows), self._micro_batch)
            minibatches.append([self._prepared(rows[start : start + self._micro_batch]) for start in starts])
        for _ in range(self._settings.iterations):
            for minibatch in minibatches:
                yield self._update(minibatch)

    def _prepared(self, samples: Sequence[Sample]) -> MicroBatch:
        """Samples that are on the device together, with what the sampling and the reference model say of them."""
        answers = [sample.tokenized for sample in samples]
        old = reference = None
        with torch.no_grad():
            if self._settings.iterations * self._settings.minibatches > 1:
                old = token_scores(self._model, answers, self._temperature).logps
            if self._reference is not None:
                with weights_swapped(self._optimiser.weights, self._reference):
                    reference = token_scores(self._model, answers, self._temperature).logps
        advantages = [torch.tensor(sample.token_advantages) for sample in samples]
        counted = [float(sample.has_ended or not self._settings.mask_truncated) for sample in samples]
        return MicroBatch(
            answers,
            torch.nn.utils.rnn.pad_sequence(advantages, batch_first=True).to(self._model.device),
            torch.tensor(counted, device=self._model.device),
            old,
            reference,
        )

    def _update(self, minibatch: Sequence[MicroBatch]) -> dict[str, float]:
        """One gradient step: the mean loss over the answers of a minibatch."""
        size = sum(len(batch.answers) for batch in minibatch)
        metrics: list[Mapping[str, float]] = []
        for batch in minibatch:
            scores = token_scores(self._model, batch.answers, self._temperature)
            old = scores.logps.detach() if batch.old is None else batch.old
            mask = scores.mask * batch.counted[:, None]
            losses, values = grpo_loss(scores, old, batch.reference, batch.advantages, mask, self._settings)
            torch.autograd.backward(losses.sum() / size)
            metrics.append(values | {"loss": losses.detach().mean().item()})
        means = {name: float(np.mean([values[name] for values in metrics])) for name in metrics[0]}
        return means | self._optimiser.step()


def batch_metrics(samples: Sequence[Sample], group_size: int) -> dict[str, float]:
    """Metrics of a batch: lengths of the answers in tokens, and their rewards after smoothing."""
    lengths = np.array([len(sample.tokenized.answer) for sample in samples], dtype=float)
    ended = np.array([sample.has_ended for sample in samples])
    whole = lengths[ended] if ended.any() else np.zeros(1)
    values = {"completions/clipped_ratio": 1 - int(ended.sum()) / len(ended)}
    for name, counted in (("", lengths), ("terminated_", whole)):
        values |= {f"completions/{kind}_{name}length": float(getattr(np, kind)(counted)) for kind in ("mean", "min", "max")}
    rewards = rewards_of(samples)
    known = rewards[~rewards.isnan()]
    mean, spread = float(known.mean()), float(known.std())
    flat = deviation(rewards.view(-1, group_size)).isclose(torch.zeros(1)).float().mean()
    return values | {
        "reward": mean,
        "reward_std": spread,
        "rewards/judge/mean": mean,
        "rewards/judge/std": spread,
        "frac_reward_zero_std": float(flat),
    }


SHARED_BY = 3
"""Tasks whose accepted answers must hold a line before it is masked for every task; for its own task one answer will do. A
line that is right for one task may be what is wrong for the next. Our choice."""


class AcceptedLines:
    """Lines of accepted answers, and the tasks for which they were accepted."""

    def __init__(self) -> None:
        self._tasks: defaultdict[str, set[str]] = defaultdict(set)

    def learn(self, task: str, answer: str) -> None:
        """Add the lines of an accepted answer to the task with this hash."""
        for line in answer.split("\n"):
            self._tasks[line].add(task)

    def learn_from(self, rollouts: Iterable[Rollout]) -> None:
        """Add the lines of those rollouts that were accepted."""
        for rollout in rollouts:
            if rollout.verdict is Verdict.ACCEPTED:
                self.learn(rollout.task_sha256, rollout.completion)

    def holds(self, task: str, line: str) -> bool:
        """True when the line is known to be right, for this task or for any."""
        tasks = self._tasks.get(line, set())
        return task in tasks or len(tasks) >= SHARED_BY

    def penalised(self, task: str, tokens: Sequence[str]) -> list[bool]:
        """True for each token of a failed answer, given as text, that is to be pushed down: its line may be wrong.

        A token belongs to the line in which it begins, and a line's end to the line.
        """
        lines = "".join(tokens).split("\n")
        known = [self.holds(task, line) for line in lines]
        return [not known[number] for number in _line_numbers(tokens)]

    def spare(self, samples: Sequence[Sample], tokenizer: Any) -> float:
        """Learn from a batch, and set the advantages of tokens to 0 where a failed answer shares the line.

        Returns the share of failed answers' tokens that are spared in this way; the token that ends an answer has no text
        and does not count.
        """
        rollouts = [sample.rollout for sample in samples if sample.rollout is not None]
        self.learn_from(rollouts)
        failed = spared = 0
        for sample, rollout in zip(samples, rollouts, strict=True):
            if rollout.verdict is not Verdict.ACCEPTED and sample.advantage < 0:
                texts = [tokenizer.decode([token], skip_special_tokens=True) for token in sample.tokenized.answer]
                pushed = self.penalised(rollout.task_sha256, texts)
                failed += sum(map(bool, texts))
                spared += sum(bool(text) and not down for text, down in zip(texts, pushed, strict=True))
                sample.token_advantages = [sample.advantage if push else 0.0 for push in pushed]
        return spared / failed if failed else 0.0


def _line_numbers(tokens: Sequence[str]) -> Iterator[int]:
    number = 0
    for token in tokens:
        yield number
        number += token.count("\n")
