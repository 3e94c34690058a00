"""Compares arms of stage 3 that were trained with several seeds, with intervals over tasks and seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from kernelwright.contrastive.answers import parse_completion
from kernelwright.contrastive.rollouts import RolloutLog
from kernelwright.contrastive.stages.held_out import BOOTSTRAP_DRAWS, HeldOutResult
from kernelwright.contrastive.techniques import rewrites_in
from kernelwright.records import RunDirectory, Verdict

Logs = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""Logarithms of speedups, a row for each seed and a column for each task."""


def compared(vanilla: Sequence[HeldOutResult], contrastive: Sequence[HeldOutResult]) -> dict[str, object]:
    """Best of the answers and worth of one answer of two arms, and their ratio; a result for each seed.

    Intervals are of 95 %, by a bootstrap that draws tasks, the same for both arms, and seeds of each arm.

    Raises:
        ValueError: the tasks differ.
    """
    if len({tuple(task.task_sha256 for task in one.tasks) for one in (*vanilla, *contrastive)}) != 1:
        raise ValueError("wanted results on the same tasks in the same order")
    best = [_logs([one.speedups() for one in arm]) for arm in (vanilla, contrastive)]
    worth = [_logs([[task.worth() for task in one.tasks] for one in arm]) for arm in (vanilla, contrastive)]
    told: dict[str, object] = {"tasks": len(vanilla[0].tasks), "seeds": min(len(vanilla), len(contrastive))}
    for name, (first, second) in (("speedup", best), ("worth", worth)):
        draws = [_draws(first, seed=1), _draws(second, seed=2)]
        for arm, logs, drawn in zip(("vanilla_grpo", "contrastive"), (first, second), draws, strict=True):
            told[f"{name}_{arm}"] = math.exp(float(logs.mean()))
            told[f"{name}_{arm}_low"], told[f"{name}_{arm}_high"] = _interval(drawn)
        ratio = "ratio" if name == "speedup" else f"{name}_ratio"
        told[ratio] = math.exp(float(second.mean() - first.mean()))
        told[f"{ratio}_low"], told[f"{ratio}_high"] = _interval(draws[1] - draws[0])
    return told


def _logs(speedups: Sequence[Sequence[float]]) -> Logs:
    return np.log(np.asarray(speedups, dtype=np.float64))


def _draws(logs: Logs, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Means of bootstrap samples; those of the same number have the same tasks, whatever the arm."""
    seeds, tasks = logs.shape
    chosen_tasks = np.random.default_rng(0).integers(tasks, size=(BOOTSTRAP_DRAWS, 1, tasks))
    chosen_seeds = np.random.default_rng(seed).integers(seeds, size=(BOOTSTRAP_DRAWS, seeds, 1))
    return np.asarray(logs[chosen_seeds, chosen_tasks].mean(axis=(1, 2)))


def _interval(logs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    low, high = np.quantile(logs, [0.025, 0.975])
    return math.exp(float(low)), math.exp(float(high))


def techniques_used(run: RunDirectory) -> Mapping[str, Mapping[str, float]]:
    """For each model that was measured in a run: the share of its right answers that use each technique."""
    right: Counter[str] = Counter()
    used: dict[str, Counter[str]] = {}
    for rollout in RolloutLog(run.path).rollouts():
        if rollout.verdict is Verdict.ACCEPTED:
            name = rollout.model.rpartition(":")[2]
            right[name] += 1
            used.setdefault(name, Counter()).update(rewrites_in(parse_completion(rollout.answered()).source or ""))
    return {name: {one: count / right[name] for one, count in sorted(counts.items())} for name, counts in used.items()}
