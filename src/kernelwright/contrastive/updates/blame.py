"""What a failed answer is to blame for: where it differs from right ones.

A policy gradient pushes a failed answer's tokens down, each by what the model is in doubt of, one minus its probability.
Failed answers are those of which the model is less sure, even of the form that they share with right ones; there it is
sure, so that those push up less than these push down. Token by token the form gives way until it turns over: in one run all
of 15 CUDA graphs ended rightly, and after three updates none of 25 did, by one word that no sampled answer had ever held
(docs/training.md). Lines that right answers hold are not what made an answer fail, so they are left out of what it learns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from kernelwright.contrastive.rollouts import Rollout
from kernelwright.records import Verdict

SHARED_BY = 3
"""Of so many tasks a right answer must hold a line before it counts as right for every task; for its own task one will do. A
line that is right for one task may be what is wrong for the next. Our choice."""


class SharedLines:
    """Lines of right answers, and for which tasks they were right."""

    def __init__(self) -> None:
        self._tasks: defaultdict[str, set[str]] = defaultdict(set)

    def learn(self, task: str, answer: str) -> None:
        """Take note of a right answer's lines; `task` is what tells tasks apart, such as a hash."""
        for line in answer.split("\n"):
            self._tasks[line].add(task)

    def learn_from(self, rollouts: Iterable[Rollout]) -> None:
        """Take note of those of rollouts that were accepted."""
        for rollout in rollouts:
            if rollout.verdict is Verdict.ACCEPTED:
                self.learn(rollout.task_sha256, rollout.completion)

    def holds(self, task: str, line: str) -> bool:
        """Whether the line is known to be right, for this task or for any."""
        tasks = self._tasks.get(line, set())
        return task in tasks or len(tasks) >= SHARED_BY

    def blamed(self, task: str, tokens: Sequence[str]) -> list[bool]:
        """Of each token of a failed answer, given as text, whether its line is not known to be right.

        A token belongs to the line in which it begins, and a line's end to the line.
        """
        lines = "".join(tokens).split("\n")
        known = [self.holds(task, line) for line in lines]
        return [not known[number] for number in _line_numbers(tokens)]


def _line_numbers(tokens: Sequence[str]) -> Iterator[int]:
    number = 0
    for token in tokens:
        yield number
        number += token.count("\n")
