"""Empties the last-level cache before every timed call."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

_HOST_MAX_BYTES = 64 << 20
"""Most of a processor's cache that is emptied. A virtual machine may report the cache of its whole host: to write twice
260 MB around each call took more than half of an evaluation. Our choice."""


class CacheFlush:
    """Empties the last-level cache by writing twice its size, on a processor at most so many bytes where told."""

    def __init__(self, device: torch.device, host_bytes_max: int | None = None) -> None:
        self._device = device
        if device.type == "cuda":
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self._buffer = torch.empty(max(size, 1 << 26), dtype=torch.uint8, device=device)
        else:
            size = 2 * last_level_cache_bytes()
            self._host = np.zeros(size if host_bytes_max is None else min(size, host_bytes_max), dtype=np.uint8)
        self._round = 0

    def __call__(self) -> float:
        """Flush and wait; returns the time it took, microseconds."""
        self._round = (self._round + 1) % 251
        start_ns = time.perf_counter_ns()
        if self._device.type == "cuda":
            self._buffer.fill_(self._round)
            torch.cuda.synchronize(self._device)
        else:
            self._host.fill(self._round)
        return (time.perf_counter_ns() - start_ns) / 1e3


def last_level_cache_bytes() -> int:
    """Size of the processor's largest cache, at most `_HOST_MAX_BYTES`; 32 MiB where the kernel does not say."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        largest = max(largest, int(text.rstrip("KM")) * unit)
    return min(largest, _HOST_MAX_BYTES) if largest else 32 << 20
