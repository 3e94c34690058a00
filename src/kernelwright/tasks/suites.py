"""Suites: the built-in one, KernelBench and CUDA-L1's release.

The built-in tasks are read as text, so this module lists and loads them without torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kernelwright.errors import TaskError
from kernelwright.records import Candidate, Task

SUITE_NAMES = ("builtin", "kernelbench", "cuda-l1")

CLASS_LEVELS: dict[str, int] = {
    "gemm": 1,
    "gemm-extreme": 1,
    "elementwise": 1,
    "softmax": 1,
    "norm": 1,
    "pooling": 1,
    "reduction": 1,
    "convolution": 1,
    "scan": 1,
    "loss": 1,
    "gemm+pointwise": 2,
    "gemm+reduce": 2,
    "gemm+norm": 2,
    "conv+pointwise": 2,
    "conv+pool": 2,
    "conv+norm": 2,
    "mlp": 3,
    "rnn": 3,
    "attention": 3,
    "cnn-block": 3,
    "network": 3,
    "state-space": 3,
    "netvlad": 3,
}
"""Level of each class of built-in task, as in KernelBench: 1 an operation, 2 a few of them, 3 a network."""

_DIRECTORY = Path(__file__).parent / "suite"


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


def load_suite(name: str, *, path: Path | None = None, levels: Sequence[int] = (1, 2, 3), hub: bool = False) -> Suite:
    """Load a suite by name.

    Args:
        name: One of `SUITE_NAMES`.
        path: For `kernelbench` a checkout, for `cuda-l1` one of the release's JSON lines files.
        levels: The levels to keep.
        hub: Read `kernelbench` from the Hugging Face hub instead of a checkout.

    Raises:
        TaskError: no such suite, its files are missing or are not what they should be, or no task is left.
        InfrastructureError: the hub was asked for and cannot be used.
    """
    if name not in SUITE_NAMES:
        hint = _hint(name, SUITE_NAMES)
        raise TaskError(f"Wanted a suite, one of {', '.join(SUITE_NAMES)}; found {name!r}.{hint}")
    if not levels:
        raise TaskError(f"Wanted at least one level of the suite {name}; found none.")
    if hub and name != "kernelbench":
        raise TaskError(f"Wanted the suite {name} from the hub; only kernelbench is read from there.")
    if name == "builtin":
        if path is not None:
            raise TaskError(f"Wanted the suite builtin; found the path {path}. It comes with the package.")
        entries = _builtin_entries(levels)
    elif name == "kernelbench":
        # Imported late, here and below: these need torch, which the built-in suite does not.
        from kernelwright.tasks.kernelbench import entries_from_checkout, entries_from_hub

        if hub and path is not None:
            raise TaskError(f"Wanted kernelbench both from the hub and from {path}; choose one.")
        if hub:
            entries = entries_from_hub(levels)
        else:
            entries = entries_from_checkout(_required(path, name, "a checkout of KernelBench"), levels)
    else:
        from kernelwright.tasks.cuda_l1 import entries_from_release

        release = _required(path, name, "a JSON lines file of CUDA-L1's release")
        entries = entries_from_release(release, levels)
    if not entries:
        raise TaskError(f"Wanted tasks of level {_listed(levels)} in the suite {name}; found none.")
    return Suite(name, tuple(entries))


@cache
def builtin_names() -> tuple[str, ...]:
    """Ids of the built-in tasks, in alphabetical order."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.py") if path.stem != "__init__"))


def builtin_tasks() -> list[Task]:
    """Every task of the built-in suite, in alphabetical order."""
    return [builtin_task(name) for name in builtin_names()]


def builtin_task(name: str) -> Task:
    """One task of the built-in suite.

    Raises:
        TaskError: there is none of this name; the message names close ones.
    """
    names = builtin_names()
    if name not in names:
        raise TaskError(
            f"Wanted a task file or one of the {len(names)} built-in tasks; found {name!r}, which is neither."
            + _hint(name, names)
        )
    source = (_DIRECTORY / f"{name}.py").read_text(encoding="utf-8")
    return Task(id=name, source=source, origin=f"builtin:{name}")


def task_class(task: Task) -> str | None:
    """What kind of computation a built-in task is, such as `gemm+reduce`; None for a task from elsewhere."""
    try:
        docstring = ast.get_docstring(ast.parse(task.source))
    except SyntaxError:
        return None
    kind, colon, _ = (docstring or "").partition(":")
    return kind if colon and kind in CLASS_LEVELS else None


def _builtin_entries(levels: Sequence[int]) -> list[SuiteEntry]:
    entries = []
    for task in builtin_tasks():
        kind = task_class(task)
        level = CLASS_LEVELS[kind] if kind else None
        if level in levels:
            entries.append(SuiteEntry(task, level=level))
    return entries


def _required(path: Path | None, name: str, what: str) -> Path:
    if path is None:
        raise TaskError(f"Wanted {what} for the suite {name}; found no path. Name one with --path.")
    return path


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _listed(levels: Sequence[int]) -> str:
    return ", ".join(map(str, levels))
