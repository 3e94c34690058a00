"""Defines the contents of a suite: tasks, each with its level, a candidate and published numbers where the suite has
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelwright.records import Candidate, Task


@dataclass(frozen=True, slots=True)
class SuiteEntry:
    """One task of a suite, with what came with it."""

    task: Task
    candidate: Candidate | None = None
    """The solution that the suite ships, where it ships one."""
    level: int | None = None
    published: dict[str, float] = field(default_factory=dict)
    """Speedups that the suite's authors published, by column name: claims, not measurements of ours."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Named tasks in a fixed order."""

    name: str
    entries: tuple[SuiteEntry, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    """Ids of what the suite has and this program cannot take, and why."""
