"""Classifies the faults of an endpoint by their remedy. No text made here contains the key."""

from __future__ import annotations

import email.utils
import importlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import openai

from kernelwright.models.answers import CompletionFailure

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


def retry_after_s(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Wait that a response asks for in seconds, milliseconds or a date (RFC 9110, 10.2.3); None where it asks for none."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        return wait_s if math.isfinite(wait_s) and wait_s >= 0 else None
    date = email.utils.parsedate_tz(headers.get("retry-after", ""))
    return max(0.0, email.utils.mktime_tz(date) - now()) if date is not None else None
