"""Computes a speedup with an interval from paired latencies of several fresh processes.

A process is the sampling unit: memory layout, clocks and allocation order are drawn once per process, so calls within
one process are not independent evidence. The interval is the wider of a hierarchical bootstrap (processes, then
pairs) and Student's t over process means, because a bootstrap of few processes covers too little.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

BOOTSTRAP_DRAWS = 2000
MISS_PROBABILITY = 0.05
"""Probability with which a 95 % interval may miss."""
FloatArray: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
IndexArray: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimated ratio with its 95 % interval."""

    estimate: float
    low: float
    high: float

    @property
    def is_decided(self) -> bool:
        """True where it lies on one side of 1."""
        return not self.low <= 1.0 <= self.high

    @property
    def half_width(self) -> float:
        """Half the interval's width, in log units."""
        return (math.log(self.high) - math.log(self.low)) / 2


def ratio_interval(processes: Sequence[Sequence[float]], miss_probability: float = MISS_PROBABILITY) -> Interval:
    """Interval of a ratio from its logarithms. The bootstrap draws the same each time, so that a record can be scored again.

    Args:
        processes: For each fresh process, the log ratio of each pair of calls.
        miss_probability: Probability with which the interval may miss. A run that could have stopped by an earlier
            interval has spent part of its 5 % there, since stopping when lucky is not evidence.

    Raises:
        ValueError: no process, or one without blocks.
    """
    if not processes or not all(len(blocks) for blocks in processes):
        raise ValueError("wanted at least one block in each of at least one process")
    arrays = [np.asarray(blocks, dtype=np.float64) for blocks in processes]
    centres = np.array([np.median(blocks) for blocks in arrays])
    estimate = float(centres.mean())
    tail = miss_probability / 2
    draws = _bootstrap(arrays)
    low, high = np.quantile(draws, [tail, 1 - tail])
    if len(centres) > 1:
        spread = float(centres.std(ddof=1)) / math.sqrt(len(centres))
        margin = t_quantile(len(centres) - 1, 1 - tail) * spread
        low, high = min(low, estimate - margin), max(high, estimate + margin)
    return Interval(math.exp(estimate), math.exp(min(low, estimate)), math.exp(max(high, estimate)))


def early_miss_probability(least: int, most: int) -> float:
    """Probability that each look spends at which a run may stop by its interval; they share half of the 5 %.

    Such looks come after `least` processes and more, but for the last one after `most`, which has what they left.
    """
    return MISS_PROBABILITY / 2 / max(1, most - least)


def noise_floor(processes: Sequence[Sequence[float]]) -> float:
    """95 % bound of |ratio - 1| of A/A ratios measured like this one."""
    arrays = [np.asarray(blocks, dtype=np.float64) for blocks in processes if len(blocks)]
    if not arrays:
        raise ValueError("wanted A/A blocks")
    return float(math.expm1(np.quantile(np.abs(_bootstrap(arrays)), 0.95)))


def upper_bound(processes: Sequence[Sequence[float]]) -> float:
    """One-sided 95 % bound of a quantity: of the mean over processes of each one's median."""
    arrays = [np.asarray(values, dtype=np.float64) for values in processes]
    return float(np.quantile(_bootstrap(arrays), 0.95))


def _bootstrap(arrays: Sequence[FloatArray]) -> FloatArray:
    """Estimates from resampled processes, each with resampled blocks."""
    chosen, first, second = _resamples(tuple(blocks.size for blocks in arrays))
    starts = np.cumsum([0, *(blocks.size for blocks in arrays)])[:-1]
    ordered = np.concatenate([np.sort(blocks) for blocks in arrays])
    medians = (ordered[starts[chosen] + first] + ordered[starts[chosen] + second]) / 2
    means: FloatArray = medians.mean(axis=1)
    return means


@functools.lru_cache(maxsize=16)
def _resamples(sizes: tuple[int, ...]) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Process of each draw at each place, and the two ranks whose mean is the median of its resampled values.

    A resample of m values is m uniform numbers u, each standing for the value of rank floor(m u). Its median needs only
    their middle order statistics, which are Beta-distributed (David and Nagaraja, Order Statistics, 3rd ed., 2.1 and 2.5).
    """
    generator = np.random.default_rng(0)
    chosen = generator.integers(0, len(sizes), (BOOTSTRAP_DRAWS, len(sizes)))
    size = np.asarray(sizes)[chosen]
    below = (size + 1) // 2
    first = generator.beta(below, size + 1 - below)
    # The next order statistic is the least of those above; of an odd number the middle one counts twice.
    even = size % 2 == 0
    second = np.where(even, first + (1 - first) * generator.beta(1, np.where(even, size - below, 1)), first)
    last = size - 1
    return chosen, np.minimum((first * size).astype(int), last), np.minimum((second * size).astype(int), last)


def t_quantile(degrees: int, probability: float) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls; not imported where nothing is scored

    return float(stdtrit(degrees, probability))
