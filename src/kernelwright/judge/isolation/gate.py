"""Lets one evaluation at a time measure on a device, and has all others stop their workers for as long.

Lock files per device serve judges in different processes and runs on one machine. Each judge stops its own workers and lets
them go on: a judge that dies takes its workers with it, so none stays stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Protocol, TextIO

import torch

from kernelwright.errors import CrowdedError, InternalError

_PROBES, _BUSY_US = 5, 500.0
"""Empty launches that tell whether a GPU is at work for other processes, and their median above which it is: each then waits
for a time slice, which lasts about 2 ms. Our choice."""
_PROBE_S = 0.01
_BRIEF_S, _OPERATORS_MAX = 5e-4, 16
"""Work that is waited for up to which the judge's next operators run together, and how many at most. Our choice."""
_ENDING_S = 2.0
"""Time in which the driver ends the work of a process that was killed. Our choice."""


class Stoppable(Protocol):
    """A worker, as far as the gate knows it."""

    @property
    def is_trusted(self) -> bool:
        """True if it runs no candidate's code."""

    def stop(self) -> bool:
        """Stop all its processes; False where they are stopped already."""

    def resume(self) -> None:
        """Let them go on."""

    def close(self) -> None:
        """End them."""

    def abandon(self) -> None:
        """End what is not trusted, in the midst of another thread's request."""


class DisturbedError(InternalError):
    """A worker was ended to see whether a GPU's endless work was its own, and it was not."""


class DeviceGate:
    """One evaluation's access to the device.

    An evaluation that wants to measure waits only for what others' judges do themselves, which is short, and for their
    workers to be stopped. GPUs are told apart by their uuid, since processes may number them differently.

    Args:
        device: The device.
        unstoppable_limit_s: Time in which a GPU must have ended the kernels of a stopped worker; None does not look.
    """

    def __init__(self, device: torch.device, unstoppable_limit_s: float | None = None) -> None:
        self._device = device
        self._path, self.turn, self._suspects = (lock_path(device, what) for what in ("", "gate-turn", "gate-suspects"))
        self._unstoppable_limit_s = unstoppable_limit_s
        self.alone = False
        """True if this evaluation has the device alone now."""
        self._shared: TextIO | None = None
        """Lock of the block of code that shares the device with others."""
        self._requests = 0
        """Requests of that block that have locks of their own."""
        self._together, self._left = 1, 1
        """Operators of the judge's own that run without a look whether others wait, and those that are left of them."""
        self._mutex = threading.Lock()
        """Guards the two fields above: sides of a process triple are asked in parallel."""
        self.workers: list[Stoppable] = []
        """Workers of this evaluation."""
        self.held_s = 0.0
        """Seconds for which this evaluation has had the device alone."""
        self.waited_s = 0.0
        """Seconds for which it has waited to get in, alone or with others."""

    @contextlib.contextmanager
    def __call__(self, *, shared: bool = False) -> Iterator[None]:
        """Enter alone, or with all others that measure nothing either."""
        with self._path.open("a") as file:
            self._enter(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            start_s = time.perf_counter()
            self.alone, self._shared = not shared, file if shared else None
            try:
                yield
            finally:
                if self.alone:
                    self.held_s += time.perf_counter() - start_s
                self.alone, self._shared = False, None

    @contextlib.contextmanager
    def request(self) -> Iterator[TextIO | None]:
        """A worker's request, which has a lock of its own for `stand_aside`; None where nobody has to wait for it.

        On a GPU a worker starts beside what is measured, on other cores. On a processor it would be in the way.
        """
        if self.alone or (self._shared is None and self._device.type != "cpu"):
            yield None
            return
        with self._path.open("a") as file:
            if self._shared is None:
                self._enter(file, fcntl.LOCK_SH)
                yield file
                return
            fcntl.flock(file, fcntl.LOCK_SH)
            with self._mutex:
                self._requests += 1
                fcntl.flock(self._shared, fcntl.LOCK_UN)
            try:
                yield file
            finally:
                with self._mutex:
                    self._requests -= 1
                    if not self._requests:
                        fcntl.flock(self._shared, fcntl.LOCK_SH)

    def give_way(self) -> None:
        """Let others measure now, in the midst of a block that shares the device; returns at once where none waits.

        For long work of the judge's own, which nobody can stop: all who came after the one that waited for it waited too.
        On a GPU short operators are waited for together: to wait for each takes longer than they do.
        """
        self._left -= 1
        if self._shared is None or self._requests or self._left > 0:
            return
        if self._device.type == "cuda":
            start_s = time.perf_counter()
            torch.cuda.synchronize(self._device)  # what is queued would be waited for, too
            is_brief = time.perf_counter() - start_s < _BRIEF_S
            self._together = min(2 * self._together, _OPERATORS_MAX) if is_brief else 1
        self._left = self._together
        if not self._is_wanted():
            return
        fcntl.flock(self._shared, fcntl.LOCK_UN)
        self._enter(self._shared, fcntl.LOCK_SH)

    def stand_aside(self, file: TextIO, worker: Stoppable) -> float:
        """Stop a worker in the midst of a request while another evaluation measures; returns the seconds that took.

        Raises:
            CrowdedError, DisturbedError: what it runs on a GPU did not end, and it was killed.
        """
        if not self._is_wanted():
            return 0.0
        came_s = time.perf_counter()
        stopped = worker.stop()
        self._wait_until_quiet(worker)
        fcntl.flock(file, fcntl.LOCK_UN)
        self._enter(file, fcntl.LOCK_SH)
        if stopped:
            worker.resume()
        return time.perf_counter() - came_s

    def _is_wanted(self) -> bool:
        """True if another evaluation waits to have the device alone."""
        with self.turn.open("a") as turn:
            return not _locked(turn, fcntl.LOCK_SH)

    def _enter(self, file: TextIO, kind: int) -> None:
        """Lock the device; one that waits to be alone keeps out those who come later. Our workers wait with us."""
        came_s = time.perf_counter()
        stopped: list[Stoppable] | None = None
        with self.turn.open("a") as turn:
            for lock in (turn, file):
                if stopped is None and not _locked(lock, kind):
                    stopped = [worker for worker in [*self.workers] if worker.stop()]
                if stopped is not None:
                    fcntl.flock(lock, kind)
        for worker in stopped or ():
            worker.resume()
        self.waited_s += time.perf_counter() - came_s

    def _wait_until_quiet(self, worker: Stoppable) -> None:
        """Wait for the kernels of stopped workers, which cannot be stopped, and kill the worker whose kernels do not end.

        All who stopped a worker see the same busy GPU. So they try in turn whether it rests once theirs is dead. Another's
        may have ended just then, and to be slow is no fault: where it is alone nobody waits for its kernels.
        """
        limit_s = self._unstoppable_limit_s
        if limit_s is None or self._device.type == "cpu" or self.rests_within(limit_s) or worker.is_trusted:
            return
        with self._suspects.open("a") as suspects:
            fcntl.flock(suspects, fcntl.LOCK_EX)
            if self.rests_within(0.0):
                return
            worker.close()
            if self.rests_within(_ENDING_S):
                raise CrowdedError(f"work on the GPU went on for {limit_s:g} s after its process had been stopped.")
        raise DisturbedError("The GPU is at work for another process.")

    def rests_within(self, limit_s: float) -> bool:
        """True if a GPU comes to rest within so many seconds."""
        came_s = time.monotonic()
        while not self.is_quiet():
            if time.monotonic() - came_s >= limit_s:
                return False
            time.sleep(_PROBE_S)
        return True

    def is_quiet(self) -> bool:
        """True if no other process has work on a GPU."""
        taken_us = []
        empty = torch.empty(1, device=self._device)
        torch.cuda.synchronize(self._device)
        for _ in range(_PROBES):
            start_ns = time.perf_counter_ns()
            empty.zero_()
            torch.cuda.synchronize(self._device)
            taken_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        return median(taken_us) < _BUSY_US


def _locked(file: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class DeviceMemory:
    """The device's memory, which evaluations share, and which one may have to itself where sharing was not enough.

    `give_back` ends what this process holds for later: before it waits for one that is alone, and before it is alone itself.
    """

    def __init__(self, device: torch.device, give_back: Callable[[], None] = lambda: None) -> None:
        self._memory, self.turn = (lock_path(device, what) for what in ("memory", "turn"))
        self._give_back = give_back
        self.alone = False
        """True if whoever entered last has it alone."""

    @contextlib.contextmanager
    def __call__(self, *, alone: bool = False) -> Iterator[None]:
        """Use it with others, or alone once they have ended; entrants wait behind one that waits to be alone."""
        with self.turn.open("a") as turn, self._memory.open("a") as memory:
            if not _locked(turn, fcntl.LOCK_EX) or alone:
                self._give_back()
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(memory, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            if not alone:
                fcntl.flock(turn, fcntl.LOCK_UN)
            self.alone = alone
            yield


def lock_path(device: torch.device, what: str) -> Path:
    """A lock file of a device for all processes of this machine."""
    name = f"gpu-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"
    return Path(tempfile.gettempdir(), ".".join(filter(None, (f"kernelwright-{name}", what, "lock"))))
