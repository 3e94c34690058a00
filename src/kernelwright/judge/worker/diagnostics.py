"""Shortens a compiler's output to its first errors, so that the record of a failed build says what to mend."""

from __future__ import annotations

import re
from pathlib import Path

LINES_MAX = 40
_LINE_CHARACTERS_MAX = 300
_WORDS_CHARACTERS_MAX, _ERRORS_CHARACTERS_MAX = 2000, 4000
"""Characters told of an ordinary exception, and of a compiler's errors."""
_LOG_BYTES_MAX = 1 << 20
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
