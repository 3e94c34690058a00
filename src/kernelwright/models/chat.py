"""Defines a language model for the rest of the package: something that answers conversations.

Endpoints (`api.py`) and models in this process (`local.py`) implement `ChatModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of drawing answers."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 4096
    """Longest answer, in tokens."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. A failed one is data too: `text` is what had arrived."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str = "stop"
    """`stop`, `length` (cut at `max_tokens`) or the provider's own word."""
    failure: str | None = None
    """Reason why there is no whole answer, such as `stream-cut`; None when there is one."""


class ChatModel(Protocol):
    """A language model."""

    name: str
    """Name in records, such as `api:deepseek-chat` or `local:Qwen2.5-Coder-1.5B`."""

    def sample(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> list[list[Completion]]:
        """Answer each conversation `count` times; the result has one list for each prompt, in order.

        Raises:
            PolicyError: the model cannot be reached or loaded, or refuses all work (a bad key, no such model). A single
                answer that fails is a `Completion` with its `failure`.
        """
        ...
