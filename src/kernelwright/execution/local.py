"""Does many evaluations at once, in processes that each hold a judge, several to a device.

Building, checking and compiling of some candidates overlap with the timing of another; a lock file per device lets only
one of them use the device at a time (`Judge`). A pool process that dies is replaced and its job tried once more. A job whose
need of memory is known begins when so much is left, and few smaller ones pass it. One for which a GPU's memory does not
suffice beside others waits until nothing else is left to do there: one that waits for it at once keeps all others out, which
took half the time of a search (results/kernelbench-h200).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import ClassVar, TypeVar

from kernelwright.errors import CrowdedError, DeviceError, InfrastructureError, KernelwrightError
from kernelwright.execution.judge_process import JudgeProcess
from kernelwright.judge.settings import Settings
from kernelwright.records import Candidate, Evaluation, Task

_TRIES = 2
_ASK_AGAIN_S = 1.0
_QUIET_S = 2 * _ASK_AGAIN_S
"""Time without a job after which a device has nothing else to do. Our choice."""

JUDGES_PER_GPU = 6
"""Judges on one GPU. With six throughput is 84 % of timing alone, four 60 % (results/2026-11-22-judge-throughput-3-h200).
Each takes about 3 GiB of the GPU for contexts alone. An evaluation makes up to 26, for which the driver has one lock: with
eight judges on an H100 starts took 36 of its 120 s, with four 13 of 63 s (results/kernelbench-h200)."""

PASSES_MAX = 6
"""Jobs that may pass one that waits for memory. After that the device fills no further until it fits: of two H200s' searches
one judged 19 small candidates, five of them of one task, while three of the most promising tasks waited for 77 to 117 GiB
until the time ended (results/kernelbench-h200/today-left-1-h200). Our choice."""

RESTING_BYTES = 6 << 30
"""GPU memory that is left to processes that wait for their next job. Our choice."""

W = TypeVar("W")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Job:
    """One evaluation to do."""

    is_rotation: ClassVar[bool] = False
    task: Task
    candidate: Candidate
    settings: Settings | None = None
    """Settings in place of the pool's."""
    rival: Candidate | None = None
    """A trusted wrapper of the task's own module to time in the same process triples (`Judge.evaluate`)."""
    memory_bytes: int = 0
    """GPU memory that it may take at most, as far as that is known. It waits, outside the slots, until so much is left."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidate, and its rival if there is one."""
        return (self.candidate,) if self.rival is None else (self.candidate, self.rival)


@dataclass(frozen=True, slots=True)
class RotationJob:
    """Trusted wrappers of one task to measure together (`rotation.rotate`)."""

    is_rotation: ClassVar[bool] = True
    task: Task
    baselines: tuple[Candidate, ...]
    settings: Settings | None = None
    memory_bytes: int = 0

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The baselines."""
        return self.baselines


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
        self._passed: Counter[Future[_Found]] = beside._passed if beside else Counter()
        """How many jobs of these pools have begun before one that waits for memory and came earlier."""
        self._pools.append(self)
        self._changed: threading.Condition = beside._changed if beside else threading.Condition()
        """Guards the seven fields above, of all these pools."""
        self._members: set[JudgeProcess] = set()
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
        self, rotations: Iterable[RotationJob | None], stop: Callable[[], bool] | None = None
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
            found = self._fitting(device)
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
                entry = self._fitting(device)[0]
                self._begin(entry, device)
            self._started[device] -= started
            if entry is not None:
                self._at_work[device] += 1
                self._taken_bytes[device] += self._share(entry[0], device, alone)
            self._changed.notify_all()
            return (entry, why) if entry is not None else None

    def _fitting(self, device: str) -> list[_Entry | None]:
        """Jobs that may begin on a device now, in turn.

        They fit into the memory that is left there. Where `PASSES_MAX` jobs have passed one that does not fit, the jobs
        behind it wait until it has begun.
        """
        found: list[_Entry | None] = []
        emptiest = min(self._slots, key=lambda name: sum(pool._taken_bytes[name] for pool in self._pools))
        # One device makes room. Of another pool's jobs each that too many have passed was there before.
        is_held = device == emptiest and any(map(self._is_passed_over, self._jobs_beside()))
        for entry in self._jobs:
            is_passed_over = self._is_passed_over(entry)
            if self._fits(entry, device) and (entry is None or is_passed_over or not is_held):
                found.append(entry)
            is_held |= device == emptiest and is_passed_over
        return found

    def _jobs_beside(self) -> list[_Entry | None]:
        return [one for pool in self._pools if pool is not self for one in pool._jobs]

    def _is_passed_over(self, entry: _Entry | None) -> bool:
        return entry is not None and self._passed[entry[1]] >= PASSES_MAX

    def _begin(self, entry: _Entry | None, device: str) -> None:
        """Take a job out of the line, and count it for those that wait for the device's memory and that it passes."""
        place = self._jobs.index(entry)
        earlier = [*self._jobs][:place] + self._jobs_beside()
        self._passed.update(one[1] for one in earlier if one is not None and not self._fits(one, device))
        del self._jobs[place]
        if entry is not None:
            del self._passed[entry[1]]

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
        member: JudgeProcess | None = None
        if ready:
            member = JudgeProcess(device, self._settings, ready=True)
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
                    member = JudgeProcess(device, self._settings)
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


@functools.cache
def memory_of(device: str) -> int:
    """Memory of a device that evaluations may take, bytes; that of a processor is not counted."""
    if not device.startswith("cuda"):
        return sys.maxsize
    import torch

    return torch.cuda.get_device_properties(device).total_memory - RESTING_BYTES
