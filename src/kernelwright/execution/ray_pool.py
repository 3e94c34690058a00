"""Does many evaluations at once on many machines, in Ray actors that each hold a judge. An optional extra.

An actor has a whole GPU to itself or, on CPUs, one place of the
custom resource `kernelwright_judge`, so that Ray puts nothing else there while a candidate is timed. An actor that
dies, with its process or its machine, is replaced and its job tried once more; Ray's own restarts are off, since they
would hide that from the count. `ray.util.ActorPool` is not used: it neither replaces a dead actor nor waits for a place
without holding up a job, and one thread at a time may use it.

Candidates run behind the same walls as under `JudgePool`: the actor's process never runs them, it asks a fork server
that was started with an environment of its own. When Ray kills an actor, that server sees its channel close and ends
with all it started.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from kernelwright.errors import ConfigError, DeviceError, InfrastructureError, KernelwrightError
from kernelwright.execution.local import _TRIES, Job, Outcome, spread
from kernelwright.execution.ray_cluster import JUDGE_RESOURCE, connect, import_ray, room_in
from kernelwright.judge.judge import Judge
from kernelwright.judge.settings import Settings
from kernelwright.records import Candidate, Evaluation, Task

START_LIMIT_S = 600.0
"""Limit for Ray to find a place for an actor and start it, such as after a machine is lost. Our choice."""

_ANSWER_LIMIT_S = 20.0
"""Limit for an idle actor, which answers in milliseconds."""

_POLL_S = 1.0
"""Interval in which a job that waits for an actor checks whether to go on."""


class RayPool:
    """Judges in Ray actors. Several threads may use it at a time.

    Args:
        settings: Settings of jobs that bring none.
        device: `cuda` takes GPUs, `cpu` takes places of the resource `kernelwright_judge`; `auto` takes GPUs where the
            cluster has any.
        slots: Actors at once; all that the cluster has room for when None.
        address: Address of a running cluster, `auto` for the one of this machine; None uses the Ray that this process is
            connected to or, where there is none, starts one for as long as the pool lives.
        per_gpu: Judges that share a GPU. They time one after another, by the judge's own lock; more than one lets
            building and checking overlap with another's timing.
        cpus: CPU cores that Ray holds back for each actor, beside its place.
        start_limit_s: Limit for an actor to find a place and start, seconds.
        make_judge: Factory of an actor's judge; for tests.

    Raises:
        ConfigError: the extra `ray` is not installed, or an argument is out of range.
        DeviceError: the cluster cannot be reached or has no room for a judge.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        device: str = "cuda",
        slots: int | None = None,
        address: str | None = None,
        per_gpu: int = 1,
        cpus: float = 1.0,
        start_limit_s: float = START_LIMIT_S,
        make_judge: Callable[[str, Settings], Judge] = Judge,
    ) -> None:
        if device not in ("auto", "cpu", "cuda") or per_gpu < 1 or (slots is not None and slots < 1):
            raise ConfigError(
                f"Wanted a device auto, cpu or cuda, at least one judge for each GPU and at least one slot; found device "
                f"{device}, per_gpu {per_gpu}, slots {slots}. Ray chooses which GPU: name none."
            )
        self._ray = import_ray()
        self._start_limit_s = start_limit_s
        self._owns_ray = not self._ray.is_initialized()
        if self._owns_ray:
            connect(self._ray, address, slots)
        try:
            resources: dict[str, float] = self._ray.cluster_resources()
            if device == "auto":
                device = "cuda" if resources.get("GPU") else "cpu"
            self._slots = slots or room_in(resources, device, per_gpu)
        except DeviceError:
            self._leave_ray()
            raise
        self.device = device
        """`cpu` or `cuda`."""
        self.hardware = sorted(name.partition(":")[2] for name in resources if name.startswith("accelerator_type:"))
        """Kinds of accelerator in the cluster, as Ray names them."""
        place: dict[str, Any] = {"num_gpus": 1 / per_gpu} if device == "cuda" else {"resources": {JUDGE_RESOURCE: 1}}
        # One task at a time, and no restart that we do not see.
        self._actor_class = self._ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0, **place)(_JudgeActor)
        self._start_arguments = (device, settings.model_dump_json(), make_judge)
        self._threads = ThreadPoolExecutor(self._slots, thread_name_prefix="kernelwright-ray")
        self._lock = threading.Lock()
        """Held while the four below change."""
        self._actors: set[Any] = set()
        self._starting: dict[Any, Future[int]] = {}
        """Actors that have not answered yet, and their answers."""
        self._waiting = 0
        """Jobs that wait for an actor."""
        self._closing = False
        self._idle: queue.Queue[Any] = queue.Queue()
        """Actors that have nothing to do, and errors of those that could not be started."""

    @property
    def slots(self) -> int:
        """Evaluations that go on at once."""
        return self._slots

    def evaluate(self, jobs: Iterable[Job | None], stop: Callable[[], bool] | None = None) -> Iterator[tuple[Job, Outcome]]:
        """Implements `Evaluator.evaluate`; raises InfrastructureError when Ray has been shut down."""
        call = _Call()
        try:
            yield from spread(jobs, self._slots, lambda job: self._submit(job, call), stop)
        finally:
            # A caller that stops asking would leave actors at work that hold the places of the next ones.
            call.is_over = True
            for actor in list(call.at_work):
                self._discard(actor)

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End the actors, after their judges or at once; leave Ray if we started it."""
        self._closing = True
        if self._ray.is_initialized():  # else the actors have ended with it, and to speak to it would start another
            if not at_once:
                closing = [actor.close.remote() for actor in self._actors - self._starting.keys()]
                if closing:
                    self._ray.wait(closing, num_returns=len(closing), timeout=_ANSWER_LIMIT_S)
            answers = list(self._starting.values())
            for actor in list(self._actors):
                self._discard(actor)
            # Ray ends the whole process when a thread of it, or of ours, speaks to it once it has been shut down.
            wait(answers, timeout=_ANSWER_LIMIT_S)
            self._threads.shutdown(cancel_futures=True)
            self._leave_ray()
        else:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, job: Job, call: _Call) -> Future[Outcome]:
        if not self._ray.is_initialized():
            raise InfrastructureError("Wanted to judge on Ray; it has been shut down. Make another pool.")
        return self._threads.submit(self._judge, job, call)

    def _judge(self, job: Job, call: _Call) -> Outcome:
        """Have a job done, by another actor where the first one dies. Runs in a thread."""
        failed = ""
        changed = job.settings and job.settings.model_dump_json()
        rival = job.rival and job.rival.model_dump_json()
        for tries in range(1, _TRIES + 1):
            try:
                actor = self._actor(call)
            except _NoActorError as error:
                failed = f"Wanted a judge for {job.task.id}; {error}"
                if error.is_final:
                    break
                continue
            call.at_work.add(actor)
            if call.is_over:  # the caller went before it could see this actor at work
                self._idle.put(actor)
                break
            try:
                kind, value = self._ray.get(
                    actor.evaluate.remote(job.task.model_dump_json(), job.candidate.model_dump_json(), changed, rival)
                )
            except self._ray.exceptions.RayError as error:
                self._discard(actor)
                failed = (
                    f"Wanted an evaluation of {job.task.id}; its judge died ({_in_a_line(error)}) {tries} times. "
                    "Is there memory left? Ray's logs say more."
                )
            else:
                self._idle.put(actor)
                return Evaluation.model_validate_json(value) if kind == "evaluation" else value
            finally:
                call.at_work.discard(actor)
            if call.is_over or self._closing:
                break
        return InfrastructureError(failed)

    def _actor(self, call: _Call) -> Any:
        """An actor that answers: one that died while idle must not cost a job a try. Raises `_NoActorError`."""
        since_s = time.monotonic()
        with self._lock:
            self._waiting += 1
        try:
            while True:
                self._start()
                try:
                    actor = self._idle.get(timeout=_POLL_S)
                except queue.Empty:
                    self._give_up(call, since_s)
                    continue
                if isinstance(actor, _NoActorError):
                    raise actor
                try:
                    self._ray.get(actor.ready.remote(), timeout=_ANSWER_LIMIT_S)
                except self._ray.exceptions.RayError:
                    self._discard(actor)
                else:
                    return actor
        finally:
            with self._lock:
                self._waiting -= 1

    def _give_up(self, call: _Call, since_s: float) -> None:
        """Raise `_NoActorError` when waiting any longer is useless."""
        if self._closing or call.is_over:
            raise _NoActorError("the pool was closed.", is_final=True)
        with self._lock:
            working = len(self._actors) > len(self._starting)
        if not working and time.monotonic() - since_s >= self._start_limit_s:
            raise _NoActorError(
                f"Ray found no place for one within {self._start_limit_s:g} s. Is a machine gone, or do others hold its "
                "GPUs? `ray status` says.",
                is_final=True,
            )

    def _start(self) -> None:
        """Start an actor for each job that waits, as far as there are slots."""
        with self._lock:
            while len(self._starting) < self._waiting and len(self._actors) < self._slots and not self._closing:
                if not self._idle.empty():
                    return
                actor = self._actor_class.remote(*self._start_arguments)
                self._actors.add(actor)
                answer = self._starting[actor] = actor.ready.remote().future()
                answer.add_done_callback(partial(self._started, actor))

    def _started(self, actor: Any, answer: Future[int]) -> None:
        """Take an actor that has answered, or could not be started, into `_idle`. Runs in a thread of Ray."""
        with self._lock:
            if actor not in self._starting:
                return  # it was discarded meanwhile
            del self._starting[actor]
            if (error := answer.exception()) is not None:
                self._actors.discard(actor)  # it has ended; besides, Ray cannot be asked for anything in this thread
        if error is None:
            self._idle.put(actor)
        else:
            why = f"it could not be started ({_in_a_line(error)}). Is this package installed on every machine?"
            self._idle.put(_NoActorError(why))

    def _discard(self, actor: Any) -> None:
        with self._lock:
            if actor not in self._actors:
                return
            self._actors.discard(actor)
            self._starting.pop(actor, None)
        self._ray.kill(actor, no_restart=True)

    def _leave_ray(self) -> None:
        if self._owns_ray:
            self._ray.shutdown()
            self._owns_ray = False


class _NoActorError(Exception):
    """A job has no actor."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


@dataclass(eq=False, slots=True)
class _Call:
    """One use of `evaluate`."""

    at_work: set[Any] = field(default_factory=set)
    """Actors that have one of its jobs."""
    is_over: bool = False


class _JudgeActor:
    """The actor: a judge in a process of Ray's."""

    def __init__(self, device: str, settings_json: str, make_judge: Callable[[str, Settings], Judge]) -> None:
        self._device = device
        self._settings = Settings.model_validate_json(settings_json)
        self._make_judge = make_judge
        self._judge: Judge | None = None

    def ready(self) -> int:
        """Id of the process, which answers once it runs."""
        return os.getpid()

    def evaluate(
        self, task_json: str, candidate_json: str, changed: str | None, rival_json: str | None = None
    ) -> tuple[str, Any]:
        """An evaluation as JSON, or an error that is the task's or the machine's."""
        try:
            if self._judge is None:
                # Ray has set CUDA_VISIBLE_DEVICES to the one GPU of this actor.
                self._judge = self._make_judge("cuda:0" if self._device == "cuda" else "cpu", self._settings)
            task, candidate = Task.model_validate_json(task_json), Candidate.model_validate_json(candidate_json)
            settings = Settings.model_validate_json(changed) if changed else None
            rival = Candidate.model_validate_json(rival_json) if rival_json else None
            evaluation = self._judge.evaluate(task, candidate, settings=settings, paired_baseline=rival)
        except KernelwrightError as error:
            return "error", type(error)(*error.args)
        where = {"device": self._device_name(), "checks": {**evaluation.checks, "node": socket.gethostname()}}
        return "evaluation", evaluation.model_copy(update=where).model_dump_json()

    def close(self) -> None:
        """End the judge's processes."""
        if self._judge is not None:
            self._judge.close()
            self._judge = None

    def _device_name(self) -> str:
        """The device as the node counts it."""
        return "cpu" if self._device == "cpu" else f"cuda:{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"


def _in_a_line(error: BaseException) -> str:
    """First and last line of an error of Ray's, whose texts run over many."""
    lines = str(error).strip().splitlines() or [""]
    return " ".join([f"{type(error).__name__}:", *dict.fromkeys((lines[0], lines[-1]))])
