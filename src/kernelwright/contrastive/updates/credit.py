"""Assigns credit to tokens: masks those of a failed answer that lie in lines which accepted answers share.

A policy gradient moves each token in proportion to 1 - p(token). The model is less sure of failed answers, also of the form
that they share with accepted ones, so that failed answers push that form down by more than accepted ones push it up. In one
run 15 of 15 CUDA graphs ended rightly, and after three updates none of 25 did, by one word that no sampled answer had ever
held (docs/training.md). Lines of accepted answers did not make an answer fail, so they are left out of what it teaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from kernelwright.contrastive.rollouts import Rollout
from kernelwright.records import Verdict

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
        """Whether the line is known to be right, for this task or for any."""
        tasks = self._tasks.get(line, set())
        return task in tasks or len(tasks) >= SHARED_BY

    def penalised(self, task: str, tokens: Sequence[str]) -> list[bool]:
        """Whether each token of a failed answer, given as text, is to be pushed down: its line is not known to be right.

        A token belongs to the line in which it begins, and a line's end to the line.
        """
        lines = "".join(tokens).split("\n")
        known = [self.holds(task, line) for line in lines]
        return [not known[number] for number in _line_numbers(tokens)]

    def token_advantages(
        self, rollouts: Sequence[Rollout], tokens: Sequence[Sequence[str]], advantages: torch.Tensor
    ) -> tuple[list[torch.Tensor], float]:
        """Learn from a batch, and spread its answers' advantages over tokens.

        `tokens` are the texts of each answer's tokens, empty for one that ends it. Returns the advantages of each token, 0
        where a failed answer shares the line, and the share of failed answers' tokens that are spared in this way.
        """
        self.learn_from(rollouts)
        spread = []
        failed = spared = 0
        for rollout, texts, advantage in zip(rollouts, tokens, advantages.tolist(), strict=True):
            pushed = [True] * len(texts)
            if rollout.verdict is not Verdict.ACCEPTED and advantage < 0:
                pushed = self.penalised(rollout.task_sha256, texts)
                failed += sum(map(bool, texts))
                spared += sum(bool(text) and not down for text, down in zip(texts, pushed, strict=True))
            spread.append(torch.tensor([advantage if push else 0.0 for push in pushed]))
        return spread, spared / failed if failed else 0.0


def _line_numbers(tokens: Sequence[str]) -> Iterator[int]:
    number = 0
    for token in tokens:
        yield number
        number += token.count("\n")
