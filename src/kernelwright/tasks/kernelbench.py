"""Loads KernelBench (Ouyang et al., arXiv 2502.10517) as a suite, from a checkout or from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import InfrastructureError, TaskError, listed
from kernelwright.records import Task
from kernelwright.tasks.entries import SuiteEntry
from kernelwright.tasks.source import check_task_source, read_source

HUB_DATASET = "ScalingIntelligence/KernelBench"
HUB_COLUMNS = ("problem_id", "code")

_NUMBERED = re.compile(r"(\d+)_.*\.py")


def entries_from_checkout(checkout: Path, levels: Sequence[int]) -> list[SuiteEntry]:
    """The tasks of a checkout, by level and then by number.

    Args:
        checkout: The repository's root, or the folder in it that holds `level1`, `level2`, ...
        levels: Which levels to read; each must be there.

    Raises:
        TaskError: there is no such folder or level, or a file in it is not a task.
    """
    if not checkout.is_dir():
        found = "it is a file" if checkout.exists() else "there is nothing"
        raise TaskError(f"Wanted a checkout of KernelBench, a folder, at {checkout}; {found}. Check --path.")
    root = checkout / "KernelBench" if (checkout / "KernelBench").is_dir() else checkout
    missing = [level for level in levels if not (root / f"level{level}").is_dir()]
    if missing:
        raise TaskError(_without_level(checkout, root, missing[0]))
    return [entry for level in levels for entry in _level_entries(root / f"level{level}", level)]


def _without_level(checkout: Path, root: Path, level: int) -> str:
    """Message for a folder that lacks a level: what was looked for, what is there, and what to do."""
    wanted = f"Wanted level {level} of KernelBench, a folder level{level} or KernelBench/level{level}, in {checkout}"
    levels = sorted(match[1] for path in root.iterdir() if (match := re.fullmatch(r"level(\d+)", path.name)))
    if levels:
        there = ",".join(levels)
        return f"{wanted}; found level {', '.join(levels)} only. Choose among these, for bench with --levels {there}."
    if re.fullmatch(r"level\d+", checkout.name):
        return f"{wanted}; that is one level itself. Name the folder above with --path, and the level with --levels."
    names = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
    return (
        f"{wanted}; found {listed(names, 4) if names else 'an empty folder'}. "
        "Point --path at a clone of github.com/ScalingIntelligence/KernelBench, or at a folder with level1/1_Title.py."
    )


def _level_entries(folder: Path, level: int) -> list[SuiteEntry]:
    paths: dict[int, Path] = {}
    for path in sorted(folder.glob("*.py")):
        match = _NUMBERED.fullmatch(path.name)
        if match is None:
            raise TaskError(f"Wanted tasks named NUMBER_TITLE.py in {folder}; found {path.name}.")
        number = int(match[1])
        if number in paths:
            both = f"{paths[number].name} and {path.name}"
            raise TaskError(f"Wanted one task {number} in {folder}; found {both}.")
        paths[number] = path
    entries = []
    for number, path in sorted(paths.items()):
        source = read_source(path, "a task of KernelBench")
        entries.append(_entry(level, number, source, str(path)))
    return entries


def entries_from_hub(levels: Sequence[int]) -> list[SuiteEntry]:
    """The tasks of the published data set, by level and then by number.

    Raises:
        InfrastructureError: the package `datasets` is missing, or the hub cannot be reached.
        TaskError: the data set has other columns, or a row is not a task.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InfrastructureError(
            "Wanted KernelBench from the Hugging Face hub; the package datasets is not installed. "
            "Run pip install 'kernelwright[hub]', or name a checkout with --path."
        ) from error
    entries = []
    for level in levels:
        split = f"level_{level}"
        try:
            rows = load_dataset(HUB_DATASET, split=split)
        # The package raises its own, requests', httpx's and plain OSErrors for one cause: no data set came.
        except Exception as error:
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InfrastructureError(
                f"Wanted {split} of {HUB_DATASET} from the Hugging Face hub; it did not come: {cause}. "
                "Check the network, or name a checkout with --path."
            ) from error
        entries += _hub_entries(rows, level)
    return entries


def _hub_entries(rows: Iterable[dict[str, Any]], level: int) -> list[SuiteEntry]:
    sources: dict[int, str] = {}
    for row in rows:
        missing = [column for column in HUB_COLUMNS if column not in row]
        if missing:
            raise TaskError(
                f"Wanted the columns {', '.join(HUB_COLUMNS)} in {HUB_DATASET}; "
                f"it has no {', '.join(missing)}. It has {', '.join(row) or 'none'}."
            )
        sources[int(row["problem_id"])] = str(row["code"])
    origin = f"hf:{HUB_DATASET}/level_{level}"
    return [_entry(level, number, source, f"{origin}/{number}") for number, source in sorted(sources.items())]


def _entry(level: int, number: int, source: str, origin: str) -> SuiteEntry:
    check_task_source(source, origin)
    task = Task(id=f"kernelbench/level{level}/{number}", source=source, origin=origin)
    return SuiteEntry(task, level=level)
