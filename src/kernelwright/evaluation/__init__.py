"""The trusted part: isolate, build, check, time, judge. Its threat model is `docs/threat-model.md`."""

from __future__ import annotations

from kernelwright.evaluation.evaluator import Evaluator
from kernelwright.evaluation.judge import Judge, devices_of, resolve_device
from kernelwright.evaluation.pool import JUDGES_PER_GPU, Job, JudgePool, Rotation
from kernelwright.evaluation.settings import Settings

__all__ = [
    "JUDGES_PER_GPU",
    "Evaluator",
    "Job",
    "Judge",
    "JudgePool",
    "Rotation",
    "Settings",
    "devices_of",
    "resolve_device",
]
