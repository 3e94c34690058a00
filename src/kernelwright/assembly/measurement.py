"""Says what running one schedule gave: its cost beside the original's, or why it has none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    """Whether the outputs were compared with the original's."""

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
