"""Errors of the machine-code layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kernelwright.errors import ToolchainError, UsageError


class CubinError(UsageError):
    """The bytes given are not a cubin this package can read (exit status 2)."""


@contextlib.contextmanager
def in_file(path: str | Path) -> Iterator[None]:
    """Let a CubinError that is raised in here name the file."""
    try:
        yield
    except CubinError as error:
        raise CubinError(f"{error}; the file is {path}") from error


class ListingError(ToolchainError):
    """A disassembly lacks what the analysis needs, for example live ranges (exit status 3).

    This is what a disassembler of another generation than the cubin's assembler produces.
    """


class MoveError(UsageError):
    """A move that the rules do not allow, or that names no instruction."""
