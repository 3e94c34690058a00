"""Handles files that users name: tells whether a name can be recorded, reads them, and replaces them in one step.

Reading and replacing raise nothing but `OSError`, whose `strerror` says what was found, so that each caller can say what it
wanted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path

TEXT_LIMIT_BYTES = 16 << 20
"""Of code and settings that a person wrote. Our choice."""
BINARY_LIMIT_BYTES = 256 << 20
"""Of machine code and of a suite. Our choice."""


def has_text_name(path: Path | str) -> bool:
    """Whether a path is UTF-8. Other bytes reach Python as halves of surrogate pairs, which no record can hold."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """The bytes of a regular file; never waits for a pipe, nor reads a device that has no end.

    Raises:
        OSError: it is missing, cannot be read, is no regular file or is larger than the limit.
    """
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if found.st_size > limit_bytes:
        raise OSError(errno.EFBIG, f"{found.st_size} bytes, which is not below {limit_bytes >> 20} MiB", str(path))
    return path.read_bytes()


def replace_file(target: Path, data: bytes) -> None:
    """Write a file in one step: whoever reads it finds the old one or the new one, also after a kill.

    Raises:
        OSError: it cannot be written, or is there and no regular file: a device such as /dev/null would be gone.
    """
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(target))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_tree(folder: Path) -> None:
    """Delete a folder, however deep it is and whatever modes its parts have; what cannot be deleted stays.

    `shutil.rmtree` needs a Python frame and an open file for every level.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, stderr=subprocess.DEVNULL)
