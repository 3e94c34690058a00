"""Handles files that users name: tells a name of the hub from a path, reads files, and replaces them in one step.

Reading and replacing raise nothing but `OSError`, whose `strerror` says what was found, so that each caller can say what it
wanted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import subprocess
from pathlib import Path

TEXT_LIMIT_BYTES = 16 << 20
"""Limit of code and settings that a person wrote, in bytes. Our choice."""
BINARY_LIMIT_BYTES = 256 << 20
"""Limit of machine code and of a suite, in bytes. Our choice."""


def has_text_name(path: Path | str) -> bool:
    """True where a path is UTF-8. Other bytes reach Python as halves of surrogate pairs, which no record can hold."""
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


def replace_file(target: Path, data: bytes | memoryview) -> None:
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


FOLDERS = ("models", "runs")
"""First parts of names that are folders by custom; no account of the hub has such a name."""
_HUB_NAME = re.compile(r"(?:([\w][\w.-]*)/)?[\w][\w.-]*")


def missing_path(name: str) -> str | None:
    """Say what to do where `name` can only be a path and nothing is there; None for what exists and for the hub's names.

    `name` and `owner/name` are names on the hub, unless the owner is a folder here or one of `FOLDERS`.
    """
    if not name or Path(name).exists():
        return None
    named = _HUB_NAME.fullmatch(name)
    owner = named[1] if named else None
    if named and not name.endswith(".gguf") and not (owner and (owner in FOLDERS or Path(owner).is_dir())):
        return None
    return (
        f"there is nothing at {name}, and as a path it is not looked up on the hub. Check the path; docs/models.md, "
        '"Getting a model", says where models come from.'
    )


def go_offline_without_hub() -> None:
    """Tell Hugging Face's libraries, before they are imported, that there is no hub where its address cannot be looked up.

    They would try six times, in 25 s for each file, before they look into their cache.
    """
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    if getproxies():
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
