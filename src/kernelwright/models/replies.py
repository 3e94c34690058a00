"""A provider's reply, whole or streamed, read with no trust in its shape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernelwright.models.accounting import Prices, Usage
from kernelwright.models.answers import CompletionFailure, ModelAnswer
from kernelwright.models.chat import Completion

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Where servers put hidden reasoning: DeepSeek, Qwen and vLLM the first, OpenRouter and newer vLLM the second."""


@dataclass(slots=True)
class Choice:
    """One answer as far as it has arrived."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None

    def add(self, part: Any) -> None:
        """Take a message, or a piece of one."""
        self.text += _text(part, "content")
        self.reasoning += next((text for name in REASONING_FIELDS if (text := _text(part, name))), "")


@dataclass(slots=True)
class ApiReply:
    """The answers of one request."""

    wanted: int
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int | None = None
    cached_prompt_tokens: int = 0
    completion_tokens: int | None = None
    reasoning_tokens: int = 0
    cause: CompletionFailure | None = None
    """Why reading stopped early."""
    detail: str = ""
    """What is to be said of the cause."""

    @property
    def is_blank(self) -> bool:
        """Whether nothing at all arrived, though reading went to the end."""
        return not self.choices and self.prompt_tokens is None and self.cause is None

    @property
    def has_text(self) -> bool:
        """Whether anything of an answer arrived."""
        return any(choice.text or choice.reasoning for choice in self.choices.values())

    def cut(self, cause: CompletionFailure, detail: str = "") -> None:
        """Reading stopped early."""
        self.cause, self.detail = cause, detail

    def add_usage(self, usage: Any) -> None:
        """Take what the server says that it counted."""
        prompt, completion = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
        if prompt is None or completion is None:
            return
        self.prompt_tokens, self.completion_tokens = prompt, completion
        cached = _number(getattr(usage, "prompt_tokens_details", None), "cached_tokens")
        if cached is None:
            # DeepSeek's own word.
            cached = _number(usage, "prompt_cache_hit_tokens")
        self.cached_prompt_tokens = min(cached or 0, prompt)
        self.reasoning_tokens = _number(getattr(usage, "completion_tokens_details", None), "reasoning_tokens") or 0

    @property
    def usage(self) -> Usage:
        """The tokens of this request."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return Usage(unreported=1)
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            completion_tokens=self.completion_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )

    def answers(self, prompt: int, numbers: list[int], prices: Prices | None) -> list[ModelAnswer]:
        """One answer for each choice that arrived, the first numbers first; at least one, be it a failed one.

        A server counts the answers' tokens together: each gets a share by its length, and the first bears the prompt's
        price, which is charged once.
        """
        choices = [self.choices[index] for index in sorted(self.choices)][: len(numbers)] or [Choice()]
        shares = _shares(self.completion_tokens or 0, [len(choice.text) + len(choice.reasoning) for choice in choices])
        known = self.prompt_tokens is not None
        found = []
        for place, (choice, tokens) in enumerate(zip(choices, shares, strict=True)):
            cost = None
            if prices is not None and known:
                charged = (self.prompt_tokens or 0, self.cached_prompt_tokens) if place == 0 else (0, 0)
                cost = prices.cost(charged[0], tokens, charged[1])
            completion = Completion(
                text=choice.text,
                prompt_tokens=self.prompt_tokens or 0,
                completion_tokens=tokens,
                finish_reason=choice.finish_reason or "error",
                failure=self._failure(choice),
            )
            found.append(
                ModelAnswer(
                    prompt=prompt, number=numbers[place], completion=completion, reasoning=choice.reasoning, cost=cost
                )
            )
        return found

    def _failure(self, choice: Choice) -> str | None:
        if choice.finish_reason is None:
            if self.cause is not None:
                return f"{self.cause}: {self.detail}" if self.detail else self.cause
            return CompletionFailure.STREAM_CUT if choice.text or choice.reasoning else CompletionFailure.EMPTY_ANSWER
        if choice.finish_reason == "content_filter":
            return CompletionFailure.CONTENT_FILTER
        return None if choice.text.strip() else CompletionFailure.EMPTY_ANSWER


def read_stream(chunks: Any, reply: ApiReply, is_over: Callable[[], bool]) -> None:
    """Fill a reply from a stream of chunks, until it ends or `is_over` says so."""
    # A server that does not stream, or sends no JSON, leaves the SDK with something that is not a stream at all.
    if not hasattr(chunks, "close"):
        reply.cut(CompletionFailure.JUNK_ANSWER)
        return
    with contextlib.closing(chunks):
        for chunk in chunks:
            reply.add_usage(getattr(chunk, "usage", None))
            for place, choice in enumerate(_choices(chunk)):
                index = _number(choice, "index")
                found = reply.choices.setdefault(place if index is None else index, Choice())
                found.add(getattr(choice, "delta", None))
                found.finish_reason = _text(choice, "finish_reason") or found.finish_reason
            if is_over():
                reply.cut(CompletionFailure.TIMEOUT)
                return


def content_type(answer: Any) -> str:
    """The media type that came with a stream, such as `text/html`; empty where none was told."""
    headers = getattr(getattr(answer, "response", None), "headers", {})
    return str(headers.get("content-type", "")).partition(";")[0].strip().lower()


def read_whole(answer: Any, reply: ApiReply) -> None:
    """Fill a reply from one that came in one piece."""
    if isinstance(answer, str) or not hasattr(answer, "choices"):
        reply.cut(CompletionFailure.JUNK_ANSWER)
        return
    reply.add_usage(getattr(answer, "usage", None))
    for place, choice in enumerate(_choices(answer)):
        found = reply.choices.setdefault(place, Choice())
        found.add(getattr(choice, "message", None))
        found.finish_reason = _text(choice, "finish_reason") or None


def _choices(source: Any) -> list[Any]:
    found = getattr(source, "choices", None)
    return found if isinstance(found, list) else []


def _text(source: Any, name: str) -> str:
    found = getattr(source, name, None)
    return found if isinstance(found, str) else ""


def _number(source: Any, name: str) -> int | None:
    found = getattr(source, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


def _shares(total: int, weights: list[int]) -> list[int]:
    """A whole number split in proportion to weights; the parts sum up to it."""
    if not sum(weights):
        weights = [1] * len(weights)
    ends = [total * sum(weights[: place + 1]) // sum(weights) for place in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
