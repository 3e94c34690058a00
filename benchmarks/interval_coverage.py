"""Simulates how often the judge's 95 % interval holds 1 when a candidate is its reference; no program runs.

    python benchmarks/interval_coverage.py RUN_DIR --runs 10000

Latencies of a reference, a candidate and a second reference are drawn from noise models and scored by the function that
scores evaluations. Each model is run with 2 to 6 processes and with the judge's own stopping rule. Writes `summary.json`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import stdtrit

from kernelwright.judge import Settings
from kernelwright.records import RunDirectory, Scoring, TimingBlock, TimingSeries
from kernelwright.records.intervals import MISS_PROBABILITY, early_miss_probability
from kernelwright.records.scoring import Score, score

LATENCY_US, HARNESS_US, HARNESS_NOISE_US = 100.0, 60.0, 3.0
BLOCKS, SERIES, SERIES_CALLS = 6, 8, 16
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def gauss(scale: float) -> Draw:
    """Normal noise of the logarithm of a latency."""
    return lambda generator, shape: generator.normal(0.0, scale, shape)


def student(scale: float, degrees: float) -> Draw:
    """Heavy tails on both sides."""
    return lambda generator, shape: np.clip(scale * generator.standard_t(degrees, shape), -3.0, 3.0)


def spikes(scale: float, share: float, height: float) -> Draw:
    """Some calls take much longer, as on a machine that others use."""
    return lambda generator, shape: (
        generator.normal(0.0, scale, shape) + (generator.random(shape) < share) * generator.exponential(height, shape)
    )


def exponential(scale: float) -> Draw:
    """Skewed: some processes are slower, none is much faster."""
    return lambda generator, shape: generator.exponential(scale, shape)


def two_places(distance: float) -> Draw:
    """Half of the processes are slower by so much, as where code or data lie in one of two places."""
    return lambda generator, shape: distance * generator.integers(0, 2, shape)


@dataclass(frozen=True)
class Noise:
    """A model: how processes and calls differ, in log units, and a drift over each process triple."""

    process: Draw
    call: Draw
    drift: float = 0.0


MODELS = {
    "normal": Noise(gauss(0.01), gauss(0.02)),
    "normal, drift of 10 %": Noise(gauss(0.01), gauss(0.02), 0.10),
    "processes alike": Noise(gauss(0.0), gauss(0.02)),
    "processes alike, drift of 10 %": Noise(gauss(0.0), gauss(0.02), 0.10),
    "processes far apart": Noise(gauss(0.05), gauss(0.02)),
    "heavy-tailed calls": Noise(gauss(0.01), student(0.02, 2.0)),
    "heavy-tailed processes": Noise(student(0.01, 2.0), gauss(0.02)),
    "spikes": Noise(gauss(0.01), spikes(0.02, 0.1, 1.0)),
    "spikes, drift of 10 %": Noise(gauss(0.01), spikes(0.02, 0.1, 1.0), 0.10),
    "skewed processes": Noise(exponential(0.02), gauss(0.02)),
    "two places, 3 % apart": Noise(two_places(0.03), gauss(0.02)),
}


def triple(noise: Noise, process: int, generator: np.random.Generator) -> tuple[list[TimingBlock], TimingSeries]:
    """Clocks of one process triple whose sides are alike."""
    offsets = noise.process(generator, (3,))
    order = np.argsort(generator.random((BLOCKS, 3)), axis=1)
    # Each block's three places, and mirrored: when each side is called, as a share of the triple's time.
    places = np.stack([order, 5 - order], axis=1) + 6 * np.arange(BLOCKS)[:, None, None]
    times = places / (6 * BLOCKS)
    latency = LATENCY_US * np.exp(offsets + noise.call(generator, (BLOCKS, 2, 3)) + noise.drift * times)
    reference, candidate, null = (tuple(map(tuple, latency[:, :, side].round(3).tolist())) for side in range(3))
    blocks = [
        TimingBlock.model_construct(
            process=process, reference_us=reference[i], candidate_us=candidate[i], claimed_us=candidate[i], null_us=null[i]
        )
        for i in range(BLOCKS)
    ]
    calls = noise.call(generator, (SERIES, 2, SERIES_CALLS))
    turns = (np.arange(SERIES)[:, None] * 2 + np.argsort(generator.random((SERIES, 2)), axis=1)) / (2 * SERIES)
    inner = LATENCY_US * np.exp(offsets[:2] + noise.drift * turns) * np.exp(calls).mean(axis=2)
    outer = inner + HARNESS_US + HARNESS_NOISE_US * generator.standard_t(3.0, inner.shape)
    found = {
        f"{side}_{clock}_us": tuple(values[:, index].round(3).tolist())
        for index, side in enumerate(("reference", "candidate"))
        for clock, values in (("inner", inner), ("outer", outer))
    }
    return blocks, TimingSeries.model_construct(process=process, calls=SERIES_CALLS, **found)


def run(noise: Noise, least: int, most: int, target: float, generator: np.random.Generator) -> Score:
    """One evaluation with the judge's stopping rule."""
    blocks: list[TimingBlock] = []
    series: list[TimingSeries] = []
    left, early = MISS_PROBABILITY, early_miss_probability(least, most)
    while True:
        more, one = triple(noise, len(series), generator)
        blocks += more
        series.append(one)
        if len(series) < least:
            continue
        last = len(series) >= most
        found = score(blocks, series, Scoring(miss_probability=left if last else early))
        left -= early
        if last or found.speedup.half_width < target or (found.speedup.high < 1 and len(series) >= 3):
            return found


def coverage(model: str, least: int, most: int, runs: int) -> dict[str, object]:
    """Shares over many runs of one model."""
    generator = np.random.default_rng([least, most, list(MODELS).index(model)])
    target = Settings().target_half_width
    found = [run(MODELS[model], least, most, target, generator) for _ in range(runs)]
    held = sum(one.speedup.low <= 1 <= one.speedup.high for one in found)
    improved = sum(one.speedup.low > 1 + (one.noise_floor or 0.0) for one in found)
    return {
        "model": model,
        "processes": str(most) if least == most else f"{least} to {most}",
        "runs": runs,
        "holds_1": held / runs,
        "called_improvement": improved / runs,
        "half_width_median": float(np.median([one.speedup.half_width for one in found])),
    }


def student_coverage(model: str, least: int, most: int, runs: int, *, spending: bool) -> float:
    """A lower bound of the coverage, whatever the stopping rule: the share of runs in which Student's part of the interval,
    which the whole contains, holds 1 at every look.

    Args:
        model: Name of the noise.
        least: Processes at the first look.
        most: Processes at the last one.
        runs: How many are simulated.
        spending: The error probability is split over the looks as the judge does; otherwise each has all of it.
    """
    noise, generator = MODELS[model], np.random.default_rng([7, least, most, list(MODELS).index(model)])
    offsets = noise.process(generator, (runs, most, 1, 1, 3))
    order = np.argsort(generator.random((runs, most, BLOCKS, 3)), axis=-1)
    places = np.stack([order, 5 - order], axis=3) + 6 * np.arange(BLOCKS)[:, None, None]
    logs = offsets + noise.call(generator, (runs, most, BLOCKS, 2, 3)) + noise.drift * places / (6 * BLOCKS)
    centres = np.median((logs[..., 0] - logs[..., 1]).reshape(runs, most, -1), axis=-1)
    held = np.ones(runs, dtype=bool)
    for count in range(least, most + 1):
        seen = centres[:, :count]
        early = early_miss_probability(least, most)
        miss = MISS_PROBABILITY - (most - least) * early if count == most else early
        margin = (
            stdtrit(count - 1, 1 - (miss if spending else MISS_PROBABILITY) / 2) * seen.std(axis=1, ddof=1) / np.sqrt(count)
        )
        held &= np.abs(seen.mean(axis=1)) <= margin
    return float(held.mean())


def main() -> None:
    """Simulate every model with every number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--runs", type=int, default=10_000, help="of each model, for the bound")
    parser.add_argument("--scored-runs", type=int, default=1000, help="of each model, scored as evaluations are")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    usual = Settings()
    rules = [*((count, count) for count in range(2, 7)), (usual.processes_min, usual.processes_max)]
    directory = RunDirectory(options.run)
    config = {
        "kind": "interval-coverage",
        "simulated": True,
        "runs": options.runs,
        "scored_runs": options.scored_runs,
        "models": list(MODELS),
    }
    directory.claim(config, same=("kind", "runs", "scored_runs", "models"), device="cpu")
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = [pool.submit(coverage, model, *rule, options.scored_runs) for model in MODELS for rule in rules]
        rows = [job.result() for job in jobs]
    for row, (model, (least, most)) in zip(rows, itertools.product(MODELS, rules), strict=True):
        row["bound_runs"] = options.runs
        row["bound"] = student_coverage(model, least, most, options.runs, spending=True)
        row["bound_before"] = student_coverage(model, least, most, options.runs, spending=False)
    directory.write_json("summary.json", {"simulated": True, "rows": rows})
    for row in rows:
        print(
            f"{row['model']:32} {row['processes']:>6} processes: holds 1 in {row['holds_1']:.4f}, at least "
            f"{row['bound']:.4f} (before {row['bound_before']:.4f}), half-width {row['half_width_median']:.4f}"
        )


if __name__ == "__main__":
    main()
