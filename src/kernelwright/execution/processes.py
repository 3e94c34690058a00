"""Starts processes that judge or screen, and holds what runs in them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from kernelwright.cores import cores_except, timing_core
from kernelwright.errors import KernelwrightError
from kernelwright.execution.fork_servers import ForkServers
from kernelwright.execution.work import Baselines, Evaluate
from kernelwright.judge.isolation import sandbox
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.judge.settings import Settings
from kernelwright.records import Evaluation
from kernelwright.records.policy import Policy

if TYPE_CHECKING:
    from kernelwright.judge import judge as judging

END_LIMIT_S = 20.0
"""Time in which a process that was hung up on must have ended, seconds."""


class ChildProcess:
    """A process of this program that takes messages and answers them.

    Args:
        main: A function of this package to run there, with the process's end of the connection and the arguments.
        arguments: Further arguments, picklable.
    """

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        self._sending = threading.Lock()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: it starts processes of its own.
        self._process = context.Process(target=main, args=(theirs, *arguments))
        with _without_main_program():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True if the process has not ended."""
        return self._process.is_alive()

    def send(self, message: Any) -> None:
        """Send a message; raises OSError where the process is gone. For any thread."""
        with self._sending:
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for an answer; raises EOFError or OSError where the process is gone."""
        return self._connection.recv()

    def release_idle(self) -> None:
        """Have a judge end the processes that wait for its next task; for any thread."""
        with contextlib.suppress(OSError):  # one that is gone holds nothing
            self.send(None)

    def stop(self) -> None:
        """End the process at once; its children die with it."""
        self._process.kill()

    def end(self) -> int | None:
        """Hang up, and kill the process if that is not enough; returns its exit status."""
        self._connection.close()
        self._process.join(timeout=END_LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


_starting = threading.Lock()


@contextlib.contextmanager
def _without_main_program() -> Iterator[None]:
    """Start a process that does not run the user's script again, as multiprocessing would have it do."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def see_one_gpu(device: str) -> str:
    """Have this process and all it forks see one GPU only, so that no candidate can borrow another; its name in here."""
    if not device.startswith("cuda:"):
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = int(device.removeprefix("cuda:"))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return "cuda:0"


def _set_up() -> None:
    sandbox.die_with_parent()  # a run that was killed must not go on holding the device
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides
    atexit.register(gc.freeze)  # the interpreter's last collection looks through all of torch, for half a second


# --- judging ----------------------------------------------------------------------------------------------------------


def judge_main(connection: Connection, device: str, settings_json: str, ready: bool = False) -> None:
    """Judge work in a process of its own until the other side hangs up; with `ready` the judge is made at once.

    A message is a pair of the work and whether it is alone on its device, or None to release what only waits.
    """
    _set_up()
    settings = Settings.model_validate_json(settings_json)
    local = see_one_gpu(device)
    servers = [ForkServer()]
    # No block is returned that is in use in part.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:1024")
    import torch  # as the fork server does at the same time

    from kernelwright.judge.judge import Judge

    judge: Judge | None = None
    with contextlib.ExitStack() as stack:
        stack.callback(_close_all, servers)
        if ready:
            with contextlib.suppress(KernelwrightError):  # the first work tries again, and tells
                judge = stack.enter_context(Judge(local, settings, fork_server=servers.pop()))
                judge.import_compiler()
        while True:
            try:
                message = connection.recv()
            except EOFError:
                return
            if message is None:
                if judge is not None:
                    judge.release_idle()
                continue
            if judge is None:
                try:
                    judge = stack.enter_context(Judge(local, settings, fork_server=servers.pop() if servers else None))
                except KernelwrightError as error:
                    connection.send(type(error)(*error.args))
                    return  # the next one tries in a new process: CUDA does not recover where it could not begin
                judge.import_compiler()  # most work has some candidate that is compiled
            # Other judges time on the same core, and this one's own work must not be in their way.
            os.sched_setaffinity(0, cores_except(judge.core))
            connection.send(judged(judge, device, *message))
            # Other judges may need what the tensors of an evaluation held, which are gone by now; cycles, if any, are not.
            gc.collect()
            torch.cuda.empty_cache()


def _close_all(servers: Iterable[ForkServer]) -> None:
    for server in servers:
        server.close()


def judged(
    judge: judging.Judge, device: str, work: Evaluate | Baselines, is_alone: bool
) -> tuple[Evaluation, ...] | KernelwrightError:
    """The evaluations of work, or an error of the task or the machine, without its traceback.

    Args:
        judge: The judge of this process.
        device: Name of its device in the process that asks.
        work: The work.
        is_alone: True where nothing else is at work on the device.
    """
    import torch  # as in `judge_main`

    on_gpu = judge.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(judge.device)
    try:
        if isinstance(work, Baselines):
            from kernelwright.judge.timing.rotation import rotate  # imports torch, as the judge has done by now

            evaluations = rotate(judge, work.task, work.baselines, settings=work.settings, alone=is_alone)
        else:
            evaluations = [
                judge.evaluate(work.task, work.candidate, settings=work.settings, alone=is_alone, alongside=work.alongside)
            ]
    except KernelwrightError as error:
        return type(error)(*error.args)
    taken = {"judge_bytes": torch.cuda.max_memory_reserved(judge.device)} if on_gpu else {}
    return tuple(
        evaluation.model_copy(update={"device": device, "checks": evaluation.checks | taken}) for evaluation in evaluations
    )


# --- screening --------------------------------------------------------------------------------------------------------


def screen_main(connection: Connection, device: str, settings_json: str) -> None:
    """Screen rounds of tasks in a process of its own until the other side hangs up.

    A message is a round without its policy, the policy packed, and whether the round is alone on its device. Answers are
    pairs: an estimate and what is left to look at, or a policy's message; then None, or an error, ends the round.
    """
    _set_up()
    local, settings = see_one_gpu(device), Settings.model_validate_json(settings_json)
    import torch

    from kernelwright.execution.screener import Screener
    from kernelwright.judge.isolation.gate import DeviceMemory

    where = torch.device(local)
    core, memory = timing_core(where), DeviceMemory(where)
    # Neither tracing nor compilers beside what a judge times; screening times on another core.
    os.sched_setaffinity(0, cores_except(core))
    policies: dict[bytes, Policy] = {}  # one that has traced a task need not do so again
    # Most tasks have a proposal for the compiler.
    with contextlib.closing(ForkServers(where.type, core, single=True)) as servers:
        while True:
            try:
                work, packed, is_alone = connection.recv()
            except EOFError:
                return
            end: KernelwrightError | None = None
            try:
                if packed not in policies:
                    policies[packed] = pickle.loads(packed)
                work = replace(work, policy=policies[packed])
                chosen = work.settings or settings
                with (
                    memory(alone=is_alone),
                    Screener(work.task, local, chosen, servers, work.slots, is_alone=is_alone) as screener,
                ):
                    for answer in screener.look(work, lambda progress: connection.send((progress, None))):
                        connection.send(answer)
            except KernelwrightError as error:
                end = type(error)(*error.args)
            connection.send((end, None))
