"""Rollouts on disk: every answer of a model with what it was asked and what became of it, one JSON line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kernelwright.policies.chat import Message
from kernelwright.records import Evaluation, Reason, Verdict
from kernelwright.rl.answers import AnswerFailure
from kernelwright.rl.rewards import Reward


class Rollout(BaseModel):
    """One answer of a model, and what the judge made of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    task_sha256: str
    stage: str
    """`search`, `sft`, `self-supervised` or `contrastive`."""
    step: int
    """Of the stage, from 0; of a search, the number of the prompt."""
    sample: int
    """Which answer to the prompt, from 0."""
    model: str
    """The model's name."""
    temperature: float
    prompt_sha256: str
    prompt: tuple[Message, ...] = ()
    exemplars: tuple[str, ...] = ()
    """Hashes of the candidates shown in the prompt."""
    completion: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"
    failure: AnswerFailure | None = None
    """Why the answer holds no candidate."""
    detail: str = ""
    candidate_sha256: str | None = None
    verdict: Verdict | None = None
    """None where it is not judged, or was judged by a search: then it is in `evaluations.jsonl`."""
    reason: Reason | None = None
    reward: float | None = None
    """As the named reward gives it."""
    smoothed: float | None = None
    """After the rolling normalisation."""
    started: str = ""
    """UTC, ISO 8601."""


class RolloutLog:
    """Appends to and reads `rollouts.jsonl` of a run directory; a torn last line is skipped.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "rollouts.jsonl"

    def append(self, rollouts: Iterable[Rollout]) -> None:
        """Write rollouts and wait until they are on disk. A prompt's text is kept once."""
        raise NotImplementedError

    def rollouts(self) -> Iterator[Rollout]:
        """Every whole record, in order of writing, prompts filled in."""
        raise NotImplementedError


def rescored(rollouts: Iterable[Rollout], evaluations: Iterable[Evaluation], reward: Reward) -> list[Rollout]:
    """Rollouts with verdict, reason and reward computed again from the recorded evaluations."""
    raise NotImplementedError
