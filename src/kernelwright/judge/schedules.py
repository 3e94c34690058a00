"""Judges schedules of machine code: runs them in a process of their own, compares their outputs, times them.

A kernel that accesses wrong memory poisons the CUDA context for good, and one that never ends can only be stopped by ending
its process. The child holds the context and the parent only talks to it, so that a bad schedule costs a restart. The child
checks the original first: if that does not run, the machine is at fault and not the schedule.

A search ends with a maximum over noise, so nothing counts before `confirm` has timed it again in fresh processes against an
A/A control. Interval, noise floor and the rule of an improvement are those of modules.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import multiprocessing.connection
import os
import statistics
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import Any

from kernelwright.errors import CudaError, DeviceError, InternalError
from kernelwright.gpu.driver import GpuIdentity
from kernelwright.gpu.launch_spec import LaunchSpec, Target
from kernelwright.gpu.launcher import TURNS_VARIABLE, Launcher, LauncherFactory, cuda_launcher, difference, turn_on_gpu
from kernelwright.judge.settings import Settings
from kernelwright.records.improvement import clears_noise_floor

START_TIMEOUT_S = 120.0
_TURN_TIMEOUT_S = 600.0
_SETTLING_SEED = 1
_OUTPUTS_KEPT = 2
_LEAST_SAMPLE_US = 40.0
"""A sample of a short kernel has so many launches that it lasts this long: events tick too coarsely for less; our choice."""
_ORDERS = ("osso", "soos", "soos", "osso")
"""In which order the copies of original and schedule are loaded. After four rounds each has been where the other was, both
if the driver puts code into the same places again and again and if it takes turns between two sets of places."""
_STOP_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 60.0


class ScheduleFailure(StrEnum):
    """The end of a process by the schedule it ran."""

    FAULT = "fault"
    """The driver reported an error, such as an illegal address or instruction."""
    HANG = "hang"
    """The schedule did not end within the limit."""
    CRASH = "crash"
    """The process ended without an answer."""


class ScheduleFailedError(InternalError):
    """A schedule ended the process it ran in; the process has been replaced."""

    def __init__(self, failure: ScheduleFailure, detail: str) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure = failure
        self.detail = detail
        """The driver's name for the error, or what was waited for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of launches, blocks and rounds by which a schedule is timed against the original; our choice.

    A block is original, schedule, schedule, original: its ratio is free of linear drift. The two originals of a block are
    two copies of its code, and so are the two schedules, because the time of a short kernel depends on where its code lies.
    """

    launches: int = 2
    """Launches of one sample, more where a kernel is short."""
    coarse: int = 3
    """Blocks for a first look; a schedule that is clearly slower gets no more."""
    fine: int = 12
    """Blocks of a schedule that is not."""
    margin: float = 0.02
    """Distance of the first look's median ratio below `wanted` at which it is given up."""
    wanted: float = 1.0
    """Speedup to beat."""
    rounds: int = 1
    """Repetitions of all of that, each with copies that are loaded anew, in another order."""

    @classmethod
    def steady(cls, blocks: int, launches: int = 4) -> Plan:
        """The plan where a decision depends on the times: so many blocks in all, all places exchanged."""
        each = math.ceil(blocks / len(_ORDERS))
        return cls(launches, each, each, rounds=len(_ORDERS))


@dataclass(frozen=True, slots=True)
class ScheduleSamples:
    """Ratios original / schedule, one a block, each the mean over rounds, and the original's times."""

    ratios: tuple[float, ...]
    original_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """A started process's GPU and the original's time on it."""

    gpu: GpuIdentity
    original_us: float


_Request = tuple[bytes, Plan | tuple[int, ...]]
"""A cubin, and how it is to be timed or the seeds on which its outputs are to be compared."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """It is this process's turn on the GPU: the time that a request may take begins."""


@dataclass(frozen=True, slots=True)
class _Faulted:
    name: str
    detail: str = ""


@dataclass(slots=True)
class ContainedLauncher:
    """The parent's side."""

    spec: LaunchSpec
    original: bytes
    """Cubin that schedules are compared with."""
    factory: LauncherFactory = cuda_launcher
    limit_s: float = 20.0
    """Longest time of one request, seconds; a schedule that takes longer hangs."""
    restarts: int = field(default=0, init=False)
    process: Any = field(default=None, init=False)
    """The child; None before its start and after its end."""
    _connection: Any = field(default=None, init=False)
    _ready: Ready | None = field(default=None, init=False)

    def __enter__(self) -> ContainedLauncher:
        self.ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ready(self) -> Ready:
        """Start the process if it is not running.

        Raises:
            DeviceError: there is no GPU, or the original does not run on it or is not what the spec says.
        """
        if self._ready is None:
            self._ready = self._start()
        return self._ready

    def time(self, cubin: bytes, plan: Plan) -> ScheduleSamples:
        """Time a schedule interleaved with the original.

        Raises:
            ScheduleFailedError: it faulted, hung or ended the process.
            DeviceError: the machine is at fault.
        """
        found: ScheduleSamples = self._ask((cubin, plan), ScheduleSamples)
        return found

    def compare(self, cubin: bytes, seeds: Sequence[int]) -> str | None:
        """Return how a schedule's outputs differ from the original's on inputs of these seeds, or None; raises as `time`."""
        found: str | None = self._ask((cubin, tuple(seeds)), str | None)
        return found

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
            self.process.join(_STOP_TIMEOUT_S)
        self._stop()

    def _start(self) -> Ready:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, self.factory, self.spec, self.original), daemon=True, name="kernelwright-schedules"
        )
        self.process.start()
        theirs.close()
        try:
            answer = self._answer(START_TIMEOUT_S)
        except ScheduleFailedError as failed:
            self._stop()
            raise DeviceError(f"wanted the original of {self.spec.name} to run, found {failed}; check the GPU") from failed
        if not isinstance(answer, Ready):
            self._stop()
            found = answer.detail or answer.name if isinstance(answer, _Faulted) else repr(answer)
            raise DeviceError(f"wanted the original of {self.spec.name} to run, found: {found}; check its launch spec")
        return answer

    def _ask(self, request: _Request, kind: Any) -> Any:
        """The child's answer, which must be of this kind."""
        self.ready()
        try:
            waits = isinstance(request[1], Plan) and TURNS_VARIABLE in os.environ
            answer = self._answer(_TURN_TIMEOUT_S if waits else self.limit_s, request)
            if isinstance(answer, _Begun):
                answer = self._answer(self.limit_s)
            if isinstance(answer, _Faulted):
                raise ScheduleFailedError(ScheduleFailure.FAULT, answer.name)
        except ScheduleFailedError:
            self._stop()  # the next request starts another process, which runs the original first
            self.restarts += 1
            raise
        if not isinstance(answer, kind):
            wanted = getattr(kind, "__name__", kind)
            raise DeviceError(f"wanted {wanted} from the process that runs schedules, found {answer!r}; report this")
        return answer

    def _answer(self, limit_s: float, request: _Request | None = None) -> Any:
        """The next answer, after sending this request; raises DeviceError where the child tells of one."""
        try:
            if request is not None:
                self._connection.send(request)
            if not self._connection.poll(limit_s):
                raise ScheduleFailedError(ScheduleFailure.HANG, f"no answer within {limit_s:g} s")
            answer = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self.process.join(_STOP_TIMEOUT_S)
            raise ScheduleFailedError(ScheduleFailure.CRASH, f"exit status {self.process.exitcode}") from error
        if isinstance(answer, DeviceError):
            self._stop()
            raise answer
        return answer

    def _stop(self) -> None:
        if self.process is not None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join(_KILL_TIMEOUT_S)
            self._connection.close()
            if self.process.is_alive():
                raise DeviceError(
                    f"wanted process {self.process.pid} to end after its schedule hung, found it alive "
                    f"{_KILL_TIMEOUT_S:.0f} s after it was killed; the GPU has to be reset"
                )
        self.process = self._connection = self._ready = None


def serve(
    connection: multiprocessing.connection.Connection, factory: LauncherFactory, spec: LaunchSpec, original: bytes
) -> None:
    """Answer requests until the parent goes away; runs in the child."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        launcher = factory(spec)
        handle = launcher.load(original)
        first, again = (launcher.outputs(handle, _SETTLING_SEED) for _ in range(2))
        if (changed := difference(spec, first, again)) is not None:
            connection.send(_Faulted("not-repeatable", f"two launches of the original differ: {changed}"))
            return
        if trivial := [
            tensor.name for tensor, data in zip(spec.outputs, first, strict=True) if data == data[:1] * len(data)
        ]:
            connection.send(_Faulted("trivial", f"the original leaves every byte of {trivial[0]} the same"))
            return
        with turn_on_gpu():
            original_us = statistics.median(launcher.sample_us(handle, 4) for _ in range(5))
        least_launches = math.ceil(_LEAST_SAMPLE_US / original_us)
        connection.send(Ready(launcher.identity(), original_us))
    except CudaError as error:
        connection.send(_Faulted(error.name, str(error)))
        return
    except DeviceError as error:
        connection.send(error)
        return
    expected: dict[int, list[bytes]] = {}
    while True:
        try:
            cubin, how = connection.recv()
        except EOFError:
            return
        try:
            if isinstance(how, Plan):
                plan = replace(how, launches=max(how.launches, least_launches))
                answer: ScheduleSamples | str | None = _timed(
                    launcher, original, cubin, plan, functools.partial(connection.send, _Begun())
                )
            else:
                answer = _compared(cubin, how, launcher, handle, spec, expected)
            connection.send(answer)
        except CudaError as error:
            connection.send(_Faulted(error.name, str(error)))
            return
        # Whatever else goes wrong in the child must reach the parent as text, or it would look like a crash.
        except Exception:  # noqa: BLE001
            connection.send(DeviceError(f"wanted schedules to run, found a defect: {traceback.format_exc()}"))
            return


def _end_with_the_parent() -> None:
    """End this process when its parent has ended, even while a kernel that never ends is waited for."""
    if (parent := multiprocessing.parent_process()) is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _timed(launcher: Launcher, original: bytes, cubin: bytes, plan: Plan, begun: Callable[[], None]) -> ScheduleSamples:
    """Time a schedule against the original, each with two copies of its code in places that are exchanged."""
    rounds: list[ScheduleSamples] = []
    # The first copies are loaded before it is this process's turn, and the last ones unloaded after it.
    copies = _load(launcher, original, cubin, _ORDERS[0])
    with turn_on_gpu():
        begun()
        for number in range(plan.rounds):
            if number:
                _unload(launcher, *copies)
                copies = _load(launcher, original, cubin, _ORDERS[number % len(_ORDERS)])
            rounds.append(time_blocks(launcher, *copies, plan))
    _unload(launcher, *copies)
    # One mean over all places, since a median over blocks would take the side of some of them.
    ratios = tuple(statistics.geometric_mean(block) for block in zip(*(samples.ratios for samples in rounds), strict=False))
    return ScheduleSamples(ratios, tuple(time_us for samples in rounds for time_us in samples.original_us))


def _load(launcher: Launcher, original: bytes, schedule: bytes, order: str) -> tuple[list[Any], list[Any]]:
    """Two loaded copies of the original and two of a schedule, in one of `_ORDERS`."""
    loaded = [(letter, launcher.load(original if letter == "o" else schedule)) for letter in order]
    originals, schedules = ([handle for letter, handle in loaded if letter == kind] for kind in "os")
    return originals, schedules


def _unload(launcher: Launcher, originals: Sequence[Any], schedules: Sequence[Any]) -> None:
    for handle in (*originals, *schedules):
        launcher.unload(handle)


def _compared(
    cubin: bytes, seeds: Sequence[int], launcher: Launcher, original: Any, spec: LaunchSpec, expected: dict[int, list[bytes]]
) -> str | None:
    handle = launcher.load(cubin)
    found = None
    for seed in seeds:
        if seed not in expected:
            # Only the latest are kept: outputs may be large.
            while len(expected) >= _OUTPUTS_KEPT:
                expected.pop(next(iter(expected)))
            expected[seed] = launcher.outputs(original, seed)
        if (found := difference(spec, expected[seed], launcher.outputs(handle, seed))) is not None:
            break
    launcher.unload(handle)
    return found


def time_blocks(launcher: Launcher, originals: Sequence[Any], schedules: Sequence[Any], plan: Plan) -> ScheduleSamples:
    """Time blocks of original, schedule, schedule, original, each from its own copy, as many as a round has."""
    (first, last), (second, third) = originals, schedules
    ratios: list[float] = []
    times: list[float] = []
    wanted = plan.coarse
    for handle in (second, third, first, last):
        # Not timed: the driver may load a kernel at its first launch only.
        launcher.sample_us(handle, 1)
    while len(ratios) < wanted:
        before = launcher.sample_us(first, plan.launches)
        middle = launcher.sample_us(second, plan.launches) + launcher.sample_us(third, plan.launches)
        after = launcher.sample_us(last, plan.launches)
        ratios.append((before + after) / middle)
        times += [before, after]
        if len(ratios) == plan.coarse and statistics.median(ratios) >= plan.wanted - plan.margin:
            wanted = max(wanted, plan.fine)
    return ScheduleSamples(tuple(ratios), tuple(times))


# --- measured again in fresh processes: the verdict that decides ---------------------------------------------------

PROCESSES: int = Settings().processes_max
"""Fresh processes, as many as a module may get."""
BLOCKS = 40
"""Blocks of original, schedule, schedule, original in each process, over all places of the code; our choice."""
LAUNCHES = 4
"""Launches of one sample; our choice."""
CHECK_SEEDS = 4
"""Fresh inputs on which outputs are compared in each process; our choice."""
CONFIRMING = Plan.steady(BLOCKS, LAUNCHES)
LogRatios = Sequence[Sequence[float]]
"""log(original / schedule) of each block, by process."""
_FIRST_CHECK_SEED = 2000
_SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Re-measurement of one schedule: its speedup with the 95 % interval, None of which where it failed."""

    speedup: float | None
    low: float | None
    high: float | None
    noise_floor: float | None
    """Distance of an A/A ratio from 1."""
    baseline: float | None
    """Cost of the original, microseconds on a GPU."""
    wrong: str | None
    """Difference of its outputs, or its failure, in words; None when they are right."""
    processes: int
    """Fresh processes it was measured in."""
    failure: ScheduleFailure | None = None
    gpu: GpuIdentity | None = None
    """GPU it was measured on; None for a model's costs."""
    log_ratios: LogRatios = ()
    null_log_ratios: LogRatios = ()
    """The same of the original against itself."""

    @classmethod
    def of_ratios(
        cls, log_ratios: LogRatios, null_log_ratios: LogRatios, baseline: float, gpu: GpuIdentity | None = None
    ) -> Confirmation:
        """Score a schedule whose outputs are right."""
        from kernelwright.records.scoring import score_ratios  # numpy is slow to import where no schedule is confirmed

        interval, floor = score_ratios(log_ratios, null_log_ratios)
        found = interval.estimate, interval.low, interval.high, floor
        ratios, nulls = (tuple(map(tuple, one)) for one in (log_ratios, null_log_ratios))
        return cls(*found, baseline, None, len(nulls), gpu=gpu, log_ratios=ratios, null_log_ratios=nulls)

    @classmethod
    def of_failure(cls, wrong: str, processes: int, failure: ScheduleFailure | None = None) -> Confirmation:
        """A schedule that does not run or gives wrong outputs has no speedup."""
        return cls(None, None, None, None, None, wrong, processes, failure)

    @property
    def is_improvement(self) -> bool:
        """True if it is right, and the interval's lower end is above 1 + the noise floor."""
        return self.wrong is None and clears_noise_floor(self.low, self.noise_floor)


def confirm(
    target: Target,
    cubins: Sequence[bytes],
    *,
    processes: int = PROCESSES,
    plan: Plan = CONFIRMING,
    check_seeds: int = CHECK_SEEDS,
    factory: LauncherFactory = cuda_launcher,
    limit_s: float = 60.0,
    on_process: Callable[[int, ScheduleSamples], Any] | None = None,
) -> list[Confirmation]:
    """Time schedules against the original in fresh processes, with an A/A control in each, and compare their outputs.

    All of them share the processes, since starting one takes longer than timing in it. A schedule that fails in one is
    not tried in the next.

    Args:
        target: the original and its launch.
        cubins: the schedules.
        processes: fresh processes; each is one sampling unit of the interval.
        plan: times of each schedule in a process.
        check_seeds: input draws of each process on which outputs are compared.
        factory: makes the launcher in the child.
        limit_s: longest time of one request to the child, seconds.
        on_process: told the number and the samples of each schedule in every process.

    Raises:
        DeviceError: the machine is at fault.
    """
    trials = [ScheduleTrial(plan) for _ in cubins]
    nulls: list[list[float]] = []
    originals_us: list[float] = []
    gpu: GpuIdentity | None = None
    for number in range(processes):
        first = _FIRST_CHECK_SEED + _SEED_STEP * number
        with ContainedLauncher(target.spec, target.cubin, factory, limit_s) as child:
            gpu = child.ready().gpu
            null = child.time(target.cubin, plan)
            nulls.append([math.log(ratio) for ratio in null.ratios])
            originals_us += null.original_us
            for cubin, trial in zip(cubins, trials, strict=True):
                samples = trial.run(child, cubin, range(first, first + check_seeds))
                if samples is not None and on_process is not None:
                    on_process(number, samples)
    return [trial.confirmation(nulls, statistics.median(originals_us), gpu) for trial in trials]


@dataclass(slots=True)
class ScheduleTrial:
    """Measurements of one schedule so far, by process."""

    plan: Plan
    log_ratios: list[list[float]] = field(default_factory=list)
    wrong: str | None = None
    failure: ScheduleFailure | None = None

    def run(self, child: ContainedLauncher, cubin: bytes, seeds: Sequence[int]) -> ScheduleSamples | None:
        """Compare outputs on inputs of these seeds and time it, unless it has failed before."""
        if self.wrong is not None:
            return None
        try:
            self.wrong = child.compare(cubin, seeds) if seeds else None
            samples = child.time(cubin, self.plan)
        except ScheduleFailedError as failed:
            self.wrong, self.failure = str(failed), failed.failure
            return None
        self.log_ratios.append([math.log(ratio) for ratio in samples.ratios])
        return samples

    def confirmation(self, nulls: LogRatios, original_us: float, gpu: GpuIdentity | None = None) -> Confirmation:
        """The measurements of all processes together."""
        if self.wrong is not None:
            return Confirmation.of_failure(self.wrong, len(nulls), self.failure)
        return Confirmation.of_ratios(self.log_ratios, nulls, original_us, gpu)
