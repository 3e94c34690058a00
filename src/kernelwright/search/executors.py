"""Joins several executors into one: judges that a caller brings, and screening on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kernelwright.execution.work import Executor, Result, Work

_TURN_S = 0.1
"""Time for which one of several executors is asked for a result, seconds."""


class Executors:
    """Executors that share the work: each kind goes to the first that can do it. The caller closes them."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._by_kind: dict[type[Work], Executor] = {}
        for executor in executors:
            for kind in executor.kinds:
                self._by_kind.setdefault(kind, executor)

    @property
    def kinds(self) -> frozenset[type[Work]]:
        """Kinds of work that one of them can do."""
        return frozenset(self._by_kind)

    @property
    def wants_device(self) -> bool:
        """True while a round of screening waits until judges leave a device to it."""
        return any(executor.wants_device for executor in self._executors)

    def submit(self, work: Work) -> None:
        """Give work to the one that does its kind."""
        self._by_kind[type(work)].submit(work)

    def free(self, kind: type[Work]) -> int:
        """Number of works of a kind that could begin soon."""
        return self._by_kind[kind].free(kind)

    def next_result(self, timeout_s: float | None = None) -> Result | None:
        """The next result of any of them, asked in turn."""
        if len(self._executors) == 1:
            return self._executors[0].next_result(timeout_s)
        turns = itertools.count() if timeout_s is None else range(max(1, round(timeout_s / _TURN_S / len(self._executors))))
        for _ in turns:
            for executor in self._executors:
                if (result := executor.next_result(_TURN_S)) is not None:
                    return result
        return None

    def cancel(self, work: Work) -> None:
        """End work now."""
        self._by_kind[type(work)].cancel(work)

    def close(self, *, at_once: bool = False) -> None:
        """Close all of them."""
        for executor in self._executors:
            executor.close(at_once=at_once)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=kind is not None)
