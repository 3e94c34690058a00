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
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import kernelwright
from kernelwright.cores import cores_beside
from kernelwright.errors import SandboxError
from kernelwright.judge.isolation import sandbox
from kernelwright.judge.worker.channel import Channel, ChannelClosedError, ChannelTimeoutError
from kernelwright.judge.worker.environment import WORKER_ENVIRONMENT

_WITHOUT_COMPILER = "KERNELWRIGHT_FORK_SERVER_WITHOUT_COMPILER"
"""Variable of a fork server that has begun anew."""
_COMPILER = (
    "torch._inductor.compile_fx",
    # Imported by the first compilation in a process, for a tenth to a quarter of a second.
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.cudagraph_trees",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
)
"""Modules of torch.compile's compiler."""
_HASHES = ("torch_key", "triton_key")
"""Functions that hash all files of PyTorch and Triton, once in a process and its forks: 0.2 and 0.4 s. Called when idle, so
that no worker waits."""
_WATCH_S = 0.05
_SESSION_WATCH_EVERY = 10
"""Looking through all processes takes longer the more of them the machine has."""
_KILL_ROUNDS = 100
_FORK_TRIES = 200
"""Tries for ten seconds: a watch needs half a second to end the processes that are in the way. Our choice."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

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


class Ending(NamedTuple):
    """The end of a worker process."""

    exit_code: int
    """Exit status; where a signal ended it, minus the signal's number."""
    cause: str | None
    """`memory` or `processes` when the watch ended it; None otherwise."""


def _installed_path() -> list[str]:
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
            [sys.executable, "-c", program, str(theirs.fileno()), json.dumps(_installed_path())],
            pass_fds=[theirs.fileno()],
            env=inherited | WORKER_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C at the terminal is the parent's to handle
        )
        self.keep_off(off)  # before it has any other thread
        theirs.close()
        self._channel = Channel(ours)
        self._has_forked = False
        self._turn = threading.Lock()
        """Workers of one process triple start beside one another; the channel serves one request at a time."""

    def keep_off(self, core: int | None) -> None:
        """Leave this core of the processor free from now on, as do later forks: they have this one thread only."""
        with contextlib.suppress(ProcessLookupError):  # where it is gone, the first worker tells
            if core is not None:
                os.sched_setaffinity(self.process.pid, cores_beside(core))

    def spawn(self, config: dict[str, Any], files: list[int]) -> int:
        """Fork a worker; `files[0]` is its end of the channel. Returns its process id, which is its session's too."""
        self._has_forked = True
        return int(self._ask({"spawn": config, "files": len(files)}, 120.0, files)["pid"])

    def end(self, pid: int, grace_s: float = 0.0) -> Ending:
        """Kill a worker with its whole session, if it still lives after `grace_s`, and say how it ended."""
        return Ending(**self._ask({"end": pid, "grace_s": grace_s}, 60.0))

    def import_compiler(self, device_type: str) -> None:
        """Import torch.compile's compiler once for all workers, before the first of them. Does not wait for it."""
        with self._turn:
            self._channel.send({"import_compiler": device_type})

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
        if not self._has_forked:
            self.process.kill()  # it may still be importing torch
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# --- inside the fork server --------------------------------------------------------------------------------------------


@dataclass
class _Watched:
    pid: int
    config: dict[str, Any]
    cause: str | None = None
    ticks: int = 0


def main(handle: int) -> None:
    """Serve the parent until it closes its end."""
    from kernelwright.judge.worker import serving  # noqa: F401 - imports torch once, for all workers that are forked off

    sandbox.adopt_orphans()
    channel = Channel(socket.socket(fileno=handle))
    watched: dict[int, _Watched] = {}
    idle: list[str] = []
    gc.collect()
    gc.freeze()
    try:
        while True:
            ready, _, _ = select.select([channel.socket], [], [], 0.0 if idle else _WATCH_S if watched else None)
            if not ready and idle:
                _hash(idle.pop())
            if ready:
                message = channel.receive()
                if "spawn" in message:
                    pid = _fork(channel, message, watched)
                    watched[pid] = _Watched(pid, message["spawn"])
                    channel.send({"pid": pid})
                elif "import_compiler" in message:
                    _import_compiler(message["import_compiler"])
                    idle = [*_HASHES]
                else:
                    channel.send(_end(watched.pop(message["end"]), message["grace_s"]))
            for one in watched.values():
                _watch(one)
    except ChannelClosedError:
        pass
    finally:
        for one in watched.values():
            _end(one)


def _import_compiler(device: str) -> None:
    """Import it: three seconds, and on a processor ten for torch's probes of its instructions, whose results stay here."""
    if _WITHOUT_COMPILER in os.environ:
        return
    before = _gpu_files()
    for name in _COMPILER:
        with contextlib.suppress(ImportError):  # not every version of torch has all
            importlib.import_module(name)
    if device == "cpu":
        importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
    if _gpu_files() > before:
        # Forks of a process that has begun to use a GPU cannot use it. So begin anew; there is no worker yet.
        os.environ[_WITHOUT_COMPILER] = "1"
        os.execv(sys.executable, sys.orig_argv)
    gc.collect()
    gc.freeze()


def _hash(name: str) -> None:
    """Have the compiler hash its own files, which is most of what a compilation takes that finds its result in a cache."""
    with contextlib.suppress(ImportError, OSError):
        getattr(sys.modules.get("torch._inductor.codecache"), name, lambda: None)()  # none where it may not be imported


def _gpu_files() -> int:
    """Files of the GPU's driver that this process has open."""
    found = 0
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            found += os.readlink(f"/proc/self/fd/{handle}").startswith("/dev/nvidia")
    return found


def _fork(channel: Channel, message: dict[str, Any], watched: dict[int, _Watched]) -> int:
    files = channel.receive_files(message["files"])
    for tries_left in reversed(range(_FORK_TRIES)):
        try:
            pid = os.fork()
            break
        except OSError:  # a candidate has started more processes than the machine has room for
            if not tries_left:
                raise
            for one in watched.values():
                _watch(one)
            time.sleep(_WATCH_S)
    if pid:
        for handle in files:
            os.close(handle)
        return pid
    status = 1
    try:
        _become_worker(channel, message["spawn"], files)
        status = 0
    finally:
        os._exit(status)


def _become_worker(channel: Channel, config: dict[str, Any], files: list[int]) -> None:
    from kernelwright.judge.worker import serving

    # A session of its own: seccomp refuses to leave it, so its members are all that this worker ever starts.
    os.setsid()
    sandbox.die_with_parent()
    channel.close()
    private = Path(config["private"])
    log = os.open(private / serving.OUTPUT_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serving.prepare_directories(private, Path(config["build"]))
    # The reference too, although it is trusted: a process behind these walls ran the same code up to 15 % faster than one
    # without them, so both sides must stand behind the same.
    sandbox.restrict((private, Path(config["build"])), config["device"], config["file_limit_bytes"])
    serving.say_where_when_asked(private)  # a thread from before would have no walls around it
    serving.serve(socket.socket(fileno=files[0]), config, files[1:])


def _watch(one: _Watched) -> None:
    """End a session that has grown beyond its limits."""
    if one.cause is not None:
        return
    one.ticks += 1
    members = [one.pid] if one.ticks % _SESSION_WATCH_EVERY else session_members(one.pid)
    if len(members) > one.config["process_limit"]:
        one.cause = "processes"
    elif sum(_anonymous_bytes(pid) for pid in members) > one.config["memory_limit_bytes"]:
        one.cause = "memory"
    if one.cause is not None:
        _kill_session(one.pid)


def session_members(session: int, *, zombies: bool = False) -> list[int]:
    """Processes of a worker's session, which is all it started: seccomp refuses setsid."""
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


def _anonymous_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _kill_session(session: int) -> None:
    """Kill until nothing is left: a process may fork while it is being looked for, but stopped ones may not."""
    signal_each(session_members(session), signal.SIGSTOP)
    for _ in range(_KILL_ROUNDS):
        if not (members := session_members(session)):
            return
        signal_each(members, signal.SIGKILL)


def _end(one: _Watched, grace_s: float = 0.0) -> dict[str, Any]:
    found, status = 0, 0
    deadline_s = time.monotonic() + grace_s
    while not found and time.monotonic() < deadline_s:
        found, status = os.waitpid(one.pid, os.WNOHANG)
        time.sleep(0.002)
    _kill_session(one.pid)
    if not found:
        signal_each([one.pid], signal.SIGKILL)  # one that was just forked is in no session of its own yet
        _, status = os.waitpid(one.pid, 0)
    # Orphans of the session come to us; none may outlive the worker.
    for _ in range(_KILL_ROUNDS):
        if not (left := session_members(one.pid, zombies=True)):
            break
        _kill_session(one.pid)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # its own parent has not died or not reaped it yet
                os.waitpid(pid, 0)
    return {"exit_code": os.waitstatus_to_exitcode(status), "cause": one.cause}
