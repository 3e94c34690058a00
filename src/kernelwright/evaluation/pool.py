"""Many evaluations at once: processes that each hold a judge, several to a device.

Building, checking and compiling of some candidates overlap with the timing of another; a lock file per device lets only
one of them use the device at a time (`Judge`). A pool process that dies is replaced and its job tried once more.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from kernelwright.errors import DeviceError, InfrastructureError, KernelwrightError
from kernelwright.evaluation.judge import Judge
from kernelwright.evaluation.settings import Settings
from kernelwright.records import Candidate, Evaluation, Task

_TRIES = 2


@dataclass(frozen=True, slots=True)
class Job:
    """One evaluation to do."""

    task: Task
    candidate: Candidate
    settings: Settings | None = None
    """Other settings than the pool's."""


Outcome = Evaluation | KernelwrightError
"""What became of a job; an error is the task's or the machine's, never the candidate's."""


class JudgePool:
    """Judges in processes of their own.

    Args:
        devices: `cpu`, `cuda:0`, `cuda:1` ...: resolved names.
        settings: Of jobs that bring none.
        per_device: Judges for each device. On a CPU more than one only adds waiting.
    """

    def __init__(self, devices: Sequence[str], settings: Settings, per_device: int = 1) -> None:
        if not devices:
            raise DeviceError("Wanted at least one device to judge on; found none.")
        self._settings = settings
        self._slots = [device for _ in range(per_device) for device in devices]
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._members: set[_Member] = set()
        self._closing = False
        self._threads = [threading.Thread(target=self._serve, args=(device,), daemon=True) for device in self._slots]
        for thread in self._threads:
            thread.start()

    @property
    def slots(self) -> int:
        """How many evaluations go on at once."""
        return len(self._slots)

    def evaluate(self, jobs: Iterable[Job], stop: Callable[[], bool] | None = None) -> Iterator[tuple[Job, Outcome]]:
        """Do the jobs, in any order; yields each as it ends.

        Args:
            jobs: What to do; taken one by one, as slots become free.
            stop: Asked before each job; True leaves it and all that follow undone.
        """
        waiting = enumerate(jobs)
        running: dict[int, Job] = {}
        while True:
            while len(running) < self.slots and not (stop is not None and stop()):
                entry = next(waiting, None)
                if entry is None:
                    break
                running[entry[0]] = entry[1]
                self._jobs.put(entry)
            if not running:
                return
            index, outcome = self._outcomes.get()
            yield running.pop(index), outcome

    def __enter__(self) -> JudgePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """Drop jobs that have not begun; end the processes once theirs are done, or now."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        if at_once:
            self._closing = True
            for member in list(self._members):
                member.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self, device: str) -> None:
        """One slot: hand jobs to its process, replace it when it dies."""
        member: _Member | None = None
        while (entry := self._jobs.get()) is not None:
            index, job = entry
            outcome: Outcome = InfrastructureError("not tried")
            for _ in range(_TRIES):
                if self._closing:
                    break
                if member is None:
                    member = _Member(device, self._settings)
                    self._members.add(member)
                try:
                    outcome = member.evaluate(job)
                    break
                except (EOFError, OSError) as error:
                    status = member.end()
                    self._members.discard(member)
                    member = None
                    outcome = InfrastructureError(
                        f"Wanted an evaluation of {job.task.id} on {device}; its judge died (status {status}, {error!r}) "
                        f"{_TRIES} times. Is there memory left?"
                    )
            self._outcomes.put((index, outcome))
        if member is not None:
            member.end()


class _Member:
    """A process with a judge."""

    def __init__(self, device: str, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: its judge starts a process of its own.
        self._process = context.Process(target=_run, args=(theirs, device, settings.model_dump_json()))
        self._process.start()
        theirs.close()

    def evaluate(self, job: Job) -> Outcome:
        """Raises EOFError or OSError when the process is gone."""
        self._connection.send(
            (job.task.model_dump_json(), job.candidate.model_dump_json(), job.settings and job.settings.model_dump_json())
        )
        kind, value = self._connection.recv()
        return Evaluation.model_validate_json(value) if kind == "evaluation" else value

    def kill(self) -> None:
        """End it in the middle of whatever it does; what it started dies with it."""
        self._process.kill()

    def end(self) -> int | None:
        """Hang up, and kill it if that is not enough; returns its exit status."""
        self._connection.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _run(connection: Connection, device: str, settings_json: str) -> None:
    """The process: judge what comes until the other side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides
    settings = Settings.model_validate_json(settings_json)
    local = device
    if device.startswith("cuda:"):
        # This process and all it forks see one GPU only: a candidate cannot borrow another.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = int(device.removeprefix("cuda:"))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
        local = "cuda:0"
    judge: Judge | None = None
    try:
        while True:
            try:
                task_json, candidate_json, changed = connection.recv()
            except EOFError:
                return
            judge = judge or Judge(local, settings)
            connection.send(_judge_one(judge, device, task_json, candidate_json, changed))
    finally:
        if judge is not None:
            judge.close()


def _judge_one(judge: Judge, device: str, task_json: str, candidate_json: str, changed: str | None) -> tuple[str, Any]:
    try:
        evaluation = judge.evaluate(
            Task.model_validate_json(task_json),
            Candidate.model_validate_json(candidate_json),
            settings=Settings.model_validate_json(changed) if changed else None,
        )
    except KernelwrightError as error:
        return "error", type(error)(*error.args)
    return "evaluation", evaluation.model_copy(update={"device": device}).model_dump_json()
