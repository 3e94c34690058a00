"""Defines a language model for the rest of the package: something that answers conversations.

An endpoint (`api.py`) and a model in this process (`local.py`) both are a `ChatModel`; prompts, exemplars and parsing are
not their business.
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
    """How answers are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 4096
    """Longest answer, in tokens."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, or what became of it. An answer that failed is data: `text` is what had arrived, `failure` says why."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str = "stop"
    """`stop`, `length` (cut at `max_tokens`) or the provider's own word."""
    failure: str | None = None
    """Why there is no whole answer, such as `stream-cut`; None when there is one."""


class ChatModel(Protocol):
    """A language model.

    Attributes:
        name: what records call it, such as `api:deepseek-chat` or `local:Qwen2.5-Coder-1.5B`.
    """

    name: str

    def sample(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> list[list[Completion]]:
        """Answer each conversation `count` times; the result has one list for each prompt, in order.

        Raises:
            PolicyError: the model cannot be reached or loaded, or refuses all work (a bad key, no such model). What
                goes wrong with a single answer is a `Completion` with its `failure`.
        """
        ...
