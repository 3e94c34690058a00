"""Starts worker processes, and keeps trusted ones for the next task.

On a GPU a fresh process is expensive: its context takes 0.13 to 0.31 s under a lock of the driver that all processes of
a host share, whatever GPU they use (results/2026-11-27-contexts-h200): with 30 judges one waits for ten seconds. Processes
of the reference and of baselines are therefore kept: each drops its module, gives back its memory and later builds another
module. Each baseline has a process of its own, so that its compiler starts afresh for each task. A candidate's process is
never kept.

On a processor a fork costs milliseconds, and every process is fresh.

Their files lie in temporary folders, which the next judge removes where theirs was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kernelwright.errors import SandboxError
from kernelwright.files import remove_tree
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.judge.isolation.process import Worker, WorkerError, WorkerSpec
from kernelwright.judge.settings import Settings

_PREFIX = "kernelwright-judge-"
_TRIES = 10
_ROOM_BYTES = 16 << 20
"""Room on the disk of temporary files below which a failure is not the candidate's. Our choice."""


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
    """Delete folders that this user's judges left when they were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (lock := _locked(path)) is not None:
            remove_tree(path)
            os.close(lock)


def require_room() -> None:
    """See that temporary files find room, where a candidate failed: it may have needed more.

    Raises:
        SandboxError: the disk is full, also without the candidate's own files.
    """
    left_bytes = shutil.disk_usage(where := tempfile.gettempdir()).free
    if left_bytes < _ROOM_BYTES:
        raise SandboxError(
            f"Wanted room for a candidate's temporary files in {where}; {left_bytes / 1e6:.1f} MB are left, so its failure "
            "says nothing. Make room, or set TMPDIR to a folder on another disk."
        )


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


KEPT = 7
"""Processes kept of each kind: an evaluation uses one for its checks, two for timing, and starts the next four meanwhile."""


class Workers:
    """Starts the workers of one judge; `keep` trusted ones of a kind may wait for another task, while it `has_room`."""

    def __init__(self, fork_server: ForkServer, keep: int, has_room: Callable[[str], bool] = lambda kind: True) -> None:
        self._fork_server = fork_server
        self._keep = keep
        self._has_room = has_room
        self._lock = threading.Lock()
        """Guards the fields below: the sides of a process triple start in parallel."""
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that stopped workers have taken, by role and request."""
        self.waiting: list[Worker] = []
        """Trusted workers that wait for another task."""
        self._folder = JudgeFolder() if keep else None
        """Folder for the files of those that are kept, since the folder of an evaluation ends with it."""

    def start(self, spec: WorkerSpec, settings: Settings) -> Worker:
        """A worker that has run nothing yet, or a kept one that has forgotten what it ran."""
        if self._folder is None or spec.kept_as is None:
            return Worker(self._fork_server, spec, settings)
        spec = replace(spec, directory=self._folder.path, build=self._folder.path / spec.build.name)
        with self._lock:
            kept = next((worker for worker in self.waiting if worker.fits(spec, settings)), None)
            if kept is not None:
                self.waiting.remove(kept)
        if kept is not None:
            try:
                kept.adopt(spec)
                return kept
            except WorkerError:  # it died while it waited
                kept.discard()
        return Worker(self._fork_server, spec, settings)

    def stop(self, worker: Worker) -> None:
        """End a worker, or keep it if it may be."""
        start_s = time.perf_counter()
        spent_s = {op: us / 1e6 for op, us in worker.spent_us.items()}
        with self._lock:
            alike = sum(other.spec.kept_as == worker.spec.kept_as for other in self.waiting)
        kind = worker.spec.kept_as
        kept = kind is not None and alike < self._keep and worker.forget() and self._has_room(kind)
        if not kept:
            worker.discard()
        spent_s["end"] = time.perf_counter() - start_s
        with self._lock:
            if kept:
                self.waiting.append(worker)
            for op, seconds in spent_s.items():
                self.spent_s[f"{worker.spec.role} {op}"] += seconds

    def release_idle(self) -> None:
        """End those that wait."""
        while self.waiting:
            self.waiting.pop().discard()

    def close(self) -> None:
        """End those that wait, for good."""
        self.release_idle()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
