"""Loads tasks in KernelBench's format and the built-in suite, and draws inputs.

Names are imported when first used: a task's text is read, and a wrong name refused, without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelwright.tasks.input_sets import INPUT_SETS, WEIGHT_SETS, InputSet, has_nan, map_tensors
    from kernelwright.tasks.invariants import is_inexact
    from kernelwright.tasks.loading import (
        LiveTask,
        bring_to_life,
        device_is_full,
        give_back_spare_memory,
        printing_aside,
        seed_generators,
        unfit,
    )
    from kernelwright.tasks.source import read_source
    from kernelwright.tasks.suites import load_task, task_from_file

__all__ = [
    "INPUT_SETS", "WEIGHT_SETS", "InputSet", "LiveTask", "bring_to_life", "device_is_full", "give_back_spare_memory",
    "has_nan", "is_inexact", "load_task", "map_tensors", "printing_aside", "read_source", "seed_generators",
    "task_from_file",
    "unfit",
]  # fmt: skip
_PLACES = {
    "input_sets": ("INPUT_SETS", "WEIGHT_SETS", "InputSet", "has_nan", "map_tensors"),
    "invariants": ("is_inexact",),
    "source": ("read_source",),
    "suites": ("load_task", "task_from_file"),
}
"""Names by module; all others are in `loading`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kernelwright.tasks' has no attribute {name!r}")
    module = next((module for module, names in _PLACES.items() if name in names), "loading")
    return getattr(importlib.import_module(f"kernelwright.tasks.{module}"), name)
