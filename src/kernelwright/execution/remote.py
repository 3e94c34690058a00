"""Does what executors whose judges are elsewhere have in common: each work waits in a thread for its answer."""

from __future__ import annotations

import abc
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from kernelwright.errors import InfrastructureError, KernelwrightError
from kernelwright.execution.work import Evaluate, Result, Work
from kernelwright.records import Evaluation

_POLL_S = 1.0
"""Time after which a thread that waits for results looks again whether any is to come, seconds."""


class RemoteExecutor(abc.ABC):
    """Judges elsewhere. A subclass says how one work is judged, and how that is stopped.

    Args:
        slots: Evaluations at once.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        """Evaluations that go on at once."""
        self.is_shut = False
        """True where no further work begins."""
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="kernelwright-remote")
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._pending: set[Work] = set()
        self._cancelled: set[Work] = set()
        self._guard = threading.Lock()
        """Held while the two sets change."""

    @abc.abstractmethod
    def judge(self, work: Evaluate) -> Evaluation | KernelwrightError:
        """Have one work judged. Runs in a thread of its own."""

    @abc.abstractmethod
    def stop(self, work: Work) -> None:
        """End work that may be in `judge`; nobody waits for it any more."""

    @property
    def kinds(self) -> frozenset[type[Work]]:
        """Implements `Executor.kinds`: judging alone."""
        return frozenset({Evaluate})

    @property
    def wants_device(self) -> bool:
        """Implements `Executor.wants_device`: nothing is screened elsewhere."""
        return False

    def free(self, kind: type[Work]) -> int:
        """Implements `Executor.free`."""
        with self._guard:
            return self.slots - len(self._pending)

    def submit(self, work: Work) -> None:
        """Implements `Executor.submit`."""
        assert isinstance(work, Evaluate)
        if self.is_shut:
            self._results.put(Result(work, _dropped(work)))
            return
        with self._guard:
            self._pending.add(work)
        self._threads.submit(self._do, work)

    def next_result(self, timeout_s: float | None = None) -> Result | None:
        """Implements `Executor.next_result`."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._guard:
                is_busy = bool(self._pending)
            left_s = _POLL_S if end_s is None else max(0.0, min(_POLL_S, end_s - time.monotonic()))
            try:
                return self._results.get(block=is_busy, timeout=left_s)
            except queue.Empty:
                if not is_busy or (end_s is not None and time.monotonic() >= end_s):
                    return None

    def cancel(self, work: Work) -> None:
        """Implements `Executor.cancel`."""
        with self._guard:
            if work not in self._pending:
                return
            self._cancelled.add(work)
        self.stop(work)

    def close(self, *, at_once: bool = False) -> None:
        """Implements `Executor.close`."""
        self.shut()
        if at_once:
            with self._guard:
                begun = [*self._pending]
            for work in begun:
                self.stop(work)
        self.join()

    def shut(self) -> None:
        """Let no further work begin."""
        self.is_shut = True

    def join(self) -> None:
        """Wait for work that has begun; what has not is told that it was dropped."""
        self._threads.shutdown()

    def is_over(self, work: Work) -> bool:
        """True where work is not to be tried once more."""
        with self._guard:
            return self.is_shut or work in self._cancelled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=kind is not None)

    def _do(self, work: Evaluate) -> None:
        outcome: Evaluation | KernelwrightError
        try:
            outcome = _dropped(work) if self.is_over(work) else self.judge(work)
        except KernelwrightError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - whoever waits for this work is told
            outcome = InfrastructureError(f"Wanted an evaluation of {work.task.id}; found a fault here: {error!r}.")
        with self._guard:
            is_cancelled = work in self._cancelled
            self._cancelled.discard(work)
            self._results.put(Result(work, None if is_cancelled else outcome))
            self._pending.discard(work)


def _dropped(work: Work) -> InfrastructureError:
    return InfrastructureError(f"Wanted an evaluation of {work.task.id}; the executor was shut down. Make another one.")
