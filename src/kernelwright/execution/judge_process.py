"""A process with a judge, and what runs in it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, ClassVar, Protocol

from kernelwright.cores import cores_beside
from kernelwright.errors import KernelwrightError
from kernelwright.execution.visible import see_one_gpu
from kernelwright.judge.isolation import sandbox
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.judge.settings import Settings
from kernelwright.records import Candidate, Evaluation, Task

if TYPE_CHECKING:
    from kernelwright.judge.judge import Judge


class Work(Protocol):
    """A job for a judge: one candidate to evaluate, or baselines to measure together."""

    is_rotation: ClassVar[bool]
    """Whether the candidates are baselines that are measured together."""

    @property
    def task(self) -> Task:
        """Task of the candidates."""

    @property
    def settings(self) -> Settings | None:
        """Settings in place of the pool's."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """A candidate and its rival, if there is one; or baselines."""


class JudgeProcess:
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

    def do(self, work: Work, alone: bool) -> list[Evaluation] | KernelwrightError:
        """Have the process do a job, alone on its device or beside others; raises EOFError or OSError when it is gone."""
        message = (
            work.is_rotation,
            work.task.model_dump_json(),
            [candidate.model_dump_json() for candidate in work.candidates],
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
    zygotes = [ForkServer()]
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:1024")  # no block is returned that is in use in part
    import torch  # as the zygote does at the same time

    from kernelwright.judge.judge import Judge

    def made() -> Judge:
        return Judge(local, settings, fork_server=zygotes.pop() if zygotes else None)

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
                    judge.release_idle()
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
            from kernelwright.judge.timing.rotation import rotate  # imports torch, as the judge has done by now

            found = rotate(judge, task, candidates, settings=settings, alone=alone)
        else:
            candidate, *rivals = candidates
            found = [
                judge.evaluate(task, candidate, settings=settings, alone=alone, paired_baseline=next(iter(rivals), None))
            ]
    except KernelwrightError as error:
        return type(error)(*error.args)  # without its traceback, which need not survive the journey
    taken = {"judge_bytes": torch.cuda.max_memory_reserved(judge.device)} if on_gpu else {}
    return [one.model_copy(update={"device": device, "checks": one.checks | taken}).model_dump_json() for one in found]
