"""Rewards: numbers computed from an evaluation's record and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kernelwright.evaluation import JudgePool
from kernelwright.records import Evaluation, Task


class Reward(Protocol):
    """A reward function.

    Attributes:
        name: As in a configuration: `speedup`, `lower-bound`, `log`, `clamped`, `milestone` or `success`.
        floor: What a failed, rejected or cheating rollout gets; below or equal to every accepted one's.
    """

    name: str
    floor: float

    def __call__(self, evaluation: Evaluation | None) -> float:
        """The reward of a rollout; None stands for an answer without a candidate."""
        ...


def reward_named(name: str, *, compile_speedups: Mapping[str, float] | None = None) -> Reward:
    """A reward by its name.

    Args:
        name: `speedup`, `lower-bound`, `log`, `clamped`, `milestone` or `success`.
        compile_speedups: For `milestone`: torch.compile's speedup by task hash. Without it 3 is out of reach.

    Raises:
        ConfigError: there is no such reward.
    """
    raise NotImplementedError


def is_suspicious(evaluation: Evaluation, best_so_far: float | None) -> bool:
    """Whether a speedup must be measured again before it counts: above 3, or more than twice the best so far."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Reverification:
    """A suspicious evaluation and its independent re-measurement."""

    first: Evaluation
    second: Evaluation
    """The re-measurement; `confirms` is set."""
    agrees: bool
    """Both accepted, and less than 10 % apart."""

    @property
    def settled(self) -> Evaluation:
        """What counts: the re-measurement where they agree, otherwise the worse of the two."""
        raise NotImplementedError


def reverify(cases: Sequence[tuple[Task, Evaluation]], judges: Mapping[str, JudgePool]) -> list[Reverification]:
    """Measure suspicious candidates again in fresh processes, each on another device than before where there is one.

    Args:
        cases: What to measure again.
        judges: One pool for each device, by the device's name. A pool starts no process before its first job.

    Raises:
        InfrastructureError: a judge failed.
    """
    raise NotImplementedError


class RewardSmoother:
    """Rewards normalised by rolling statistics and clipped, as in CUDA-L1 (section 3.2, equation 6)."""

    def smooth(self, rewards: Sequence[float]) -> list[float]:
        """Take note of a batch and return it normalised; all of a batch by the same statistics."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Everything needed to go on later, as JSON."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RewardSmoother:
        """The smoother that `state` was taken from."""
        raise NotImplementedError
