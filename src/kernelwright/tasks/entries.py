"""Defines a suite, chooses its tasks by name, and attaches a user's own candidates to them.

A task is named by its id, by the end of it, or by its file in a checkout: `kernelbench/level1/1`, `level1/1` and
`1_Square_matrix_multiplication_` are one task. Nothing is executed here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from kernelwright.errors import CandidateError, TaskError, listed
from kernelwright.files import BINARY_LIMIT_BYTES, read_regular
from kernelwright.records import Candidate, Task
from kernelwright.tasks.source import read_source

NO_CODE = ("", "None")
"""Texts that stand for no code; seventeen rows of CUDA-L1's H100 file hold the word None beside a score."""


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


_SAMPLE = re.compile(r"level_(\d+)_problem_(\d+)(?:_sample_\d+)?(?:_kernel)?")
"""Name that KernelBench's own scripts give to a generated kernel."""
_NUMBERED = re.compile(r"(\d+)[_.-].+")


@dataclass(frozen=True, slots=True)
class Attached:
    """A suite whose candidates are a user's."""

    suite: Suite
    """The tasks that have a candidate, one entry for each."""
    without: tuple[str, ...]
    """Ids of the tasks that have none."""
    unknown: tuple[str, ...]
    """Candidates that name no task of the suite."""


def near_names(name: str, known: Sequence[str]) -> str:
    """A question that names the known names nearest to one; empty where none is near."""
    close = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def chosen_tasks(suite: Suite, names: Sequence[str]) -> Suite:
    """The suite with the named tasks alone, in its own order.

    Raises:
        TaskError: a name is none of the suite's, or of several of its tasks.
    """
    known = _TaskNames(suite)
    places = set()
    for name in names:
        place = known.place((name.removesuffix(".py"),))
        if place is None:
            for task_id, reason in suite.left_out.items():
                if task_id.endswith(f"/{name}") or task_id == name:
                    raise TaskError(f"Wanted the task {task_id}; it is left out, as {reason}. Choose another.")
            ids = [entry.task.id for entry in suite.entries]
            raise TaskError(
                f"Wanted tasks of the suite {suite.name}; found {name!r}, which is none of its {len(ids)}, "
                f"such as {ids[0]}. Check the name, and for bench --levels.{near_names(name, list(known.names))}"
            )
        places.add(place)
    return replace(suite, entries=tuple(suite.entries[place] for place in sorted(places)))


def with_candidates(suite: Suite, path: Path) -> Attached:
    """The suite with the candidates of a folder, or of a file of JSON lines, without its own.

    Args:
        suite: The tasks.
        path: A folder of Python files, or a file with one JSON object a line.

    Raises:
        CandidateError: a file cannot be read, none of them names a task, or two name the same.
        TaskError: a name is of several tasks.
    """
    known = _TaskNames(suite)
    attached: dict[int, Candidate] = {}
    unknown = []
    if path.is_file() and path.suffix == ".py":
        raise CandidateError(
            f"Wanted candidates, a folder of Python files or a file of JSON lines, at {path}; found one Python file. "
            "Name its folder, or judge it alone with `kernelwright evaluate`."
        )
    for names, shown, source in _of_lines(path) if path.is_file() else _of_folder(path):
        place = known.place(names)
        if place is None:
            unknown.append(shown)
            continue
        candidate = Candidate(source=source, note=shown)
        if attached.setdefault(place, candidate).source != source:
            raise CandidateError(
                f"Wanted one candidate for {suite.entries[place].task.id} in {path}; "
                f"found {attached[place].note} and {shown}. "
                "Judge them in runs of their own: the best of several would have to be measured once more."
            )
    if not attached:
        shown = listed(unknown) if unknown else "no candidate at all"
        raise CandidateError(
            f"Wanted candidates in {path}, named as tasks of the suite {suite.name}, such as "
            f"{suite.entries[0].task.id.partition('/')[2] or suite.entries[0].task.id}.py; found {shown}. "
            "Rename them, or check --levels and --only."
        )
    entries = tuple(replace(suite.entries[place], candidate=attached[place]) for place in sorted(attached))
    without = tuple(entry.task.id for place, entry in enumerate(suite.entries) if place not in attached)
    return Attached(replace(suite, entries=entries), without, tuple(unknown))


class _TaskNames:
    """Places of a suite's tasks by every name that they have."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self.names: defaultdict[str, set[int]] = defaultdict(set)
        for place, entry in enumerate(suite.entries):
            for name in _names_of(entry):
                self.names[name].add(place)

    def place(self, names: Sequence[str]) -> int | None:
        """Place of the task that has one of the names, of which the first known counts; None where no task has.

        Raises:
            TaskError: several tasks have that name.
        """
        for name in names:
            if len(places := self.names.get(name, ())) > 1:
                ids = [self._suite.entries[place].task.id for place in sorted(places)]
                raise TaskError(f"Wanted the name of one task; found {name!r}, which is {listed(ids)}. Name it in full.")
            for place in places:
                return place
        return None


def _names_of(entry: SuiteEntry) -> Iterator[str]:
    """The id and every end of it; the same with the name of the task's file for its number."""
    parts = entry.task.id.split("/")
    ends = [parts, [*parts[:-1], PurePath(entry.task.origin).stem]] if entry.task.origin.endswith(".py") else [parts]
    for end in ends:
        for start in range(len(end)):
            yield "/".join(end[start:])


def _of_folder(folder: Path) -> Iterator[tuple[list[str], str, str]]:
    """Names that may be a task's, the file's own name, and its text."""
    if not folder.is_dir():
        raise CandidateError(
            f"Wanted candidates, a folder of Python files or a file of JSON lines, at {folder}; there is nothing. "
            "Check --candidates."
        )
    for path in sorted(folder.rglob("*.py")):
        shown = path.relative_to(folder)
        yield (
            _possible_names(folder.name, shown.with_suffix("")),
            str(shown),
            read_source(path, "a candidate that defines ModelNew", CandidateError),
        )


def _possible_names(folder: str, path: PurePath) -> list[str]:
    """Names that a file may mean, the likeliest first: itself, then its number."""
    *above, last = path.parts
    if sample := _SAMPLE.fullmatch(last):
        return [f"level{sample[1]}/{sample[2]}"]
    numbered = _NUMBERED.fullmatch(last)
    ends = [last, numbered[1]] if numbered else [last]
    return ["/".join([*base, *above, end]) for end in ends for base in ([folder], [])]


def _of_lines(path: Path) -> Iterator[tuple[list[str], str, str]]:
    try:
        text = read_regular(path, BINARY_LIMIT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8 text"
        raise CandidateError(f"Wanted candidates, one JSON object a line, in {path}; found {reason}.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"line {number} of {path}"
            task, source = _of_row(_parsed(line, where), where)
            if source is not None:
                yield [task], f"{path.name}:{number}", source


def _parsed(line: str, where: str) -> dict[str, Any]:
    wanted = f'Wanted a candidate, {{"task": ..., "source": ...}}, in {where}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CandidateError(f"{wanted}; it is not JSON ({error}). Name a folder, or a file of JSON lines.") from error
    if not isinstance(row, dict):
        raise CandidateError(f"{wanted}; found a {type(row).__name__}.")
    return row


def _of_row(row: dict[str, Any], where: str) -> tuple[str, str | None]:
    """Name of the task and text of the candidate, by our keys or by those of CUDA-L1's release; None for no text."""
    task = row.get("task", f"level{row.get('level_id')}/{row.get('task_id')}" if "task_id" in row else None)
    given = [row[key] for key in ("source", "custom_code") if key in row]
    if not isinstance(task, str) or not given or not (given[0] is None or isinstance(given[0], str)):
        raise CandidateError(
            f"Wanted texts as task and source, or level_id, task_id and custom_code, in {where}; "
            f"found {', '.join(map(str, row)) or 'no key'}."
        )
    return task, None if given[0] is None or given[0].strip() in NO_CODE else given[0]
