"""Temporary folders of judges, which the next judge removes where theirs was killed."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path

from kernelwright.errors import SandboxError
from kernelwright.files import remove_tree

_PREFIX = "kernelwright-judge-"
_TRIES = 10


class JudgeFolder:
    """A temporary folder, locked for as long as this process lives and has not removed it."""

    def __init__(self) -> None:
        for _ in range(_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            if (lock := _locked(self.path)) is not None:
                self._lock = lock
                return
            # Another judge took it for one that was left, in the moment before it was locked.
            remove_tree(self.path)
        raise SandboxError(
            f"Wanted a folder in {tempfile.gettempdir()} that can be locked; found none in {_TRIES} tries. "
            "Set TMPDIR to a folder on a local disk."
        )

    def remove(self) -> None:
        """Delete it with all that is in it."""
        remove_tree(self.path)
        os.close(self._lock)


def remove_left_folders() -> None:
    """Delete folders of this user's judges that have ended without doing so."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (lock := _locked(path)) is not None:
            remove_tree(path)
            os.close(lock)


def _locked(path: Path) -> int | None:
    """The lock of a folder of this user; None where somebody has it, or the folder is gone."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return None
        path.chmod(0o700)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
