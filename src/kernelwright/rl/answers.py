"""From a model's answer to a candidate's source, or to the reason why there is none. Never raises on any text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernelwright.policies.chat import Completion


class AnswerFailure(StrEnum):
    """Why an answer holds no candidate."""

    NO_ANSWER = "no-answer"
    """The model gave none: its `Completion` carries a failure."""
    EMPTY = "empty"
    """Nothing but white space, or nothing after the reasoning."""
    TRUNCATED = "truncated"
    """Cut off before the code was complete."""
    NO_CODE = "no-code"
    """Words without code."""
    NO_MODEL_NEW = "no-model-new"
    """Code that does not define `ModelNew`."""
    SYNTAX_ERROR = "syntax-error"
    """Code that names `ModelNew` and is not Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A parsed answer: either `source` or `failure` is set."""

    source: str | None = None
    """A module that defines `ModelNew`."""
    failure: AnswerFailure | None = None
    detail: str = ""
    """The failure in words."""
    analysis: str = ""
    """Text of the section Performance Analysis; empty when there is none."""
    design: str = ""
    """Text of the section Algorithm Design."""


def parse_answer(text: str, *, truncated: bool = False) -> Answer:
    """Find the candidate in an answer.

    Args:
        text: The whole answer.
        truncated: Whether it is known to have been cut.
    """
    raise NotImplementedError


def parse_completion(completion: Completion) -> Answer:
    """As `parse_answer`, with what is known about how the answer ended."""
    raise NotImplementedError
