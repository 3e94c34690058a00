"""Lets one evaluation at a time measure on a device; evaluations that measure nothing share it.

Lock files per device serve judges in different processes and runs on one machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch

_PATIENCE_S, _PATIENCE_MAX_S = 0.5, 4.0
"""Seconds for which a waiting timer blocks new entrants before it lets them in for as long, at first and at most: checks
hold the gate for a tenth of a second, a first call that compiles for a minute. Our choice."""
_POLL_S = 0.005


class DeviceGate:
    """One evaluation's access to the device.

    A waiting timer blocks new entrants for up to 4 s. Without that, evaluations that measure nothing would keep it waiting;
    without an end to it, all would wait for one that compiles. GPUs are told apart by their uuid, since processes may number
    them differently.
    """

    def __init__(self, device: torch.device) -> None:
        folder, name = Path(tempfile.gettempdir()), _name(device)
        self._path, self._turn = folder / f"kernelwright-{name}.lock", folder / f"kernelwright-{name}.gate-turn.lock"
        self.held_s = 0.0
        """Seconds for which this evaluation has had the device alone."""
        self.waited_s = 0.0
        """Seconds for which it has waited to get in, alone or with others."""

    @contextlib.contextmanager
    def __call__(self, *, shared: bool = False) -> Iterator[None]:
        """Enter alone, or with all others that measure nothing either."""
        with self._turn.open("a") as turn, self._path.open("a") as file:
            came_s = time.perf_counter()
            if shared:
                fcntl.flock(turn, fcntl.LOCK_SH)
                fcntl.flock(file, fcntl.LOCK_SH)
                fcntl.flock(turn, fcntl.LOCK_UN)
            else:
                _enter_alone(turn, file)
            start_s = time.perf_counter()
            self.waited_s += start_s - came_s
            try:
                yield
            finally:
                if not shared:
                    self.held_s += time.perf_counter() - start_s
                fcntl.flock(file, fcntl.LOCK_UN)


def _enter_alone(turn: TextIO, file: TextIO) -> None:
    patience_s = _PATIENCE_S
    while True:
        fcntl.flock(turn, fcntl.LOCK_EX)  # keeps out who comes now
        try:
            if _got_in(file, patience_s):
                return
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)
        # They are let in now; for a moment there may be nobody all the same.
        if _got_in(file, patience_s):
            return
        patience_s = min(2 * patience_s, _PATIENCE_MAX_S)


def _got_in(file: TextIO, patience_s: float) -> bool:
    """Whether the gate was free at some moment of that time."""
    came_s = time.monotonic()
    while not _locked(file):
        if time.monotonic() - came_s >= patience_s:
            return False
        time.sleep(_POLL_S)
    return True


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class DeviceMemory:
    """The device's memory, which evaluations share, and which one may have to itself where sharing was not enough."""

    def __init__(self, device: torch.device) -> None:
        folder, name = Path(tempfile.gettempdir()), _name(device)
        self._memory, self._turn = (folder / f"kernelwright-{name}.{what}.lock" for what in ("memory", "turn"))

    @contextlib.contextmanager
    def __call__(self, *, alone: bool = False) -> Iterator[None]:
        """Use it with others, or alone once they have ended; entrants wait behind one that waits to be alone."""
        with self._turn.open("a") as turn, self._memory.open("a") as memory:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(memory, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            if not alone:
                fcntl.flock(turn, fcntl.LOCK_UN)
            yield


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"gpu-{torch.cuda.get_device_properties(device).uuid}"
    return "cpu"
