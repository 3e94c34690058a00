"""Shortens a compiler's output to its first errors, so that the record of a failed build says what to mend."""

from __future__ import annotations

import ast
import re
from pathlib import Path

LINES_MAX = 40
_LINE_CHARACTERS_MAX = 300
_WORDS_CHARACTERS_MAX, _ERRORS_CHARACTERS_MAX = 2000, 4000
"""Characters told of an ordinary exception, and of a compiler's errors."""
_LOG_BYTES_MAX = 1 << 20
_TRITON_LINES = 4
"""Lines of a kernel that are shown, up to the wrong one."""
_EXTENSION = "Error building extension"
"""First words of PyTorch's error when ninja fails; the compiler's output follows unless `verbose` sent it to stdout."""
_ERROR = re.compile(r"\b(error|fatal)\b\s*:|\bundefined reference\b|\bcannot find -l|^\w+ fatal\b|^ptxas\b.*\berror\b")
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+")
"""Folders in front of a file's name: they are this machine's."""


def first_errors(text: str, log: Path) -> str:
    """An exception's words, at most `LINES_MAX` lines; of compilers' output the errors, each with its file and line.

    `log` is the file that the process prints to.
    """
    if text.startswith(_EXTENSION) and not _ERROR.search(text):
        text = f"{text.splitlines()[0]}\n{_tail(log)}"
    lines = text.splitlines()
    if text.startswith(_EXTENSION):
        errors = _with_context(lines)
        lines = [lines[0].partition(": ")[0], *(errors or lines[1:][-LINES_MAX + 1 :])][:LINES_MAX]
    elif len(lines) > LINES_MAX:  # as Triton's errors: the place first, then the kernel, then what is wrong with it
        lines = [lines[0], *lines[1 - LINES_MAX :]]
    else:
        return text[:_WORDS_CHARACTERS_MAX]
    return "\n".join(_FOLDERS.sub("", line)[:_LINE_CHARACTERS_MAX] for line in lines)[:_ERRORS_CHARACTERS_MAX]


def triton_errors(error: BaseException, file: str, source: str) -> str | None:
    """Errors of Triton's compiler as place, message and code, the innermost function first; None for other errors.

    Triton counts lines from the kernel's first one, and names no file.
    """
    told: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        code, node, inner = getattr(cause, "src", None), getattr(cause, "node", None), cause.__cause__
        if isinstance(code, str) and isinstance(node, ast.expr | ast.stmt):
            line, column = node.lineno, node.col_offset
            message = getattr(cause, "error_message", None) or ("" if hasattr(inner, "node") else str(inner or ""))
            begin = _begin(code.splitlines(), source.splitlines())
            place = f"{file}:{begin + line}:{column + 1}" if begin is not None else f"line {line} of a kernel outside {file}"
            shown = code.splitlines()[max(0, line - _TRITON_LINES) : line]
            told[:0] = [f"{place}: {'error: ' + message if message else 'called here'}", *shown, " " * column + "^"]
        cause = inner
    return "\n".join("\n".join(told).splitlines()[:LINES_MAX]) or None


def _begin(part: list[str], lines: list[str]) -> int | None:
    """Number of lines before a function, whose own lines may have lost their indentation."""
    wanted = [line.strip() for line in part]
    found = [line.strip() for line in lines]
    return next((at for at in range(len(found)) if found[at : at + len(wanted)] == wanted), None)


def _with_context(lines: list[str]) -> list[str]:
    """Lines that tell of an error, and the indented ones after each, which show the code."""
    kept, in_error = [], False
    for line in lines:
        in_error = bool(_ERROR.search(line)) or (in_error and line.startswith(" "))
        if in_error:
            kept.append(line)
    return kept


def _tail(log: Path) -> str:
    """Output of the latest build."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES_MAX))
            return file.read().decode("utf-8", "replace").rpartition("Building extension module")[2]
    except OSError:
        return ""
