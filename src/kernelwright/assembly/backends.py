"""Says what a schedule costs: by the clock of a GPU, or by a model, whose costs are no times.

On a GPU a schedule is timed interleaved with the original by the same launcher, longer if it looks faster. A search ends
with a maximum over noise, so nothing counts before `confirm` has timed it again in fresh processes against an A/A control.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from types import TracebackType
from typing import Protocol

from kernelwright.errors import InfrastructureError
from kernelwright.gpu.driver import GpuIdentity
from kernelwright.gpu.launch_spec import Target
from kernelwright.gpu.launcher import LauncherFactory, cuda_launcher
from kernelwright.judge.schedules import (
    ContainedLauncher,
    Plan,
    ScheduleFailedError,
    ScheduleSamples,
)
from kernelwright.sass import Kernel, Program, Schedule
from kernelwright.sass.simulator import simulate

_CONTROL_RUNS = 5
_CONTROL_QUANTILE = 0.95
_FIRST_CHECK_SEED = 1000
BEST_AGAIN = Plan.steady(32)
"""For a schedule that seems to be a search's new best, since it will be compared with all that follow; our choice."""
_CHECKS_OF_A_DRAW = 100
"""Schedules that are compared on the same inputs where every one is compared; our choice."""


class Status(StrEnum):
    """Outcome of running a schedule."""

    MEASURED = "measured"
    WRONG_OUTPUT = "wrong-output"
    FAULT = "fault"
    HANG = "hang"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Cost of one schedule and of the original, in the backend's unit; None of both unless measured."""

    status: Status
    cost: float | None = None
    baseline: float | None = None
    detail: str = ""
    """Reason, in words, for which there is no cost."""
    blocks: int = 0
    """Number of timed blocks."""
    checked: bool = False
    """True if the outputs were compared with the original's."""

    @property
    def relative(self) -> float | None:
        """Cost in units of the original's; less is better; None without a cost."""
        if self.cost is None or self.baseline is None:
            return None
        return self.cost / self.baseline

    @property
    def speedup(self) -> float | None:
        """Cost of the original / cost of the schedule; None without a cost."""
        return None if self.relative is None else 1.0 / self.relative


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
        if known is None or known[0] is not schedule.original:
            known = self._baseline = schedule.original, self.cost(Schedule(schedule.original))
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


@dataclass(frozen=True, slots=True)
class Control:
    """The original timed against a second copy of itself."""

    original_us: float
    noise_floor: float
    """Distance from 1 within which 95 % of A/A medians lie."""


class GpuBackend:
    """Costs by the clock of a GPU; satisfies the game's `Backend`.

    Args:
        program: program of the target's cubin.
        target: the kernel and its launch.
        plan: times of a schedule at first.
        again: times of one that seems better than the best so far; only these count for it.
        check_seeds: input draws on which a schedule's outputs are compared.
        check_all: whether every schedule's outputs are compared, not only those of each new best.
        factory: makes the launcher in the child.
        limit_s: longest time of one request to the child, seconds.

    Raises:
        InfrastructureError: program and target differ.
    """

    name = "gpu-time"
    unit = "us"

    def __init__(
        self,
        program: Program,
        target: Target,
        *,
        plan: Plan | None = None,
        again: Plan = BEST_AGAIN,
        check_seeds: int = 2,
        check_all: bool = False,
        factory: LauncherFactory = cuda_launcher,
        limit_s: float = 20.0,
    ) -> None:
        if program.image.data != target.cubin:
            raise InfrastructureError("wanted the program of the target's cubin, found another; load it from `target.cubin`")
        self.program = program
        self.target = target
        self.counts: Counter[Status] = Counter()
        self.best_speedup = 1.0
        self._plan = Plan() if plan is None else plan
        self._again = again
        self._check_seeds = check_seeds
        self._check_all = check_all
        self._child = ContainedLauncher(target.spec, target.cubin, factory, limit_s)
        self._known: dict[bytes, Measurement] = {}
        self._seed = _FIRST_CHECK_SEED
        self._drawn_for = 0
        self._control: Control | None = None

    def __enter__(self) -> GpuBackend:
        self.control()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def gpu(self) -> GpuIdentity:
        """The GPU that measures."""
        return self._child.ready().gpu

    @property
    def restarts(self) -> int:
        """Number of processes that a schedule ended."""
        return self._child.restarts

    def control(self) -> Control:
        """Time the original against itself, once.

        Raises:
            DeviceError: there is no GPU, or the original does not run on it.
        """
        if self._control is None:
            plan = replace(self._plan, coarse=self._plan.fine, wanted=math.inf)
            runs = [self._child.time(self.target.cubin, plan) for _ in range(_CONTROL_RUNS)]
            strays = sorted(abs(statistics.median(run.ratios) - 1.0) for run in runs)
            # So few runs have no 95 % quantile below their maximum; each block's scatter widens it honestly.
            scatter = max(_standard_error(run) for run in runs)
            floor = max(strays[math.ceil(_CONTROL_QUANTILE * len(strays)) - 1], 2 * scatter)
            self._control = Control(statistics.median(t for run in runs for t in run.original_us), floor)
        return self._control

    def measure(self, schedule: Schedule) -> Measurement:
        """Run a schedule, once however often it is asked for.

        Raises:
            DeviceError: the machine is at fault.
        """
        cubin = schedule.cubin(self.program)
        if cubin == self.target.cubin:
            control_us = self.control().original_us
            return Measurement(Status.MEASURED, control_us, control_us, "the original", checked=True)
        key = hashlib.sha256(cubin).digest()
        if key not in self._known:
            self._known[key] = self._run(cubin)
            self.counts[self._known[key].status] += 1
        return self._known[key]

    def close(self) -> None:
        """End the child."""
        self._child.close()

    def _run(self, cubin: bytes) -> Measurement:
        control = self.control()
        try:
            samples = self._child.time(cubin, replace(self._plan, wanted=self.best_speedup))
            speedup = statistics.median(samples.ratios)
            if speedup > self.best_speedup:
                # The best of many short looks is the luckiest, and the search goes on from here.
                samples = self._child.time(cubin, self._again)
                speedup = statistics.median(samples.ratios)
            is_best = speedup > self.best_speedup
            wrong = self._difference(cubin, anew=is_best) if is_best or self._check_all else None
        except ScheduleFailedError as failed:
            return Measurement(Status(failed.failure.value), detail=failed.detail)
        if wrong is not None:
            return Measurement(Status.WRONG_OUTPUT, detail=wrong, blocks=len(samples.ratios), checked=True)
        self.best_speedup = max(self.best_speedup, speedup)
        return Measurement(
            Status.MEASURED,
            control.original_us / speedup,
            control.original_us,
            blocks=len(samples.ratios),
            checked=is_best or self._check_all,
        )

    def _difference(self, cubin: bytes, *, anew: bool) -> str | None:
        """Compare outputs on inputs drawn anew, or on the latest ones, which are on the GPU already."""
        if anew or self._drawn_for >= _CHECKS_OF_A_DRAW:
            self._seed += self._check_seeds
            self._drawn_for = 0
        self._drawn_for += 1
        return self._child.compare(cubin, range(self._seed, self._seed + self._check_seeds))


def _standard_error(samples: ScheduleSamples) -> float:
    ratios = samples.ratios
    return statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
