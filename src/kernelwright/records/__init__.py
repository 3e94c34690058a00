"""Typed records of everything that crosses a process or a disk."""

from __future__ import annotations

from kernelwright.records.canonical import canonical_json, sha256_of
from kernelwright.records.lines import append_lines, encodable
from kernelwright.records.models import (
    Candidate,
    Evaluation,
    Label,
    Reason,
    Task,
    TimingBlock,
    Verdict,
)
from kernelwright.records.run_directory import RunDirectory, capture_environment

__all__ = [
    "Candidate",
    "Evaluation",
    "Label",
    "Reason",
    "RunDirectory",
    "Task",
    "TimingBlock",
    "Verdict",
    "append_lines",
    "canonical_json",
    "capture_environment",
    "encodable",
    "sha256_of",
]
