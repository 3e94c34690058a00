"""Adds up what answers cost: tokens as the model reported them, and money where the user gave prices."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

from pydantic import BaseModel, ConfigDict, Field

TOKENS_PER_PRICE = 1_000_000
"""Providers quote prices per million tokens."""


class Prices(BaseModel):
    """A provider's prices per million tokens, from the user: none is built in, for they change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: float = Field(ge=0)
    """Price of prompt tokens."""
    output: float = Field(ge=0)
    """Price of answer tokens, hidden reasoning included."""
    cached_input: float | None = Field(default=None, ge=0)
    """Price of prompt tokens that the provider had cached; without it they cost as much as any other."""
    currency: str = "USD"

    def cost(self, prompt_tokens: int, completion_tokens: int, cached_prompt_tokens: int = 0) -> float:
        """Price of these tokens, in `currency`; cached ones are among the prompt's."""
        cached_price = self.input if self.cached_input is None else self.cached_input
        total = (
            (prompt_tokens - cached_prompt_tokens) * self.input
            + cached_prompt_tokens * cached_price
            + completion_tokens * self.output
        )
        return total / TOKENS_PER_PRICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Totals since a model was opened."""

    requests: int = 0
    """Requests that ended in an answer, whole or not."""
    retries: int = 0
    """Attempts repeated after a fault."""
    failures: int = 0
    """Answers that carry a `failure`."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Part of `completion_tokens`: hidden reasoning."""
    unreported: int = 0
    """Requests whose tokens the server never told. Above 0, all token totals are lower bounds."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})

    def cost(self, prices: Prices | None) -> float | None:
        """Total price, a lower bound while `unreported` is above 0; None without prices."""
        if prices is None:
            return None
        return prices.cost(self.prompt_tokens, self.completion_tokens, self.cached_prompt_tokens)


class Meter:
    """Adds up usage over threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Usage()

    def add(self, usage: Usage) -> None:
        """Count more usage."""
        with self._lock:
            self._total = self._total + usage

    @property
    def total(self) -> Usage:
        """Everything counted so far."""
        with self._lock:
            return self._total
