"""Forks workers quickly: a process that has imported torch and only forks workers, watches them and ends them.

Importing torch takes seconds and a judge needs a dozen fresh processes for every candidate; a fork takes milliseconds.
The fork server is started before the parent holds any secret, never runs candidate code and never touches CUDA. It is the
workers' parent, so it sees how they ended, and it measures memory and process counts from outside without
disturbing the judge's clock.

The handle needs no torch, so that the process imports it while its parent still does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernelwright
from kernelwright.cores import cores_except
from kernelwright.errors import SandboxError
from kernelwright.judge.isolation import sandbox
from kernelwright.judge.isolation.sandbox import Ending, Session
from kernelwright.judge.worker.channel import Channel, ChannelClosedError, ChannelTimeoutError
from kernelwright.judge.worker.environment import WORKER_ENVIRONMENT

_IMPORTED, _LEFT_OUT = "KERNELWRIGHT_FORK_SERVER_IMPORTED", "KERNELWRIGHT_FORK_SERVER_LEFT_OUT"
"""Variables of a fork server that has begun anew: modules that it imports at once, and those that it does not import."""
COMPILER = (
    "torch._inductor.compile_fx",
    # Imported by the first compilation in a process, for a tenth to a quarter of a second.
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.cudagraph_trees",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
)
"""Modules of torch.compile's compiler."""
HASHES = ("torch_key", "triton_key")
"""Functions that hash all files of PyTorch and Triton, once in a process and its forks: 0.2 and 0.4 s. Called when idle, so
that no worker waits."""
_WATCH_S = 0.05
FORK_TRIES = 200
"""Tries for ten seconds: a watch needs half a second to end the processes that are in the way. Our choice."""

INHERITED_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "LANG",
    "LC_ALL",
    "CC",
    "CXX",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "TZ",
    "TORCH_CUDA_ARCH_LIST",
    "MAX_JOBS",
)
"""Environment that workers see. Nothing else, keys and tokens above all, reaches them. `CUDA_DEVICE_MAX_CONNECTIONS` stays
out: with 1, three cheats whose work goes on in streams that are never joined were accepted on an H200."""


def installed_path() -> list[str]:
    """`sys.path` without the folder that Python put there for the program it was started with.

    A candidate stands alone: it must not find modules there, beside a task perhaps.
    """
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    started = {"", os.getcwd(), *([os.path.dirname(os.path.abspath(program))] if program else [])}
    first, *others = sys.path
    ours = str(Path(kernelwright.__file__).parents[1])
    return sys.path if first not in started or first == ours else others


class ForkServer:
    """The parent's handle on the fork server, which leaves the processor's core `off` free, as do its forks."""

    def __init__(self, off: int | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        inherited = {key: os.environ[key] for key in INHERITED_VARIABLES if key in os.environ}
        program = (
            "import json, sys; "
            "sys.path[:] = json.loads(sys.argv[2]); "
            "from kernelwright.judge.isolation import fork_server; fork_server.main(int(sys.argv[1]))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), json.dumps(installed_path())],
            pass_fds=[theirs.fileno()],
            env=inherited | WORKER_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C at the terminal is the parent's to handle
        )
        self.keep_off(off)  # before it has any other thread
        theirs.close()
        self._channel = Channel(ours)
        self.has_forked = False
        """True if a worker was asked for: before that it may still be importing torch, and is killed."""
        self._turn = threading.Lock()
        """Held during a request: workers start together, and the channel serves one request at a time."""

    def keep_off(self, core: int | None) -> None:
        """Leave this core of the processor free from now on, as do later forks: they have this one thread only."""
        with contextlib.suppress(ProcessLookupError):  # where it is gone, the first worker tells
            if core is not None:
                os.sched_setaffinity(self.process.pid, cores_except(core))

    def spawn(self, config: dict[str, Any], files: list[int]) -> int:
        """Fork a worker; `files[0]` is its end of the channel. Returns its process id, which is its session's too."""
        self.has_forked = True
        return int(self._ask({"spawn": config, "files": len(files)}, 120.0, files)["pid"])

    def end(self, pid: int, grace_s: float = 0.0) -> Ending:
        """Kill a worker with its whole session, if it still lives after `grace_s`, and say how it ended."""
        return Ending(**self._ask({"end": pid, "grace_s": grace_s}, 60.0))

    def import_compiler(self, device_type: str) -> None:
        """Import torch.compile's compiler once for all workers, before the first of them. Does not wait for it."""
        with self._turn:
            self._channel.send({"import_compiler": device_type})

    def import_modules(self, names: Sequence[str]) -> None:
        """Import installed modules once for all workers that are forked later. There may be no worker now. Does not wait."""
        with self._turn:
            self._channel.send({"import_modules": names})

    def _ask(self, request: dict[str, Any], limit_s: float, files: list[int] | None = None) -> dict[str, Any]:
        try:
            with self._turn:
                self._channel.send(request)
                self._channel.send_files(files or [])
                return self._channel.receive(time.monotonic() + limit_s)
        except (ChannelClosedError, ChannelTimeoutError, OSError) as error:
            raise SandboxError(
                "Wanted a worker from the process that forks them; it is gone "
                f"({error}, exit status {self.process.poll()}). Is there memory left? Try again."
            ) from error

    def close(self) -> None:
        """End the fork server; workers still alive die with it."""
        self._channel.close()
        if not self.has_forked:
            self.process.kill()  # it may still be importing torch
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# --- inside the fork server --------------------------------------------------------------------------------------------


def main(handle: int) -> None:
    """Serve the parent until it closes its end."""
    import statistics  # noqa: F401 - among what a module shares with its user

    from kernelwright.judge.worker import inspection, serving  # noqa: F401 - imports torch once, for all that are forked off

    inspection.library()
    sandbox.adopt_orphans()
    loop = ForkLoop(Channel(socket.socket(fileno=handle)))
    loop.import_modules(json.loads(os.environ.get(_IMPORTED, "[]")))
    loop.serve()


class ForkLoop:
    """Forks workers for the other end of a channel, watches them and ends them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sessions: dict[int, Session] = {}
        self._left_to_hash: list[str] = []
        self._imported: list[str] = []

    def serve(self) -> None:
        """Answer until the other end is closed, and end what is left."""
        try:
            while True:
                wait_s = 0.0 if self._left_to_hash else _WATCH_S if self._sessions else None
                ready, _, _ = select.select([self._channel.socket], [], [], wait_s)
                if ready:
                    self._answer(self._channel.receive())
                elif self._left_to_hash:
                    self.hash_compiler(self._left_to_hash.pop())
                self._watch()
        except ChannelClosedError:
            pass
        finally:
            for session in self._sessions.values():
                session.end()

    def _answer(self, message: dict[str, Any]) -> None:
        if "spawn" in message:
            config = message["spawn"]
            pid = self._fork(config, self._channel.receive_files(message["files"]))
            self._sessions[pid] = Session(pid, config["memory_limit_bytes"], config["process_limit"])
            self._channel.send({"pid": pid})
        elif "import_compiler" in message:
            self.import_compiler(message["import_compiler"])
            self._left_to_hash = [*HASHES]
        elif "import_modules" in message:
            self.import_modules(message["import_modules"])
        else:
            self._channel.send(self._sessions.pop(message["end"]).end(message["grace_s"])._asdict())

    def _watch(self) -> None:
        for session in self._sessions.values():
            session.watch()

    def _fork(self, config: dict[str, Any], files: list[int]) -> int:
        for tries_left in reversed(range(FORK_TRIES)):
            try:
                pid = os.fork()
                break
            except OSError:  # a candidate has started more processes than the machine has room for
                if not tries_left:
                    raise
                self._watch()
                time.sleep(_WATCH_S)
        if pid:
            for handle in files:
                os.close(handle)
            return pid
        status = 1
        try:
            self._channel.close()
            self.become_worker(config, files)
            status = 0
        finally:
            os._exit(status)

    def become_worker(self, config: dict[str, Any], files: list[int]) -> None:
        """Serve as a worker behind walls, in a fork; `files[0]` is its end of a channel."""
        from kernelwright.judge.worker import serving

        # A session of its own: seccomp refuses to leave it, so its members are all that this worker ever starts.
        os.setsid()
        sandbox.die_with_parent()
        private = Path(config["private"])
        log = os.open(private / serving.OUTPUT_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(nothing)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        serving.prepare_directories(private, Path(config["build"]))
        # The reference too, although it is trusted: a process behind these walls ran the same code up to 15 % faster than
        # one without them, so both sides must stand behind the same.
        sandbox.restrict((private, Path(config["build"])), config["device"], config["file_limit_bytes"])
        serving.say_where_when_asked(private)  # a thread from before would have no walls around it
        serving.serve(socket.socket(fileno=files[0]), config, files[1:])

    def import_compiler(self, device: str) -> None:
        """Import it: 3 s, and on a processor 10 s for torch's probes of its instructions, whose results stay here."""
        self.import_modules(COMPILER)
        if device == "cpu":
            importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()

    def import_modules(self, names: Sequence[str]) -> None:
        """Import modules, and what modules import when a name in them is asked for.

        One that is not there is left to the workers, as is one whose import fails.
        """
        from kernelwright.judge.worker import inspection

        left_out = json.loads(os.environ.get(_LEFT_OUT, "[]"))
        if not (names := [name for name in names if name not in left_out]):
            return
        before, loaded = (open_gpu_files(), threading.active_count()), len(sys.modules)
        for name in names:
            with contextlib.suppress(Exception):
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError:
                    pkgutil.resolve_name(name)
        if any(now > earlier for now, earlier in zip((open_gpu_files(), threading.active_count()), before, strict=True)):
            # Forks of a process that has begun to use a GPU cannot use it, and lack threads. So begin anew; there is no
            # worker yet.
            os.environ |= {_IMPORTED: json.dumps(self._imported), _LEFT_OUT: json.dumps([*left_out, *names])}
            os.execv(sys.executable, sys.orig_argv)
        self._imported += names
        if len(sys.modules) == loaded:
            return
        inspection.library.cache_clear()
        inspection.library()
        gc.collect()
        gc.freeze()

    def hash_compiler(self, name: str) -> None:
        """Have the compiler hash its files: most of the time of a compilation that finds its result in a cache."""
        with contextlib.suppress(ImportError, OSError):
            getattr(sys.modules.get("torch._inductor.codecache"), name, lambda: None)()  # none where it is not imported


def open_gpu_files() -> int:
    """Number of files of the GPU's driver that this process has open."""
    count = 0
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            count += os.readlink(f"/proc/self/fd/{handle}").startswith("/dev/nvidia")
    return count
