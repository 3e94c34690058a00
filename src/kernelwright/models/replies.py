"""Reads a provider's reply, whole or streamed, with no trust in its shape.

The SDK's own accumulation of a stream is not used: it copies all text with each chunk, and raises on chunks that are out of
order or lack a field.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kernelwright.models.accounting import Prices, Usage
from kernelwright.models.answers import CompletionFailure, ModelAnswer
from kernelwright.models.chat import Completion
from kernelwright.models.faults import Fault

EVENT_STREAM = "text/event-stream"
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Names for hidden reasoning: DeepSeek, Qwen and vLLM use the first, OpenRouter and newer vLLM the second."""


@dataclass(slots=True)
class Choice:
    """One answer as far as it has arrived."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class ApiReply:
    """The answers of one request."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Usage = field(default_factory=lambda: Usage(unreported=1))
    fault: Fault | None = None
    """Reason why reading stopped early."""

    @property
    def is_blank(self) -> bool:
        """True when nothing at all arrived, though reading went to the end."""
        return not self.choices and self.usage.unreported > 0 and self.fault is None

    @property
    def has_text(self) -> bool:
        """True when anything of an answer arrived."""
        return any(choice.text or choice.reasoning for choice in self.choices.values())

    def read_stream(self, chunks: Any, is_over: Callable[[], bool]) -> None:
        """Take a stream of chunks, until it ends or `is_over` says so."""
        # A server that does not stream, or sends no JSON, leaves the SDK with something that is not a stream at all.
        if not hasattr(chunks, "close"):
            self.fault = Fault(CompletionFailure.JUNK_ANSWER)
            return
        with contextlib.closing(chunks):
            for chunk in chunks:
                self._add(chunk, "delta")
                if is_over():
                    self.fault = Fault(CompletionFailure.TIMEOUT)
                    return

    def read_whole(self, answer: Any) -> None:
        """Take a reply that came in one piece."""
        if isinstance(answer, str) or not hasattr(answer, "choices"):
            said = _text(getattr(answer, "error", None), "message")
            self.fault = Fault(CompletionFailure.PROVIDER_ERROR if said else CompletionFailure.JUNK_ANSWER, said)
        else:
            self._add(answer, "message")

    def _add(self, part: Any, message: str) -> None:
        """Take a reply or a chunk, whose choices have their text under the name `message`."""
        self._add_usage(getattr(part, "usage", None))
        choices = getattr(part, "choices", None)
        for place, choice in enumerate(choices if isinstance(choices, list) else []):
            index = _number(choice, "index") if message == "delta" else None
            found = self.choices.setdefault(place if index is None else index, Choice())
            piece = getattr(choice, message, None)
            found.text += _text(piece, "content")
            found.reasoning += next((text for name in REASONING_FIELDS if (text := _text(piece, name))), "")
            found.finish_reason = _text(choice, "finish_reason") or found.finish_reason

    def _add_usage(self, usage: Any) -> None:
        prompt, completion = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
        if prompt is None or completion is None:
            return
        cached = _number(getattr(usage, "prompt_tokens_details", None), "cached_tokens")
        if cached is None:
            cached = _number(usage, "prompt_cache_hit_tokens")  # DeepSeek's own word
        self.usage = Usage(
            prompt_tokens=prompt,
            cached_prompt_tokens=min(cached or 0, prompt),
            completion_tokens=completion,
            reasoning_tokens=_number(getattr(usage, "completion_tokens_details", None), "reasoning_tokens") or 0,
        )

    def answers(self, prompt: int, numbers: list[int], prices: Prices | None) -> list[ModelAnswer]:
        """One answer for each choice that arrived, the first numbers first; at least one, be it a failed one.

        A server counts the answers' tokens together: each gets a share by its length, and the first bears the prompt's
        price, which is charged once.
        """
        usage = self.usage
        choices = [self.choices[index] for index in sorted(self.choices)][: len(numbers)] or [Choice()]
        shares = _shares(usage.completion_tokens, [len(choice.text) + len(choice.reasoning) for choice in choices])
        found = []
        for number, choice, tokens in zip(numbers, choices, shares, strict=False):
            cost, first = None, number == numbers[0]
            if prices is not None and not usage.unreported:
                cost = prices.cost(usage.prompt_tokens * first, tokens, usage.cached_prompt_tokens * first)
            completion = Completion(
                text=choice.text,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=tokens,
                finish_reason=choice.finish_reason or "error",
                failure=self._failure(choice),
            )
            found.append(
                ModelAnswer(
                    prompt=prompt,
                    number=number,
                    completion=completion,
                    reasoning=choice.reasoning,
                    cost=cost,
                    currency="" if prices is None or cost is None else prices.currency,
                    bears_prompt=first,
                )
            )
        return found

    def _failure(self, choice: Choice) -> str | None:
        if choice.finish_reason is None and self.fault is not None:
            return self.fault.text
        if choice.finish_reason is None and (choice.text or choice.reasoning):
            return CompletionFailure.STREAM_CUT
        if choice.finish_reason == "content_filter":
            return CompletionFailure.CONTENT_FILTER
        return None if choice.text.strip() else CompletionFailure.EMPTY_ANSWER


def body_in_one_piece(answer: Any) -> str | None:
    """Body of an answer that a server sent in one piece though asked to stream; None where it streams."""
    if content_type(answer) == EVENT_STREAM or not hasattr(answer, "response"):
        return None
    return bytes(answer.response.read()).decode("utf-8", "replace")


def whole_reply(body: str | None) -> Any | None:
    """The reply in such a body; None where it holds none."""
    try:
        found = json.loads(body or "", object_hook=lambda fields: SimpleNamespace(**fields))
    except ValueError:
        return None
    return found if getattr(found, "choices", None) or hasattr(found, "error") else None


def content_type(answer: Any) -> str:
    """Media type of a stream, such as `text/html`; empty where none was told."""
    headers = getattr(getattr(answer, "response", None), "headers", {})
    return str(headers.get("content-type", "")).partition(";")[0].strip().lower()


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
