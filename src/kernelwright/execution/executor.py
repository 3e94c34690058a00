"""Runs work in processes of this machine: judges and screening, several at a time to a device.

Building, checking and compiling of some candidates overlap with the timing of another; a lock file per device lets only one
of them use the device at a time (`judge.isolation.gate`). The scheduler says what may begin where. A process that dies is
replaced and its work tried once more.

Screening of a task may run in a process of its own. Proposing is Python that holds its interpreter's lock: in processes of
their own many tasks are traced at a time. Candidates that the caller gives, and those of a policy that cannot be sent to
another process, are screened from this one.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

import torch

from kernelwright.cores import cores_of_each, timing_core
from kernelwright.errors import CrowdedError, DeviceError, InfrastructureError, KernelwrightError
from kernelwright.execution.fork_servers import ForkServers
from kernelwright.execution.processes import ChildProcess, judge_main, screen_main
from kernelwright.execution.scheduler import QUIET_S, Exclusivity, Lease, LeaseRequest, Scheduler, Slot
from kernelwright.execution.screener import Screener
from kernelwright.execution.work import Baselines, Evaluate, Outcome, Progress, Result, Screen, Work
from kernelwright.judge.isolation.gate import DeviceMemory
from kernelwright.judge.settings import Settings
from kernelwright.records import Task
from kernelwright.records.screened import Compiles, Screened

TRIES = 2
"""Processes that work may be given to, where the first one dies."""

JUDGES_PER_GPU = 6
"""Judges on one GPU. With six throughput is 84 % of timing alone, four 60 % (results/2026-11-22-judge-throughput-3-h200).
Each takes about 3 GiB of the GPU for contexts alone. An evaluation makes up to 26, for which the driver has one lock: with
eight judges on an H100 starts took 36 of its 120 s, with four 13 of 63 s (results/kernelbench-h200)."""

ROUNDS_PER_GPU = 16
"""Most tasks that are screened at once on a GPU in processes of their own, one for each core: one is timed while the others
trace, compile and start. Each holds half a GiB of the GPU for its context alone. Our choice."""

GIVEN_ROUNDS_PER_GPU = 8
"""Tasks whose given candidates are screened at once on a GPU: one is timed while others compile and load. Our choice."""

RESTING_BYTES = 6 << 30
"""GPU memory that is left to processes that wait for their next work. Our choice."""

GIVEN_SLOTS = 2
"""Processes that look at given candidates: one for those that compile nothing, and one that compiles."""

APART_SLOTS = 1
"""Processes that look at candidates of a round that has a process of its own: there are as many rounds as cores already.
With eight an H200 made 9 estimates in two minutes, and 254 with one (results/2026-11-28-one-engine-h200): contexts are made
one after another."""

_WAKE_S = 1.0
"""Time after which a thread that waits for results looks again, seconds."""
_STOPPED_S = 5.0
"""Time for which work that was stopped is waited for, seconds: a task that hangs while it is traced never ends."""


def judges_per_device(device: str) -> int:
    """Judges at once on a device. On a processor more than one only adds waiting."""
    return JUDGES_PER_GPU if device.startswith("cuda") else 1


def rounds_per_device(devices: Sequence[str]) -> int:
    """Tasks that are screened at once on each of some devices, in processes of their own."""
    on_gpu = max(2, min(ROUNDS_PER_GPU, len(os.sched_getaffinity(0)) // len(devices)))
    return on_gpu if devices[0].startswith("cuda") else 1


class Interruptible(Protocol):
    """Something at work that another thread may end."""

    def stop(self) -> None:
        """End it now."""


@dataclass(slots=True, eq=False)
class _Submitted:
    """Work between `submit` and its last result."""

    work: Work
    thread: threading.Thread | None = None
    """Thread that does it, while it has a lease."""
    at: Interruptible | None = None
    """Process that does it, or processes that screen it."""
    made: list[Screened] = field(default_factory=list)
    """Estimates of a round so far."""
    is_cancelled: bool = False


class _DiedError(InfrastructureError):
    """The process of a round died, perhaps for want of memory."""


class LocalExecutor:
    """Runs work on devices of this machine.

    Args:
        devices: Resolved names: `cpu`, `cuda:0`, `cuda:1` ...
        settings: Settings of work that brings none.
        judges: Judges on each device; by default `judges_per_device`.
        baselines: Further judges on each device, for `Baselines` alone; with 0 all judges do them.
        rounds: Tasks that are screened at once on each device; with 0 none are.
        apart: True screens what a policy proposes in a process of its own for each round.
        ready: Judges that start now rather than with their first work.
        servers: Fork servers for screening from this process, which stay open; by default it starts its own.
        start: Starts a process, given what runs there and its arguments.
        quiet_s: As of `Scheduler`.
    """

    def __init__(
        self,
        devices: Sequence[str],
        settings: Settings,
        *,
        judges: int | None = None,
        baselines: int = 0,
        rounds: int = 0,
        apart: bool = False,
        ready: int = 0,
        servers: ForkServers | None = None,
        start: Callable[..., ChildProcess] = ChildProcess,
        quiet_s: float = QUIET_S,
    ) -> None:
        if not devices:
            raise DeviceError("Wanted at least one device to judge on; found none.")
        self.devices = tuple(devices)
        self._settings, self._apart, self._given_servers = settings, apart, servers
        self._cores = cores_of_each(devices)
        """Cores of each device's processes, so that compiling for one device does not disturb timing on another."""
        self._start_process = start
        self._groups: dict[type[Work], str] = {Evaluate: "judges", Baselines: "baselines" if baselines else "judges"}
        if rounds:
            self._groups[Screen] = "rounds"
        counts = {"judges": judges or judges_per_device(devices[0]), "baselines": baselines, "rounds": rounds}
        self._scheduler = Scheduler({name: memory_of(name) for name in devices}, counts, quiet_s)
        self._changed = threading.Condition()
        """Guards all that follows; told when a result has come."""
        self._results: deque[Result] = deque()
        self._entries: dict[LeaseRequest, _Submitted] = {}
        self._processes: dict[Slot, ChildProcess] = {}
        self._servers: dict[str, ForkServers] = {}
        self._prepared: dict[str, Screener] = {}
        """Processes of tasks whose candidates are yet to come, by the task's hash."""
        self._levels: dict[str, Exclusivity] = {}
        """Levels of tasks that did not fit beside many others, by the task's hash."""
        self._closing = self._killing = False
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="kernelwright-start")
        """The thread that starts all processes. Linux kills them when it ends (`sandbox.die_with_parent`), so that it must
        outlive the work that they are started for."""
        for slot in [slot for slot in self._scheduler.slots if slot.group == "judges"][:ready]:
            self._start(slot, ready=True)

    # --- the interface --------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> frozenset[type[Work]]:
        """Implements `Executor.kinds`."""
        return frozenset(self._groups)

    @property
    def wants_device(self) -> bool:
        """Implements `Executor.wants_device`."""
        with self._changed:
            return self._scheduler.wants_device("rounds")

    def free(self, kind: type[Work]) -> int:
        """Implements `Executor.free`."""
        with self._changed:
            return self._scheduler.free(self._groups[kind])

    def submit(self, work: Work) -> None:
        """Implements `Executor.submit`."""
        request = LeaseRequest(self._groups[type(work)], work.memory_bytes)
        if isinstance(work, Evaluate):
            request.elsewhere_than = work.elsewhere_than
        if isinstance(work, Screen):
            request.others, request.few_first = self._levels.get(work.task.sha256, Exclusivity.MANY), True
        with self._changed:
            if self._closing:
                self._tell(Result(work, _dropped(work)))
                return
            self._entries[request] = _Submitted(work)
            self._scheduler.request(request)
            self._begin()

    def next_result(self, timeout_s: float | None = None) -> Result | None:
        """Implements `Executor.next_result`."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._results:
                self._begin()
                now_s = time.monotonic()
                if not self._entries or (end_s is not None and now_s >= end_s):
                    return None
                pauses_s = (_WAKE_S, self._scheduler.due_s(now_s), None if end_s is None else end_s - now_s)
                self._changed.wait(min(pause_s for pause_s in pauses_s if pause_s is not None))
            return self._results.popleft()

    def cancel(self, work: Work) -> None:
        """Implements `Executor.cancel`."""
        with self._changed:
            for request, entry in [*self._entries.items()]:
                if entry.work is not work:
                    continue
                entry.is_cancelled = True
                if entry.thread is None:
                    self._scheduler.withdraw(request)
                    self._end(request, None)
                else:
                    self._stop(entry)

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Start what screening candidates of these tasks will need: it loads beside other work, such as sampling."""
        self._drop_prepared()
        places = [slot.device for slot in self._scheduler.slots if slot.group == "rounds"]
        for task, device in zip(tasks, places, strict=False):
            work = Screen(task, slots=GIVEN_SLOTS)
            self._prepared[task.sha256] = self._screener(work, device, is_alone=False)

    def close(self, *, at_once: bool = False) -> None:
        """Implements `Executor.close`."""
        with self._changed:
            self._closing, self._killing = True, self._killing or at_once
            for request, entry in [*self._entries.items()]:
                if entry.thread is None:
                    self._scheduler.withdraw(request)
                    self._end(request, _dropped(entry.work))  # somebody waits for it
                elif at_once:
                    self._stop(entry)
            threads = [entry.thread for entry in self._entries.values() if entry.thread is not None]
        for thread in threads:
            thread.join(_STOPPED_S if at_once else None)
        while self._processes:
            process = self._processes.popitem()[1]
            if at_once:
                process.stop()
            process.end()
        self._starter.shutdown()
        self._drop_prepared()
        while self._servers:
            self._servers.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=kind is not None)

    # --- from a lease to a result ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin all work that may have a lease now; called with the lock."""
        if self._closing:
            return
        for lease in self._scheduler.grants(time.monotonic()):
            entry = self._entries[lease.request]
            entry.thread = threading.Thread(target=self._serve, args=(entry, lease), daemon=True)
            entry.thread.start()

    def _stay_on_cores(self, device: str) -> None:
        """Keep this thread, and what it starts, on the cores of a device."""
        if device in self._cores:
            os.sched_setaffinity(0, self._cores[device])

    def _serve(self, entry: _Submitted, lease: Lease) -> None:
        """Do work under a lease, and give the lease back. Runs in a thread of its own."""
        self._stay_on_cores(lease.device)
        if lease.is_exclusive:
            self._release_idle(lease.device)
        outcome: Outcome
        try:
            outcome = None
            if isinstance(entry.work, Screen):
                self._screen(entry, entry.work, lease)
            else:
                outcome = self._judge(entry, entry.work, lease)
        except KernelwrightError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - whoever waits for this work is told
            outcome = InfrastructureError(f"Wanted {_goal(entry.work)}; found a fault of this program: {error!r}.")
        with self._changed:
            entry.thread = entry.at = None
            if not self._tries_again(entry, lease, outcome):
                self._end(lease.request, None if entry.is_cancelled else outcome)
            self._begin()

    def _tries_again(self, entry: _Submitted, lease: Lease, outcome: Outcome) -> bool:
        """Give a lease back, and have work that failed because others had the memory wait for another one."""
        is_round = isinstance(entry.work, Screen)
        is_crowded = isinstance(outcome, (DeviceError, _DiedError) if is_round else CrowdedError)
        if not is_crowded or entry.is_cancelled or self._closing:
            self._scheduler.release(lease)
            return False
        is_waiting = self._scheduler.retry(lease, str(outcome))
        if is_round and is_waiting:
            self._levels[entry.work.task.sha256] = lease.request.others
        return is_waiting

    def _end(self, request: LeaseRequest, outcome: Outcome) -> None:
        """Put the last result of work where it is asked for; called with the lock."""
        self._tell(Result(self._entries.pop(request).work, outcome))

    def _tell(self, result: Result) -> None:
        with self._changed:
            self._results.append(result)
            self._changed.notify_all()

    def _stop(self, entry: _Submitted) -> None:
        """End running work; called with the lock."""
        if entry.at is not None:
            entry.at.stop()

    def _start(self, slot: Slot, *, ready: bool = False) -> ChildProcess:
        """The process of a slot, started where it has none."""
        if (process := self._processes.get(slot)) is None:
            process = self._starter.submit(self._started, slot, ready).result()
            with self._changed:
                self._processes[slot] = process
                self._scheduler.warm(slot)
        return process

    def _started(self, slot: Slot, ready: bool) -> ChildProcess:
        """A new process for a slot, on the cores of its device. Runs in the thread that starts processes."""
        self._stay_on_cores(slot.device)
        settings = self._settings.model_dump_json()
        if slot.group == "rounds":
            return self._start_process(screen_main, slot.device, settings)
        return self._start_process(judge_main, slot.device, settings, ready)

    def _process_for(self, entry: _Submitted, slot: Slot) -> ChildProcess:
        """The process that does some work. One that died while it waited costs that work none of its tries."""
        if (process := self._processes.get(slot)) is not None and not process.is_alive:
            self._say(entry, f"a process on {slot.device} died while it waited (status {self._end_process(slot)})")
        return self._start(slot)

    def _say(self, entry: _Submitted, died: str) -> None:
        self._tell(Result(entry.work, Progress(f"{died}; another one takes its place", lasting=True), False))

    def _end_process(self, slot: Slot) -> int | None:
        """End what is left of a slot's process; returns its exit status."""
        with self._changed:
            process = self._processes.pop(slot)
            self._scheduler.warm(slot, is_warm=False)
        return process.end()

    def _take(self, entry: _Submitted, at: Interruptible) -> None:
        """Note what does some work, and end it where the work is to end."""
        with self._changed:
            entry.at = at
            if entry.is_cancelled or self._killing:
                self._stop(entry)

    def _release_idle(self, device: str) -> None:
        """Have all judges on a device give back what only waits: now, or after their work."""
        with self._changed:
            processes = [
                process for slot, process in self._processes.items() if slot.device == device and slot.group != "rounds"
            ]
        for process in processes:
            process.release_idle()

    # --- judging --------------------------------------------------------------------------------------------------

    def _judge(self, entry: _Submitted, work: Evaluate | Baselines, lease: Lease) -> Outcome:
        """Have a slot's process judge, and another where it dies."""
        status: int | None = None
        reason: Exception | None = None
        for tried in range(TRIES):
            if self._killing or entry.is_cancelled:
                break
            if tried:
                self._say(entry, f"the judge of {work.task.id} on {lease.device} died (status {status})")
            process = self._process_for(entry, lease.slot)
            self._take(entry, process)
            try:
                process.send((work, lease.is_exclusive))
                outcome = process.receive()
            except (EOFError, OSError) as error:
                status, reason = self._end_process(lease.slot), error
                continue
            if isinstance(outcome, KernelwrightError):
                return outcome
            if lease.is_exclusive:
                why = {"alone": lease.request.why_alone}
                outcome = tuple(evaluation.model_copy(update={"checks": evaluation.checks | why}) for evaluation in outcome)
            return outcome[0] if isinstance(work, Evaluate) else tuple(outcome)
        return InfrastructureError(
            f"Wanted an evaluation of {work.task.id} on {lease.device}; its judge died (status {status}, {reason!r}) "
            f"{TRIES} times. Is there memory left?"
        )

    # --- screening ------------------------------------------------------------------------------------------------

    def _screen(self, entry: _Submitted, work: Screen, lease: Lease) -> None:
        """Screen a round, in the slot's process or from this one."""
        made = {estimate.candidate_sha256 for estimate in entry.made}
        rest = replace(
            work,
            earlier=[*work.earlier, *entry.made],
            candidates=tuple(candidate for candidate in work.candidates if candidate.sha256 not in made),
        )
        policy = _packed(work) if self._apart else None
        if policy is None:
            self._screen_here(entry, rest, lease)
        else:
            self._screen_apart(entry, replace(rest, policy=None, history=[*work.history]), policy, lease)

    def _screen_here(self, entry: _Submitted, rest: Screen, lease: Lease) -> None:
        with DeviceMemory(torch.device(lease.device))(alone=lease.is_exclusive):
            screener = None if lease.is_exclusive else self._prepared.pop(rest.task.sha256, None)
            with screener or self._screener(rest, lease.device, is_alone=lease.is_exclusive) as screener:
                self._take(entry, screener)
                for estimate, left in screener.look(rest, lambda progress: self._tell(Result(entry.work, progress, False))):
                    self._note(entry, estimate, left)

    def _screen_apart(self, entry: _Submitted, rest: Screen, policy: bytes, lease: Lease) -> None:
        try:
            process = self._process_for(entry, lease.slot)
            self._take(entry, process)
            process.send((replace(rest, slots=rest.slots or APART_SLOTS), policy, lease.is_exclusive))
            while True:
                outcome, left = process.receive()
                if isinstance(outcome, Screened):
                    self._note(entry, outcome.model_copy(update={"device": lease.device}), left)
                elif isinstance(outcome, Progress):
                    self._tell(Result(entry.work, outcome, False))
                elif outcome is None:
                    return
                else:
                    raise outcome
        except (EOFError, OSError) as error:
            # A process that is killed for want of memory dies this way.
            self._end_process(lease.slot)
            raise _DiedError(f"Wanted to screen {rest.task.id}; its process died ({error!r}).") from error

    def _note(self, entry: _Submitted, estimate: Screened, left: Compiles | None) -> None:
        entry.made.append(estimate)
        self._tell(Result(entry.work, estimate, False, left))

    def _screener(self, work: Screen, device: str, *, is_alone: bool) -> Screener:
        with self._changed:
            servers = self._given_servers or self._servers.get(device)
            if servers is None:
                where = torch.device(device)
                servers = self._servers[device] = ForkServers(where.type, timing_core(where))
        slots = work.slots or (None if work.policy is not None else GIVEN_SLOTS)
        early = work.policy is not None
        settings = work.settings or self._settings
        return Screener(work.task, device, settings, servers, slots, is_alone=is_alone, early=early)

    def _drop_prepared(self) -> None:
        while self._prepared:
            self._prepared.popitem()[1].close()


def _packed(work: Screen) -> bytes | None:
    """The policy of a round for another process; None where there is none, or it cannot be sent."""
    try:
        return pickle.dumps(work.policy) if work.policy is not None else None
    except Exception:  # noqa: BLE001 - a policy is anything, and says so in any way
        return None


def _goal(work: Work) -> str:
    return f"to screen {work.task.id}" if isinstance(work, Screen) else f"an evaluation of {work.task.id}"


def _dropped(work: Work) -> InfrastructureError:
    return InfrastructureError(f"Wanted {_goal(work)}; the executor was closed before.")


@functools.cache
def memory_of(device: str) -> int:
    """Memory of a device that evaluations may take, bytes; that of a processor is not counted."""
    if not device.startswith("cuda"):
        return sys.maxsize
    return torch.cuda.get_device_properties(device).total_memory - RESTING_BYTES
