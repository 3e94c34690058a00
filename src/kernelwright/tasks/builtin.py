"""Loads the built-in suite: the `.task` files of `data`, each the Python text of one task in KernelBench's format.

The first line of a task's docstring says its class, before the colon, and what bounds it. Sizes are small enough for one
CPU core: an eager forward takes about 0.3 to 30 ms. Inputs are signed and outputs depend on all of them, so that no constant
passes for a solution.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.tasks.entries import SuiteEntry

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

_DIRECTORY = Path(__file__).parent / "data"


@cache
def builtin_names() -> tuple[str, ...]:
    """Ids of the built-in tasks, in alphabetical order."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.task")))


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
            f"Wanted a task: a Python file, one of the {len(names)} built-in ids, or an id such as "
            f"kernelbench/level1/1 with --path; found {name!r}, which is none of them." + near_names(name, names)
        )
    source = (_DIRECTORY / f"{name}.task").read_text(encoding="utf-8")
    return Task(id=name, source=source, origin=f"builtin:{name}")


def task_class(task: Task) -> str | None:
    """The class of a built-in task, such as `gemm+reduce`; None for a task from elsewhere."""
    try:
        docstring = ast.get_docstring(ast.parse(task.source))
    except SyntaxError:
        return None
    kind, colon, _ = (docstring or "").partition(":")
    return kind if colon and kind in CLASS_LEVELS else None


def builtin_entries(levels: Sequence[int]) -> list[SuiteEntry]:
    """The built-in tasks of some levels, in alphabetical order."""
    entries = []
    for task in builtin_tasks():
        kind = task_class(task)
        level = CLASS_LEVELS[kind] if kind else None
        if level in levels:
            entries.append(SuiteEntry(task, level=level))
    return entries


def near_names(name: str, known: Sequence[str]) -> str:
    """A question that names the known names nearest to one; empty where none is near."""
    close = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""
