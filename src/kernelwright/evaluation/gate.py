"""One evaluation at a time may measure on a device; those that measure nothing may use it together.

A lock file per device, so that judges in different processes, and different runs on one machine, respect one another.
"""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch


class DeviceGate:
    """The device, as one evaluation gets it.

    Args:
        device: Resolved; GPUs are told apart by their uuid, since processes may number them differently.
    """

    def __init__(self, device: torch.device) -> None:
        self._path = Path(tempfile.gettempdir()) / f"kernelwright-{_name(device)}.lock"
        self.phase = "check"
        """What the evaluation is doing; what it holds the device for is counted under this name."""
        self.held_s: dict[str, float] = {}
        """Seconds for which this evaluation had the device alone, by phase."""

    @contextlib.contextmanager
    def __call__(self, *, shared: bool = False) -> Iterator[None]:
        """Enter alone, or with all others that measure nothing either."""
        with self._path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            start_s = time.perf_counter()
            try:
                yield
            finally:
                if not shared:
                    held_s = time.perf_counter() - start_s
                    self.held_s[self.phase] = self.held_s.get(self.phase, 0.0) + held_s
                fcntl.flock(file, fcntl.LOCK_UN)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"gpu-{torch.cuda.get_device_properties(device).uuid}"
    return "cpu"
