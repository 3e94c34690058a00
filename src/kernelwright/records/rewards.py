"""Computes rewards from an evaluation's record and nothing else, so that any run can be scored again.

speedup      the paired speedup (CUDA-L1, section 2.4.4); failed or rejected: 0
lower-bound  the lower end of its interval instead: what the judge is sure of
log          its logarithm to base 2, between -4 and 4; failed: -5
clamped      the speedup, but no more than 3 (Dr.Kernel, arXiv 2602.05885)
milestone    -1, 1, 2, 3: failed, right, faster, faster than torch.compile too (CUDA Agent, arXiv 2602.24286)
success      1 or 0: CUDA-L1's self-supervised stage (section 2.3)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kernelwright.errors import ConfigError
from kernelwright.records import Evaluation
from kernelwright.records.screened import Screened

FLOOR = 0.0
"""Reward of a failed or rejected implementation (CUDA-L1, table 3: "score 0")."""

CLAMP = 3.0
"""Dr.Kernel clamps the speedup to 0..3."""

LOG_LIMIT = 4.0
"""Largest absolute log2 of a speedup that counts: 16x. Our choice."""

LOG_FLOOR = -5.0
"""Failing is one doubling worse than the slowest that counts. Our choice."""

MILESTONE = 1.05
"""CUDA Agent's milestones are at 5 % faster."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Facts of an accepted candidate on which its reward depends."""

    task: str
    task_sha256: str
    speedup: float | None
    speedup_low: float | None
    """Lower end of its interval; of an estimate, the estimate less its spread."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function."""

    name: str
    """Name in a configuration."""
    floor: float
    """Reward of a rollout that failed, was rejected or cheated; no accepted one gets less."""
    accepted: Callable[[Timed], float]
    """Reward of an accepted candidate, before the floor."""
    needs_time: bool = True
    """True when an accepted candidate must have been timed."""
    baselines: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Speedup of the best baseline over the reference, by the task's hash: what a candidate's speedup is divided by; 1 where
    none is given."""

    def __call__(self, evaluation: Evaluation | None) -> float:
        """The reward of a rollout; None stands for an answer without a candidate.

        Raises:
            ConfigError: the candidate was accepted without being timed, and this reward needs its time.
        """
        if evaluation is None or not evaluation.accepted:
            return self.floor
        return self._earned(Timed(evaluation.task, evaluation.task_sha256, evaluation.speedup, evaluation.speedup_low))

    def estimated(self, found: Screened) -> float:
        """The reward of a candidate that was screened and not judged; raises as a call does."""
        if not found.correct:
            return self.floor
        estimate, spread = found.estimate, found.spread or 0.0
        low = None if estimate is None else estimate * math.exp(-spread)
        return self._earned(Timed(found.task, found.task_sha256, estimate, low))

    def _earned(self, found: Timed) -> float:
        by = self.baselines.get(found.task_sha256, 1.0)
        speedup, low = (None if value is None else value / by for value in (found.speedup, found.speedup_low))
        return max(self.floor, self.accepted(replace(found, speedup=speedup, speedup_low=low)))


def conservative(speedup: float) -> float:
    """Round to two decimals towards 1 (CUDA-L1, section 2.4.4): 1.118 is 1.11 and 0.992 is 1.00."""
    # 1.15 * 100 is 114.99999999999999: nine decimals drop what binary fractions add.
    hundredths = round(speedup * 100, 9)
    return (math.floor(hundredths) if speedup > 1 else math.ceil(hundredths)) / 100


def reward_named(
    name: str,
    *,
    floor: float | None = None,
    compile_speedups: Mapping[str, float] = MappingProxyType({}),
    baselines: Mapping[str, float] = MappingProxyType({}),
) -> Reward:
    """A reward by its name.

    Args:
        name: `speedup`, `lower-bound`, `log`, `clamped`, `milestone` or `success`.
        floor: Reward of a failure, and the least of any rollout; None for the reward's own floor.
        compile_speedups: For `milestone`: torch.compile's own speedup by the task's hash. Other tasks cannot earn 3.
        baselines: Speedup of the best baseline by the task's hash, which candidates are compared with in place of the
            reference; what is added to it later counts too.

    Raises:
        ConfigError: there is no such reward.
    """

    def milestone(evaluation: Timed) -> float:
        faster = _low(evaluation)
        if faster <= MILESTONE:
            return 1.0
        rival = compile_speedups.get(evaluation.task_sha256)
        return 3.0 if rival is not None and faster > MILESTONE * rival else 2.0

    known = {
        "speedup": Reward("speedup", FLOOR, lambda found: conservative(_speedup(found))),
        "lower-bound": Reward("lower-bound", FLOOR, lambda found: conservative(_low(found))),
        "log": Reward("log", LOG_FLOOR, _log),
        "clamped": Reward("clamped", FLOOR, lambda found: min(CLAMP, conservative(_speedup(found)))),
        "milestone": Reward("milestone", -1.0, milestone),
        "success": Reward("success", 0.0, lambda found: 1.0, needs_time=False),
    }
    if name not in known:
        raise ConfigError(f"Wanted a reward, found `{name}`; known are {', '.join(known)}.")
    chosen = replace(known[name], baselines=baselines)
    return chosen if floor is None else replace(chosen, floor=floor)


def _log(evaluation: Timed) -> float:
    speedup = max(conservative(_speedup(evaluation)), 2**-LOG_LIMIT)
    return min(LOG_LIMIT, math.log2(speedup))


def _speedup(evaluation: Timed) -> float:
    return _timed(evaluation, evaluation.speedup)


def _low(evaluation: Timed) -> float:
    return _timed(evaluation, evaluation.speedup_low)


def _timed(evaluation: Timed, value: float | None) -> float:
    if value is None:
        raise ConfigError(
            f"Wanted a timed evaluation of the task {evaluation.task}; it was accepted without a time. "
            "Turn timing on in the judge's settings, or take the reward `success`."
        )
    return value
