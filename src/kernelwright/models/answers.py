"""Defines answers that come one by one, so that a paid answer is recorded before the next comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from kernelwright.models.chat import ChatModel, Completion, Message, Sampling


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
    bears_prompt: bool = True
    """True for the first answer of a request, to which the prompt is charged."""


@runtime_checkable
class Incremental(Protocol):
    """A model that hands over answers in the order in which they finish."""

    def answers(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> Iterator[ModelAnswer]:
        """Answer each conversation `count` times; as `ChatModel.sample`, but one by one."""
        ...


def answers_of(
    model: ChatModel, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling
) -> Iterator[ModelAnswer]:
    """The answers of any model, one by one where it is `Incremental`, else all at the end."""
    if isinstance(model, Incremental):
        yield from model.answers(prompts, count=count, sampling=sampling)
        return
    for prompt, completions in enumerate(model.sample(prompts, count=count, sampling=sampling)):
        for number, completion in enumerate(completions):
            yield ModelAnswer(prompt=prompt, number=number, completion=completion)


def gather(answers: Iterable[ModelAnswer], prompts: int) -> list[list[Completion]]:
    """Answers in any order as `ChatModel.sample` returns them: a list for each prompt, by number."""
    found: list[dict[int, Completion]] = [{} for _ in range(prompts)]
    for answer in answers:
        found[answer.prompt][answer.number] = answer.completion
    return [[completions[number] for number in sorted(completions)] for completions in found]
