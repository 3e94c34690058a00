"""Sees and ends the processes of a worker's session, which are all that it started: seccomp refuses setsid."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import NamedTuple

_WHOLE_WATCH_EVERY = 10
"""Looks at the worker alone for one at its whole session: that takes longer the more processes the machine has."""
_KILL_ROUNDS = 100
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Ending(NamedTuple):
    """The end of a worker process."""

    exit_code: int
    """Exit status; where a signal ended it, minus the signal's number."""
    cause: str | None
    """`memory` or `processes` when the watch ended it; None otherwise."""


@dataclass
class Session:
    """A worker's session, seen by the worker's parent."""

    pid: int
    """Process id of the worker, which is its session's too."""
    memory_limit_bytes: int
    """Anonymous memory of all its processes."""
    process_limit: int
    cause: str | None = None
    """Limit for which it was ended; None as long as it keeps both."""
    looks: int = 0

    def watch(self) -> None:
        """End it where it has grown beyond its limits."""
        if self.cause is not None:
            return
        self.looks += 1
        members = [self.pid] if self.looks % _WHOLE_WATCH_EVERY else session_members(self.pid)
        if len(members) > self.process_limit:
            self.cause = "processes"
        elif sum(map(anonymous_bytes, members)) > self.memory_limit_bytes:
            self.cause = "memory"
        if self.cause is not None:
            self._kill()
            signal_each([self.pid], signal.SIGKILL)  # one that was just forked is in no session of its own yet

    def end(self, grace_s: float = 0.0) -> Ending:
        """Kill all its processes, the worker only if it still lives after `grace_s`, and tell how the worker ended."""
        ended, status = 0, 0
        deadline_s = time.monotonic() + grace_s
        while not ended and time.monotonic() < deadline_s:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            time.sleep(0.002)
        self._kill()
        if not ended:
            signal_each([self.pid], signal.SIGKILL)  # as in `watch`
            _, status = os.waitpid(self.pid, 0)
        # Orphans of the session come to us; none may outlive the worker.
        for _ in range(_KILL_ROUNDS):
            if not (left := session_members(self.pid, zombies=True)):
                break
            self._kill()
            for pid in left:
                with contextlib.suppress(ChildProcessError):  # its own parent has not died or not reaped it yet
                    os.waitpid(pid, 0)
        return Ending(os.waitstatus_to_exitcode(status), self.cause)

    def _kill(self) -> None:
        """Kill until nothing is left: a process may fork while it is being looked for, but stopped ones may not."""
        signal_each(session_members(self.pid), signal.SIGSTOP)
        for _ in range(_KILL_ROUNDS):
            if not (members := session_members(self.pid)):
                return
            signal_each(members, signal.SIGKILL)


def session_members(session: int, *, zombies: bool = False) -> list[int]:
    """Ids of a session's processes."""
    members = []
    # The youngest first: one that lives for a millisecond is gone by the end.
    for name in reversed(os.listdir("/proc")):
        try:
            if not name.isdigit() or os.getsid(int(name)) != session:
                continue
            if not zombies:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                        continue
        except OSError:
            continue  # it ended while we looked
        members.append(int(name))
    return members


def signal_each(pids: list[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is not shared; 0 of one that has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES
