"""Has the reward service judge: an executor whose judges are behind HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import CancelledError, Future

from kernelwright.errors import InfrastructureError, KernelwrightError
from kernelwright.execution.remote import RemoteExecutor
from kernelwright.execution.service.client import ServiceClient
from kernelwright.execution.service.protocol import EvaluationReply, EvaluationRequest, SettingsRequest, TaskText
from kernelwright.execution.work import Evaluate, Work
from kernelwright.judge.settings import Settings
from kernelwright.records import Evaluation

SLOTS = 32
"""Evaluations that are asked for at once. The service queues what its judges cannot begin. Our choice."""


class HttpExecutor(RemoteExecutor):
    """Judges of a reward service.

    Settings that a request cannot change are the service's own. It times no baseline beside a candidate.

    Args:
        client: Client of the service.
        slots: Evaluations that are asked for at once.
    """

    def __init__(self, client: ServiceClient, slots: int = SLOTS) -> None:
        super().__init__(slots)
        self._client = client
        self._asked: Counter[tuple[str, str, Settings | None]] = Counter()
        """How often the same evaluation was asked for: another one is another measurement."""
        self._lock = threading.Lock()
        """Guards that and the requests."""
        self._requests: dict[Work, Future[EvaluationReply]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def judge(self, work: Evaluate) -> Evaluation | KernelwrightError:
        """Ask the service, and wait for its record."""
        with self._lock:
            key = work.task.sha256, work.candidate.sha256, work.settings
            request = request_of(work, self._asked[key])
            self._asked[key] += 1
            reply = asyncio.run_coroutine_threadsafe(self._client.evaluate_async(request), self._loop)
            self._requests[work] = reply
        try:
            found = reply.result().evaluation
        except CancelledError:
            found = None
        finally:
            with self._lock:
                del self._requests[work]
        return found or InfrastructureError(f"Wanted an evaluation of {work.task.id}; the request was cut short.")

    def stop(self, work: Work) -> None:
        """Ask for work no longer. The service finishes it, and remembers its record."""
        with self._lock:
            if work in self._requests:
                self._requests[work].cancel()

    def join(self) -> None:
        """Implements `RemoteExecutor.join`."""
        super().join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def request_of(work: Evaluate, repeat: int = 0) -> EvaluationRequest:
    """The request that asks for work: of its settings, those that a request may name and that differ from the defaults."""
    usual, wanted = Settings(), work.settings or Settings()
    changed = {
        name: value for name in SettingsRequest.model_fields if (value := getattr(wanted, name)) != getattr(usual, name)
    }
    return EvaluationRequest(
        task=TaskText(id=work.task.id, source=work.task.source),
        candidate=work.candidate.source,
        policy=work.candidate.policy,
        techniques=work.candidate.techniques,
        settings=SettingsRequest(**changed),
        repeat=repeat,
    )
