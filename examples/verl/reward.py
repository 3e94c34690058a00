"""Rewards verl's rollouts by asking `kernelwright serve` at KERNELWRIGHT_URL."""

from __future__ import annotations

import functools
import os
from typing import Any

from kernelwright.contrastive.grader import Grader


@functools.cache
def _grader(**options: Any) -> Grader:
    return Grader(os.environ.get("KERNELWRIGHT_URL", "http://127.0.0.1:8730"), **options)


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, reward: str = "lower-bound", **_: Any
) -> dict[str, float]:
    """The reward of one rollout as `score`, and parts of a rubric for verl's metrics; `ground_truth` names the task."""
    grade = await _grader(reward=reward).grade_async(ground_truth, solution_str)
    parts = {"form": grade.form, "right": grade.right, "speedup": grade.speedup, "honest": grade.honest}
    return {"score": grade.reward, **parts}
