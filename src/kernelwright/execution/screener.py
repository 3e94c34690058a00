"""Screens candidates that a policy proposes for one task: several contained processes build and check them, one at a time is
timed.

A screening process holds the task and takes one candidate after another. It is started anew after a crash, a hang, a leak,
and after a candidate that left settings or libraries changed. Its answers are estimates (`records.screened`).

All candidates that compile nothing go to the first process, which loads the task while proposals are still made. The others
are for compilers, and are started when there is work for them, a few of them earlier on a GPU; they share one folder of
compiled files.

Compiled files stay in the screening processes' own folder. The judge compiles a screened winner again: it must not trust
files that a candidate could have written.

If the device's memory runs out for one of several processes, its candidate is tried once more when they have ended: each
of them holds the task.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from kernelwright.cores import timing_core
from kernelwright.errors import (
    CrowdedError,
    DeviceError,
    InfrastructureError,
    KernelwrightError,
    NothingUsableError,
    TaskError,
)
from kernelwright.execution.fork_servers import ForkServers
from kernelwright.execution.work import Progress, Screen
from kernelwright.judge.isolation.gate import DeviceGate, DisturbedError, lock_path
from kernelwright.judge.isolation.process import Worker, WorkerError, WorkerSpec, on_core
from kernelwright.judge.isolation.sandbox import signal_each
from kernelwright.judge.isolation.workers import JudgeFolder
from kernelwright.judge.settings import Settings
from kernelwright.records import Candidate, Evaluation, Reason, Task
from kernelwright.records.decisions import is_worth_its_compiler, next_of
from kernelwright.records.policy import Context, Policy
from kernelwright.records.screened import Compiles, Screened, compiles, screened_of, uses_inductor
from kernelwright.records.variants import variants
from kernelwright.seconds import counted, utc_now
from kernelwright.tasks import device_is_full


class Proposals:
    """Proposals for one task, and what has been found of them.

    Args:
        task: The task.
        policy: Proposer of candidates.
        device: Resolved name.
        budget: Proposals to look at, those found already included.
        seed: Seed of the policy.
        history: Verdicts so far; the caller may add to it.
        screened: Estimates so far; the caller appends to it.
        tell: Callback for what the policy has to say, and whether that lasts.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        device: str,
        budget: int,
        seed: int,
        history: Sequence[Evaluation],
        screened: list[Screened],
        tell: Callable[[str, bool], None] = lambda text, lasting: None,
    ) -> None:
        self._task, self._policy, self._device, self._budget, self._seed = task, policy, device, budget, seed
        self.history, self.screened, self._tell = history, screened, tell
        self._given: dict[str, Candidate] = {}
        self._waiting: list[Candidate] = []
        self._noted: set[str] = set()

    @property
    def _context(self) -> Context:
        return Context(
            task=self._task,
            device=self._device,
            history=tuple(self.history),
            seed=self._seed,
            screened=tuple(self.screened),
        )

    @property
    def done(self) -> int:
        """Proposals that were looked at."""
        return len(self._context.seen)

    @property
    def left(self) -> Compiles | None:
        """The quickest compiler among the proposals that are known and still to be looked at; None where there are none."""
        seen = self._context.seen
        left = [*self._waiting, *(given for sha256, given in self._given.items() if sha256 not in seen)]
        return min((compiles(candidate.source) for candidate in left), default=None)

    def _may_stay(self, waiting: Candidate) -> bool:
        """True for a proposal that is no reason to leave the policy unasked: it comes last of all, or never."""
        is_last = compiles(waiting.source) is Compiles.VARIANTS
        return is_last or not is_worth_its_compiler(waiting, self.screened)

    def candidates(self, slots: int, takes: Callable[[Compiles], bool] | None = None) -> Iterator[Candidate | None]:
        """Candidates to look at, one after the other; None where the next depends on one that is being looked at.

        The policy is asked for as many as there are slots, when none is left of those that it gave before. With `takes`,
        which tells whether a process is free for a candidate of a kind, it is asked for all that the budget has room for,
        and they are taken in the order of `schedule`.
        """
        taken = self._context.seen
        given, waiting = self._given, self._waiting
        asked_at = None
        while len(taken) < self._budget:
            seen = self._context.seen
            busy = [candidate for sha256, candidate in given.items() if sha256 not in seen]
            if asked_at != self.done and all(takes and self._may_stay(candidate) for candidate in waiting):
                asked_at = self.done
                self._tell("proposing", False)
                most = self._budget - self.done + len(waiting)
                try:
                    # It does not know of those at work, and may name them again.
                    proposed = self._policy.propose(self._context, most if takes else min(slots + len(busy), most))
                except NothingUsableError as error:
                    if not taken:
                        raise
                    self._tell(str(error), True)
                    return
                for note in dict.fromkeys(candidate.note for candidate in proposed):
                    if note and note not in self._noted:
                        self._noted.add(note)
                        self._tell(note, True)
                known = taken | {candidate.sha256 for candidate in waiting}
                # Every other place is for the knobs of what was found so far, and all once the policy has nothing more.
                new = sum(candidate.sha256 not in known for candidate in proposed)
                proposed = [*variants(self.screened, known, max(1, slots - new, slots // 2)), *proposed]
                waiting += {candidate.sha256: candidate for candidate in proposed if candidate.sha256 not in known}.values()
            if takes:
                candidate = next_of(waiting, busy, self.screened, {kind for kind in Compiles if takes(kind)})
            else:
                candidate = next(iter(waiting), None)
            if candidate is not None:
                given[candidate.sha256] = candidate
                waiting.remove(candidate)
                taken.add(candidate.sha256)
                yield candidate
            elif busy or asked_at != self.done:
                yield None
            else:
                self._tell("the rest is not worth its compiler" if waiting else "the policy has nothing more to try", True)
                return


PROGRAM = "kernelwright.judge.worker.screening"
SCREENS_PER_GPU, SCREENS_PER_CPU = 8, 4
"""Most processes that screen one task: one for each core, of which one is timed while the others compile. Our choice."""
BUILD_LIMIT_S, RUN_LIMIT_S = 120.0, 20.0
"""Limits of a build or first call and of a later request; the judge's own, where they are lower. Our choice."""
STARTED_EARLY = 3
"""Processes for compilers that start on a GPU while proposals are made: contexts are made one after another. Our choice."""
LEFT_BYTES_MAX = {"resident_bytes": 3 << 30, "device_bytes": 1 << 30}
"""Memory that a process may have gained beyond its task before it is started anew. torch.compile takes 1 GiB of the host's.
Our choice."""
LONG_CALL_US = 1000.0
"""Latency of a reference from which on screening has a GPU alone while it times. Others' work comes between the many kernels
of a long call, and less often between those of a CUDA graph: in such company these read 1.4 to 2 times too fast, and
short ones hardly (`docs/log.md`). Our choice."""
TIMED_ALONE_S, TIMED_ALONE_CALLS = 5.0, 100
"""Limit of timing alone, and calls of the reference that it may take beyond that: all others on the GPU wait. Our choice."""
SPARED_BYTES = 4 << 30
"""GPU memory that a process which has it alone leaves to libraries' workspaces and to contexts of processes that wait. Our
choice."""
_POLL_S = 0.05
_ASK_AGAIN_S = 1.0


class Screener:
    """Processes that screen candidates of one task; the first is started at once, others when they are first needed.

    Args:
        task: The task.
        device: Resolved name: `cpu`, `cuda:0` ...
        settings: Settings of the judge whose limits and labels hold here too.
        servers: Fork servers, which stay open.
        slots: Most processes; by default one for each core, at most `SCREENS_PER_GPU` or `SCREENS_PER_CPU`.
        is_alone: True where nobody else needs the device's memory meanwhile, so that all of it may be used.
        early: True starts a few processes for compilers before there is a candidate for them, on a GPU.
        start: Starts a worker from a fork server.
    """

    def __init__(
        self,
        task: Task,
        device: str,
        settings: Settings,
        servers: ForkServers,
        slots: int | None = None,
        *,
        is_alone: bool = False,
        early: bool = True,
        start: Callable[..., Worker] = Worker,
    ) -> None:
        self.start = start
        self.task, self.device, self.where = task, device, torch.device(device)
        # One process holds what a judge, its reference and its candidate hold in three.
        self.settings = settings.model_copy(
            update={
                "memory_limit_bytes": 2 * settings.memory_limit_bytes,
                "device_memory_limit_bytes": device_limit_bytes(settings, self.where, is_alone),
            }
        )
        on_gpu = self.where.type == "cuda"
        most = SCREENS_PER_GPU if on_gpu else SCREENS_PER_CPU
        self.slots = slots or max(2, min(most, len(os.sched_getaffinity(0))))
        self.build_limit_s = min(settings.build_limit_s, BUILD_LIMIT_S)
        self.run_limit_s = min(settings.run_limit_s, RUN_LIMIT_S)
        self._core = timing_core(self.where)
        self.is_alone = is_alone
        self._turn = lock_path(self.where, "screening")
        self.servers = servers
        servers.keep_off(self._core)
        self._folder = JudgeFolder()
        self.directory = self._folder.path
        self.closing = False
        """True where no further process may start."""
        self._processes = [_Process(self) for _ in range(self.slots)]
        self._free = [*self._processes]
        self._threads = ThreadPoolExecutor(self.slots + 1)
        self._begun: list[Future[Any]] = [self._threads.submit(self._processes[0].begin, False)]
        if on_gpu and early and not servers.is_single:
            self._begun += [self._threads.submit(process.begin, True) for process in self._processes[1 : 1 + STARTED_EARLY]]

    def screen(self, candidates: Iterable[Candidate | None]) -> Iterator[tuple[Candidate, Screened | KernelwrightError]]:
        """Look at candidates, taken as processes become free; yields each as it ends, in any order.

        None among them says that the next one depends on one that is being looked at.
        """
        waiting = iter(candidates)
        running: dict[Future[Screened | KernelwrightError], tuple[Candidate, _Process]] = {}
        put_off: deque[Candidate] = deque()  # what found too little memory beside others
        is_alone = False
        while not self.closing:
            while not is_alone and self._free and (candidate := next(waiting, None)) is not None:
                process = self._process_for(candidate)
                running[self._submit(process, candidate)] = candidate, process
            if put_off and not running:
                candidate, process, is_alone = put_off.popleft(), self._free.pop(), True
                for other in self._processes:
                    if other is not process:
                        other.close()
                running[self._submit(process, candidate)] = candidate, process
            if not running:
                return
            # What there is to do may depend on others, and a process may be free though nothing has ended.
            for ended in [*wait(running, timeout=_ASK_AGAIN_S, return_when=FIRST_COMPLETED).done][:1]:
                candidate, process = running.pop(ended)
                self._free.append(process)
                outcome, was_alone, is_alone = ended.result(), is_alone, False
                if self.closing:
                    return  # processes that were ended in the middle of their work find nothing out
                if ran_out(outcome) and self.slots > 1 and not was_alone:
                    put_off.append(candidate)
                else:
                    yield candidate, outcome

    def look(self, work: Screen, tell: Callable[[Progress], None]) -> Iterator[tuple[Screened, Compiles | None]]:
        """One round for this task: estimates as they come, each with the quickest compiler that is left to look at.

        Args:
            work: The round.
            tell: Callback for the policy's messages.

        Raises:
            DeviceError: the device's memory does not suffice beside others.
            KernelwrightError: the task cannot be screened here, or the policy failed.
        """
        if work.policy is None:
            for _, outcome in self.screen(work.candidates):
                if isinstance(outcome, KernelwrightError):
                    raise outcome
                yield outcome, None
            return
        proposals = Proposals(
            work.task,
            work.policy,
            self.device,
            work.budget,
            work.seed,
            work.history,
            [*work.earlier],
            lambda text, lasting: tell(Progress(text, lasting)),
        )
        takes = self.takes if work.tunes else lambda kind: kind is not Compiles.VARIANTS and self.takes(kind)
        for _, outcome in self.screen(proposals.candidates(self.slots, takes)):
            if isinstance(outcome, KernelwrightError):
                raise outcome
            if ran_out(outcome) and not self.is_alone:
                raise DeviceError(f"Wanted to screen candidates of {work.task.id}; {outcome.detail}")
            proposals.screened.append(outcome)
            yield outcome, proposals.left

    def stop(self) -> None:
        """Have the round end now; for any thread."""
        self.closing = True
        signal_each(self._alive, signal.SIGKILL)

    @property
    def _alive(self) -> list[int]:
        workers = [process.worker for process in self._processes]
        return [worker.pid for worker in workers if worker is not None and not worker.ended]

    def takes(self, kind: Compiles) -> bool:
        """True if a process is free for a candidate of this kind: the first one, or any where compilers will be at work."""
        return self._processes[0] in self._free if kind is Compiles.NOTHING else bool(self._free)

    def wants_compiler(self, source: str) -> bool:
        """True if its process should have torch.compile's compiler from the beginning.

        On a GPU all that compile do: the compiler is imported early there, and any of them may get torch.compile next.
        """
        return uses_inductor(source) or (self.where.type == "cuda" and compiles(source) is not Compiles.NOTHING)

    def _process_for(self, candidate: Candidate) -> _Process:
        """Take a free process: the first for what compiles nothing, else one of the others that is alive by now."""
        first, nothing = self._processes[0], compiles(candidate.source) is Compiles.NOTHING
        process = min(self._free, key=lambda free: ((free is first) != nothing, free.worker is None))
        self._free.remove(process)
        return process

    def _submit(self, process: _Process, candidate: Candidate) -> Future[Screened | KernelwrightError]:
        self._begun = [begun for begun in self._begun if not begun.done()]
        self._begun.append(self._threads.submit(self._look, process, candidate))
        return self._begun[-1]

    def _look(self, process: _Process, candidate: Candidate) -> Screened | KernelwrightError:
        try:
            try:
                return process.screen(candidate)
            except DisturbedError:
                process.share_the_gpu()
                return process.screen(candidate)
        except KernelwrightError as error:
            return error
        except RuntimeError as error:
            if not device_is_full(error):
                raise
            process.close()
            return DeviceError(f"Wanted to screen candidates of {self.task.id}; out-of-memory: {str(error).splitlines()[0]}")

    @contextlib.contextmanager
    def timing(self, worker: Worker, spent_s: defaultdict[str, float]) -> Iterator[None]:
        """Be the only one that screening times on the device, on the core for timing.

        Compilers of the others go on meanwhile, on other cores. On a processor they would be on the same cores, so the other
        processes of this pool are stopped.
        """
        with contextlib.ExitStack() as stack:
            with counted(spent_s, "wait"):
                fcntl.flock(stack.enter_context(self._turn.open("a")), fcntl.LOCK_EX)
            stack.enter_context(on_core(self._core, [worker]))
            if self.where.type == "cpu":
                for other in [process.worker for process in self._processes]:
                    if other is not None and other is not worker and other.stop():
                        stack.callback(other.resume)
            yield

    def close(self) -> None:
        """End the processes, those at work too, and remove their files."""
        self.closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._begun = [begun for begun in self._begun if not begun.cancelled()]  # `wait` would wait for those for ever
        ended = False
        while not ended:
            # The thread that waits for an answer finds its process dead, and ends. A GPU's driver takes a while to let go of
            # a process, so that all die at once.
            signal_each(self._alive, signal.SIGKILL)
            ended = not wait(self._begun, timeout=_POLL_S).not_done
        for process in self._processes:
            process.close()
        self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Process:
    """One process that screens candidates of the task, one after another; not for several threads at once."""

    def __init__(self, screener: Screener) -> None:
        self._screener = screener
        self._gate = DeviceGate(screener.where, screener.settings.unstoppable_limit_s)
        self._worker: Worker | None = None
        self._costs: dict[str, Any] = {}
        """The task's `least_us`, `operations_us` and `memory_bytes` for its records, where they are known."""
        self._reference_us = 0.0
        """Latency of the reference, microseconds; 0 where it is not known."""
        self._starting = threading.Lock()

    @property
    def worker(self) -> Worker | None:
        """The process that is alive; None before the first candidate and after one that ended it."""
        return self._worker

    def screen(self, candidate: Candidate) -> Screened:
        """Look at one candidate. Its failure is data.

        Raises:
            KernelwrightError: the task or the machine failed.
        """
        screener, start_s = self._screener, time.monotonic()
        spent_s: defaultdict[str, float] = defaultdict(float)
        began = utc_now()
        with counted(spent_s, "task"):
            worker = self._started(screener.wants_compiler(candidate.source))
        fields: dict[str, Any] = {}
        try:
            fields = self._look(worker, candidate, spent_s)
        except WorkerError as failure:
            fields = {"correct": False, "reason": failure.reason, "detail": failure.detail.strip()[:2000]}
        except CrowdedError as failure:  # of the gate, which has ended the process
            fields = {"correct": False, "reason": Reason.RUN_TIMEOUT, "detail": str(failure)}
        with counted(spent_s, "next"):
            self._make_ready(worker)
        return screened_of(
            screener.task,
            candidate,
            **fields,
            **self._costs,
            device=screener.device,
            started=began,
            elapsed_s=round(time.monotonic() - start_s, 3),
            spent_s={name: round(seconds, 4) for name, seconds in spent_s.items()},
        )

    def _look(self, worker: Worker, candidate: Candidate, spent_s: defaultdict[str, float]) -> dict[str, Any]:
        screener = self._screener
        with counted(spent_s, "build"):
            answer = worker.request("build", screener.build_limit_s, source=candidate.source)
        if "reason" not in answer:
            # Whoever judges on this device stops these requests while it measures.
            with self._gate(shared=True):
                with counted(spent_s, "first call"):
                    worker.request("call", screener.build_limit_s)
                with counted(spent_s, "check"):
                    answer = worker.request("check", screener.run_limit_s)
        if "reason" in answer:
            said = answer["reason"]  # by an untrusted process
            reason = Reason(said) if said in set(Reason) else Reason.PROTOCOL_VIOLATION
            return {"correct": False, "reason": reason, "detail": str(answer.get("detail", ""))[:2000]}
        if not screener.settings.timed:
            return {"correct": True}
        limit_s, long_us = screener.run_limit_s, self._reference_us
        if alone := long_us >= LONG_CALL_US:
            limit_s = min(limit_s, TIMED_ALONE_S + TIMED_ALONE_CALLS * long_us / 1e6)
        with screener.timing(worker, spent_s), self._gate(shared=not alone), counted(spent_s, "time"):
            timed = worker.request("time", limit_s)
        names = ("estimate", "spread", "reference_us", "candidate_us")
        numbers = {name: _number(timed.get(name)) for name in names}
        return {"correct": True, "pairs": int(_number(timed.get("pairs"))), **numbers}

    def begin(self, compiling: bool) -> None:
        """Start it before there is a candidate. A failure is left to the first candidate to tell."""
        with contextlib.suppress(KernelwrightError):
            self._started(compiling)

    def _started(self, compiling: bool) -> Worker:
        with self._starting:
            return self._worker or self._start(compiling)

    def _start(self, compiling: bool) -> Worker:
        screener = self._screener
        spec = WorkerSpec(
            role="reference",
            source="",
            class_name="ModelNew",
            device=screener.device,
            directory=screener.directory,
            build=screener.directory / "build",
            arena_bytes={},
            gate=self._gate,
            program=PROGRAM,
        )
        if screener.closing:
            raise InfrastructureError(f"Wanted to screen candidates of {screener.task.id}; the search was ended.")
        self._worker = worker = screener.start(screener.servers.server(compiling=compiling), spec, screener.settings)
        task, settings = screener.task.model_dump_json(), screener.settings.model_dump_json()
        try:
            worker.request("task", screener.build_limit_s, task=task, settings=settings)
            # In float64 the reference may be at work for seconds. Beside it a call of milliseconds reads twice as long.
            with self._gate(shared=True):
                answer = worker.request("truth", screener.build_limit_s)
        except WorkerError as failure:
            self.close()
            if failure.reason is Reason.OUT_OF_MEMORY:
                raise DeviceError(f"Wanted to screen candidates of {screener.task.id}; {failure}") from failure
            raise TaskError(f"Wanted the reference of {screener.task.id} to run; {failure}") from failure
        worker.spec = replace(spec, role="candidate")  # candidates' code runs in it from now on
        self._costs = {name: answer.get(name) for name in ("least_us", "operations_us", "memory_bytes")}
        self._reference_us = answer.get("reference_us") or 0.0
        return worker

    def _make_ready(self, worker: Worker) -> None:
        """Have the process drop the candidate; end it where it is not as it was before."""
        try:
            answer = {} if worker.ended else worker.request("next", self._screener.run_limit_s)
            ready = answer.get("clean") is True and all(
                _number(answer.get(name)) <= most for name, most in LEFT_BYTES_MAX.items()
            )
        except WorkerError:
            ready = False
        if not ready:
            self.close()

    def share_the_gpu(self) -> None:
        """Begin anew without looking whether the GPU rests: others than judges are at work on it."""
        self.close()
        self._gate = DeviceGate(self._screener.where)

    def close(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.discard()


def device_limit_bytes(settings: Settings, device: torch.device, alone: bool) -> int:
    """Memory of the device that one process may have: twice a worker's, and of a GPU that it has alone nearly all."""
    limit = 2 * settings.device_memory_limit_bytes
    if device.type != "cuda" or not alone:
        return limit
    return max(limit, torch.cuda.get_device_properties(device).total_memory - SPARED_BYTES)


def ran_out(outcome: Screened | KernelwrightError) -> bool:
    """True if the device's memory was full, which others may have caused."""
    return isinstance(outcome, DeviceError) or (isinstance(outcome, Screened) and outcome.reason is Reason.OUT_OF_MEMORY)


def _number(value: Any) -> float:
    """A number that an untrusted process named; raises WorkerError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e15 < value < 1e15:
        raise WorkerError(Reason.PROTOCOL_VIOLATION, "an answer's number is not one")
    return float(value)
