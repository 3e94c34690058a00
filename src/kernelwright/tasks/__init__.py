"""Loads tasks in KernelBench's format and the built-in suite, and draws inputs."""

from __future__ import annotations

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
