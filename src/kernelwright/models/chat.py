"""Defines a language model for the rest of the package: something that answers conversations, and what its answers cost.

Endpoints (`api.py`) and models in this process (`local.py`) implement `ChatModel`. Answers may come one by one, so that a
paid answer is recorded before the next comes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of drawing answers."""

    temperature: float = 1.0
    """Temperature; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Share of probability that tokens are drawn from."""
    max_tokens: int = 4096
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of the drawing, where the server takes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. A failed one is data too."""

    text: str
    """The answer; of a failed one, as much as had arrived."""
    prompt_tokens: int
    """Tokens of the prompt; 0 if the server did not report them."""
    completion_tokens: int
    """Tokens of the answer; 0 if the server did not report them."""
    finish_reason: str = "stop"
    """`stop`, `length` (cut at `max_tokens`) or the provider's own word."""
    failure: str | None = None
    """Reason why there is no whole answer, such as `stream-cut`; None when there is one."""


class CompletionFailure(StrEnum):
    """Reason code of a failed answer: `Completion.failure`, or its beginning before `: ` and a detail."""

    EMPTY_ANSWER = "empty-answer"
    """Nothing but white space, or no choices at all."""
    STREAM_CUT = "stream-cut"
    """The connection ended before the answer did; the text is what had arrived."""
    JUNK_ANSWER = "junk-answer"
    """The reply breaks the protocol."""
    CONTENT_FILTER = "content-filter"
    """The provider withheld the answer."""
    PROVIDER_ERROR = "provider-error"
    """The server reported an error while it answered."""
    REFUSED = "refused"
    """The server refuses this request, such as a prompt that is too long, and may take others."""
    TIMEOUT = "timeout"
    """Too long a silence, or too long an answer."""
    RATE_LIMITED = "rate-limited"
    """Status 429 at the last attempt, or a server that wants to be left alone for longer than allowed."""
    SERVER_ERROR = "server-error"
    """Status 5xx and the like at the last attempt."""
    UNREACHABLE = "unreachable"
    """No connection at the last attempt."""
    PROMPT_TOO_LONG = "prompt-too-long"
    """The prompt leaves no room for an answer in the window of a local model."""


ADVICE = {
    CompletionFailure.EMPTY_ANSWER: "See whether the address is right; where a model reasons first, raise --max-tokens.",
    CompletionFailure.JUNK_ANSWER: "",
    CompletionFailure.STREAM_CUT: "See the server's log.",
    CompletionFailure.TIMEOUT: "Raise `silence_timeout_s` or `answer_timeout_s` in --model-settings.",
    CompletionFailure.REFUSED: "Change what the server names, such as --max-tokens, or ask another model.",
    CompletionFailure.PROMPT_TOO_LONG: "Use a model with a longer window, or fewer --exemplars.",
}
"""Remedies of failures that come again and again; the rest name their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """One completion and its place among those asked for."""

    prompt: int
    """Index of the conversation."""
    number: int
    """Number among the `count` answers to that conversation."""
    completion: Completion
    reasoning: str = ""
    """Reasoning that a provider shows in a field of its own; no part of the answer."""
    cost: float | None = None
    """Cost in `currency`; None without prices or token counts."""
    currency: str = ""
    """Currency of the cost; empty without one."""
    bears_prompt: bool = True
    """True for the first answer of a request, to which the prompt is charged."""


class ChatModel:
    """A language model. A subclass implements `answers` or, where all answers come at once, `sample`."""

    name: str
    """Name in records, such as `api:deepseek-chat` or `local:Qwen2.5-Coder-1.5B`."""

    def sample(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> list[list[Completion]]:
        """Answer each conversation `count` times; the result has one list for each prompt, in order.

        Raises:
            PolicyError: the model cannot be reached or loaded, or refuses all work (a bad key, no such model). A single
                answer that fails is a `Completion` with its `failure`.
        """
        return gather(self.answers(prompts, count=count, sampling=sampling), len(prompts))

    def answers(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> Iterator[ModelAnswer]:
        """The same answers in the order in which they finish."""
        for prompt, completions in enumerate(self.sample(prompts, count=count, sampling=sampling)):
            for number, completion in enumerate(completions):
                yield ModelAnswer(prompt=prompt, number=number, completion=completion)


def gather(answers: Iterable[ModelAnswer], prompts: int) -> list[list[Completion]]:
    """Answers in any order as `ChatModel.sample` returns them: a list for each prompt, by number."""
    found: list[dict[int, Completion]] = [{} for _ in range(prompts)]
    for answer in answers:
        found[answer.prompt][answer.number] = answer.completion
    return [[completions[number] for number in sorted(completions)] for completions in found]


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
    """Currency of all prices."""

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
    """Prompt tokens, counted once where one request returns several answers."""
    cached_prompt_tokens: int = 0
    """Part of `prompt_tokens` that the provider had cached."""
    completion_tokens: int = 0
    """Answer tokens."""
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
