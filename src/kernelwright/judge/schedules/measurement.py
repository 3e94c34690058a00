"""Says what running one schedule gave: its cost beside the original's, or why it has none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """What became of a schedule."""

    MEASURED = "measured"
    WRONG_OUTPUT = "wrong-output"
    FAULT = "fault"
    HANG = "hang"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a backend says of one schedule.

    Attributes:
        status: whether there is a cost, or why there is none.
        cost: cost in the backend's unit, such as microseconds; None unless measured.
        baseline: cost of the original on the same scale; None unless measured.
        detail: why there is no cost, in words.
        blocks: number of timed blocks; 0 where nothing was timed.
        checked: whether the outputs were compared with the original's.
    """

    status: Status
    cost: float | None = None
    baseline: float | None = None
    detail: str = ""
    blocks: int = 0
    checked: bool = False

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
