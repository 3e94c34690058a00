"""Keeps the processes from which screening's workers are forked.

It needs no torch, so that they import it while a command still does.
"""

from __future__ import annotations

import threading

from kernelwright.judge.isolation.fork_server import ForkServer


class Zygotes:
    """A zygote, and beside it one that imports torch.compile's compiler: at once for a GPU, else when it is first needed."""

    def __init__(self, device_type: str, off: int | None = None) -> None:
        self._device_type, self._off = device_type, off
        self._lock = threading.Lock()
        """Guards the second one."""
        self._compiling: ForkServer | None = None
        self.plain = ForkServer(off)
        if device_type == "cuda":
            self.compiling()

    def compiling(self) -> ForkServer:
        """The one with the compiler."""
        with self._lock:
            if self._compiling is None:
                self._compiling = ForkServer(self._off)
                self._compiling.import_compiler(self._device_type)
            return self._compiling

    def keep_off(self, core: int | None) -> None:
        """Leave this core of the processor free from now on."""
        with self._lock:
            self._off = core
            for one in (self.plain, self._compiling):
                if one is not None:
                    one.keep_off(core)

    def close(self) -> None:
        """End both; workers still alive die with them."""
        self.plain.close()
        if self._compiling is not None:
            self._compiling.close()
