"""What a model is asked: the task, what was tried before with its scores, how to answer, and the judge's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernelwright.errors import UsageError
from kernelwright.policies.chat import Message
from kernelwright.records import Task
from kernelwright.rl.exemplars import Exemplar

PROMPT_LIMIT_CHARACTERS = 40_000
"""Of all messages together; about 10,000 tokens of code. Our choice."""


class PromptTooLongError(UsageError):
    """The task alone, with no exemplar, does not fit."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to be answered."""

    messages: tuple[Message, ...]
    shown: tuple[Exemplar, ...]
    """The exemplars in it, worst first; fewer than were given where they did not fit."""


def contrastive_prompt(
    task: Task,
    exemplars: Sequence[Exemplar],
    *,
    device: str,
    hardware: str = "",
    limit_characters: int = PROMPT_LIMIT_CHARACTERS,
) -> Prompt:
    """Ask for a better implementation, given earlier ones with their scores.

    Args:
        task: What to speed up.
        exemplars: What to show; shown worst first. Where they do not fit, those with the lowest scores are left out.
        device: `cpu`, `cuda` or `cuda:N`.
        hardware: The device's name for people, such as `NVIDIA H200`.
        limit_characters: Of all messages together.

    Raises:
        PromptTooLongError: it does not fit even without exemplars.
    """
    raise NotImplementedError


def plain_prompt(
    task: Task, *, device: str, hardware: str = "", limit_characters: int = PROMPT_LIMIT_CHARACTERS
) -> Prompt:
    """The same request without exemplars: of supervised training, and of vanilla GRPO."""
    return contrastive_prompt(task, (), device=device, hardware=hardware, limit_characters=limit_characters)
