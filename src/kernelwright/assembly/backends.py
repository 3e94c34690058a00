"""Says what a schedule costs: the interface of backends, and those that need no GPU.

The backend that measures on a GPU is `kernelwright.assembly.gpu_backend.GpuBackend`. The costs of models are no times.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Protocol

from kernelwright.assembly.measurement import Measurement, Status
from kernelwright.sass import Kernel, Schedule
from kernelwright.sass.simulator import simulate


class Backend(Protocol):
    """Measures schedules, or says why one has no cost."""

    @property
    def name(self) -> str:
        """Name of the quantity."""

    @property
    def unit(self) -> str:
        """Unit of the cost."""

    def measure(self, schedule: Schedule) -> Measurement:
        """Return a schedule's cost beside the original's."""


class CostFunction(ABC):
    """A backend that gives every schedule a cost; subclasses define `cost`."""

    name: str
    unit: str
    _baseline: tuple[Kernel, float] | None = None

    @abstractmethod
    def cost(self, schedule: Schedule) -> float:
        """Return the cost of a schedule, more than zero; less is better."""

    def measure(self, schedule: Schedule) -> Measurement:
        """Return the cost of a schedule beside that of its kernel's original."""
        known = self._baseline
        if known is None or known[0] is not schedule.kernel:
            known = self._baseline = schedule.kernel, self.cost(Schedule(schedule.kernel))
        return Measurement(Status.MEASURED, self.cost(schedule), known[1])


class StaticIssueCycles(CostFunction):
    """Sum of stall counts: cycles in which one warp issues each instruction once.

    It ignores loops, waits for memory and other warps. It is for tests and for sorting moves.
    """

    name = "static-issue-cycles"
    unit = "issue cycles"

    def cost(self, schedule: Schedule) -> float:
        """Return the sum of stall counts."""
        return float(schedule.issue_cycles)


class SimulatedIssue(CostFunction):
    """Cycles of some warps of a simulated in-order scheduler (`kernelwright.sass.simulator`)."""

    name = "simulated-issue"
    unit = "simulated cycles"

    def __init__(self, architecture: int, warps: int = 4, iterations: int = 4) -> None:
        self.architecture = architecture
        self.warps = warps
        self.iterations = iterations

    def cost(self, schedule: Schedule) -> float:
        """Return the simulated cycles."""
        return float(simulate(schedule, self.architecture, self.warps, self.iterations))


def schedule_digest(schedule: Schedule) -> str:
    """Return the SHA-256 of a schedule's instruction words, in hexadecimal."""
    return hashlib.sha256(b"".join(word.to_bytes(16, "little") for word in schedule.words())).hexdigest()
