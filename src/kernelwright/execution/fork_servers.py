"""Keeps the processes from which screening's workers are forked.

It needs no torch, so that they import it while a command still does.
"""

from __future__ import annotations

import threading

from kernelwright.judge.isolation.fork_server import ForkServer


class ForkServers:
    """A fork server, and another that imports torch.compile's compiler: at once for a GPU, else when it is first needed.

    Args:
        device_type: `cpu` or `cuda`.
        off: Core of the processor that they leave free.
        single: One server for all, which imports the compiler at once.
    """

    def __init__(self, device_type: str, off: int | None = None, *, single: bool = False) -> None:
        self._device_type, self._off, self.is_single = device_type, off, single
        self._lock = threading.Lock()
        """Guards the second one."""
        self._compiling: ForkServer | None = None
        self._plain = ForkServer(off)
        if single:
            self._plain.import_compiler(device_type)
        elif device_type == "cuda":
            self.server(compiling=True)

    def server(self, *, compiling: bool) -> ForkServer:
        """The server for a worker that will compile by torch.compile, or for one that will not."""
        if self.is_single or not compiling:
            return self._plain
        with self._lock:
            if self._compiling is None:
                self._compiling = ForkServer(self._off)
                self._compiling.import_compiler(self._device_type)
            return self._compiling

    def keep_off(self, core: int | None) -> None:
        """Leave this core of the processor free from now on."""
        with self._lock:
            self._off = core
            for server in (self._plain, self._compiling):
                if server is not None:
                    server.keep_off(core)

    def close(self) -> None:
        """End them; workers still alive die with them."""
        self._plain.close()
        if self._compiling is not None:
            self._compiling.close()
