"""An executor for tests: what it finds follows from the work alone, and comes when it is asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import GeneratorType

from kernelwright.errors import InfrastructureError, KernelwrightError
from kernelwright.execution.work import Baselines, Evaluate, Result, Screen


class FakeExecutor:
    """Works are done one after the other, in the order in which they came, by whoever asks for results.

    Args:
        find: What is found for a work: its last outcome, or a generator of all of them, whose last is the end. An error that
            is raised ends the work.
        slots: Works of each kind that there is room for.
        kinds: Kinds of work that it takes.
    """

    wants_device = False

    def __init__(self, find, slots=1, kinds=(Evaluate, Baselines, Screen)):
        self.find, self.slots, self.kinds = find, slots, frozenset(kinds)
        self.submitted, self.cancelled, self.closed = [], [], []
        self._works, self._outcomes = deque(), deque()

    def submit(self, work):
        assert type(work) in self.kinds
        self.submitted.append(work)
        self._works.append(work)

    def free(self, kind):
        at_work = [work for work, _ in [*self._outcomes][:1]]
        return self.slots - sum(type(work) is kind for work in {*self._works, *at_work})

    def next_result(self, timeout_s=None):
        if not self._outcomes and self._works:
            work = self._works.popleft()
            self._outcomes.extend((work, outcome) for outcome in self._found(work))
        if not self._outcomes:
            return None
        work, outcome = self._outcomes.popleft()
        return Result(work, outcome, is_last=not self._outcomes)

    def _found(self, work) -> Iterator[object]:
        if self.closed:
            return [InfrastructureError("closed before")]
        try:
            found = self.find(work)
            return [*found] if isinstance(found, GeneratorType) else [found]
        except KernelwrightError as error:
            return [error]

    def cancel(self, work):
        self.cancelled.append(work)
        if work in self._works:
            self._works.remove(work)
            self._outcomes.append((work, None))

    def close(self, *, at_once=False):
        self.closed.append(at_once)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.close(at_once=kind is not None)
