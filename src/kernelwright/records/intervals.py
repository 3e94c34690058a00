"""From paired latencies of several fresh processes to a speedup with an interval.

A process is the sampling unit: memory layout, clocks and allocation order are drawn once per process, so calls within
one process are not independent evidence. The interval is the wider of a hierarchical bootstrap (processes, then
pairs) and Student's t over process means, because a bootstrap of few processes covers too little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_T_QUANTILES_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, 97.5 %, for 1 to 15 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""

BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimated ratio with its 95 % interval."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width, in log units."""
        return (math.log(self.high) - math.log(self.low)) / 2


def ratio_interval(processes: Sequence[Sequence[float]], seed: int = 0, looks: int = 1) -> Interval:
    """Interval of a ratio from its logarithms.

    Args:
        processes: For each fresh process, the log ratio of each pair of calls.
        seed: Of the bootstrap, so that a record can be scored again to the same digits.
        looks: How many times the run may have looked at its own interval to decide whether to go on; the error
            probability is split evenly over them (Bonferroni), since stopping when lucky is not evidence.

    Raises:
        ValueError: no process, or one without blocks.
    """
    if not processes or not all(len(blocks) for blocks in processes):
        raise ValueError("wanted at least one block in each of at least one process")
    arrays = [np.asarray(blocks, dtype=np.float64) for blocks in processes]
    centres = np.array([np.median(blocks) for blocks in arrays])
    estimate = float(centres.mean())
    alpha = 0.05 / looks
    draws = _bootstrap(arrays, seed)
    low, high = np.quantile(draws, [alpha / 2, 1 - alpha / 2])
    if len(centres) > 1:
        spread = float(centres.std(ddof=1)) / math.sqrt(len(centres))
        margin = _t_quantile(len(centres) - 1) * spread
        low, high = min(low, estimate - margin), max(high, estimate + margin)
    return Interval(math.exp(estimate), math.exp(min(low, estimate)), math.exp(max(high, estimate)))


def noise_floor(processes: Sequence[Sequence[float]], seed: int = 0) -> float:
    """How far from 1 an A/A ratio measured like this one strays: the 95 % bound of |ratio - 1|."""
    arrays = [np.asarray(blocks, dtype=np.float64) for blocks in processes if len(blocks)]
    if not arrays:
        raise ValueError("wanted A/A blocks")
    return float(math.expm1(np.quantile(np.abs(_bootstrap(arrays, seed)), 0.95)))


def upper_bound(processes: Sequence[Sequence[float]], seed: int = 0) -> float:
    """One-sided 95 % bound of a quantity: of the mean over processes of each one's median."""
    arrays = [np.asarray(values, dtype=np.float64) for values in processes]
    return float(np.quantile(_bootstrap(arrays, seed), 0.95))


def _bootstrap(
    arrays: list[np.ndarray[tuple[int], np.dtype[np.float64]]], seed: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Estimates from resampled processes, each with resampled blocks."""
    generator = np.random.default_rng(seed)
    count = len(arrays)
    shape = (BOOTSTRAP_DRAWS, count)
    medians = np.stack(
        [np.median(blocks[generator.integers(0, blocks.size, (*shape, blocks.size))], axis=-1) for blocks in arrays]
    )
    chosen = generator.integers(0, count, shape)
    picked = np.take_along_axis(medians, chosen[np.newaxis], axis=0)[0]
    means: np.ndarray[tuple[int], np.dtype[np.float64]] = picked.mean(axis=1)
    return means


def _t_quantile(degrees: int) -> float:
    return _T_QUANTILES_975[min(degrees, len(_T_QUANTILES_975)) - 1]
