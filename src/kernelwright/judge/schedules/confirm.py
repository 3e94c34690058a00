"""Measures schedules of machine code again in fresh processes: the verdict that decides.

A search ends with a maximum over noise, so nothing counts before it has been timed again against an A/A control.
Interval, noise floor and the rule of an improvement are those of modules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelwright.gpu.driver import GpuIdentity
from kernelwright.gpu.launch_spec import Target
from kernelwright.gpu.launcher import LauncherFactory, cuda_launcher
from kernelwright.judge.schedules.contained import (
    ContainedLauncher,
    Plan,
    ScheduleFailedError,
    ScheduleFailure,
    ScheduleSamples,
)
from kernelwright.judge.settings import Settings
from kernelwright.records.improvement import clears_noise_floor

PROCESSES: int = Settings().processes_max
"""Fresh processes, as many as a module may get."""
BLOCKS = 40
"""Blocks of original, schedule, schedule, original in each process, over all places of the code; our choice."""
LAUNCHES = 4
"""Launches of one sample; our choice."""
CHECK_SEEDS = 4
"""Fresh inputs on which outputs are compared in each process; our choice."""
CONFIRMING = Plan.steady(BLOCKS, LAUNCHES)
LogRatios = Sequence[Sequence[float]]
"""log(original / schedule) of each block, by process."""
_FIRST_CHECK_SEED = 2000
_SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Re-measurement of one schedule: its speedup with the 95 % interval, None of which where it failed."""

    speedup: float | None
    low: float | None
    high: float | None
    noise_floor: float | None
    """Distance of an A/A ratio from 1."""
    baseline: float | None
    """Cost of the original, microseconds on a GPU."""
    wrong: str | None
    """Difference of its outputs, or its failure, in words; None when they are right."""
    processes: int
    """Fresh processes it was measured in."""
    failure: ScheduleFailure | None = None
    gpu: GpuIdentity | None = None
    """GPU it was measured on; None for a model's costs."""
    log_ratios: LogRatios = ()
    null_log_ratios: LogRatios = ()
    """The same of the original against itself."""

    @classmethod
    def of_ratios(
        cls, log_ratios: LogRatios, null_log_ratios: LogRatios, baseline: float, gpu: GpuIdentity | None = None
    ) -> Confirmation:
        """Score a schedule whose outputs are right."""
        from kernelwright.records.scoring import score_ratios  # numpy is slow to import where no schedule is confirmed

        interval, floor = score_ratios(log_ratios, null_log_ratios)
        found = interval.estimate, interval.low, interval.high, floor
        ratios, nulls = (tuple(map(tuple, one)) for one in (log_ratios, null_log_ratios))
        return cls(*found, baseline, None, len(nulls), gpu=gpu, log_ratios=ratios, null_log_ratios=nulls)

    @classmethod
    def of_failure(cls, wrong: str, processes: int, failure: ScheduleFailure | None = None) -> Confirmation:
        """A schedule that does not run or gives wrong outputs has no speedup."""
        return cls(None, None, None, None, None, wrong, processes, failure)

    @property
    def is_improvement(self) -> bool:
        """Whether it is right, and the interval's lower end is above 1 + the noise floor."""
        return self.wrong is None and clears_noise_floor(self.low, self.noise_floor)


def confirm(
    target: Target,
    cubins: Sequence[bytes],
    *,
    processes: int = PROCESSES,
    plan: Plan = CONFIRMING,
    check_seeds: int = CHECK_SEEDS,
    factory: LauncherFactory = cuda_launcher,
    limit_s: float = 60.0,
    on_process: Callable[[int, ScheduleSamples], Any] | None = None,
) -> list[Confirmation]:
    """Time schedules against the original in fresh processes, with an A/A control in each, and compare their outputs.

    All of them share the processes, since starting one takes longer than timing in it. A schedule that fails in one is
    not tried in the next.

    Args:
        target: the original and its launch.
        cubins: the schedules.
        processes: fresh processes; each is one sampling unit of the interval.
        plan: times of each schedule in a process.
        check_seeds: input draws of each process on which outputs are compared.
        factory: makes the launcher in the child.
        limit_s: longest time of one request to the child, seconds.
        on_process: told the number and the samples of each schedule in every process.

    Raises:
        DeviceError: the machine is at fault.
    """
    trials = [ScheduleTrial(plan) for _ in cubins]
    nulls: list[list[float]] = []
    originals_us: list[float] = []
    gpu: GpuIdentity | None = None
    for number in range(processes):
        first = _FIRST_CHECK_SEED + _SEED_STEP * number
        with ContainedLauncher(target.spec, target.cubin, factory, limit_s) as child:
            gpu = child.ready().gpu
            null = child.time(target.cubin, plan)
            nulls.append([math.log(ratio) for ratio in null.ratios])
            originals_us += null.original_us
            for cubin, trial in zip(cubins, trials, strict=True):
                samples = trial.run(child, cubin, range(first, first + check_seeds))
                if samples is not None and on_process is not None:
                    on_process(number, samples)
    return [trial.confirmation(nulls, statistics.median(originals_us), gpu) for trial in trials]


@dataclass(slots=True)
class ScheduleTrial:
    """Measurements of one schedule so far, by process."""

    plan: Plan
    log_ratios: list[list[float]] = field(default_factory=list)
    wrong: str | None = None
    failure: ScheduleFailure | None = None

    def run(self, child: ContainedLauncher, cubin: bytes, seeds: Sequence[int]) -> ScheduleSamples | None:
        """Compare outputs on inputs of these seeds and time it, unless it has failed before."""
        if self.wrong is not None:
            return None
        try:
            self.wrong = child.compare(cubin, seeds) if seeds else None
            samples = child.time(cubin, self.plan)
        except ScheduleFailedError as failed:
            self.wrong, self.failure = str(failed), failed.failure
            return None
        self.log_ratios.append([math.log(ratio) for ratio in samples.ratios])
        return samples

    def confirmation(self, nulls: LogRatios, original_us: float, gpu: GpuIdentity | None = None) -> Confirmation:
        """The measurements of all processes together."""
        if self.wrong is not None:
            return Confirmation.of_failure(self.wrong, len(nulls), self.failure)
        return Confirmation.of_ratios(self.log_ratios, nulls, original_us, gpu)
