"""Defines work, its results, and the interface of what runs it: local processes, a Ray cluster, or the HTTP service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from kernelwright.errors import KernelwrightError
from kernelwright.judge.settings import Settings
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.policy import Policy
from kernelwright.records.screened import Compiles, Screened

WAIT_S = 1.0
"""Time after which `run_all` asks again for work where there was none, seconds: what is next may depend on others."""


@dataclass(frozen=True, slots=True, eq=False)
class Screen:
    """One round of quick looks at candidates of a task: those given, and else what a policy proposes."""

    task: Task
    policy: Policy | None = None
    """Proposer of candidates. It is sent to another process where it can be."""
    candidates: tuple[Candidate, ...] = ()
    budget: int = 0
    """Proposals that the round ends with, those in `earlier` and in `history` included."""
    seed: int = 0
    """Seed of the policy."""
    earlier: Sequence[Screened] = ()
    """Estimates of the task so far."""
    history: Sequence[Evaluation] = ()
    """Verdicts on the task's candidates so far. In the caller's process the policy sees what is added meanwhile."""
    tunes: bool = True
    """True looks at proposals with an autotuner too, last and where they can still win."""
    settings: Settings | None = None
    """Settings of the judge whose limits and labels hold here too; by default the executor's."""
    slots: int | None = None
    """Most processes that look at this task's candidates; by default the executor's choice."""
    memory_bytes: int = 0
    """GPU memory that the round may take at most, as far as that is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """One evaluation of a candidate by the judge."""

    task: Task
    candidate: Candidate
    settings: Settings | None = None
    """Settings of the judge; by default the executor's."""
    alongside: tuple[Candidate, ...] = ()
    """Stock configurations and other finalists to time in the same process triples."""
    memory_bytes: int = 0
    """GPU memory that it may take at most, as far as that is known. It waits, outside the slots, until so much is left."""
    elsewhere_than: str | None = None
    """Device on which it is not judged where there is another."""


@dataclass(frozen=True, slots=True, eq=False)
class Baselines:
    """Wrappers of one task's own module to measure together (`kernelwright.judge.timing.rotation`)."""

    task: Task
    baselines: tuple[Candidate, ...]
    settings: Settings | None = None
    memory_bytes: int = 0


Work = Screen | Evaluate | Baselines


@dataclass(frozen=True, slots=True)
class Progress:
    """A message about work that goes on, such as one of a policy."""

    message: str
    lasting: bool = False
    """True when it matters after the next one."""


Outcome = Screened | Progress | Evaluation | tuple[Evaluation, ...] | KernelwrightError | None
"""Messages about work and estimates of a `Screen`, any number of them; then what ends work: None for a `Screen`, an
evaluation for an `Evaluate`, one for each of the `Baselines`, or an error of the task or the machine, never of the
candidate."""


@dataclass(frozen=True, slots=True)
class Result:
    """A result of work, the very object that was submitted. Each work has exactly one last result."""

    work: Work
    outcome: Outcome
    is_last: bool = True
    left: Compiles | None = None
    """With an estimate: the quickest compiler among the proposals that are known and still to be looked at; None where there
    are none."""


class Executor(Protocol):
    """Runs work, several at once.

    Every work that is submitted gets exactly one last result, whatever happens to the processes that have it. Any thread may
    submit; one thread at a time asks for results.
    """

    @property
    def kinds(self) -> frozenset[type[Work]]:
        """Kinds of work that it can do."""
        ...

    @property
    def wants_device(self) -> bool:
        """True while a task that is to be screened waits until judges leave a device to it."""
        ...

    def submit(self, work: Work) -> None:
        """Take work of one of its kinds. It begins when a slot, and memory where it asks for some, is free."""
        ...

    def free(self, kind: type[Work]) -> int:
        """Number of works of a kind that could begin soon if they were submitted now."""
        ...

    def next_result(self, timeout_s: float | None = None) -> Result | None:
        """The next result, in the order in which they come; None where there is none in time, or nothing is at work."""
        ...

    def cancel(self, work: Work) -> None:
        """End work now. Its last result says None, or what it had found until now."""
        ...

    def close(self, *, at_once: bool = False) -> None:
        """Drop what has not begun; end the processes once their work is done or, with `at_once`, in the middle of it.

        What was dropped or cut short has an error as its last result.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def run_all(executor: Executor, work: Iterable[Work | None], stop: Callable[[], bool] | None = None) -> Iterator[Result]:
    """Results of all the work, which is taken one by one as slots become free. Nobody else may use the executor meanwhile.

    None among the work says that the next one depends on one that is running. `stop` is asked before each; True leaves it
    and all that follow undone.
    """
    waiting = iter(work)
    running: set[Work] = set()
    kind: type[Work] | None = None
    """Kind of the work that was taken last: where it has no slot left, what comes next can wait."""
    while True:
        while (kind is None or executor.free(kind) > 0) and not (stop is not None and stop()):
            if (taken := next(waiting, None)) is None:
                break
            kind = type(taken)
            executor.submit(taken)
            running.add(taken)
        if not running:
            return
        if (result := executor.next_result(WAIT_S)) is not None:
            if result.is_last:
                running.discard(result.work)
            yield result
