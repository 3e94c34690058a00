"""Errors of compilers and disassemblers."""

from __future__ import annotations

from kernelwright.errors import ToolchainError, UsageError


class DisassemblerMissing(ToolchainError):
    """No nvdisasm was found (exit status 3)."""


class DisassemblerMismatch(ToolchainError):
    """Every nvdisasm found is of another generation than the cubin's assembler (exit status 3)."""


class DisassemblyRejected(UsageError):
    """nvdisasm ran and could not read the file (exit status 2)."""


class CompilerMissing(ToolchainError):
    """A compiler that was asked for is not installed (exit status 3)."""


class CompilationFailed(ToolchainError):
    """A compiler refused a kernel (exit status 3)."""
