"""Judges on many machines, in Ray actors that each hold a judge. An optional extra.

An actor has a whole GPU to itself or, on CPUs, one place of the custom resource `kernelwright_judge`, so that Ray puts
nothing else there while a candidate is timed. An actor that dies, with its process or its machine, is replaced and its work
tried once more; Ray's own restarts are off, since they would hide that from the count. `ray.util.ActorPool` is not used: it
neither replaces a dead actor nor waits for a place without holding up work.

Candidates run behind the same walls as under `LocalExecutor`: the actor's process never runs them, it asks a fork server
that was started with an environment of its own. When Ray kills an actor, that server sees its channel close and ends with
all it started.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from kernelwright.errors import ConfigError, DeviceError, InfrastructureError, KernelwrightError
from kernelwright.execution.executor import TRIES
from kernelwright.execution.remote import RemoteExecutor
from kernelwright.execution.work import Evaluate, Work
from kernelwright.judge.judge import Judge
from kernelwright.judge.settings import Settings
from kernelwright.records import Candidate, Evaluation, Task

JUDGE_RESOURCE = "kernelwright_judge"
"""Custom resource of a node: number of CPU judges that may time there. One, unless timing does not matter."""

OBJECT_STORE_BYTES = 80 << 20
"""Object store of a Ray started here: records are small, and Ray refuses less than 75 MiB."""

START_LIMIT_S = 600.0
"""Limit for Ray to find a place for an actor and start it, such as after a machine is lost. Our choice."""

_CONNECT_LIMIT_S = 10.0

_ANSWER_LIMIT_S = 20.0
"""Limit for an idle actor, which answers in milliseconds."""

_POLL_S = 1.0
"""Interval in which work that waits for an actor checks whether to go on."""


class RayExecutor(RemoteExecutor):
    """Judges in Ray actors.

    Args:
        settings: Settings of work that brings none.
        device: `cuda` takes GPUs, `cpu` takes places of the resource `kernelwright_judge`; `auto` takes GPUs where the
            cluster has any.
        slots: Actors at once; all that the cluster has places for when None.
        address: Address of a running cluster, `auto` for the one of this machine; None uses the Ray that this process is
            connected to or, where there is none, starts one for as long as the executor lives.
        per_gpu: Judges that share a GPU. They time one after another, by the judge's own lock; more than one lets
            building and checking overlap with another's timing.
        cpus: CPU cores that Ray holds back for each actor, beside its place.
        start_limit_s: Limit for an actor to find a place and start, seconds.
        make_judge: Factory of an actor's judge; for tests.

    Raises:
        ConfigError: the extra `ray` is not installed, or an argument is out of range.
        DeviceError: the cluster cannot be reached or has no place for a judge.
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
            super().__init__(slots or places_in(resources, device, per_gpu))
        except DeviceError:
            self._leave_ray()
            raise
        self.device = device
        """`cpu` or `cuda`."""
        self.hardware = sorted(name.partition(":")[2] for name in resources if name.startswith("accelerator_type:"))
        """Kinds of accelerator in the cluster, as Ray names them."""
        place: dict[str, Any] = {"num_gpus": 1 / per_gpu} if device == "cuda" else {"resources": {JUDGE_RESOURCE: 1}}
        # One task at a time, and no restart that we do not see.
        self._actor_class = self._ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0, **place)(JudgeActor)
        self._start_arguments = (device, settings.model_dump_json(), make_judge)
        self._lock = threading.RLock()
        """Held while the four below change; an answer may be there before it is waited for."""
        self.actors: set[Any] = set()
        """Actors that are alive, as far as is known."""
        self._starting: dict[Any, Future[int]] = {}
        """Actors that have not answered yet, and their answers."""
        self._waiting = 0
        """Works that wait for an actor."""
        self._having: dict[Work, Any] = {}
        """Actors that have work, by the work."""
        self._idle: queue.Queue[Any] = queue.Queue()
        """Actors that have nothing to do, and errors of those that could not be started."""

    # --- work -----------------------------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Implements `Executor.submit`."""
        if not self._ray.is_initialized():
            self.shut()
        super().submit(work)

    def stop(self, work: Work) -> None:
        """End the actor that has work, so that its place is free."""
        with self._lock:
            actor = self._having.get(work)
        if actor is not None:
            self._discard(actor)

    def close(self, *, at_once: bool = False) -> None:
        """Implements `Executor.close`; leaves Ray if it was started for this."""
        self.shut()
        if self._ray.is_initialized():  # else the actors have ended with it, and to speak to it would start another
            if not at_once:
                closing = [actor.close.remote() for actor in self.actors - self._starting.keys()]
                if closing:
                    self._ray.wait(closing, num_returns=len(closing), timeout=_ANSWER_LIMIT_S)
            answers = list(self._starting.values())
            for actor in list(self.actors):
                self._discard(actor)
            # Ray ends the whole process when a thread of it, or of ours, speaks to it once it has been shut down.
            wait(answers, timeout=_ANSWER_LIMIT_S)
            self.join()
            self._leave_ray()

    def judge(self, work: Evaluate) -> Evaluation | KernelwrightError:
        """Have work done by an actor, and by another one where it dies."""
        failed = "the executor was closed."
        for tries in range(1, TRIES + 1):
            if self.is_over(work):
                break
            try:
                actor = self._actor(work)
            except _NoActorError as error:
                failed = f"Wanted a judge for {work.task.id}; {error}"
                if error.is_final:
                    break
                continue
            with self._lock:
                self._having[work] = actor
            if self.is_over(work):  # it was cancelled before its actor was known
                self._discard(actor)
            sent = [*map(_json, (work.task, work.candidate, work.settings)), tuple(map(_json, work.alongside))]
            try:
                # JSON: another version on another machine says what it does not understand.
                kind, value = self._ray.get(actor.evaluate.remote(*sent))
            except self._ray.exceptions.RayError as error:
                self._discard(actor)
                failed = (
                    f"Wanted an evaluation of {work.task.id}; its judge died ({_in_a_line(error)}) {tries} times. "
                    "Is there memory left? Ray's logs say more."
                )
            else:
                self._idle.put(actor)
                return Evaluation.model_validate_json(value) if kind == "evaluation" else value
            finally:
                with self._lock:
                    del self._having[work]
        return InfrastructureError(failed)

    # --- actors ---------------------------------------------------------------------------------------------------

    def _actor(self, work: Work) -> Any:
        """An actor that answers: one that died while idle must not cost work a try. Raises `_NoActorError`."""
        since_s = time.monotonic()
        with self._lock:
            self._waiting += 1
        try:
            while True:
                self._start()
                try:
                    actor = self._idle.get(timeout=_POLL_S)
                except queue.Empty:
                    self._give_up(work, since_s)
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

    def _give_up(self, work: Work, since_s: float) -> None:
        """Raise `_NoActorError` when waiting any longer is useless."""
        if self.is_over(work):
            raise _NoActorError("the executor was closed.", is_final=True)
        with self._lock:
            working = len(self.actors) > len(self._starting)
        if not working and time.monotonic() - since_s >= self._start_limit_s:
            raise _NoActorError(
                f"Ray found no place for one within {self._start_limit_s:g} s. Is a machine gone, or do others hold its "
                "GPUs? `ray status` says.",
                is_final=True,
            )

    def _start(self) -> None:
        """Start an actor for each work that waits, as far as there are slots."""
        with self._lock:
            while len(self._starting) < self._waiting and len(self.actors) < self.slots and not self.is_shut:
                if not self._idle.empty():
                    return
                actor = self._actor_class.remote(*self._start_arguments)
                self.actors.add(actor)
                answer = self._starting[actor] = actor.ready.remote().future()
                answer.add_done_callback(partial(self._started, actor))

    def _started(self, actor: Any, answer: Future[int]) -> None:
        """Take an actor that has answered, or could not be started, into `_idle`. Runs in a thread of Ray."""
        with self._lock:
            if actor not in self._starting:
                return  # it was discarded meanwhile
            del self._starting[actor]
            if (error := answer.exception()) is not None:
                self.actors.discard(actor)  # it has ended; besides, Ray cannot be asked for anything in this thread
        if error is None:
            self._idle.put(actor)
        else:
            why = f"it could not be started ({_in_a_line(error)}). Is this package installed on every machine?"
            self._idle.put(_NoActorError(why))

    def _discard(self, actor: Any) -> None:
        with self._lock:
            if actor not in self.actors:
                return
            self.actors.discard(actor)
            self._starting.pop(actor, None)
        self._ray.kill(actor, no_restart=True)

    def _leave_ray(self) -> None:
        if self._owns_ray:
            self._ray.shutdown()
            self._owns_ray = False


class _NoActorError(Exception):
    """Work has no actor."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


class JudgeActor:
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
        self, task_json: str, candidate_json: str, settings_json: str | None = None, alongside: tuple[str | None, ...] = ()
    ) -> tuple[str, Any]:
        """An evaluation as JSON, or an error of the task or the machine."""
        try:
            if self._judge is None:
                # Ray has set CUDA_VISIBLE_DEVICES to the one GPU of this actor.
                self._judge = self._make_judge("cuda:0" if self._device == "cuda" else "cpu", self._settings)
            task, candidate = Task.model_validate_json(task_json), Candidate.model_validate_json(candidate_json)
            settings = Settings.model_validate_json(settings_json) if settings_json else None
            others = [Candidate.model_validate_json(one) for one in alongside if one]
            evaluation = self._judge.evaluate(task, candidate, settings=settings, alongside=others)
        except KernelwrightError as error:
            return "error", type(error)(*error.args)
        # The device as the node counts it.
        device = "cpu" if self._device == "cpu" else f"cuda:{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
        where = {"device": device, "checks": {**evaluation.checks, "node": socket.gethostname()}}
        return "evaluation", evaluation.model_copy(update=where).model_dump_json()

    def close(self) -> None:
        """End the judge's processes."""
        if self._judge is not None:
            self._judge.close()
            self._judge = None


def _json(record: Task | Candidate | Settings | None) -> str | None:
    return None if record is None else record.model_dump_json()


def _in_a_line(error: BaseException) -> str:
    """First and last line of an error of Ray's, whose texts run over many."""
    lines = str(error).strip().splitlines() or [""]
    return " ".join([f"{type(error).__name__}:", *dict.fromkeys((lines[0], lines[-1]))])


# --- the cluster ------------------------------------------------------------------------------------------------------


def import_ray() -> Any:
    """The package; raises ConfigError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Wanted Ray, to judge on many machines; {error}. Install it with `pip install 'kernelwright[ray]'`."
        ) from error
    return ray


def places_in(resources: dict[str, float], device: str, per_gpu: int) -> int:
    """Number of judges that a cluster with these resources has places for; raises DeviceError at none."""
    places = int(resources.get("GPU", 0)) * per_gpu if device == "cuda" else int(resources.get(JUDGE_RESOURCE, 0))
    if places:
        return places
    what = "a GPU" if device == "cuda" else f"the resource `{JUDGE_RESOURCE}`"
    start = f"""Start each node with `ray start --resources='{{"{JUDGE_RESOURCE}": 1}}' ...`."""
    do = "Start nodes that have one, or judge on device cpu." if device == "cuda" else start
    raise DeviceError(f"Wanted a Ray cluster with {what}; found {', '.join(sorted(resources))}. {do}")


def connect(ray: Any, address: str | None, slots: int | None) -> None:
    """Connect to a cluster, or start one on this machine with places for `slots` judges; raises DeviceError."""
    quiet = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
    try:
        if address is not None:
            host, colon, port = address.rpartition(":")
            if colon and "//" not in host:
                # Ray asks for minutes; a port that nobody listens on is known at once.
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_LIMIT_S).close()
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            places = {JUDGE_RESOURCE: slots or 1}
            ray.init(address="local", resources=places, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise DeviceError(
            f"Wanted the Ray cluster at {address or 'this machine'}; {error}. Start it with `ray start --head`."
        ) from error
