"""Errors of the machine-code layer."""

from __future__ import annotations

from kernelwright.errors import ToolchainError, UsageError


class CubinError(UsageError):
    """The bytes given are not a cubin this package can read (exit status 2)."""


class ListingError(ToolchainError):
    """A disassembly lacks what the analysis needs, for example live ranges (exit status 3).

    This is what a disassembler of another generation than the cubin's assembler produces.
    """


class MoveError(UsageError):
    """A move that the rules do not allow, or that names no instruction."""
