"""Draws every exception of the package in one tree, each with the exit status that the command line gives it.

    KernelwrightError
    ├── UsageError                        2  an argument, option or input file is wrong
    │   ├── ConfigError                   2  a setting is unknown or out of range
    │   ├── TaskError                     2  a task file cannot be used
    │   ├── ModelError                    2  a model in memory, or its example inputs, cannot be used
    │   ├── CandidateError                2  a candidate file cannot be read at all
    │   ├── CubinError                    2  bytes are not a cubin that this package can read
    │   ├── DisassemblyError              2  nvdisasm ran and could not read the file
    │   ├── MoveError                     2  a move of the assembly game is not allowed
    │   ├── PromptTooLongError            2  a task does not fit into a model's context
    │   ├── ExemplarDatabaseError         2  a file is no exemplar database, or one of another version
    │   └── SourcesRefusedError           2  the service judges built-in tasks only
    ├── InfrastructureError               3  this machine cannot do what was asked
    │   ├── DeviceError                   3  no such device, or it stopped answering
    │   │   ├── CrowdedError              3  others hold the GPU's memory, or wait for it too long
    │   │   └── CudaError                 3  a call of the CUDA driver failed
    │   ├── ToolchainError                3  a compiler or disassembler is missing or failed
    │   │   ├── CompilerMissingError      3  a compiler is not installed
    │   │   ├── CompilationError          3  a compiler refused a kernel
    │   │   ├── DisassemblerMissingError  3  no nvdisasm was found
    │   │   ├── DisassemblerMismatchError 3  every nvdisasm found is of another generation than the cubin
    │   │   └── ListingError              3  a disassembly lacks what the analysis needs
    │   ├── SandboxError                  3  a worker process could not be started or contained
    │   ├── QueueFullError                3  the service has no place in its queue
    │   ├── ShuttingDownError             3  the service ends, and takes nothing in
    │   └── PolicyError                   3  a policy could not be reached or gave nothing usable
    │       ├── NothingUsableError        3  a model answered, but with no new candidate
    │       └── GraphError                3  a step of a local model cannot be recorded as a CUDA graph
    └── InternalError                     3  one part's word to another, always caught inside the package
        ├── RejectionError                   a candidate may not replace its reference
        ├── WorkerError                      a worker process raised, died, hung or answered out of turn
        ├── StuckError                       a worker neither answers nor compiles
        ├── DisturbedError                   a worker was ended for kernels that were not its own
        ├── OutOfDomainError                 the reference is undefined on some inputs
        ├── StructureError                   a value holds neither tensors nor plain data
        ├── ChannelClosedError               the other side of a worker's socket is gone
        ├── ChannelTimeoutError              no complete message arrived in time
        ├── ChannelGarbageError              what arrived is not a message
        ├── RequestError                     an HTTP request is answered with a status of 400 or above
        ├── ScheduleFailedError              a schedule ended the process it ran in
        ├── BudgetSpentError                 a search of schedules has no budget left: its ordinary end
        ├── UntraceableError                 a module has no operator graph that could be printed
        │   ├── OtherFormError               shared storage is written, or graphs are nested
        │   └── CarriedStateError            a module keeps a state from one call to the next
        ├── UnsupportedError                 an operator cannot be a step of a fused kernel
        ├── RuleError                        a rewrite rule raised, or never ends
        └── UnfitSettingError                a suite's setting does not fit its task's functions

Errors that a user can see are defined here. Internal ones stand with the code that raises them, and carry its types.
A candidate that fails is never an error: its failure is a verdict with a reason code (`kernelwright.records.Reason`).
Every message says what was wanted, what was found, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


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


class ModelError(UsageError):
    """A model in memory cannot be judged, does not fit its example inputs, or is not the one that was optimized."""


class CandidateError(UsageError):
    """A candidate file is missing or is not text."""


class CubinError(UsageError):
    """The bytes given are not a cubin this package can read."""


class DisassemblyError(UsageError):
    """nvdisasm ran and could not read the file."""


class MoveError(UsageError):
    """A move that the rules do not allow, or that names no instruction."""


class PromptTooLongError(UsageError):
    """The task alone, with no exemplar, does not fit into the model's context."""


class ExemplarDatabaseError(UsageError):
    """The file is not an exemplar database, or is one of another version."""


class SourcesRefusedError(UsageError):
    """The service judges built-in tasks only."""


class InfrastructureError(KernelwrightError):
    """The machine, not the caller or the candidate, is at fault."""


class DeviceError(InfrastructureError):
    """The device asked for is absent, busy beyond patience, or stopped answering."""


class CrowdedError(DeviceError):
    """A GPU's memory does not suffice beside what others hold of it, or others waited too long for kernels."""


class CudaError(DeviceError):
    """A call of the CUDA driver failed.

    Attributes:
        call: the driver's function.
        status: its numeric result.
        name: the driver's name for the result, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
    """

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"wanted {call} to succeed, found {name} ({status})")
        self.call = call
        self.status = status
        self.name = name

    def __reduce__(self) -> tuple[type[CudaError], tuple[str, int, str]]:
        return CudaError, (self.call, self.status, self.name)


class ToolchainError(InfrastructureError):
    """A compiler, assembler or disassembler is missing, mismatched or failed on valid input."""


class CompilerMissingError(ToolchainError):
    """A compiler that was asked for is not installed."""


class CompilationError(ToolchainError):
    """A compiler refused a kernel."""


class DisassemblerMissingError(ToolchainError):
    """No nvdisasm was found."""


class DisassemblerMismatchError(ToolchainError):
    """Every nvdisasm found is of another generation than the cubin's assembler."""


class ListingError(ToolchainError):
    """A disassembly lacks what the analysis needs, for example live ranges.

    A disassembler of another generation than the cubin's assembler produces such a listing.
    """


class SandboxError(InfrastructureError):
    """A worker process could not be started, reached or contained."""


class QueueFullError(InfrastructureError):
    """The service has no place in its queue.

    Attributes:
        limit: Evaluations that may wait.
        retry_after_s: When to ask again.
    """

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(f"{limit} evaluations are waiting")
        self.limit = limit
        self.retry_after_s = retry_after_s


class ShuttingDownError(InfrastructureError):
    """The service ends; it takes nothing in and drops what has not begun."""


class PolicyError(InfrastructureError):
    """A policy could not be reached, or answered with nothing usable."""


class NothingUsableError(PolicyError):
    """A model answered many times and none of it was a new candidate."""


class GraphError(PolicyError):
    """A step of the model cannot be recorded as a CUDA graph."""


class InternalError(KernelwrightError):
    """One part of the package tells another what happened; one that reaches a user is a fault of the package."""


class BudgetSpentError(InternalError):
    """There is no budget left for one more schedule; searches end with it, and their caller catches it.

    Attributes:
        by: `schedules` or `time`.
    """

    def __init__(self, by: str) -> None:
        super().__init__(f"no {by} left")
        self.by = by


def listed(names: Iterable[object], most: int = 5) -> str:
    """Names for a message: the first few, and how many more there are; `none` for none."""
    words = [str(name) for name in names]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return (", ".join(words[:most]) or "none") + more
