"""Queues the reward service's evaluations, keeps their records in a run directory, and tells the callers who wait for them.

All state lives in the event loop's thread, so it needs no locks: between looking for a request and taking it in nothing
else can run, and two equal requests can never become two evaluations. One thread takes results of the executor and writes
them.

A record is on disk before anybody is told of it, so a kill at any moment loses no finished evaluation; a restart reads
the file and answers from it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import math
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelwright.errors import (
    InfrastructureError,
    KernelwrightError,
    QueueFullError,
    ShuttingDownError,
    SourcesRefusedError,
    TaskError,
    UsageError,
)
from kernelwright.execution.service.protocol import EvaluationRequest, Metrics, SettingsRequest, State
from kernelwright.execution.work import Evaluate, Executor
from kernelwright.judge.settings import DROP_IN_LABELS, Settings
from kernelwright.records import Candidate, Contract, Evaluation, RunDirectory, Task, capture_environment, sha256_of
from kernelwright.tasks.source import check_task_source
from kernelwright.tasks.suites import builtin_task
from kernelwright.version import __version__

REQUEST_KEY = "request"
"""In an evaluation's `checks`: the id of the request that it answers."""


class EvaluationStore:
    """The service's run directory. One service at a time may have it open.

    Args:
        path: The directory; created when missing.
        device: `cpu` or `cuda`, the kind of device that its records are of.
        settings: Settings of requests that change none.
        hardware: Names of the hardware that judges; found on this machine when None.

    Raises:
        UsageError: another service has it open, or it belongs to a run on other hardware, by other versions, or of
            another kind: its records would answer what they were not asked.
    """

    def __init__(self, path: Path, device: str, settings: Settings, hardware: list[str] | None = None) -> None:
        self.run = RunDirectory(path)
        try:
            self._lock_file = (path / ".lock").open("a")
        except OSError as error:
            raise UsageError(f"Wanted a directory to write to at {path}; {error.strerror}. Choose another one.") from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock_file.close()
            raise UsageError(
                f"Wanted a run directory to myself; another service has {path} open. Choose another one."
            ) from error
        self._writing = threading.Lock()
        try:
            self._claim(device, settings, hardware)
            self._offsets = self._index()
        except UsageError:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._offsets)

    def get(self, request: str) -> Evaluation | None:
        """The record that answers a request; None when there is none."""
        offset = self._offsets.get(bytes.fromhex(request))
        if offset is None:
            return None
        with self.run.evaluations_path.open("rb") as file:
            file.seek(offset)
            return Evaluation.model_validate_json(file.readline())

    def append(self, request: str, evaluation: Evaluation) -> Evaluation:
        """Put a record on disk, under the request that it answers; returns it as it is there.

        Raises:
            InfrastructureError: it could not be written.
        """
        marked = evaluation.model_copy(update={"checks": {**evaluation.checks, REQUEST_KEY: request}})
        with self._writing:
            self.run.append(marked)
            end = self.run.evaluations_path.stat().st_size
            self._offsets[bytes.fromhex(request)] = end - len(marked.model_dump_json().encode()) - 1
        return marked

    def close(self) -> None:
        """Let another service have the directory."""
        self._lock_file.close()

    def _index(self) -> dict[bytes, int]:
        offsets: dict[bytes, int] = {}
        path = self.run.evaluations_path
        if not path.exists():
            return offsets
        with path.open("rb") as file:
            offset = 0
            for line in file:
                try:
                    # Read as JSON only, which is ten times as fast as checking it; `get` checks.
                    request = json.loads(line)["checks"][REQUEST_KEY]
                    offsets[bytes.fromhex(request)] = offset
                except (ValueError, KeyError, TypeError):
                    pass  # torn by a kill: its work is still pending
                offset += len(line)
        return offsets

    def _claim(self, device: str, settings: Settings, hardware: list[str] | None) -> None:
        environment = capture_environment(device)
        if hardware is None:
            hardware = sorted({gpu["name"] for gpu in environment.get("gpu", ())}) or [environment["processor"]]
        config: dict[str, Any] = {
            "kind": "serve",
            "device": device,
            "hardware": hardware,
            "torch": environment["packages"]["torch"],
            "kernelwright": __version__,
        }
        earlier: dict[str, Any] | None = self.run.read_json("config.json")
        for key, value in config.items():
            if earlier is not None and earlier.get(key) != value:
                raise UsageError(
                    f"Wanted to go on in {self.run.path}; it belongs to a run with another `{key}` ({earlier.get(key)!r}, "
                    f"now {value!r}), whose records answer other questions. Choose another directory."
                )
        values = settings.model_dump(mode="json")
        values["forbid"] = sorted(values["forbid"])
        self.run.write_json("config.json", {**config, "settings": values})
        self.run.write_json("environment.json", environment)


FAILURES_KEPT = 1000
"""Ids of failed evaluations that `get` can still explain. A failure is never an answer to a new request."""

DURATIONS_KEPT = 32
"""Latest evaluations from whose length the wait for a place in the queue is estimated."""

FIRST_GUESS_S = 10.0
"""Length of an evaluation before one has been seen."""

RETRY_LIMIT_S = 600

_FREE = ("timed", "processes_min", "processes_max", "blocks", "target_half_width", "build_limit_s", "run_limit_s")
"""Settings that a request may replace."""

_COUNTED = ("accepted", "infrastructure_errors", "task_errors", "dropped", "reused", "joined", "refused_full")
"""Metrics that only count."""

_log = logging.getLogger(__name__)


Outcome = Evaluation | KernelwrightError
"""An evaluation, or an error of the task or the machine, never of the candidate."""


@dataclass(eq=False, slots=True)
class PendingEvaluation:
    """An evaluation that was asked for."""

    id: str
    work: Evaluate
    repeat: int = 0
    state: State = State.QUEUED
    outcome: Outcome | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, outcome: Outcome) -> None:
        """Tell everybody who waits."""
        self.outcome = outcome
        self.state = State.DONE
        self.done.set()


class EvaluationQueue:
    """Takes requests, hands them to judges, remembers the answers.

    Args:
        executor: Judges, which are closed with the queue.
        store: Records of finished evaluations.
        settings: Judge settings where a request changes none.
        queue_limit: Requests that may wait for a judge.
        drain_s: Time for evaluations that have begun to end at shutdown, seconds.
        builtin_only: Refuse tasks that are not built in: a task's code runs unconfined.
    """

    def __init__(
        self,
        executor: Executor,
        store: EvaluationStore,
        settings: Settings,
        *,
        queue_limit: int = 256,
        drain_s: float = 120.0,
        builtin_only: bool = False,
    ) -> None:
        self.settings = settings
        self.store = store
        self.draining = False
        self._executor = executor
        self.lanes = executor.free(Evaluate)
        """Evaluations that can go on at once."""
        self._queue_limit = queue_limit
        self._drain_s = drain_s
        self._builtin_only = builtin_only
        self._queue: asyncio.Queue[PendingEvaluation] = asyncio.Queue()
        self._pending: dict[str, PendingEvaluation] = {}
        self._failed: OrderedDict[str, KernelwrightError] = OrderedDict()
        self._running: dict[Evaluate, asyncio.Future[Outcome]] = {}
        """Evaluations that the executor has."""
        self._begun: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each result that the executor will have, then False."""
        self._taker = threading.Thread(target=self._take_results, daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self._drainer: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._durations_s: deque[float] = deque(maxlen=DURATIONS_KEPT)
        self._counts: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._judging_s = 0.0
        self._started = time.monotonic()

    def start(self) -> None:
        """Begin to judge; call in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._taker.start()
        self._tasks = [asyncio.create_task(self._serve()) for _ in range(self.lanes)]

    def submit(self, request: EvaluationRequest) -> PendingEvaluation:
        """Take a request in, or join the equal one that waits or runs; done at once where it is on record.

        Raises:
            TaskError, UsageError: the task or the settings cannot be used.
            QueueFullError: there is no place for it.
            ShuttingDownError: the service ends.
        """
        pending = self._pending_of(request)
        if (known := self.store.get(pending.id)) is not None:
            self._counts["reused"] += 1
            pending.finish(known)
            return pending
        if (running := self._pending.get(pending.id)) is not None:
            self._counts["joined"] += 1
            return running
        if self.draining:
            raise _shutting_down(pending.work)
        if self._queue.qsize() >= self._queue_limit:
            self._counts["refused_full"] += 1
            raise QueueFullError(self._queue_limit, self.retry_after_s())
        self._failed.pop(pending.id, None)
        self._pending[pending.id] = pending
        self._queue.put_nowait(pending)
        return pending

    def find(self, request: str) -> PendingEvaluation | KernelwrightError | Evaluation | None:
        """The evaluation of an id while it waits or runs, its record, or its failure; None where the id is unknown."""
        return self._pending.get(request) or self.store.get(request) or self._failed.get(request)

    def retry_after_s(self) -> int:
        """Seconds until a place in the queue may be free, estimated from the latest evaluations."""
        mean_s = sum(self._durations_s) / len(self._durations_s) if self._durations_s else FIRST_GUESS_S
        return max(1, min(RETRY_LIMIT_S, math.ceil(mean_s / self.lanes)))

    def metrics(self) -> Metrics:
        """Counts since the start, and what goes on now."""
        return Metrics(
            lanes=self.lanes,
            queued=self._queue.qsize(),
            queue_limit=self._queue_limit,
            running=sum(pending.state is State.RUNNING for pending in self._pending.values()),
            recorded=len(self.store),
            rejected=dict(self._rejected),
            judging_s=round(self._judging_s, 3),
            uptime_s=round(time.monotonic() - self._started, 3),
            **{name: self._counts[name] for name in _COUNTED},
        )

    def drain(self) -> None:
        """Take nothing more in, drop what has not begun, and give what has begun its time. Call in the event loop."""
        if self._drainer is None:
            self.draining = True
            while not self._queue.empty():
                pending = self._queue.get_nowait()
                self._end(pending, _shutting_down(pending.work))
            self._drainer = asyncio.create_task(self._drain())

    async def stop(self) -> None:
        """Drain, then end the judges."""
        self.drain()
        assert self._drainer is not None
        await self._drainer
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._executor.close)
        self._begun.put(False)
        await asyncio.to_thread(self._taker.join)
        self.store.close()

    def hurry(self) -> None:
        """Let draining end now: what still runs is cut short, and its callers are told to ask again."""
        self._hurry.set()

    async def _drain(self) -> None:
        ended = asyncio.create_task(_all_end(list(self._pending.values())))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([ended, hurry], timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not ended.done():
            await asyncio.to_thread(self._executor.close, at_once=True)
            await ended

    def _pending_of(self, request: EvaluationRequest) -> PendingEvaluation:
        if isinstance(request.task, str):
            # By its id only: a path would let a caller make the judge read and run a file of this machine.
            task = builtin_task(request.task)
        elif self._builtin_only:
            raise SourcesRefusedError(
                f"Wanted the id of a built-in task; found the text of {request.task.id}, which this service does not run."
            )
        else:
            task = Task(id=request.task.id, source=request.task.source, origin="service")
            check_task_source(task.source, task.id)
        candidate = Candidate(source=request.candidate, policy=request.policy, techniques=request.techniques)
        settings = resolve(self.settings, request.settings)
        values = settings.model_dump(mode="json")
        values["forbid"] = sorted(values["forbid"])
        key = {"task": task.sha256, "candidate": candidate.sha256, "settings": values, "repeat": request.repeat}
        return PendingEvaluation(sha256_of(key), Evaluate(task, candidate, settings), request.repeat)

    async def _serve(self) -> None:
        """One lane: hand the executor one request after another."""
        while True:
            pending = await self._queue.get()
            pending.state = State.RUNNING
            began = time.monotonic()
            future = self._running[pending.work] = self._loop.create_future()
            self._executor.submit(pending.work)
            self._begun.put(True)
            outcome = await future
            if isinstance(outcome, Evaluation):
                outcome = await asyncio.to_thread(self._keep, pending, outcome)
            duration_s = time.monotonic() - began
            self._durations_s.append(duration_s)
            self._judging_s += duration_s
            self._end(pending, outcome)

    def _take_results(self) -> None:
        """In a thread: take each result of the executor to the lane that waits for it."""
        while self._begun.get():
            result = self._executor.next_result()
            if result is not None and result.is_last and isinstance(result.work, Evaluate):
                self._loop.call_soon_threadsafe(self._hand_over, result.work, result.outcome)

    def _hand_over(self, work: Evaluate, outcome: object) -> None:
        assert isinstance(outcome, Evaluation | KernelwrightError)
        self._running.pop(work).set_result(outcome)

    def _keep(self, pending: PendingEvaluation, outcome: Evaluation) -> Outcome:
        """In a thread: put the record on disk before anybody hears of it."""
        try:
            # Another measurement of a candidate that is on record is what `confirms` means.
            return self.store.append(pending.id, outcome.model_copy(update={"confirms": pending.repeat > 0}))
        except KernelwrightError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one request's fault must not end its lane; it is told and logged
            _log.exception("fault while keeping %s", pending.id)
            return InfrastructureError(f"Wanted an evaluation of {pending.work.task.id}; fault of the service: {error!r}.")

    def _end(self, pending: PendingEvaluation, outcome: Outcome) -> None:
        del self._pending[pending.id]
        if isinstance(outcome, Evaluation):
            if outcome.accepted:
                self._counts["accepted"] += 1
            else:
                self._rejected[str(outcome.reason)] += 1
        else:
            self._counts[_kind(outcome)] += 1
            self._failed[pending.id] = outcome
            if len(self._failed) > FAILURES_KEPT:
                self._failed.popitem(last=False)
        pending.finish(outcome)
        _log.info("%s %s: %s", pending.id[:12], pending.work.task.id, _in_words(outcome))


async def _all_end(pending: Sequence[PendingEvaluation]) -> None:
    for one in pending:
        await one.done.wait()


def resolve(own: Settings, asked: SettingsRequest) -> Settings:
    """The service's settings with what a request may change of them.

    Raises:
        UsageError: a limit is higher than the service's own, the contract is weaker, or the numbers of processes contradict
            each other.
    """
    changes = {name: value for name in _FREE if (value := getattr(asked, name)) is not None}
    for name in ("build_limit_s", "run_limit_s"):
        if changes.get(name, 0) > (limit := getattr(own, name)):
            raise UsageError(
                f"Wanted a `{name}` of at most {limit:g}, this service's own; found {changes[name]:g}. Ask for less."
            )
    low, high = (changes.get(name, getattr(own, name)) for name in ("processes_min", "processes_max"))
    if low > high:
        raise UsageError(f"Wanted `processes_min` at most `processes_max`; found {low} and {high}. Name both.")
    forbid = own.forbid | asked.forbid
    if asked.contract is not None and asked.contract is not own.contract:
        if asked.contract is Contract.KERNELBENCH:
            raise UsageError(
                "Wanted the contract drop-in, this service's own; found kernelbench. `contracts` of a record answers both."
            )
        changes["contract"], forbid = asked.contract, forbid | DROP_IN_LABELS
    strict = own.strict_fp32 or asked.strict_fp32
    changes |= {"strict_fp32": strict, "tf32_products": own.tf32_products and not strict, "forbid": forbid}
    return own.model_copy(update=changes)


def _kind(error: KernelwrightError) -> str:
    if isinstance(error, ShuttingDownError):
        return "dropped"
    return "task_errors" if isinstance(error, TaskError) else "infrastructure_errors"


def _in_words(outcome: Outcome) -> str:
    if not isinstance(outcome, Evaluation):
        return f"{type(outcome).__name__}: {outcome}"
    if outcome.reason is not None:
        return f"rejected, {outcome.reason}"
    return "accepted" if outcome.speedup is None else f"accepted, {outcome.speedup:.4g}x"


def _shutting_down(work: Evaluate) -> ShuttingDownError:
    return ShuttingDownError(
        f"Wanted an evaluation of {work.task.id}; the service is shutting down before it has begun. Ask again later."
    )
