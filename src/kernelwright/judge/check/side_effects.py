"""Finds what a candidate has done to its process: settings, library functions and the mode of its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelwright.judge.check.trial import RejectionError, Trial
from kernelwright.judge.isolation.side import Side
from kernelwright.records import Label, Reason


def check_process(trial: Trial, candidate: Side) -> None:
    """Reject or label what a candidate has done to its process and its mode."""
    seen = candidate.inspect()
    changes = forbidden_changes(seen.before, seen.after)
    changes += [f"{name} was replaced" for name in seen.patched]
    if changes:
        raise RejectionError(Reason.GLOBAL_STATE_CHANGED, "; ".join(changes))
    if seen.training != trial.facts.oracle.training:
        trial.findings.miss(Reason.MODE_MISMATCH, f"after the calls the module has training={seen.training}")
    for label in sorted(dynamic_labels(seen.before, seen.after)):
        trial.findings.label(label, "a process-wide setting was changed")


_PERFORMANCE = ("matmul_precision", "cudnn_tf32", "cudnn_benchmark", "cudnn_deterministic", "mkldnn", "threads")
"""Settings that change how fast or how exact the user's other modules are; all others a drop-in must leave alone."""


def dynamic_labels(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[Label]:
    """Labels that follow from process-wide settings before the build and after the calls."""
    labels: set[Label] = set()
    if any(before.get(name) != after.get(name) for name in _PERFORMANCE):
        labels.add(Label.GLOBAL_FLAGS)
    if before.get("matmul_precision") == "highest" and after.get("matmul_precision") != "highest":
        labels.add(Label.TF32)
    return labels


def forbidden_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Process-wide settings that this module has changed and a drop-in must leave alone."""
    names = sorted((before.keys() | after.keys()) - set(_PERFORMANCE))
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if before.get(name) != after.get(name)]
