"""Reads the text of a task or a candidate, and checks that a task defines what KernelBench's format asks for.

Nothing is executed here, and torch is not needed.
"""

from __future__ import annotations

import ast
from pathlib import Path

from kernelwright.errors import TaskError, UsageError
from kernelwright.files import TEXT_LIMIT_BYTES, has_text_name, read_regular

REQUIRED_NAMES = ("Model", "get_inputs", "get_init_inputs")


def read_source(path: Path, what: str, wrong: type[UsageError] = TaskError, *, may_be_empty: bool = False) -> str:
    """The text of a Python file.

    Args:
        path: The file.
        what: What it should hold, in words.
        wrong: What to raise.
        may_be_empty: Whether an empty file is a text too.

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
        raise wrong(f"{wanted}; found {len(data)} bytes that are not UTF-8 text. Name a Python file.") from error
    if "\0" in text:
        raise wrong(f"{wanted}; found binary data with null bytes. Name a Python file.")
    if not text.strip() and not may_be_empty:
        raise wrong(f"{wanted}; the file is empty. Name another, or save yours.")
    return text


def parsed(source: str, what: str) -> ast.Module:
    """The syntax tree of a task's text or of a module that it imports.

    Raises:
        TaskError: it is not Python.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise TaskError(
            f"Wanted {what}; it is not valid Python{line}: {getattr(error, 'msg', error)}. Correct it there."
        ) from error


def check_task_source(source: str, where: str) -> None:
    """See that a text is Python and defines what a task must.

    Raises:
        TaskError: it is not, or does not.
    """
    tree = parsed(source, f"a task in {where}")
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
