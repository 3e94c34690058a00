"""Smooths rewards: normalises and clips them by their recent statistics (CUDA-L1, section 3.2)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

CLIP = 1.5
"""k of CUDA-L1's equation 6."""

UPDATE_EVERY = 100
"""Rewards between updates of the statistics. CUDA-L1 says 100 iterations; that one is a reward is our reading."""

WINDOW = 1000
"""Latest rewards that the statistics are of. CUDA-L1 says "rolling"; our choice."""

LEAST_DEVIATION = 0.01
"""Rewards are rounded to hundredths, so a smaller spread is none. Our choice."""


class RewardSmoother:
    """clip((reward - mean) / deviation, -k, k) over the latest rewards, as in CUDA-L1 (section 3.2, equation 6).

    Until the first `update_every` rewards have been seen the statistics follow every batch: there is nothing better yet.
    `clip` is k; `window` is the number of latest rewards that count.
    """

    def __init__(self, *, clip: float = CLIP, update_every: int = UPDATE_EVERY, window: int = WINDOW) -> None:
        self.clip = clip
        self.update_every = update_every
        self.window = window
        self.mean = 0.0
        self.deviation = 1.0
        self._latest: deque[float] = deque(maxlen=window)
        self._seen = 0
        self._updated_at = 0

    def smooth(self, rewards: Sequence[float]) -> list[float]:
        """Take note of a batch and return it normalised; all of a batch by the same statistics, so its order stays."""
        self._latest.extend(rewards)
        self._seen += len(rewards)
        due = self._seen <= self.update_every or self._seen - self._updated_at >= self.update_every
        if due and self._latest:
            self.mean = statistics.fmean(self._latest)
            self.deviation = max(LEAST_DEVIATION, statistics.pstdev(self._latest))
            self._updated_at = self._seen
        return [max(-self.clip, min(self.clip, (reward - self.mean) / self.deviation)) for reward in rewards]

    def state(self) -> dict[str, Any]:
        """Everything needed to go on later, as JSON."""
        return {
            "clip": self.clip,
            "update_every": self.update_every,
            "window": self.window,
            "mean": self.mean,
            "deviation": self.deviation,
            "latest": list(self._latest),
            "seen": self._seen,
            "updated_at": self._updated_at,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RewardSmoother:
        """The smoother that `state` was taken from."""
        smoother = cls(clip=state["clip"], update_every=state["update_every"], window=state["window"])
        smoother.mean, smoother.deviation = state["mean"], state["deviation"]
        smoother._latest.extend(state["latest"])
        smoother._seen, smoother._updated_at = state["seen"], state["updated_at"]
        return smoother
