"""Defines typed records of everything that crosses a process or a disk."""

from __future__ import annotations

from kernelwright.records.lines import (
    append_lines,
    canonical_json,
    encodable,
    files_of,
    read_lines,
    read_objects,
    read_records,
    sha256_of,
    unpacked,
)
from kernelwright.records.models import (
    Candidate,
    Contract,
    Evaluation,
    KeptContract,
    Scoring,
    StoredPasses,
    Task,
    TimingBlock,
    TimingSeries,
    Verdict,
)
from kernelwright.records.reasons import Label, Reason
from kernelwright.records.run_directory import RunDirectory, capture_environment, not_written, require_possible

__all__ = [
    "Candidate",
    "Contract",
    "Evaluation",
    "KeptContract",
    "Label",
    "Reason",
    "RunDirectory",
    "Scoring",
    "StoredPasses",
    "Task",
    "TimingBlock",
    "TimingSeries",
    "Verdict",
    "append_lines",
    "canonical_json",
    "capture_environment",
    "encodable",
    "files_of",
    "not_written",
    "read_lines",
    "read_objects",
    "read_records",
    "require_possible",
    "sha256_of",
    "unpacked",
]
