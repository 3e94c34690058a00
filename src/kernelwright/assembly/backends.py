"""What a schedule costs: the interface of backends, those that need no GPU, and one spelling of their answers.

The backend that measures on a GPU is `kernelwright.judge.schedules.measure.GpuBackend`. Costs of the backends here
are no times: each names its unit, and `is_time` says it once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kernelwright.errors import UsageError
from kernelwright.sass import Kernel, Schedule
from kernelwright.sass.simulator import simulate

MEASURED = "measured"
"""The status of a schedule that has a cost. Every other status says why one has none."""


@runtime_checkable
class Backend(Protocol):
    """Says what a schedule costs.

    Attributes:
        name: what is measured or simulated.
        unit: unit of the cost.
    """

    name: str
    unit: str

    def cost(self, schedule: Schedule) -> float:
        """Return the cost of a schedule, more than zero; less is better."""
        ...


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a backend says of one schedule.

    Attributes:
        status: `MEASURED`, or why there is no cost: `wrong-output`, `fault`, `hang`, `crash`.
        cost: in the backend's unit; None unless measured.
        baseline: cost of the original on the same scale; None unless measured.
        detail: why there is no cost, in words.
    """

    status: str
    cost: float | None = None
    baseline: float | None = None
    detail: str = ""

    @property
    def relative(self) -> float | None:
        """Cost in units of the original's; less is better; None without a cost."""
        if self.cost is None or self.baseline is None:
            return None
        return self.cost / self.baseline


class StaticIssueCycles:
    """Sum of stall counts: cycles in which one warp issues each instruction once. Not a time of any GPU.

    It knows neither loops, waits for memory nor other warps. It is for tests and for sorting moves.
    """

    name = "static-issue-cycles"
    unit = "issue cycles"
    is_time = False

    def cost(self, schedule: Schedule) -> float:
        """Return the sum of stall counts."""
        return float(schedule.issue_cycles)


class SimulatedIssue:
    """Cycles of a simulated in-order scheduler (`kernelwright.sass.simulator`). Not a time of any GPU.

    Args:
        architecture: compute capability times ten.
        warps: that one scheduler holds.
        iterations: passes through each loop.
    """

    name = "simulated-issue"
    unit = "simulated cycles"
    is_time = False

    def __init__(self, architecture: int, warps: int = 4, iterations: int = 4) -> None:
        self.architecture = architecture
        self.warps = warps
        self.iterations = iterations

    def cost(self, schedule: Schedule) -> float:
        """Return the simulated cycles."""
        return float(simulate(schedule, self.architecture, self.warps, self.iterations))


class RecordedTimings:
    """Times measured earlier, by the digest of the schedule's code; see `schedule_digest`."""

    name = "recorded-timings"
    unit = "us"
    is_time = True

    def __init__(self, times_us: Mapping[str, float]) -> None:
        self.times_us = dict(times_us)

    def cost(self, schedule: Schedule) -> float:
        """Return the recorded time.

        Raises:
            UsageError: this schedule was not recorded.
        """
        digest = schedule_digest(schedule)
        if digest not in self.times_us:
            raise UsageError(
                f"wanted a recorded time of schedule {digest[:12]}, found none among {len(self.times_us)}; "
                "record it, or use another backend"
            )
        return self.times_us[digest]


def schedule_digest(schedule: Schedule) -> str:
    """Return the SHA-256 of a schedule's instruction words, in hexadecimal."""
    return hashlib.sha256(b"".join(word.to_bytes(16, "little") for word in schedule.words())).hexdigest()


def measure(backend: Any, schedule: Schedule) -> Measurement:
    """Return what a backend says of a schedule, in one spelling for all of them.

    A backend that tells why a schedule has no cost, as the one for GPUs does, has a method `measure` whose
    result has `status`, `detail`, `cost_us` and `speedup`; any other has `cost` alone.
    """
    if isinstance(backend, _Measuring):
        return backend.measured(schedule)
    if not hasattr(backend, "measure"):
        return Measurement(MEASURED, backend.cost(schedule), backend.cost(_original(schedule.kernel)))
    verdict = backend.measure(schedule)
    if verdict.cost_us is None or verdict.speedup is None:
        return Measurement(str(verdict.status), detail=verdict.detail)
    return Measurement(MEASURED, verdict.cost_us, verdict.cost_us * verdict.speedup, verdict.detail)


@runtime_checkable
class _Measuring(Protocol):
    """A backend that answers in this module's own spelling, such as a ledger."""

    def measured(self, schedule: Schedule) -> Measurement:
        """Return what the backend says of a schedule."""
        ...


_originals: dict[int, tuple[Kernel, Schedule]] = {}


def _original(kernel: Kernel) -> Schedule:
    """Return the kernel's own schedule, made once."""
    known = _originals.get(id(kernel))
    if known is None or known[0] is not kernel:
        _originals.clear()
        known = _originals[id(kernel)] = (kernel, Schedule(kernel))
    return known[1]
