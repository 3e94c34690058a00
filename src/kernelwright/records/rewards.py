"""Computes rewards from an evaluation's record and nothing else, so that any run can be scored again.

- `speedup`: the paired speedup (CUDA-L1, section 2.4.4); failed or rejected: 0
- `lower-bound`: the lower end of its interval instead, which the judge is sure of
- `log`: its logarithm to base 2, between -4 and 4; failed: -5
- `clamped`: the speedup, but no more than 3 (Dr.Kernel, arXiv 2602.05885)
- `milestone`: -1, 1, 2, 3: failed, right, faster, faster than torch.compile too (CUDA Agent, arXiv 2602.24286)
- `success`: 1 or 0: CUDA-L1's self-supervised stage (section 2.3)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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


FLOORS = {"speedup": FLOOR, "lower-bound": FLOOR, "log": LOG_FLOOR, "clamped": FLOOR, "milestone": -1.0, "success": 0.0}
"""Rewards by name, and what each gives for a failure."""
BY_LOWER_BOUND = ("lower-bound", "milestone")
"""Rewards of the lower end of a speedup's interval; the others take the speedup itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function."""

    name: str
    """Name in a configuration."""
    floor: float
    """Reward of a rollout that failed, was rejected or cheated; no accepted one gets less."""
    baselines: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Speedup of the best baseline over the reference, by the task's hash: what a candidate's speedup is divided by; 1 where
    none is given."""
    compile_speedups: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Speedup of torch.compile over the reference, by the task's hash, which `milestone` compares with."""

    @property
    def needs_time(self) -> bool:
        """True when an accepted candidate must have been timed."""
        return self.name != "success"

    def __call__(self, evaluation: Evaluation | None) -> float:
        """The reward of a rollout; None stands for an answer without a candidate.

        Raises:
            ConfigError: the candidate was accepted without being timed, and this reward needs its time.
        """
        if evaluation is None or not evaluation.accepted:
            return self.floor
        return self._earned(evaluation.task, evaluation.task_sha256, evaluation.speedup, evaluation.speedup_low)

    def estimated(self, screened: Screened) -> float:
        """The reward of a candidate that was screened and not judged; raises as a call does.

        The lower end of an estimate is the estimate less its spread.
        """
        if not screened.correct:
            return self.floor
        estimate, spread = screened.estimate, screened.spread or 0.0
        low = None if estimate is None else estimate * math.exp(-spread)
        return self._earned(screened.task, screened.task_sha256, estimate, low)

    def _earned(self, task: str, task_sha256: str, speedup: float | None, low: float | None) -> float:
        if not self.needs_time:
            return max(self.floor, 1.0)
        measured = low if self.name in BY_LOWER_BOUND else speedup
        if measured is None:
            raise ConfigError(
                f"Wanted a timed evaluation of the task {task}; it was accepted without a time. "
                "Turn timing on in the judge's settings, or take the reward `success`."
            )
        by = self.baselines.get(task_sha256, 1.0)
        compiled = self.compile_speedups.get(task_sha256)
        return max(self.floor, self._of_ratio(measured / by, None if compiled is None else compiled / by))

    def _of_ratio(self, speedup: float, compiled: float | None) -> float:
        """Reward of an accepted candidate, before the floor, by its and torch.compile's ratio to the baseline."""
        match self.name:
            case "log":
                return min(LOG_LIMIT, math.log2(max(conservative(speedup), 2**-LOG_LIMIT)))
            case "clamped":
                return min(CLAMP, conservative(speedup))
            case "milestone":
                if speedup <= MILESTONE:
                    return 1.0
                return 3.0 if compiled is not None and speedup > MILESTONE * compiled else 2.0
        return conservative(speedup)


def conservative(speedup: float) -> float:
    """Round to two decimals towards 1 (CUDA-L1, section 2.4.4): 1.118 is 1.11 and 0.992 is 1.00."""
    # 1.15 * 100 is 114.99999999999999: nine decimals drop what binary fractions add.
    hundredths = round(speedup * 100, 9)
    return (math.floor(hundredths) if speedup > 1 else math.ceil(hundredths)) / 100


def reward_named(
    name: str,
    *,
    floor: float | None = None,
    compile_speedups: Mapping[str, float] | None = None,
    baselines: Mapping[str, float] = MappingProxyType({}),
) -> Reward:
    """A reward by its name.

    Args:
        name: `speedup`, `lower-bound`, `log`, `clamped`, `milestone` or `success`.
        floor: Reward of a failure, and the least of any rollout; None for the reward's own floor.
        compile_speedups: For `milestone`: torch.compile's own speedup by the task's hash. Other tasks cannot earn 3.
        baselines: Speedup of the best baseline by the task's hash, which candidates are compared with in place of the
            reference; what is added to either later counts too.

    Raises:
        ConfigError: there is no such reward, or it is `milestone` where nothing measures torch.compile.
    """
    if name not in FLOORS:
        raise ConfigError(f"Wanted a reward, found `{name}`; known are {', '.join(FLOORS)}.")
    if name == "milestone" and compile_speedups is None:
        raise ConfigError(
            "Wanted the speedup of torch.compile, which the reward `milestone` compares with; nothing here measures it. "
            "Train with it, where the stage measures it once on each task, or take another reward."
        )
    return Reward(
        name=name,
        floor=FLOORS[name] if floor is None else floor,
        baselines=baselines,
        compile_speedups=compile_speedups if compile_speedups is not None else {},
    )
