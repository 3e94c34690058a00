"""Reads a provider's reply, whole or streamed, with no trust in its shape, and classifies its faults by their remedy.

The SDK's own accumulation of a stream is not used: it copies all text with each chunk, and raises on chunks that are out of
order or lack a field. No text made here contains the key.
"""

from __future__ import annotations

import contextlib
import email.utils
import importlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import openai

from kernelwright.models.chat import Completion, CompletionFailure, ModelAnswer, Prices, Usage

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


RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""HTTP status codes after which the same request may succeed: RFC 9110's, 52x of proxies, 529 `overloaded`."""
HOPELESS_STATUS = frozenset({401, 402, 403, 404})
"""Status codes that every further request would get too: a bad key, no credit, no right, no such model or address."""
HOPELESS_CODES = frozenset({"insufficient_quota", "invalid_api_key", "model_not_found"})
_NO_SUCH_MODEL = re.compile(r"\bmodel\b.{0,80}\b(?:not (?:exist|found|supported)|unknown)|\b(?:no such|unknown) model", re.I)
LONGEST_DETAIL = 300
"""Characters of a provider's message that are passed on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed attempt."""

    code: CompletionFailure
    detail: str = ""
    """The server's words, without the key."""
    retried: bool = False
    hopeless: bool = False
    retry_after_s: float | None = None
    """Wait that the server asked for."""
    status: int | None = None
    """HTTP status; None without an answer."""

    @property
    def text(self) -> str:
        """Code and detail."""
        return f"{self.code}: {self.detail}" if self.detail else self.code


def transport_errors() -> tuple[type[Exception], ...]:
    """Exceptions of a connection while an answer is read; which HTTP library it is depends on the SDK's version."""
    found: list[type[Exception]] = [openai.APIError, json.JSONDecodeError, UnicodeDecodeError]
    for name in ("httpx", "httpx2"):
        try:
            found.append(importlib.import_module(name).HTTPError)
        except ImportError:
            continue
    return tuple(found)


def redacted(text: str, key: str) -> str:
    """One short line of `text` in which the key, or the larger part of it, does not occur."""
    line = " ".join(text.split())
    if key:
        line = line.replace(key, "[key]")
        # Providers echo a rejected key with its middle starred out.
        line = re.sub(re.escape(key[:6]) + r"\S*", "[key]", line) if len(key) > 6 else line
    return line[:LONGEST_DETAIL]


def fault_of(error: Exception, key: str) -> Fault:
    """Classify the exception of an attempt."""
    if isinstance(error, openai.APIStatusError):
        return _status_fault(error, key)
    if isinstance(error, openai.APITimeoutError) or "Timeout" in type(error).__name__:
        return Fault(CompletionFailure.TIMEOUT, "no answer in time", retried=True)
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | openai.APIResponseValidationError):
        return Fault(CompletionFailure.JUNK_ANSWER, "what arrived is not JSON")
    if isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
        return Fault(CompletionFailure.PROVIDER_ERROR, redacted(error.message, key))
    cause = error.__cause__ or error
    return Fault(CompletionFailure.UNREACHABLE, redacted(f"{type(cause).__name__}: {cause}", key), retried=True)


def _status_fault(error: openai.APIStatusError, key: str) -> Fault:
    status, message = error.status_code, redacted(_said(error), key)
    hopeless = (
        status in HOPELESS_STATUS or error.code in HOPELESS_CODES or (status == 400 and bool(_NO_SUCH_MODEL.search(message)))
    )
    if status == 429:
        code = CompletionFailure.RATE_LIMITED
    elif status >= 500 or status in RETRIED_STATUS:
        code = CompletionFailure.SERVER_ERROR
    else:
        code = CompletionFailure.REFUSED
    return Fault(
        code,
        message,
        retried=status in RETRIED_STATUS and not hopeless,
        hopeless=hopeless,
        retry_after_s=retry_after_s(error.response.headers),
        status=status,
    )


def _said(error: openai.APIStatusError) -> str:
    """The provider's own words; versions of the SDK wrap them differently."""
    body = error.body
    inner = body.get("error", body) if isinstance(body, dict) else body
    message = inner.get("message") if isinstance(inner, dict) else inner
    return message if isinstance(message, str) and message else f"status {error.status_code}"


def retry_after_s(headers: Mapping[str, str], now_s: float | None = None) -> float | None:
    """Wait that a response asks for in seconds, milliseconds or a date (RFC 9110, 10.2.3); None where it asks for none."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        return wait_s if math.isfinite(wait_s) and wait_s >= 0 else None
    date = email.utils.parsedate_tz(headers.get("retry-after", ""))
    return max(0.0, email.utils.mktime_tz(date) - (time.time() if now_s is None else now_s)) if date is not None else None
