"""Reads the text of a task or a candidate, and checks that a task defines what KernelBench's format asks for.

Nothing is executed here, and torch is not needed.
"""

from __future__ import annotations

import ast
from pathlib import Path

from kernelwright.errors import TaskError, UsageError
from kernelwright.files import TEXT_LIMIT_BYTES, has_text_name, read_regular
from kernelwright.records import Task

REQUIRED_NAMES = ("Model", "get_inputs", "get_init_inputs")


def task_from_file(path: Path) -> Task:
    """A task from a Python file in KernelBench's format; only its syntax and names are checked here."""
    source = read_source(path, "a task")
    check_task_source(source, str(path))
    return Task(id=path.stem, source=source, origin=str(path))


def read_source(path: Path, what: str, wrong: type[UsageError] = TaskError) -> str:
    """The text of a Python file.

    Args:
        path: The file.
        what: What it should hold, in words.
        wrong: What to raise.

    Raises:
        UsageError: it is missing, is no regular file, is empty, too large or is not UTF-8 text, or its name is not.
    """
    wanted = f"Wanted {what}, a Python file, at {path}"
    if not has_text_name(path):
        raise wrong(f"{wanted}; its name is not UTF-8 text, and no record could hold it. Rename the file.")
    try:
        data = read_regular(path, TEXT_LIMIT_BYTES)
    except FileNotFoundError as error:
        raise wrong(f"{wanted}; there is no such file. Check the path.") from error
    except IsADirectoryError as error:
        raise wrong(f"{wanted}; it is a directory. Name a file in it.") from error
    except OSError as error:
        raise wrong(f"{wanted}; {error.strerror}. Name a file that can be read.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(f"{wanted}; found {len(data)} bytes that are not UTF-8 text.") from error
    if "\0" in text:
        raise wrong(f"{wanted}; found binary data with null bytes.")
    if not text.strip():
        raise wrong(f"{wanted}; the file is empty.")
    return text


def check_task_source(source: str, where: str) -> None:
    """See that a text is Python and defines what a task must.

    Raises:
        TaskError: it is not, or does not.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise TaskError(
            f"Wanted a task in {where}; it is not valid Python{line}: {getattr(error, 'msg', error)}."
        ) from error
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            defined |= {alias.asname or alias.name for alias in node.names}
    missing = [name for name in REQUIRED_NAMES if name not in defined]
    if missing:
        raise TaskError(
            f"Wanted a task in {where} that defines {', '.join(REQUIRED_NAMES)}; found no {', '.join(missing)}. "
            "See KernelBench's format in docs/start.md."
        )
