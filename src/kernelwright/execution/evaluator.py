"""Defines the interface of judges for searches, benchmarks and trainers: `JudgePool` on one machine, `RayPool` on many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from kernelwright.execution.local import Job, Outcome


@runtime_checkable
class Evaluator(Protocol):
    """Judges jobs, several at once. Every job that it takes gets exactly one outcome, whatever happens to its judges.

    One thread may use it at a time.
    """

    @property
    def slots(self) -> int:
        """Evaluations that go on at once."""
        ...

    def evaluate(self, jobs: Iterable[Job | None], stop: Callable[[], bool] | None = None) -> Iterator[tuple[Job, Outcome]]:
        """Do the jobs, taken one by one as slots become free; yields each as it ends, in any order.

        None among the jobs says that the next one depends on one at work: it is asked for when something has ended.
        `stop` is asked before each job; True leaves it and all that follow undone.
        """
        ...

    def close(self, *, at_once: bool = False) -> None:
        """End the judges once their jobs are done or, with `at_once`, in the middle of them.

        `at_once` may come from another thread, whose `evaluate` then ends with errors for what was cut short.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
