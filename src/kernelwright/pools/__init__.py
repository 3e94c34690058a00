"""Where evaluations run: judges on this machine's devices, on a Ray cluster, or behind an HTTP service."""

from __future__ import annotations

from kernelwright.pools.evaluator import Evaluator
from kernelwright.pools.local import JUDGES_PER_GPU, Job, JudgePool, RotationJob

__all__ = ["JUDGES_PER_GPU", "Evaluator", "Job", "JudgePool", "RotationJob"]
