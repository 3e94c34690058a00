"""Screens the proposals of many tasks at once, in processes that each propose for one task and screen for it.

Proposing is Python that holds its interpreter's lock: in processes of their own many tasks are traced at a time. Large tasks
do not fit into a GPU's memory beside many others. One for which it runs out is put off and screened beside few, and one for
which it runs out again has it alone, as have all further proposals for the task. It begins where judges are idle: one that
waited for them kept six of them from beginning anything for minutes (results/kernelbench-h200/today-fifths-3-4-h200).
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Protocol, Self

import torch

from kernelwright.cores import cores_beside, timing_core
from kernelwright.errors import DeviceError, InfrastructureError, KernelwrightError
from kernelwright.execution.screening import ScreeningPool, ran_out
from kernelwright.execution.visible import see_one_gpu
from kernelwright.judge.isolation import sandbox
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.judge.isolation.gate import DeviceMemory
from kernelwright.judge.settings import Settings
from kernelwright.records import Task
from kernelwright.records.compiling import Compiles
from kernelwright.records.screened import Screened
from kernelwright.search.policies import policy_named
from kernelwright.search.proposals import Proposals

SEARCHERS_PER_GPU = 16
"""Most tasks that are screened at once on a GPU, one for each core: one is timed while the others trace, compile and start.
Each holds half a GiB of the GPU for its context alone. Our choice."""
SEARCHERS_PER_CPU = 1
FEW_AT_ONCE = 4
"""Most tasks that are screened at once on a device while one of them did not fit beside more. Our choice."""
_ASK_AGAIN_S = 5.0
"""Time after which a process without a job asks again whether to stop. Our choice."""
_NO_MORE = object()
"""End of the jobs, where None among them says to wait."""


class Others(IntEnum):
    """How many other tasks may be at work on a device while one is screened. A value counts that one too."""

    MANY = sys.maxsize
    FEW = FEW_AT_ONCE
    NONE = 1

    @property
    def fewer(self) -> Others:
        """The level to try after this one."""
        return Others.FEW if self is Others.MANY else Others.NONE


@dataclass(frozen=True, slots=True)
class ScreenJob:
    """Proposals for one task to screen."""

    task: Task
    budget: int
    """Proposals to look at, those in `earlier` included."""
    earlier: tuple[Screened, ...] = ()
    seed: int = 0
    slots: int = 1
    """Screening processes for this task."""
    others: Others = Others.MANY
    """How many others may be at work on the device meanwhile; where none may, judges wait too."""
    tunes: bool = True
    """Whether proposals with an autotuner are looked at too, last and where they can still win."""

    def beside_fewer(self, made: Iterable[Screened]) -> ScreenJob:
        """The rest of the job beside fewer others; `made` are all estimates of the task by now."""
        return replace(self, earlier=tuple(made), others=self.others.fewer)


class JudgesBeside(Protocol):
    """Judges on the same devices, as far as a search needs them."""

    def is_idle(self, device: str) -> bool:
        """Whether they have nothing to do on a device."""

    def rest(self, device: str) -> None:
        """Have them give back what only waits there."""


@dataclass(slots=True)
class _Member:
    """A process that searches, and the thread that speaks with it."""

    device: str
    thread: threading.Thread | None = None
    process: multiprocessing.process.BaseProcess | None = field(default=None)


class Searchers:
    """Processes that screen, several to a device; each is started when its first task comes.

    Args:
        devices: Resolved names.
        settings: Settings of the judge, whose limits and labels hold here too.
        at_once: Tasks at once on each device; by default `SEARCHERS_PER_GPU` or `SEARCHERS_PER_CPU`.
        policy: Name of a policy that a name alone describes.
        cores: As of `JudgePool`.
        judges: On the same devices.
    """

    def __init__(
        self,
        devices: list[str],
        settings: Settings,
        at_once: int | None = None,
        policy: str = "builtin",
        cores: Mapping[str, frozenset[int]] | None = None,
        judges: JudgesBeside | None = None,
    ) -> None:
        on_gpu = max(2, min(SEARCHERS_PER_GPU, len(os.sched_getaffinity(0)) // len(devices)))
        count = at_once or (on_gpu if devices[0].startswith("cuda") else SEARCHERS_PER_CPU)
        self._settings, self._policy, self._cores = settings, policy, cores or {}
        self._judges = judges
        self._members = [_Member(device) for _ in range(count) for device in devices]
        self._closing = threading.Event()
        self._changed = threading.Condition()
        """Guards the jobs; told when one that others may depend on has ended."""
        self._put_off: list[ScreenJob] = []
        """What did not fit beside others at work, of the present call of `screen`."""

    @property
    def at_once(self) -> int:
        """Tasks that are screened at once, on all devices together."""
        return len(self._members)

    @property
    def want_a_device(self) -> bool:
        """Whether a task waits until judges leave a device to it alone."""
        # Without the lock: who has it may ask the caller for another job.
        return any(one.others is Others.NONE for one in [*self._put_off])

    def screen(
        self, jobs: Iterable[ScreenJob | None], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[ScreenJob, Screened | KernelwrightError | None]]:
        """Estimates as they are made, in any order; None says that a job is done, an error that it cannot be.

        None among the jobs says that the next one depends on one at work. `stop` is asked before each job; True leaves it
        and all that follow undone. One thread may call this at a time.
        """
        waiting = iter(jobs)
        put_off = self._put_off = list[ScreenJob]()
        at_work: defaultdict[str, list[ScreenJob]] = defaultdict(list)
        large: dict[str, Others] = {}  # by a task's hash, where it did not fit beside many
        found: queue.SimpleQueue[tuple[ScreenJob, Screened | KernelwrightError | None] | None] = queue.SimpleQueue()

        def has_room(device: str, others: Others) -> bool:
            """Whether one more task may begin, by its own level and by the levels of all at work."""
            if others is Others.NONE and self._judges is not None and not self._judges.is_idle(device):
                return False
            return len(at_work[device]) < min([others, *(one.others for one in at_work[device])])

        def take(device: str) -> ScreenJob | None:
            with self._changed:
                while not (self._closing.is_set() or (stop is not None and stop())):
                    job = next(waiting, _NO_MORE) if has_room(device, Others.MANY) else None
                    if isinstance(job, ScreenJob) and job.task.sha256 in large:
                        put_off.append(replace(job, others=large[job.task.sha256]))
                        continue
                    if not isinstance(job, ScreenJob) and put_off:
                        # Where the one that allows most others has no room, none has.
                        easiest = max(put_off, key=lambda one: one.others)
                        if has_room(device, easiest.others):
                            put_off.remove(easiest)
                            job = easiest
                    if isinstance(job, ScreenJob):
                        at_work[device].append(job)
                        return job
                    if job is _NO_MORE and not put_off:
                        return None
                    self._changed.wait(_ASK_AGAIN_S)
                return None

        def end(device: str, job: ScreenJob, again: ScreenJob | None) -> None:
            """Let others have the device's memory, and put off what is tried `again`."""
            with self._changed:
                at_work[device].remove(job)
                if again is not None:
                    large[job.task.sha256] = again.others
                    put_off.append(again)
                self._changed.notify_all()

        for member in self._members:
            member.thread = threading.Thread(target=self._serve, args=(member, take, end, found), daemon=True)
            member.thread.start()
        serving = len(self._members)
        while serving:
            one = found.get()
            if one is None:
                serving -= 1
                continue
            yield one
            if not isinstance(one[1], Screened):
                with self._changed:
                    self._changed.notify_all()

    def _serve(
        self,
        member: _Member,
        take: Callable[[str], ScreenJob | None],
        end: Callable[[str, ScreenJob, ScreenJob | None], None],
        found: queue.SimpleQueue[tuple[ScreenJob, Screened | KernelwrightError | None] | None],
    ) -> None:
        connection: Connection | None = None
        if member.device in self._cores:
            os.sched_setaffinity(0, self._cores[member.device])  # of this thread; what it starts inherits it
        try:
            while (job := take(member.device)) is not None:
                made, again = list(job.earlier), None
                if job.others is Others.NONE and self._judges is not None:
                    self._judges.rest(member.device)
                try:
                    if connection is None:
                        connection = self._start(member)
                    connection.send(job)
                    while True:
                        answer = connection.recv()
                        if isinstance(answer, DeviceError) and job.others is not Others.NONE:
                            again = job.beside_fewer(made)
                            break
                        found.put((job, answer))
                        made.append(answer)
                        if not isinstance(answer, Screened):
                            break
                except (EOFError, OSError) as error:
                    # A process that is killed for want of memory dies this way.
                    if job.others is not Others.NONE and not self._closing.is_set():
                        again = job.beside_fewer(made)
                    else:
                        message = f"Wanted to screen {job.task.id}; its process died ({error!r})."
                        found.put((job, InfrastructureError(message)))
                    if connection is not None:
                        self._end(member, connection)
                    connection = None
                finally:
                    end(member.device, job, again)
        finally:
            if connection is not None:
                self._end(member, connection)
            found.put(None)

    def _start(self, member: _Member) -> Connection:
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        # Not a daemon: it starts processes of its own.
        member.process = context.Process(
            target=_run, args=(theirs, member.device, self._settings.model_dump_json(), self._policy)
        )
        member.process.start()
        theirs.close()
        return connection

    @staticmethod
    def _end(member: _Member, connection: Connection) -> None:
        connection.close()
        if member.process is not None:
            member.process.join(timeout=20)
            member.process.kill()
            member.process.join()

    def close(self) -> None:
        """End the processes in the middle of their work; a `screen` at work ends too."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        for member in self._members:
            if member.process is not None:
                member.process.kill()  # what it started dies with it
        for member in self._members:
            if member.thread is not None:
                member.thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(connection: Connection, device: str, settings_json: str, policy_name: str) -> None:
    """Screen tasks in a process of its own until the other side hangs up."""
    sandbox.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    local, settings = see_one_gpu(device), Settings.model_validate_json(settings_json)
    policy, memory = policy_named(policy_name), DeviceMemory(torch.device(local))
    judges_core = timing_core(torch.device(local))
    # Neither tracing nor compilers beside what a judge times; screening times on another core.
    os.sched_setaffinity(0, cores_beside(judges_core))
    zygote = ForkServer(off=timing_core(torch.device(local)))
    zygote.import_compiler(torch.device(local).type)  # most tasks have a proposal for it
    try:
        while True:
            try:
                job: ScreenJob = connection.recv()
            except EOFError:
                return
            try:
                alone = job.others is Others.NONE
                with memory(alone=alone), ScreeningPool(job.task, local, settings, job.slots, zygote, alone=alone) as pool:
                    proposals = Proposals(job.task, policy, local, job.budget, job.seed, [], list(job.earlier))
                    takes = pool.takes if job.tunes else lambda kind: kind is not Compiles.VARIANTS and pool.takes(kind)
                    for _, outcome in pool.screen(proposals.candidates(pool.slots, takes)):
                        if isinstance(outcome, KernelwrightError):
                            raise outcome
                        if ran_out(outcome) and not alone:
                            raise DeviceError(f"Wanted to screen candidates of {job.task.id}; {outcome.detail}")
                        proposals.screened.append(outcome)
                        connection.send(outcome.model_copy(update={"device": device}))
            except KernelwrightError as error:
                connection.send(type(error)(*error.args))
            else:
                connection.send(None)
    finally:
        zygote.close()
