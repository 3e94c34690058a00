"""Defines a policy: it proposes candidates for a task, given the evaluations so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.screened import Screened


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything a policy may base its proposals on."""

    task: Task
    device: str
    """Device of the candidates: `cpu`, `cuda` or `cuda:N`."""
    history: tuple[Evaluation, ...]
    """Finished evaluations of this task, oldest first."""
    seed: int
    screened: tuple[Screened, ...] = ()
    """Estimates of candidates of this task, oldest first; most of these are never judged."""

    @property
    def seen(self) -> set[str]:
        """Hashes of all candidates that were looked at."""
        return {found.candidate_sha256 for found in self.history} | {found.candidate_sha256 for found in self.screened}


Look = Literal["screened", "judged"]
"""Source from which a policy learns: estimates of all its proposals, of which the judge sees the best few, or verdicts on
each."""


def look_of(policy: Policy) -> Look:
    """The look that a policy asks for by its attribute `look`; by default verdicts."""
    return getattr(policy, "look", "judged")


class Policy(Protocol):
    """Proposes candidates.

    Proposals are a function of the context alone, so that a run that was killed can be resumed, and never
    contain a candidate whose hash is already in the history or among those screened.
    """

    name: str

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """At most `count` new candidates; an empty list means that there is nothing more to try."""
        ...
