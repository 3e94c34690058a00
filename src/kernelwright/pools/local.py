"""Does many evaluations at once, in processes that each hold a judge, several to a device.

Building, checking and compiling of some candidates overlap with the timing of another; a lock file per device lets only
one of them use the device at a time (`Judge`). A pool process that dies is replaced and its job tried once more. A job whose
need of memory is known begins when so much is left, and smaller ones pass it. One for which a GPU's memory does not suffice
beside others waits until nothing else is left to do there: one that waits for it at once keeps all others out, which took
half the time of a search (results/kernelbench-h200).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from kernelwright.cores import cores_beside
from kernelwright.errors import CrowdedError, DeviceError, InfrastructureError, KernelwrightError
from kernelwright.judge.isolation import sandbox
from kernelwright.judge.isolation.zygote import Zygote
from kernelwright.judge.settings import Settings
from kernelwright.pools.generated import without_advice_on_generated
from kernelwright.pools.visible import see_one_gpu
from kernelwright.records import Candidate, Evaluation, Task

if TYPE_CHECKING:
    from kernelwright.judge.judge import Judge

_TRIES = 2
_ASK_AGAIN_S = 1.0
_QUIET_S = 2 * _ASK_AGAIN_S
"""Time without a job after which a device has nothing else to do. Our choice."""

JUDGES_PER_GPU = 6
"""Judges on one GPU. With six throughput is 84 % of timing alone, four 60 % (results/2026-11-22-judge-throughput-3-h200).
Each takes about 3 GiB of the GPU for contexts alone. An evaluation makes up to 26, for which the driver has one lock: with
eight judges on an H100 starts took 36 of its 120 s, with four 13 of 63 s (results/kernelbench-h200)."""

RESTING_BYTES = 6 << 30
"""GPU memory that is left to processes that wait for their next job. Our choice."""

W = TypeVar("W")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Job:
    """One evaluation to do."""

    task: Task
    candidate: Candidate
    settings: Settings | None = None
    """Settings in place of the pool's."""
    rival: Candidate | None = None
    """A trusted wrapper of the task's own module to time in the same process triples (`Judge.evaluate`)."""
    memory_bytes: int = 0
    """GPU memory that it may take at most, as far as that is known. It waits, outside the slots, until so much is left."""


@dataclass(frozen=True, slots=True)
class RotationJob:
    """Trusted wrappers of one task to measure together (`rotation.rotate`)."""

    task: Task
    baselines: tuple[Candidate, ...]
    settings: Settings | None = None
    memory_bytes: int = 0


Outcome = Evaluation | KernelwrightError
"""An evaluation, or an error of the task or the machine, never of the candidate."""

_Found = list[Evaluation] | KernelwrightError
_Entry = tuple[Job | RotationJob, Future[_Found]]
"""What is to be done, and where its outcome is waited for."""


def spread(
    work: Iterable[W | None],
    slots: int,
    submit: Callable[[W], Future[R]],
    stop: Callable[[], bool] | None,
    waits: Callable[[], int] = lambda: 0,
) -> Iterator[tuple[W, R]]:
    """Keep slots busy: take work as they become free, until there is none or `stop()`; yields each as it ends.

    None among the work asks to wait until something has ended. `waits` says how much of what was submitted waits outside
    the slots.
    """
    waiting = iter(work)
    running: dict[Future[R], W] = {}
    while True:
        while len(running) - waits() < slots and not (stop is not None and stop()):
            one = next(waiting, None)
            if one is None:
                break
            running[submit(one)] = one
        if not running:
            return
        # What there is to do may depend on others, and a slot may be free though nothing has ended: ask again after a while.
        for ended in wait(running, timeout=_ASK_AGAIN_S, return_when=FIRST_COMPLETED).done:
            yield running.pop(ended), ended.result()
            break


class JudgePool:
    """Judges in processes of their own.

    Args:
        devices: Resolved names: `cpu`, `cuda:0`, `cuda:1` ...
        settings: Settings of jobs that bring none.
        per_device: Judges for each device. On a CPU more than one only adds waiting.
        cores: Processor cores that a device's judges and their workers may use, so that compiling for one device does not
            disturb timing on another. By default all.
        ready: Slots whose processes start now rather than with their first job.
        beside: Another pool on the same devices. What has to be alone waits until neither has anything else to do.
    """

    def __init__(
        self,
        devices: Sequence[str],
        settings: Settings,
        per_device: int = 1,
        cores: Mapping[str, frozenset[int]] | None = None,
        ready: int = 0,
        beside: JudgePool | None = None,
    ) -> None:
        if not devices:
            raise DeviceError("Wanted at least one device to judge on; found none.")
        self._settings = settings
        self._cores = cores or {}
        self._slots = [device for _ in range(per_device) for device in devices]
        self._jobs: deque[_Entry | None] = deque()
        """What is to be done; None ends a slot."""
        self._crowded: deque[tuple[_Entry, str]] = deque()
        """What has to have a device's memory to itself, and why."""
        self._again: weakref.WeakSet[Future[_Found]] = weakref.WeakSet()
        """Of what has failed beside others once."""
        self._started: Counter[str] = Counter()
        """Slots of each device that have a process and wait for a job."""
        self._at_work: Counter[str] = Counter()
        """Slots of each device that do one."""
        self._taken_bytes: Counter[str] = Counter()
        """Memory of each device that those may take."""
        self._pools: list[JudgePool] = beside._pools if beside else []
        """All pools that share the devices."""
        self._pools.append(self)
        self._changed: threading.Condition = beside._changed if beside else threading.Condition()
        """Guards the six fields above, of all these pools."""
        self._members: set[_JudgeProcess] = set()
        self._closing = self._killing = False
        self._threads = [
            threading.Thread(target=self._serve, args=(device, number < ready), daemon=True)
            for number, device in enumerate(self._slots)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def slots(self) -> int:
        """Evaluations that go on at once."""
        return len(self._slots)

    def evaluate(self, jobs: Iterable[Job | None], stop: Callable[[], bool] | None = None) -> Iterator[tuple[Job, Outcome]]:
        """Implements `Evaluator.evaluate`."""
        for job, found in spread(jobs, self.slots, self._submit, stop, lambda: self.waiting):
            yield job, found if isinstance(found, KernelwrightError) else found[0]

    def rotate(
        self, rotations: Iterable[RotationJob], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[RotationJob, list[Evaluation] | KernelwrightError]]:
        """Measure rotations; yields one evaluation for each baseline of each."""
        return spread(rotations, self.slots, self._submit, stop, lambda: self.waiting)

    @property
    def waiting(self) -> int:
        """Jobs that leave their slot to others until they fit into a device, or until nothing else is left to do."""
        with self._changed:
            return len(self._crowded) + sum(not any(self._fits(one, name) for name in {*self._slots}) for one in self._jobs)

    def _submit(self, work: Job | RotationJob) -> Future[_Found]:
        future: Future[_Found] = Future()
        with self._changed:
            self._line_up(work, future, "it may take more memory than a device has")
            self._changed.notify_all()
        return future

    def _line_up(self, work: Job | RotationJob, future: Future[_Found], why: str) -> None:
        """Have a job wait for its memory, or until it can be alone where it takes more than a device has."""
        if work.memory_bytes and work.memory_bytes > max(map(memory_of, self._slots)):
            self._crowded.append(((work, future), why))
        else:
            self._jobs.append((work, future))

    def _put_back(self, work: Job | RotationJob, future: Future[_Found], why: str) -> None:
        """Have a job that failed beside others wait for twice the memory that it asked for, and after that to be alone.

        A neighbour may have taken more than it had asked for: four jobs of 11 to 33 GiB waited eight minutes for all others.
        """
        if work.memory_bytes and future not in self._again:
            self._again.add(future)
            self._line_up(replace(work, memory_bytes=2 * work.memory_bytes), future, why)
        else:
            self._crowded.append(((work, future), why))

    def _next(self, device: str, started: bool) -> tuple[_Entry, str | None] | None:
        """The next job that fits, and why it is to be alone, if it is; None at the end.

        Slots that have a process come first: to start another takes up to eight seconds.
        """

        def fitting() -> list[_Entry | None]:
            found = [entry for entry in self._jobs if self._fits(entry, device)]
            others = 0 if started or not found else sum(n for name, n in self._started.items() if self._fits(found[0], name))
            return found[others:]

        def is_quiet() -> bool:
            return bool(self._crowded) and (started or not self._started.total()) and self.is_idle(device)

        with self._changed:
            alone = False
            while not (alone or fitting()):
                self._changed.wait_for(lambda: fitting() or is_quiet())
                alone = is_quiet() and not self._changed.wait_for(lambda: not is_quiet(), timeout=_QUIET_S)
            entry: _Entry | None
            why: str | None = None
            if alone:
                entry, why = self._crowded.popleft()
            else:
                entry = next(one for one in self._jobs if self._fits(one, device))
                self._jobs.remove(entry)
            self._started[device] -= started
            if entry is not None:
                self._at_work[device] += 1
                self._taken_bytes[device] += self._share(entry[0], device, alone)
            self._changed.notify_all()
            return (entry, why) if entry is not None else None

    def is_idle(self, device: str) -> bool:
        """Whether neither this pool nor those beside it have anything to do on a device, but for what has to be alone."""
        with self._changed:
            return not any(pool._jobs or pool._at_work[device] for pool in self._pools)

    def _fits(self, entry: _Entry | None, device: str) -> bool:
        """Whether a device has the memory that a job may take beside what is at work there: where nothing is, always."""
        if entry is None or not entry[0].memory_bytes or not any(pool._at_work[device] for pool in self._pools):
            return True
        taken_bytes = sum(pool._taken_bytes[device] for pool in self._pools)
        return taken_bytes + entry[0].memory_bytes <= memory_of(device)

    @staticmethod
    def _share(work: Job | RotationJob, device: str, alone: bool) -> int:
        """Memory that others cannot have while a job is at work."""
        return memory_of(device) if alone else work.memory_bytes

    def __enter__(self) -> JudgePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """Drop jobs that have not begun; end the processes once theirs are done, or now."""
        self._closing = True
        with self._changed:
            dropped = [entry for entry in (*self._jobs, *(one for one, _ in self._crowded)) if entry is not None]
            self._jobs.clear()
            self._crowded.clear()
        for work, future in dropped:  # somebody waits for them
            future.set_result(InfrastructureError(f"Wanted an evaluation of {work.task.id}; the pool was closed before."))
        with self._changed:
            self._jobs.extend(None for _ in self._threads)
            self._changed.notify_all()
        if at_once:
            self._killing = True
            for member in list(self._members):
                member.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self, device: str, ready: bool) -> None:
        """One slot: hand jobs to its process, replace it when it dies."""
        if device in self._cores:
            os.sched_setaffinity(0, self._cores[device])  # of this thread; what it starts inherits it
        member: _JudgeProcess | None = None
        if ready:
            member = _JudgeProcess(device, self._settings, ready=True)
            self._members.add(member)
            with self._changed:
                self._started[device] += 1
        while (entry := self._next(device, started=member is not None)) is not None:
            (job, future), why = entry
            alone = why is not None
            found: _Found = InfrastructureError("not tried")
            for _ in range(_TRIES):
                if self._killing:
                    break
                if member is None:
                    member = _JudgeProcess(device, self._settings)
                    self._members.add(member)
                if alone:
                    self.rest(device)
                try:
                    found = member.do(job, alone)
                    break
                except (EOFError, OSError) as error:
                    status = member.end()
                    self._members.discard(member)
                    member = None
                    found = InfrastructureError(
                        f"Wanted an evaluation of {job.task.id} on {device}; its judge died (status {status}, {error!r}) "
                        f"{_TRIES} times. Is there memory left?"
                    )
            with self._changed:  # before the result is told: the next job may follow at once
                self._started[device] += member is not None
                self._at_work[device] -= 1
                self._taken_bytes[device] -= self._share(job, device, alone)
                waits = isinstance(found, CrowdedError) and not (alone or self._closing)
                if waits:
                    self._put_back(job, future, str(found))
                elif alone and isinstance(found, list):
                    found = [one.model_copy(update={"checks": one.checks | {"alone": why}}) for one in found]
                self._changed.notify_all()
            if not waits:
                future.set_result(found)
        if member is not None:
            member.end()

    def rest(self, device: str) -> None:
        """Have all judges on a device, also of pools beside this one, give back what only waits: now, or after their job."""
        with self._changed:
            members = [one for pool in self._pools for one in list(pool._members)]
        for one in members:
            if one.device == device:
                one.rest()


class _JudgeProcess:
    """A process with a judge."""

    def __init__(self, device: str, settings: Settings, ready: bool = False) -> None:
        self.device = device
        self._sending = threading.Lock()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: its judge starts a process of its own.
        self._process = context.Process(target=_run, args=(theirs, device, settings.model_dump_json(), ready))
        with _without_main_program():
            self._process.start()
        theirs.close()

    def do(self, work: Job | RotationJob, alone: bool) -> _Found:
        """Have the process do a job, alone on its device or beside others; raises EOFError or OSError when it is gone."""
        candidates = work.baselines if isinstance(work, RotationJob) else (work.candidate, work.rival)
        message = (
            isinstance(work, RotationJob),
            work.task.model_dump_json(),
            [candidate.model_dump_json() for candidate in candidates if candidate is not None],
            work.settings and work.settings.model_dump_json(),
            alone,
        )
        with self._sending:
            self._connection.send(message)
        found = self._connection.recv()
        return [Evaluation.model_validate_json(one) for one in found] if isinstance(found, list) else found

    def rest(self) -> None:
        """Have it end the processes that wait for its next task; for any thread."""
        with self._sending, contextlib.suppress(OSError):  # one that is gone holds nothing
            self._connection.send(None)

    def kill(self) -> None:
        """End the process at once; its children die with it."""
        self._process.kill()

    def end(self) -> int | None:
        """Hang up, and kill the process if that is not enough; returns its exit status."""
        self._connection.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


_starting = threading.Lock()


@contextlib.contextmanager
def _without_main_program() -> Iterator[None]:
    """A process that is started in here does not run the user's script again, as multiprocessing would have it do."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _run(connection: Connection, device: str, settings_json: str, ready: bool = False) -> None:
    """Judge jobs in a process of its own until the other side hangs up; with `ready` the judge is made at once."""
    sandbox.die_with_parent()  # a run that was killed must not go on holding the device
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides
    settings = Settings.model_validate_json(settings_json)
    local = see_one_gpu(device)
    zygotes = [Zygote()]
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:1024")  # no block is returned that is in use in part
    import torch  # as the zygote does at the same time

    from kernelwright.judge.judge import Judge

    def made() -> Judge:
        return Judge(local, settings, zygote=zygotes.pop() if zygotes else None)

    judge: Judge | None = None
    try:
        if ready:
            with contextlib.suppress(KernelwrightError):  # the first job tries again, and tells
                judge = made()
        while True:
            try:
                message = connection.recv()
            except EOFError:
                return
            if message is None:
                if judge is not None:
                    judge.rest()
                continue
            try:
                judge = judge or made()
            except KernelwrightError as error:
                connection.send(type(error)(*error.args))
                return  # the next one tries in a new process: CUDA does not recover in one where it could not begin
            # Other judges time on the same core, and this one's own work must not be in their way.
            os.sched_setaffinity(0, cores_beside(judge.core))
            connection.send(_do(judge, device, *message))
            # Other judges may need what the tensors of an evaluation held, which are gone by now; cycles, if any, are not.
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        if judge is not None:
            judge.close()
        for unused in zygotes:
            unused.close()


@functools.cache
def memory_of(device: str) -> int:
    """Memory of a device that evaluations may take, bytes; that of a processor is not counted."""
    if not device.startswith("cuda"):
        return sys.maxsize
    import torch

    return torch.cuda.get_device_properties(device).total_memory - RESTING_BYTES


def _do(
    judge: Judge,
    device: str,
    together: bool,
    task_json: str,
    candidates_json: list[str],
    changed: str | None,
    alone: bool,
) -> list[str] | KernelwrightError:
    import torch  # as in `_run`

    on_gpu = judge.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(judge.device)
    try:
        task = Task.model_validate_json(task_json)
        candidates = [Candidate.model_validate_json(one) for one in candidates_json]
        settings = Settings.model_validate_json(changed) if changed else None
        if together:
            from kernelwright.pools.rotation import rotate  # imports torch, as the judge has done by now

            found = rotate(judge, task, candidates, settings=settings, alone=alone)
        else:
            candidate, *rivals = candidates
            found = [judge.evaluate(task, candidate, settings=settings, alone=alone, rival=next(iter(rivals), None))]
    except KernelwrightError as error:
        return type(error)(*error.args)  # without its traceback, which need not survive the journey
    taken = {"judge_bytes": torch.cuda.max_memory_reserved(judge.device)} if on_gpu else {}
    plain = [without_advice_on_generated(one, task) for one in found]
    return [one.model_copy(update={"device": device, "checks": one.checks | taken}).model_dump_json() for one in plain]
