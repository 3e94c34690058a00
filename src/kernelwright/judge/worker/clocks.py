"""Brackets a module's call with the clock of its device; functions are bound before candidate code exists."""

from __future__ import annotations

import ctypes
import time

import torch

_clock_ns = time.perf_counter_ns


class HostClock:
    """Brackets a call with the monotonic clock."""

    def ready(self) -> None:
        """A processor always is."""

    def start(self) -> None:
        """Directly before the call."""
        self._start_ns = _clock_ns()

    def stop(self) -> None:
        """Directly after the call."""
        self._stop_ns = _clock_ns()

    def arrive(self) -> None:
        """A processor's call ends when it returns."""

    def settle(self) -> None:
        """Nothing is asynchronous here."""

    def elapsed_us(self) -> float:
        """Time between start and stop."""
        return (self._stop_ns - self._start_ns) / 1e3


class DeviceClock:
    """Brackets a call with CUDA events on the stream that was current before the call."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").split(".")[0]
        runtime = ctypes.CDLL(f"libcudart.so.{major}")
        self._record, self._elapsed, self._synchronize, self._wait = (
            runtime.cudaEventRecord,
            runtime.cudaEventElapsedTime,
            runtime.cudaDeviceSynchronize,
            runtime.cudaEventSynchronize,
        )
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        for event in self._events:
            if runtime.cudaEventCreate(ctypes.byref(event)) != 0:
                raise RuntimeError("cudaEventCreate failed")
        self._stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def ready(self) -> None:
        """Have the device switch to this process before the clock starts.

        While it switches, the host can queue many launches; their cost would show in one call and not in the next.
        """
        self._record(self._events[0], self._stream)
        self._synchronize()

    def start(self) -> None:
        """Directly before the call."""
        self._record(self._events[0], self._stream)

    def stop(self) -> None:
        """Directly after the call."""
        self._record(self._events[1], self._stream)

    def arrive(self) -> None:
        """Wait for the end of the call, and for nothing on other streams: they get no time to finish late work.

        The harness's own work after a call would else be done beside a call that is long on the device, and after one that
        is long on the host, whose time outside the clock would be the longer one. `settle` reports what failed.
        """
        self._wait(self._events[1])

    def settle(self) -> None:
        """Wait for the whole device, whatever stream the work is on."""
        status = self._synchronize()
        if status != 0:
            raise RuntimeError(f"the device reports CUDA error {status} after the call")

    def elapsed_us(self) -> float:
        """Time between start and stop."""
        milliseconds = ctypes.c_float()
        if self._elapsed(ctypes.byref(milliseconds), *self._events) != 0:
            raise RuntimeError("the call's events were not recorded")
        return milliseconds.value * 1e3
