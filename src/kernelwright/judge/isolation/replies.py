"""Parses a worker's answers field by field: in a candidate's process the harness itself can be made to lie."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class _WorkerReply(BaseModel):
    model_config = ConfigDict(frozen=True, strict=False, extra="ignore")


class Output(_WorkerReply):
    """One tensor, as the worker describes it."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    aliases: tuple[str, ...]
    traits: tuple[str, ...] = ()


class Described(_WorkerReply):
    """All that one call returned."""

    skeleton: Any
    strange: tuple[str, ...]
    outputs: tuple[Output, ...]


class Series(_WorkerReply):
    """Several calls."""

    answers: tuple[Described, ...]


class BuiltModule(_WorkerReply):
    """Mode and state of a module that was built, or the name of the class that was missing."""

    missing: str | None = None
    training: bool = True
    state: tuple[tuple[str, str, tuple[int, ...]], ...] = ()


class Mode(_WorkerReply):
    """The mode a module says it is in."""

    training: bool


class Inspection(Mode):
    """Process-wide settings before the build and now, and library functions that were replaced."""

    before: dict[str, Any]
    after: dict[str, Any]
    patched: tuple[str, ...]
    memory_bytes: int = 0


class Operators(_WorkerReply):
    """Names of PyTorch operators that a call ran."""

    operators: tuple[str, ...]


R = TypeVar("R", bound=_WorkerReply)


def parse(kind: type[R], answer: dict[str, Any]) -> R | None:
    """The answer as what it should be, or None when it is not."""
    try:
        return kind.model_validate(answer)
    except (ValidationError, RecursionError):
        return None
