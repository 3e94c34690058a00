"""Writes and reads JSON lines that survive a kill: each is on disk, whole, before the next one starts.

A published run may have its files packed, each under its name and `.gz` or `.xz`: what is here reads them alike.
Canonical JSON has one form for each value, so that equal records have equal hashes on every machine.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import logging
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from kernelwright.errors import UsageError

_LOGGER = logging.getLogger(__name__)
R = TypeVar("R", bound=BaseModel)
_PACKED: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".xz": lzma.open}
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of opening and reading a file, packed or not."""


def append_lines(path: Path, lines: Iterable[str], *, sync: bool = True) -> None:
    """Append lines to a file and wait until they are on disk.

    A line torn by an earlier kill swallows none of them, and a lock keeps writers of several processes apart. Half a
    surrogate pair, as a cut stream may leave it, has no UTF-8 and becomes a question mark.

    The file is made, with its folder, when missing. Without `sync` lines outlive this process but no power cut. Raises
    OSError where it cannot be written.
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
        if sync:
            os.fsync(file.fileno())


def files_of(path: Path) -> list[Path]:
    """Existing parts of a file: the packed one of a published run, then the one being written."""
    return [file for file in (path.with_name(path.name + ending) for ending in (*_PACKED, "")) if file.exists()]


def unpacked(path: Path) -> bytes:
    """All of a file, packed parts first; nothing where there is none."""
    return b"".join(_opened(file, "rb").read() for file in files_of(path))


def read_json(path: Path) -> Any | None:
    """A JSON file, packed or not, or None where it is missing.

    Raises:
        UsageError: the file is there and cannot be read, or is not JSON.
    """
    files = files_of(path)
    if not files:
        return None
    try:
        with _opened(files[-1], "rt", encoding="utf-8") as text:
            return json.load(text)
    except _UNREADABLE as error:
        raise UsageError(f"Wanted to read {files[-1]}; {_why(error)}. Choose another directory.") from error
    except ValueError as error:
        raise UsageError(f"Wanted JSON in {files[-1]}; {error}. Remove the file or choose another directory.") from error


def read_lines(path: Path) -> Iterator[str]:
    """Every line of a file in order of writing, packed ones first; none where it is missing. The last may be torn.

    Raises:
        UsageError: the file is there and cannot be read.
    """
    for file in files_of(path):
        try:
            with _opened(file, "rt", encoding="utf-8", errors="replace") as text:
                yield from text
        except _UNREADABLE as error:
            raise UsageError(f"Wanted a run's records in {file}; {_why(error)}. Choose another directory.") from error


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Every whole record of a JSON lines file, packed or not, in order of writing.

    A line that is none is left out with a warning: its work is still pending.

    Raises:
        UsageError: the file is there and cannot be read.
    """
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError:
            if line.strip():
                _tell_of_torn_line(path, number)


@cache
def _tell_of_torn_line(path: Path, number: int) -> None:
    """Warn once of a line that is no record."""
    _LOGGER.warning("line %d of %s is torn or broken, and is left out: its work counts as pending", number, path)


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Every JSON object of a JSON lines file, packed or not; a torn line is work that is still pending, and is skipped.

    Raises:
        UsageError: the file is there and cannot be read.
    """
    for line in read_lines(path):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _opened(path: Path, mode: str, **options: str) -> IO[Any]:
    opener: Callable[..., IO[Any]] = _PACKED.get(path.suffix, open)
    return opener(path, mode, **options)


def _why(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def encodable(text: str) -> str:
    """A text without halves of surrogate pairs, which no file takes."""
    return text.encode("utf-8", "replace").decode()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces and no NaN; `value` is anything `json` accepts.

    Raises:
        ValueError: a float is NaN or infinite. Such a number has no JSON spelling; store `None` and say why.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def sha256_of(value: Any) -> str:
    """Hex SHA-256 of text as it is, or of the canonical JSON of anything else."""
    text = value if isinstance(value, str) else canonical_json(value)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
