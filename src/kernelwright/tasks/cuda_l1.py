"""Loads CUDA-L1's release (arXiv 2507.14111) as a suite: 250 tasks of an older KernelBench with the kernels found.

Each file `optimized_cuda_code/<gpu>.json` holds one JSON object a line: `ref_code` is the task as they ran
it, whose shapes are not today's; `custom_code` is the kernel; every `score_*` is a speedup they claim.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import TaskError, listed
from kernelwright.files import BINARY_LIMIT_BYTES, read_regular
from kernelwright.records import Candidate, Task
from kernelwright.tasks.entries import SuiteEntry
from kernelwright.tasks.source import check_task_source

COLUMNS = ("level_id", "task_id", "ref_code", "custom_code")
SCORE_PREFIX = "score_"

NO_CODE = ("", "None")
"""Texts that stand for no code; seventeen rows of the H100 file hold the word None beside a score."""


def entries_from_release(path: Path, levels: Sequence[int]) -> list[SuiteEntry]:
    """The tasks of one release file, by level and then by number, each with its kernel where it has one.

    Raises:
        TaskError: the file is missing or is not JSON lines with the columns of the release.
    """
    text = _read(path)
    entries: dict[tuple[int, int], SuiteEntry] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        row = _parse(line, where)
        level, task = _integer(row, "level_id", where), _integer(row, "task_id", where)
        if level not in levels:
            continue
        if (level, task) in entries:
            raise TaskError(f"Wanted one row for task {task} of level {level}; {where} is a second one.")
        entries[level, task] = _entry(row, level, task, where)
    return [entry for _, entry in sorted(entries.items())]


def _read(path: Path) -> str:
    wanted = f"Wanted a file of CUDA-L1's release, such as optimized_cuda_code/h100.json, at {path}"
    try:
        return read_regular(path, BINARY_LIMIT_BYTES).decode("utf-8")
    except FileNotFoundError as error:
        raise TaskError(f"{wanted}; there is no such file. Check --path.") from error
    except IsADirectoryError as error:
        raise TaskError(f"{wanted}; it is a directory. Name a file in it.") from error
    except OSError as error:
        raise TaskError(f"{wanted}; {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{wanted}; found bytes that are not UTF-8 text.") from error


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"Wanted one JSON object a line; {where} is not JSON ({error}). "
            "Use a file straight in optimized_cuda_code, not one in its folder codes."
        ) from error
    if not isinstance(row, dict):
        raise TaskError(f"Wanted one JSON object a line; {where} holds a {type(row).__name__}.")
    missing = [column for column in COLUMNS if column not in row]
    if missing:
        raise TaskError(
            f"Wanted the columns {', '.join(COLUMNS)}; {where} has no {', '.join(missing)}. "
            f"It has {listed(row)}. Use a file straight in optimized_cuda_code."
        )
    return row


def _integer(row: dict[str, Any], column: str, where: str) -> int:
    value = row[column]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TaskError(f"Wanted a whole number as {column} in {where}; found {value!r}.")
    return value


def _code(row: dict[str, Any], column: str, where: str) -> str | None:
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise TaskError(f"Wanted text or null as {column} in {where}; found a {type(value).__name__}.")
    return None if value is None or value.strip() in NO_CODE else value


def _entry(row: dict[str, Any], level: int, number: int, where: str) -> SuiteEntry:
    reference = _code(row, "ref_code", where)
    if reference is None:
        raise TaskError(f"Wanted the code of a task as ref_code in {where}; found none.")
    check_task_source(reference, where)
    custom = _code(row, "custom_code", where)
    candidate = None
    if custom is not None:
        candidate = Candidate(source=custom, policy="cuda-l1", note=f"published in {where}")
    task = Task(id=f"cuda-l1/level{level}/{number}", source=reference, origin=where)
    return SuiteEntry(task, candidate, level, _published(row, where))


def _published(row: dict[str, Any], where: str) -> dict[str, float]:
    published: dict[str, float] = {}
    for column, value in row.items():
        if not column.startswith(SCORE_PREFIX) or value is None:
            continue
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TaskError(f"Wanted a number or null as {column} in {where}; found {value!r}.")
        published[column] = float(value)
    return published
