"""Screens candidates of several tasks for whoever wants quick looks and no search, such as training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch

from kernelwright.cores import timing_core
from kernelwright.errors import KernelwrightError
from kernelwright.execution.local import Job
from kernelwright.execution.screening import ScreeningPool
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.judge.settings import Settings
from kernelwright.records import Task
from kernelwright.records.screened import Screened

TASKS_PER_GPU = 8
"""Tasks that are screened at once on a GPU: one is timed while others compile and load. Our choice."""


class Screens:
    """Takes quick looks on devices of this machine. Nothing is started before the first.

    Args:
        devices: Resolved names.
        settings: Settings of the judge, whose limits and labels hold here too.
    """

    def __init__(self, devices: Sequence[str], settings: Settings) -> None:
        self._settings = settings
        self._places = [*devices] * (TASKS_PER_GPU if devices[0].startswith("cuda") else 1)
        self._zygotes: dict[str, ForkServer] = {}
        self._prepared: dict[str, ScreeningPool] = {}
        """Processes of tasks whose candidates are yet to come, by the task's hash."""

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Start processes for tasks whose candidates will come next: they load beside other work, such as sampling."""
        self._drop_prepared()
        for task, device in zip(tasks, self._places, strict=False):
            self._prepared[task.sha256] = self._pool(task, device)

    def look(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Screened]]:
        """Estimates as they are made, in any order; candidates of a task that cannot be screened are missing.

        One thread may call this at a time.
        """
        by_task: dict[str, list[Job]] = {}
        for job in jobs:
            by_task.setdefault(job.task.sha256, []).append(job)
        waiting: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
        found: queue.SimpleQueue[tuple[Job, Screened] | BaseException | None] = queue.SimpleQueue()
        for several in by_task.values():
            waiting.put(several)

        def serve(device: str) -> None:
            try:
                while True:
                    for one in self._look(waiting.get_nowait(), device):
                        found.put(one)
            except queue.Empty:
                found.put(None)
            except BaseException as error:  # noqa: BLE001 - the thread that asked raises it
                found.put(error)

        places = self._places[: len(by_task)]
        for device in {*places}:
            self._zygote(device)
        for device in places:
            threading.Thread(target=serve, args=(device,), daemon=True).start()
        at_work = len(places)
        while at_work:
            one = found.get()
            if isinstance(one, BaseException):
                raise one
            if one is None:
                at_work -= 1
            else:
                yield one

    def _look(self, jobs: Sequence[Job], device: str) -> Iterator[tuple[Job, Screened]]:
        """Estimates of candidates of one task."""
        by_hash = {job.candidate.sha256: job for job in jobs}
        # What compiles nothing shares a process; one more compiles beside it.
        with self._prepared.pop(jobs[0].task.sha256, None) or self._pool(jobs[0].task, device) as pool:
            for candidate, outcome in pool.screen(job.candidate for job in by_hash.values()):
                if isinstance(outcome, KernelwrightError):
                    return
                yield by_hash[candidate.sha256], outcome

    def _pool(self, task: Task, device: str) -> ScreeningPool:
        return ScreeningPool(task, device, self._settings, 2, self._zygote(device))

    def _zygote(self, device: str) -> ForkServer:
        if device not in self._zygotes:
            self._zygotes[device] = ForkServer(off=timing_core(torch.device(device)))
        return self._zygotes[device]

    def _drop_prepared(self) -> None:
        while self._prepared:
            self._prepared.popitem()[1].close()

    def close(self) -> None:
        """End the processes."""
        self._drop_prepared()
        while self._zygotes:
            self._zygotes.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
