"""Rewards rollouts of other trainers: finds the candidate in an answer, has it judged, and says how it did.

`kernelwright serve` judges on another machine; without an address the same service judges in this process. `examples/` calls
it from TRL, verl and verifiers.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kernelwright.contrastive.answers import parse_answer
from kernelwright.contrastive.families import CHEATING
from kernelwright.contrastive.prompts import contrastive_prompt
from kernelwright.execution.service.client import EvaluationReply, EvaluationRequest, ServiceClient
from kernelwright.execution.service.protocol import SOURCE_LIMIT_CHARACTERS
from kernelwright.records import Task
from kernelwright.records.rewards import reward_named

if TYPE_CHECKING:
    from kernelwright.judge import Settings

QUEUE_LIMIT = 4096
"""Rollouts that may wait in this process: a batch of a trainer's, several times over."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Grade:
    """One rollout's reward, and what a rubric may weigh besides."""

    reward: float
    """The named reward, which is its floor for a rollout that failed."""
    form: float
    """1 where the answer holds a candidate, else 0."""
    right: float
    """1 where the candidate was accepted, else 0."""
    speedup: float
    """Lower end of the speedup's interval; 0 where there is none."""
    honest: float
    """0 where the judge rejected it for work that was skipped, hidden or done elsewhere, else 1."""
    why: str = ""
    """Reason of a failure."""


class Grader:
    """Grades answers. A rollout's failure is a grade; a failure of the machine raises after the client's retries.

    Args:
        service: Address of `kernelwright serve`, or a client of it; empty to judge in this process.
        reward: Name of the reward.
        out: Run directory of judges in this process.
        device: Of judges in this process.
        settings: Of judges in this process.

    Raises:
        ConfigError: there is no such reward, the address is none, or a package to serve is not installed.
        UsageError: the run directory belongs to another run or is in use.
        InfrastructureError: this machine cannot judge.
    """

    def __init__(
        self,
        service: str | ServiceClient = "",
        *,
        reward: str = "lower-bound",
        out: Path = Path("runs/rewards"),
        device: str = "auto",
        settings: Settings | None = None,
    ) -> None:
        self._floor, self._reward = reward_named(reward).floor, reward
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kernelwright-grader", daemon=True)
        self._stack = ExitStack()
        if service:
            self._client = ServiceClient(service) if isinstance(service, str) else service
            self._thread.start()
            return
        from httpx import ASGITransport

        from kernelwright.execution.executor import LocalExecutor
        from kernelwright.execution.service.app import create_app
        from kernelwright.execution.service.queue import EvaluationQueue, EvaluationStore
        from kernelwright.judge import Settings, devices_of

        settings, devices = settings or Settings(), devices_of(device)
        with self._stack:
            store = EvaluationStore(out, devices[0].partition(":")[0], settings)
            self._stack.callback(store.close)
            executor = self._stack.enter_context(LocalExecutor(devices, settings))
            queue = EvaluationQueue(executor, store, settings, queue_limit=QUEUE_LIMIT, drain_s=0.0)
            self._client = ServiceClient("http://127.0.0.1", transport=ASGITransport(app=create_app(queue, None)))
            self._thread.start()
            self._loop.call_soon_threadsafe(queue.start)
            self._stack.callback(lambda: self._wait(queue.stop()))
            self._stack = self._stack.pop_all()

    def grade(self, tasks: Sequence[str], answers: Sequence[str]) -> list[Grade]:
        """Grade answers, each to the task at the same place: `task_text` of it, or the id of a built-in one.

        Raises:
            TaskError: a task itself does not work.
            UsageError: there is no such built-in task, or the service refuses its text.
            InfrastructureError: nothing could judge.
        """

        async def all_of_them() -> list[Grade]:
            return await asyncio.gather(*map(self._grade, tasks, answers))

        return self._wait(all_of_them())

    async def grade_async(self, task: str, answer: str) -> Grade:
        """Grade one answer, in a coroutine; raises as `grade`."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._grade(task, answer), self._loop))

    async def _grade(self, task: str, answer: str) -> Grade:
        parsed = parse_answer(answer)
        if parsed.source is None or len(parsed.source) > SOURCE_LIMIT_CHARACTERS:
            return Grade(self._floor, 0.0, 0.0, 0.0, 1.0, parsed.detail or "longer than any kernel")
        named = json.loads(task) if task.startswith("{") else task
        request = EvaluationRequest(task=named, candidate=parsed.source, policy="trainer", reward=self._reward)
        return _graded(await self._client.evaluate_async(request))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the judges of this process; what they found is in the run directory."""
        self._stack.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _graded(reply: EvaluationReply) -> Grade:
    found, reward = reply.evaluation, reply.reward
    assert found is not None
    assert reward is not None
    why = "" if found.reason is None else f"{found.reason}: {found.detail.partition(chr(10))[0]}"
    cheated = found.reason is not None and found.reason in CHEATING
    return Grade(reward.value, 1.0, float(found.accepted), found.speedup_low or 0.0, float(not cheated), why)


def task_text(task: Task) -> str:
    """A task as one string, for a column of a data set: the id of a built-in one, else JSON with its source."""
    return task.id if task.origin.startswith("builtin:") else json.dumps({"id": task.id, "source": task.source})


def chat_prompt(task: Task, device: str = "cuda", hardware: str = "") -> list[dict[str, str]]:
    """A prompt's messages for a trainer; it shows no earlier attempts, which change while a policy learns.

    Args:
        task: The task.
        device: `cuda` or `cpu`, what judges.
        hardware: Its name for people.
    """
    messages = contrastive_prompt(task, [], device=device, hardware=hardware).messages
    return [{"role": message.role, "content": message.content} for message in messages]
