"""JSON lines that survive whatever ends the process: each is on disk, whole, before the next one starts."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file and wait until they are on disk.

    A line torn by an earlier kill swallows none of them, and a lock keeps writers of several processes apart. Half a
    surrogate pair, as a cut stream may leave it, has no UTF-8 and becomes a question mark.

    Args:
        path: The file; made, with its folder, when missing.
        lines: Without their newlines.

    Raises:
        OSError: it cannot be written.
    """
    text = "".join(line + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode("utf-8", "replace"))
        file.flush()
        os.fsync(file.fileno())


def encodable(text: str) -> str:
    """A text without halves of surrogate pairs, which no file takes."""
    return text.encode("utf-8", "replace").decode()
