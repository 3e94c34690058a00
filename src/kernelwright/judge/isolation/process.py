"""Handles one worker process in the parent: starts it, asks it, clocks it from outside, ends it.

A watch tells a worker whose compiler is at work from one that hangs: only the first has minutes for its answer. A compiler
is at work when processes of the toolchain use processor time, or when the worker does so inside a compiler that is a
library. The worker's own account of where it is can be forged. A candidate that does so only waits longer itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import secrets
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from kernelwright.cores import cores_except
from kernelwright.errors import InternalError
from kernelwright.files import remove_tree
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.judge.isolation.gate import DeviceGate
from kernelwright.judge.isolation.sandbox import Ending, session_members, signal_each
from kernelwright.judge.settings import Settings
from kernelwright.judge.worker.arena import SharedArena
from kernelwright.judge.worker.channel import (
    Channel,
    ChannelClosedError,
    ChannelGarbageError,
    ChannelTimeoutError,
    decode,
    encode,
)
from kernelwright.judge.worker.serving import ASKED, STACK_LOG
from kernelwright.records import Reason

_COMPILERS = re.compile(
    r"(?:[\w-]+-)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cpp|ld|lld|as)(?:[-.][\w.]+)?|cc1|cc1plus|collect2|lto1|lto-wrapper|gold"
    r"|nvcc|cicc|ptxas|ptxas-\w+|fatbinary|cudafe\+\+|nvlink|ninja|hipcc|rustc"
)
"""Names of processes as the kernel knows them."""
_LIBRARIES = re.compile(
    r"/torch/(_dynamo/(convert_frame|symbolic_convert)|_inductor/(graph|scheduler|lowering)|jit/(_script|frontend)|cuda/_utils)\.py"
    r"|/torch/_inductor/codegen/|/triton/(compiler|backends)/"
    r"|/numba/core/|/cupy/cuda/compiler\.py|/cutlass/base_dsl/|/tilelang/|/tvm/"
)
"""Python files that are on the stack while a compiler works in the worker's own process, and not while its result runs.

Inductor's own are among them: an account ends after a hundred frames, and its recursion over a large graph is deeper.
"""
_FRAME = re.compile(r'^  File "([^"\n]{1,4096})", line (\d{1,9}|\?\?\?) in (.{1,200})$', re.MULTILINE)
_DUMP = "(most recent call first)"
_DUMP_BYTES_MAX = 1 << 16
_BUSY_SHARE = 0.05
"""Share of one core that a compiler at work uses at least. Our choice."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StuckError(InternalError):
    """A worker neither answers nor compiles, or its kernels go on after it was stopped."""


class CompilerWatch:
    """Looks at a worker from time to time while an answer is due, until it has been without progress for too long.

    Args:
        pid: The worker, whose session is all that it started.
        asked: Pipe that asks the worker where it is.
        stack: File to which it writes that.
        limit_s: Longest time without progress, of the worker's running time.
    """

    def __init__(self, pid: int, asked: int, stack: int, limit_s: float) -> None:
        self._pid = pid
        self._asked = asked
        self._stack = stack
        self._limit_s = limit_s
        self._looked_s = 0.0
        self._spent_s: dict[int, float] = {}
        self.compiled_s = 0.0
        """Latest moment at which a compiler was at work."""
        self._where = ""
        self._compiler = ""
        self._read_from = os.fstat(stack).st_size

    def is_stuck(self, ran_s: float) -> bool:
        """True if the worker, which has run for so long, has made no progress within the limit."""
        if ran_s - self._looked_s >= self._limit_s / 16:
            if self._has_worked(ran_s - self._looked_s):
                self.compiled_s = ran_s
            self._looked_s = ran_s
            os.write(self._asked, b"?")
        return ran_s - self.compiled_s >= self._limit_s

    def detail(self) -> str:
        """Reason, in words, for saying that there was no progress."""
        if self._compiler:
            return f"its compiler ({self._compiler}) was started and used no processor time"
        return f"no compiler was at work{self._where}"

    def _has_worked(self, passed_s: float) -> bool:
        least_s = _BUSY_SHARE * passed_s
        before, self._spent_s, self._compiler = self._spent_s, {}, ""
        worked_s = 0.0
        for pid in session_members(self._pid):
            name, spent_s = _name_and_time(pid)
            is_compiler = pid != self._pid and _COMPILERS.fullmatch(name) is not None
            if is_compiler or pid == self._pid:
                self._spent_s[pid] = spent_s
            if is_compiler:
                self._compiler = name
                worked_s += spent_s - before.get(pid, 0.0)
        own_s = self._spent_s.get(self._pid, 0.0) - before.get(self._pid, 0.0)
        return worked_s >= least_s or (self._in_library() and own_s >= least_s)

    def _in_library(self) -> bool:
        """True if a thread of the worker's latest account has a compiler above the candidate's own code."""
        size = os.fstat(self._stack).st_size
        start = max(self._read_from, size - _DUMP_BYTES_MAX)
        self._read_from = size
        text = os.pread(self._stack, size - start, start).decode("utf-8", "replace")
        self._where = "" if text else "; no Python code ran in it"
        for thread in text.split(_DUMP)[1:]:
            for path, line, function in _FRAME.findall(thread):
                if _LIBRARIES.search(path):
                    return True
                if path.endswith("/candidate.py"):
                    self._where = f"; it was last seen in candidate.py, line {line}, in {function}"
                    break
        return False


def _name_and_time(pid: int) -> tuple[str, float]:
    """A process's name, and processor time of it and of its children that have ended, seconds."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
    except OSError:
        return "", 0.0
    return before.partition("(")[2], sum(map(int, after.split()[11:15])) / _TICKS_PER_S


class WorkerError(InternalError):
    """A worker did not do what was asked. For a candidate this becomes the verdict's reason and detail."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass
class CallBudget:
    """Time that one evaluation's candidate may take beyond its reference, seconds."""

    limit_s: float
    spent_s: float = 0.0

    def charge(self, role: str, seconds: float) -> None:
        """Count a request; raises WorkerError, once, where the candidate has spent it all: it may still be settled."""
        self.spent_s += {"candidate": seconds, "reference": -seconds}.get(role, 0.0)
        if self.spent_s > self.limit_s:
            limit_s, self.limit_s = self.limit_s, math.inf
            raise WorkerError(
                Reason.TIMEOUT,
                f"its calls took {self.spent_s:.0f} s more than the reference's; an evaluation allows {limit_s:g} s",
            )


_FORGET_LIMIT_S = 20.0
_POLL_S = 0.02
"""Time between two looks whether another evaluation wants to measure."""
_MESSAGE_S = 5.0
"""Time in which an answer that has begun must have arrived."""
_EXIT_GRACE_S = 0.2
"""Time for a worker that has closed its channel to leave by itself: its exit status tells more than that it was killed."""


@dataclass(frozen=True, slots=True)
class CallClocks:
    """Times of one call by three clocks, microseconds."""

    inner_us: float
    """Time that the worker claims, by CUDA events or its monotonic clock around the module's call."""
    outer_us: float
    """Time by the parent's clock from sending the request to receiving the answer."""
    idle_us: float
    """Processor time of the worker's process between the previous answer and this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker's module, device, folders and memory."""

    role: str
    """`reference` (trusted, but behind the same walls), `baseline` (this package's own wrapper around it) or `candidate`."""
    source: str
    class_name: str
    device: str
    directory: Path
    """Parent of the private directories of one evaluation."""
    build: Path
    """Compiler caches, shared by the fresh processes of one candidate so that each is compiled once. Inputs never
    repeat, so nothing worth keeping can be smuggled through it from one process to the next."""
    arena_bytes: dict[str, int]
    gate: DeviceGate
    """Access to the device of the evaluation that it serves."""
    budget: CallBudget | None = None
    """Time that is left to that evaluation."""
    kept_as: str | None = None
    """Kind of process that may take over this worker for another task; None where none may."""
    program: str | None = None
    """Module that serves the worker's requests; None for the ordinary harness."""


class Worker:
    """A running worker process."""

    def __init__(self, fork_server: ForkServer, spec: WorkerSpec, settings: Settings) -> None:
        self._fork_server = fork_server
        self._settings = settings
        self._take(spec)
        spec.build.mkdir(mode=0o700, exist_ok=True)
        self.private = spec.directory / f"{spec.role}-{secrets.token_hex(6)}"
        self.private.mkdir(mode=0o700)
        # Opened before the candidate can put anything else in their places.
        self._stack = os.open(self.private / STACK_LOG, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.mkfifo(self.private / ASKED, 0o600)
        self._asked = os.open(self.private / ASKED, os.O_RDWR)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        config = self._task | {
            "device": spec.device,
            "program": spec.program,
            "private": str(self.private),
            "build": str(spec.build),
            **_of_the_process(settings),
        }
        start_ns = time.perf_counter_ns()
        try:
            self.pid = fork_server.spawn(config, [theirs.fileno(), *self._files])
        finally:
            theirs.close()
        self.spent_us: defaultdict[str, float] = defaultdict(float, start=(time.perf_counter_ns() - start_ns) / 1e3)
        """Microseconds that its start and its requests have taken by the parent's clock, by kind."""
        self.channel = Channel(ours)
        self.cpu_clock = process_clock(self.pid)
        self._answered_cpu_us: float | None = None
        self._still = False
        self._paused: list[int] = []
        self.ended = False
        """True if the process has been ended."""
        spec.gate.workers.append(self)  # to be stopped when the evaluation that it serves has to wait

    @property
    def is_trusted(self) -> bool:
        """True if it runs no candidate's code."""
        return self.spec.role != "candidate"

    def _take(self, spec: WorkerSpec) -> None:
        """Make the memory that a task needs."""
        self.spec = spec
        self.arenas = {name: SharedArena(torch.device(spec.device), size) for name, size in spec.arena_bytes.items()}

    def serve(self, gate: DeviceGate) -> None:
        """Belong to the evaluation of another gate from now on."""
        with contextlib.suppress(ValueError):  # it has left already where it has ended
            self.spec.gate.workers.remove(self)  # at once: others enter meanwhile
        self.spec = replace(self.spec, gate=gate)
        gate.workers.append(self)

    @property
    def _task(self) -> dict[str, Any]:
        """The part of a worker's configuration that changes with the task."""
        arenas = {name: arena.describe() for name, arena in self.arenas.items()}
        return {"role": self.spec.role, "source": self.spec.source, "class": self.spec.class_name, "arenas": arenas}

    @property
    def _files(self) -> list[int]:
        return [handle for arena in self.arenas.values() for handle in arena.files]

    def fits(self, spec: WorkerSpec, settings: Settings) -> bool:
        """True if the process is of the kind wanted, and what these settings would start."""
        return spec.kept_as == self.spec.kept_as and _of_the_process(settings) == _of_the_process(self._settings)

    def forget(self) -> bool:
        """Have a trusted worker drop its module and its memory; whether it lives and has left no trace, and may `adopt`."""
        if self.ended:
            return False
        try:
            clean = self.request("forget", _FORGET_LIMIT_S).get("clean") is True
        except WorkerError:
            return False
        self._leave()
        return clean

    def adopt(self, spec: WorkerSpec) -> None:
        """Give a worker that has forgotten its module another one; raises as `exchange`."""
        self._take(spec)
        self._answered_cpu_us = None
        self.spent_us.clear()
        spec.gate.workers.append(self)
        self.exchange("adopt", _FORGET_LIMIT_S, self._files, config=self._task, files=len(self._files))

    def request(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; raises as `exchange`."""
        return self.exchange(op, timeout_s, **fields)[0]

    def exchange(
        self, op: str, timeout_s: float, handles: list[int] | None = None, **fields: Any
    ) -> tuple[dict[str, Any], CallClocks]:
        """The answer to a request that goes out with these file handles, and its clocks.

        Raises:
            WorkerError: the worker raised, died, hung or answered out of turn.
        """
        nonce = secrets.token_hex(8)
        data = encode({"op": op, "nonce": nonce, **fields})
        if self.channel.pending():
            # A harness speaks only when spoken to; an answer prepared in advance is a forgery.
            raise self._failure(Reason.PROTOCOL_VIOLATION, "something was written to the channel between two requests")
        cpu_before = self.cpu_us()
        timed_out = Reason.BUILD_TIMEOUT if op == "build" else Reason.RUN_TIMEOUT
        try:
            with self.spec.gate.request() as lock:
                if self._still:
                    self._reject_started_while_stopped()
                    self.resume()
                start_ns = time.perf_counter_ns()
                self.channel.send_encoded(data)
                if handles is not None:
                    self.channel.send_files(handles)
                body, stopped_s, compiled_s = self._receive(timeout_s, lock)
                stop_ns = time.perf_counter_ns()
            answer = decode(body)
        except ChannelTimeoutError:
            raise self._failure(timed_out, f"no answer to `{op}` within {timeout_s:g} s") from None
        except StuckError as error:
            raise self._failure(timed_out, f"no answer to `{op}`: {error}") from None
        except ChannelGarbageError as error:
            raise self._failure(Reason.PROTOCOL_VIOLATION, str(error)) from None
        except ChannelClosedError:
            raise self._death(op) from None
        if answer.get("nonce") != nonce:
            raise self._failure(Reason.PROTOCOL_VIOLATION, "an answer did not carry its request's nonce")
        cpu_after_us = self.cpu_us()
        if self._still:
            self.pause()
        outer_us = (stop_ns - start_ns) / 1e3 - stopped_s * 1e6
        self.spent_us[op] += outer_us
        if self.spec.budget is not None:
            self.spec.budget.charge(self.spec.role, outer_us / 1e6 - compiled_s)
        if "error" in answer:
            raise self._raised(op, answer["error"] if isinstance(answer["error"], dict) else {})
        idle = 0.0 if self._answered_cpu_us is None else cpu_before - self._answered_cpu_us
        self._answered_cpu_us = cpu_after_us
        inner = answer.get("inner_us", 0.0)
        if not isinstance(inner, int | float) or not 0 <= inner < 1e12:
            raise self._failure(Reason.PROTOCOL_VIOLATION, "an answer's latency is not a time")
        return answer, CallClocks(float(inner), outer_us, idle)

    def _receive(self, limit_s: float, lock: TextIO | None) -> tuple[bytes, float, float]:
        """An answer, and the seconds for which the worker was stopped in favour of others, and for which it compiled."""
        if self.spec.gate.alone:
            return self.channel.receive_encoded(time.monotonic() + limit_s), 0.0, 0.0
        watch = None if self.is_trusted else CompilerWatch(self.pid, self._asked, self._stack, self._settings.stall_limit_s)
        came_s, stopped_s, compiled_s = time.monotonic(), 0.0, 0.0
        while not self.channel.pending(_POLL_S):
            if lock is not None:
                stopped_s += self.spec.gate.stand_aside(lock, self)
            ran_s = time.monotonic() - came_s - stopped_s
            # A later call in another mode may compile once more, as long as a first call may.
            if ran_s >= max(limit_s, min(limit_s + compiled_s, self._settings.build_limit_s)):
                raise ChannelTimeoutError
            if watch is not None and watch.is_stuck(ran_s):
                raise StuckError(f"no progress within {self._settings.stall_limit_s:g} s; {watch.detail()}")
            compiled_s = 0.0 if watch is None else watch.compiled_s
        return self.channel.receive_encoded(time.monotonic() + _MESSAGE_S), stopped_s, compiled_s

    @property
    def asked_us(self) -> float:
        """Microseconds that its requests have taken so far."""
        return sum(us for op, us in self.spent_us.items() if op != "start")

    def cpu_us(self) -> float:
        """Processor time of the worker so far, microseconds; as of its latest answer where it has died."""
        try:
            return time.clock_gettime_ns(self.cpu_clock) / 1e3
        except OSError:
            return self._answered_cpu_us or 0.0  # it has died; the next read of the channel says so

    def helpers_cpu_us(self) -> float:
        """Processor time so far of other processes in the worker's session."""
        total = 0.0
        for pid in session_members(self.pid):
            if pid != self.pid:
                with contextlib.suppress(OSError):  # it ended while we looked
                    total += time.clock_gettime_ns(process_clock(pid)) / 1e3
        return total

    def run_on(self, cores: Iterable[int]) -> None:
        """Keep every thread of the worker on these cores."""
        for pid in session_members(self.pid):
            with contextlib.suppress(OSError):  # it ended while we looked
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), cores)

    def keep_still(self) -> None:
        """Let the worker run only while it answers, from now on.

        Inputs lie in its memory before a call begins, and neither clock sees what it does between calls.
        """
        self._still = True
        self.pause()

    def pause(self) -> None:
        """Stop every process of the worker, so that it does not disturb others that are timed."""
        signal_each([self.pid], signal.SIGSTOP)  # at once: to look for the others takes longer
        others = [pid for pid in session_members(self.pid) if pid != self.pid]
        self._paused = [self.pid, *others]  # one that was just forked is in no session of its own yet
        signal_each(self._paused, signal.SIGSTOP)

    def stop(self) -> bool:
        """Stop it in the midst of what it does; False where it is stopped, or has ended, already."""
        if self._paused or self.ended:
            return False
        self.pause()
        # A process that was not stopped yet may have started another one.
        while started := self._not_stopped():
            signal_each(started, signal.SIGSTOP)
            self._paused += started
        return True

    def _not_stopped(self) -> list[int]:
        """Processes of a stopped worker that were not there when it was stopped."""
        return [pid for pid in session_members(self.pid) if pid not in self._paused]

    def _reject_started_while_stopped(self) -> None:
        """Notice a chain of processes that each start the next one and end: none is there long enough to be stopped."""
        if len(self._paused) > 1 and self._not_stopped():
            raise self._failure(Reason.WORK_OUTSIDE_TIMING, "it started a process between calls, while it was stopped")

    def resume(self) -> None:
        """Let a paused worker go on."""
        paused, self._paused = self._paused, []
        signal_each(paused, signal.SIGCONT)

    def _failure(self, reason: Reason, detail: str) -> WorkerError:
        self.close()
        return WorkerError(reason, detail)

    def _raised(self, op: str, error: dict[str, str]) -> WorkerError:
        kind, text = str(error.get("type")), str(error.get("message"))
        detail = f"{kind}: {text}"
        if kind == "SyntaxError" and op == "build":
            return WorkerError(Reason.SYNTAX_ERROR, detail)
        if kind == "SystemExit":
            return WorkerError(Reason.EXITED, text)
        # The driver's own "CUDA error: out of memory" comes under more general names, as CUBLAS_STATUS_ALLOC_FAILED does.
        if kind in ("MemoryError", "OutOfMemoryError") or "CUDA error: out of memory" in text or "_ALLOC_FAILED" in text:
            return WorkerError(Reason.OUT_OF_MEMORY, detail)
        where = {"build": Reason.BUILD_FAILED, "load_state": Reason.STATE_MISMATCH, "save_state": Reason.STATE_MISMATCH}
        return WorkerError(where.get(op, Reason.RUNTIME_ERROR), detail + "\n" + str(error.get("trace", "")))

    def _death(self, op: str) -> WorkerError:
        ending = self._finish(_EXIT_GRACE_S)
        if ending.cause == "memory":
            limit = self._settings.memory_limit_bytes / (1 << 30)
            return WorkerError(Reason.OUT_OF_MEMORY, f"used more than {limit:g} GiB during `{op}`")
        if ending.cause == "processes":
            return WorkerError(Reason.TOO_MANY_PROCESSES, f"more than {self._settings.process_limit} during `{op}`")
        if ending.exit_code == -signal.SIGKILL:
            return WorkerError(Reason.CRASHED, f"killed or closed its channel during `{op}`")
        if ending.exit_code < 0:
            return WorkerError(Reason.CRASHED, f"{signal.Signals(-ending.exit_code).name} during `{op}`")
        return WorkerError(Reason.EXITED, f"left with status {ending.exit_code} during `{op}`")

    def _finish(self, grace_s: float = 0.0) -> Ending:
        self.ended = True
        for file in (self._asked, self._stack):
            os.close(file)
        ending = self._fork_server.end(self.pid, grace_s)
        self.channel.close()
        return ending

    def close(self) -> None:
        """End the session and free the arenas' memory. Safe to call twice."""
        if not self.ended:
            self._finish()
        self._leave()

    def _leave(self) -> None:
        """Give back what belongs to the evaluation that it served."""
        with contextlib.suppress(ValueError):
            self.spec.gate.workers.remove(self)
        for arena in self.arenas.values():
            arena.close()
        self.arenas = {}

    def abandon(self) -> None:
        """Kill a candidate's process in the midst of a request, which then fails: nobody waits for its answer any more."""
        if not self.is_trusted and not self.ended:
            signal_each([self.pid], signal.SIGKILL)

    def discard(self) -> None:
        """Close and remove the private directory."""
        self.close()
        remove_tree(self.private)


@contextlib.contextmanager
def on_core(core: int | None, workers: Iterable[Worker]) -> Iterator[None]:
    """Run workers, with all their threads, on this core only; afterwards on all others that this process may use."""
    if core is None:
        yield
        return
    moved = list(workers)
    for worker in moved:
        worker.run_on({core})
    try:
        yield
    finally:
        for worker in moved:
            worker.run_on(cores_except(core))


def _of_the_process(settings: Settings) -> dict[str, Any]:
    """The part of a worker's configuration that holds as long as its process."""
    limits = {"process_limit", "memory_limit_bytes", "device_memory_limit_bytes", "file_limit_bytes"}
    chosen = limits | {"strict_fp32", "tf32_products"}
    return settings.model_dump(include=chosen) | {"threads": settings.threads or len(os.sched_getaffinity(0))}


def process_clock(pid: int) -> int:
    """The kernel's clock of another process's processor time (clock_getcpuclockid(3))."""
    clock = ctypes.c_int()
    status = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if status != 0:
        raise OSError(status, os.strerror(status))
    return clock.value
