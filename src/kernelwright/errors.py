"""Errors of the infrastructure, each with the exit status the command line gives it.

    KernelwrightError
    ├── UsageError             2   an argument, option or input file is wrong
    │   ├── ConfigError        2   a setting is unknown or out of range
    │   ├── TaskError          2   a task file cannot be used
    │   └── CandidateError     2   a candidate file cannot be read at all
    └── InfrastructureError    3   this machine cannot do what was asked
        ├── DeviceError        3   no such device, or it stopped answering
        ├── ToolchainError     3   a compiler or disassembler is missing or failed
        ├── SandboxError       3   a worker process could not be started or contained
        └── PolicyError        3   a policy could not be reached or gave nothing usable

A candidate that fails is never one of these: its failure is a verdict with a reason code
(`kernelwright.records.Reason`). Every message says what was wanted, what was found, and what to do.
"""

from __future__ import annotations


class KernelwrightError(Exception):
    """Anything this package raises on purpose."""

    exit_status = 3


class UsageError(KernelwrightError):
    """The caller asked for something that cannot be understood or read."""

    exit_status = 2


class ConfigError(UsageError):
    """A setting is unknown, of the wrong type or out of range."""


class TaskError(UsageError):
    """A task is missing, is not valid Python, or lacks `Model`, `get_inputs` or `get_init_inputs`."""


class CandidateError(UsageError):
    """A candidate file is missing or is not text."""


class InfrastructureError(KernelwrightError):
    """The machine, not the caller or the candidate, is at fault."""


class DeviceError(InfrastructureError):
    """The device asked for is absent, busy beyond patience, or stopped answering."""


class ToolchainError(InfrastructureError):
    """A compiler, assembler or disassembler is missing, mismatched or failed on valid input."""


class SandboxError(InfrastructureError):
    """A worker process could not be started, reached or contained."""


class PolicyError(InfrastructureError):
    """A policy could not be reached, or answered with nothing usable."""
