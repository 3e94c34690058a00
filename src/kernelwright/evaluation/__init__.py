"""The trusted part: isolate, build, check, time, judge. Its threat model is `docs/threat-model.md`."""

from __future__ import annotations

from kernelwright.evaluation.evaluator import Evaluator
from kernelwright.evaluation.judge import Judge, resolve_device
from kernelwright.evaluation.pool import Job, JudgePool, Rotation
from kernelwright.evaluation.settings import Settings

__all__ = ["Evaluator", "Job", "Judge", "JudgePool", "Rotation", "Settings", "resolve_device"]
