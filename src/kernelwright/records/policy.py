"""Defines a policy: it proposes candidates for a task, given the evaluations so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kernelwright.records import Candidate, Evaluation, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything a policy may base its proposals on."""

    task: Task
    device: str
    """Device of the candidates: `cpu`, `cuda` or `cuda:N`."""
    history: tuple[Evaluation, ...]
    """Finished evaluations of this task, oldest first."""
    seed: int


class Policy(Protocol):
    """Proposes candidates.

    Proposals are a function of the context alone, so that a run that was killed can be resumed, and never
    contain a candidate whose hash is already in the history.
    """

    name: str

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """At most `count` new candidates; an empty list means that there is nothing more to try."""
        ...
