"""Many evaluations at once on many machines: Ray actors that each hold a judge. An optional extra.

The counterpart of `JudgePool`, with the same interface. An actor has a whole GPU to itself or, on CPUs, one place of the
custom resource `kernelwright_judge`, so that Ray puts nothing else there while a candidate is timed. An actor that
dies, with its process or its machine, is replaced and its job tried once more; Ray's own restarts are off, since they
would hide that from the count.

Candidates run behind the same walls as under `JudgePool`: the actor's process never runs them, it asks a fork server
that was started with an environment of its own. When Ray kills an actor, that server sees its channel close and ends
with all it started.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from kernelwright.errors import ConfigError, DeviceError, InfrastructureError, KernelwrightError
from kernelwright.judge.judge import Judge
from kernelwright.judge.settings import Settings
from kernelwright.pools.local import _TRIES, Job, Outcome
from kernelwright.pools.ray_cluster import JUDGE_RESOURCE, connect, import_ray, room_in
from kernelwright.records import Candidate, Evaluation, Task

START_LIMIT_S = 600.0
"""How long Ray may take to find a place for an actor and start it, such as after a machine is lost. Our choice."""

_ANSWER_LIMIT_S = 20.0
"""An actor that does nothing answers in milliseconds."""

_POLL_S = 1.0
"""How often a wait looks whether an actor has become free elsewhere, or has taken too long to start."""


class JudgeLike(Protocol):
    """What an actor needs of a judge."""

    def evaluate(self, task: Task, candidate: Candidate, *, settings: Settings | None = None) -> Evaluation:
        """Judge one candidate."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


MakeJudge = Callable[[str, Settings], JudgeLike]
"""From a device, as its process sees it, and settings to a judge."""


class RayPool:
    """Judges in Ray actors.

    Several threads may use it at a time, as long as all of them together have no more jobs at work than it has slots.

    Args:
        settings: Of jobs that bring none.
        device: `cuda` takes GPUs, `cpu` takes places of the resource `kernelwright_judge`; `auto` takes GPUs where the
            cluster has any.
        slots: Actors at once; all that the cluster has room for when None.
        address: Of a running cluster, `auto` for the one of this machine; None uses the Ray that this process is
            connected to or, where there is none, starts one for as long as the pool lives.
        per_gpu: Judges that share a GPU. They time one after another, by the judge's own lock; more than one lets
            building and checking overlap with another's timing.
        cpus: CPU cores that Ray holds back for each actor, beside what it names above.
        start_limit_s: How long an actor may take to find a place and start.
        make_judge: What makes an actor's judge; for tests.

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
        make_judge: MakeJudge = Judge,
    ) -> None:
        if device not in ("auto", "cpu", "cuda") or per_gpu < 1 or (slots is not None and slots < 1):
            raise ConfigError(
                f"Wanted a device auto, cpu or cuda, at least one judge for each GPU and at least one slot; found device "
                f"{device}, per_gpu {per_gpu}, slots {slots}. Ray chooses which GPU: name none."
            )
        self._ray = import_ray()
        self._settings = settings
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
        self._lock = threading.Lock()
        """Held while the three below change; each actor is in `_members`, and in at most one of the others."""
        self._members: set[_Actor] = set()
        self._idle: list[_Actor] = []
        self._starting: dict[Any, _Actor] = {}
        self._closing = False

    @property
    def slots(self) -> int:
        """How many evaluations go on at once."""
        return self._slots

    def evaluate(self, jobs: Iterable[Job], stop: Callable[[], bool] | None = None) -> Iterator[tuple[Job, Outcome]]:
        """Do the jobs, in any order; yields each as it ends.

        Args:
            jobs: What to do; taken one by one, as slots become free.
            stop: Asked before each job; True leaves it and all that follow undone.

        Raises:
            InfrastructureError: Ray has been shut down.
        """
        waiting = iter(jobs)
        owed: deque[_PendingJob] = deque()
        running: dict[Any, _RunningJob] = {}
        try:
            while True:
                if not self._ray.is_initialized():
                    raise InfrastructureError("Wanted to judge on Ray; it has been shut down. Make another pool.")
                self._give(owed, running)
                while len(running) + len(owed) < self._slots and not (self._closing or (stop is not None and stop())):
                    job = next(waiting, None)
                    if job is None:
                        break
                    owed.append(_PendingJob(job))
                    self._give(owed, running)  # at once: to make the next job may take long
                if not running and not owed:
                    return
                for reference in self._wait(running):
                    run = running.pop(reference)
                    outcome = self._outcome(run)
                    if outcome is None:
                        owed.appendleft(_PendingJob(run.owed.job, run.owed.tries + 1))
                    else:
                        yield run.owed.job, outcome
                failed = self._settle()
                if owed and (why := failed or self._hopeless(owed[0])):
                    owed[0].tries += 1
                    if owed[0].tries >= _TRIES or not failed:
                        job = owed.popleft().job
                        yield job, InfrastructureError(f"Wanted a judge for {job.task.id}; {why}")
        finally:
            # Whoever stops asking for outcomes leaves actors at work that hold the places of the next ones.
            for run in running.values():
                self._discard(run.member)

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End the actors, once their judges have ended what they started, or now; leave Ray if we started it."""
        self._closing = True
        if not self._ray.is_initialized():
            return  # Ray has ended, and the actors with it; to speak to it would start another
        if not at_once:
            closing = [member.actor.close.remote() for member in self._idle]
            if closing:
                self._ray.wait(closing, num_returns=len(closing), timeout=_ANSWER_LIMIT_S)
        for member in list(self._members):
            self._discard(member)
        self._leave_ray()

    def _give(self, owed: deque[_PendingJob], running: dict[Any, _RunningJob]) -> None:
        """Give jobs to actors that run, never to one that may find no place; for the rest, see that actors start."""
        while owed and (member := self._living()) is not None:
            run = self._begin(owed.popleft(), member)
            running[run.reference] = run
        self._start(len(owed))

    def _living(self) -> _Actor | None:
        """An idle actor that answers: one that died while it was idle, as with its machine, must not cost a job a try."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                member = self._idle.pop()
            try:
                self._ray.get(member.actor.ready.remote(), timeout=_ANSWER_LIMIT_S)
                return member
            except self._ray.exceptions.RayError:
                self._discard(member)

    def _begin(self, owed: _PendingJob, member: _Actor) -> _RunningJob:
        job = owed.job
        changed = job.settings and job.settings.model_dump_json()
        reference = member.actor.evaluate.remote(job.task.model_dump_json(), job.candidate.model_dump_json(), changed)
        return _RunningJob(reference, owed, member)

    def _start(self, wanted: int) -> None:
        """See that as many actors are starting, as far as there are slots."""
        with self._lock:
            while len(self._starting) < wanted and len(self._members) < self._slots and not self._closing:
                actor = self._actor_class.remote(*self._start_arguments)
                member = _Actor(actor)
                self._members.add(member)
                self._starting[actor.ready.remote()] = member

    def _wait(self, running: dict[Any, _RunningJob]) -> list[Any]:
        """Those of the running that have ended; returns after a while, or as soon as an actor has started, with none."""
        with self._lock:
            references = [*running, *self._starting]
        if not references:
            time.sleep(_POLL_S)  # all of the pool's actors work for other threads
            return []
        ended, _ = self._ray.wait(references, num_returns=1, timeout=_POLL_S)
        return [reference for reference in ended if reference in running]

    def _settle(self) -> str:
        """Make idle what has started; returns why one could not start, if that is so."""
        with self._lock:
            references = list(self._starting)
        if not references:
            return ""
        started, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        failed = ""
        for reference in started:
            with self._lock:
                member = self._starting.pop(reference, None)
            if member is None:
                continue  # another thread has seen it
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._discard(member)
                failed = f"it could not be started ({_in_a_line(error)}). Is this package installed on every machine?"
            else:
                with self._lock:
                    self._idle.append(member)
        return failed

    def _hopeless(self, owed: _PendingJob) -> str:
        """Why a job need not wait any longer, if that is so."""
        if self._closing:
            return "the pool was closed."
        with self._lock:
            working = len(self._members) > len(self._starting)
        if working or time.monotonic() - owed.since < self._start_limit_s:
            return ""
        return (
            f"Ray found no place for one within {self._start_limit_s:g} s. Is a machine gone, or do others hold its GPUs? "
            "`ray status` says."
        )

    def _outcome(self, run: _RunningJob) -> Outcome | None:
        """What became of a job; None when its actor died and it is to be tried again."""
        try:
            kind, value = self._ray.get(run.reference)
        except self._ray.exceptions.RayError as error:
            self._discard(run.member)
            tries = run.owed.tries + 1
            if tries < _TRIES and not self._closing:
                return None
            return InfrastructureError(
                f"Wanted an evaluation of {run.owed.job.task.id}; its judge died ({_in_a_line(error)}) {tries} times. "
                "Is there memory left? Ray's logs say more."
            )
        with self._lock:
            self._idle.append(run.member)
        return Evaluation.model_validate_json(value) if kind == "evaluation" else value

    def _discard(self, member: _Actor) -> None:
        with self._lock:
            if member not in self._members:
                return
            self._members.discard(member)
            self._idle = [other for other in self._idle if other is not member]
            self._starting = {reference: other for reference, other in self._starting.items() if other is not member}
        self._ray.kill(member.actor, no_restart=True)

    def _leave_ray(self) -> None:
        if self._owns_ray:
            self._ray.shutdown()
            self._owns_ray = False


@dataclass(eq=False, slots=True)
class _Actor:
    """An actor."""

    actor: Any


@dataclass(eq=False, slots=True)
class _PendingJob:
    """A job that no actor has yet, or not any more."""

    job: Job
    tries: int = 0
    """Actors that died of it, or that did not start for it."""
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _RunningJob:
    """A job that an actor has been given."""

    reference: Any
    owed: _PendingJob
    member: _Actor


class _JudgeActor:
    """What runs in the actor's process."""

    def __init__(self, device: str, settings_json: str, make_judge: MakeJudge) -> None:
        self._device = device
        self._settings = Settings.model_validate_json(settings_json)
        self._make_judge = make_judge
        self._judge: JudgeLike | None = None

    def ready(self) -> int:
        """The process's id: answered once it runs."""
        return os.getpid()

    def evaluate(self, task_json: str, candidate_json: str, changed: str | None) -> tuple[str, Any]:
        """An evaluation as JSON, or an error that is the task's or the machine's."""
        try:
            if self._judge is None:
                # Ray has set CUDA_VISIBLE_DEVICES to the one GPU of this actor.
                self._judge = self._make_judge("cuda:0" if self._device == "cuda" else "cpu", self._settings)
            evaluation = self._judge.evaluate(
                Task.model_validate_json(task_json),
                Candidate.model_validate_json(candidate_json),
                settings=Settings.model_validate_json(changed) if changed else None,
            )
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


def _in_a_line(error: Exception) -> str:
    """An error of Ray's, whose texts run over many lines: the first and the last say what happened."""
    lines = str(error).strip().splitlines() or [""]
    return " ".join([f"{type(error).__name__}:", *dict.fromkeys((lines[0], lines[-1]))])
