"""One executor for all tests of the engine: it screens and judges by a script, on a simulated clock."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelwright.execution.work import Baselines, Evaluate, Result, Screen, Work
from kernelwright.records import Candidate, Evaluation, Scoring, Task, TimingBlock
from kernelwright.records.screened import Compiles, compiles, screened_of
from tests.samples import TASK, accepted, rejected

TAKEN_BYTES = 10 << 30
TEXTS = {
    Compiles.NOTHING: "",
    Compiles.CODE: "triton",
    Compiles.INDUCTOR: "torch.compile",
    Compiles.VARIANTS: "max-autotune",
}


def task_named(name: str) -> Task:
    return Task(id=name, source=f"{TASK.source}# {name}\n")


@dataclass(frozen=True)
class Proposal:
    """A candidate of the script, named by its technique."""

    name: str
    estimate: float | None = None
    """Speedup by screening; None where it is wrong there."""
    speedup: Any = None
    """Speedup that the judge measures, None where it rejects it, or an error; by default the estimate."""
    compiler: Compiles = Compiles.NOTHING
    look: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its estimate."""
    verdict: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its evaluations."""
    again: Any = None
    """Speedup of the second measurement, where that differs."""
    is_rejected: bool = False

    def candidate(self, task: Task) -> Candidate:
        source = f"# {task.id} {self.name} {TEXTS[self.compiler]}"
        return Candidate(source=source, policy="builtin", techniques=(self.name,))


class SimulatedClock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


class Scripted:
    """A policy that gives the proposals of its script; `look` as of policies."""

    name = "builtin"

    def __init__(self, script: Mapping[str, list[Proposal]], look: str = "screened") -> None:
        self.script, self.look = script, look

    def propose(self, context: Any, count: int) -> list[Candidate]:
        proposed = [one.candidate(context.task) for one in self.script[context.task.id]]
        return [one for one in proposed if one.sha256 not in context.seen][:count]


class FakeExecutor:
    """Does each piece of work by the script; its result comes when the simulated clock has reached its end.

    Args:
        script: Proposals by the task's id.
        gains: Speedups of baselines over eager, by the task's id or for all; an error where they cannot be measured.
        slots: Works at once of each kind; a kind that is missing cannot be done.
        seconds: Duration of a piece of work, and of each estimate of a round.
    """

    def __init__(
        self,
        script: Mapping[str, list[Proposal]],
        gains: Mapping[str, Any] | Callable[[str], Any] = lambda task: 1.0,
        slots: Mapping[type[Work], int] | None = None,
        seconds: Callable[[Work], float] = lambda work: 1.0,
    ) -> None:
        self.script, self.gains, self.seconds = script, gains, seconds
        self.slots = dict(slots or {Screen: 1, Evaluate: 1, Baselines: 1})
        self.clock = SimulatedClock()
        self.submitted: list[Work] = []
        self.cancelled: list[Work] = []
        self.closed: list[bool] = []
        self.wants_device = False
        self.waiting = 0
        """Judgements that wait outside the slots."""
        self.measured: Counter[tuple[str, str]] = Counter()
        self._running: list[Work] = []
        self.coming: list[tuple[float, int, Result]] = []
        self._numbers = itertools.count()

    # --- what was asked for

    @property
    def rounds(self) -> list[tuple[str, int, bool]]:
        return [(one.task.id, one.budget, one.tunes) for one in self.submitted if isinstance(one, Screen)]

    @property
    def judged(self) -> list[tuple[str, str]]:
        """Task and technique of each judgement, in turn."""
        return [(one.task.id, ", ".join(one.candidate.techniques)) for one in self.judgements]

    @property
    def judgements(self) -> list[Evaluate]:
        return [one for one in self.submitted if isinstance(one, Evaluate)]

    @property
    def rotations(self) -> list[str]:
        return [one.task.id for one in self.submitted if isinstance(one, Baselines)]

    # --- the protocol

    @property
    def kinds(self) -> frozenset[type[Work]]:
        return frozenset(self.slots)

    def free(self, kind: type[Work]) -> int:
        waiting = self.waiting if kind is Evaluate else 0
        return self.slots[kind] - sum(isinstance(one, kind) for one in self._running) + waiting

    def submit(self, work: Work) -> None:
        assert self.free(type(work)) > 0
        self.submitted.append(work)
        self._running.append(work)
        for after_s, result in self._results(work):
            heapq.heappush(self.coming, (self.clock.time_s + after_s, next(self._numbers), result))

    def next_result(self, timeout_s: float | None = None) -> Result | None:
        limit_s = self.clock.time_s + (timeout_s if timeout_s is not None else 1e9)
        if not self.coming or self.coming[0][0] > limit_s:
            self.clock.time_s = limit_s
            return None
        at_s, _, result = heapq.heappop(self.coming)
        self.clock.time_s = max(self.clock.time_s, at_s)
        if result.is_last:
            self._running.remove(result.work)
        return result

    def cancel(self, work: Work) -> None:
        self.cancelled.append(work)
        self.coming = [one for one in self.coming if one[2].work is not work]
        heapq.heapify(self.coming)
        heapq.heappush(self.coming, (self.clock.time_s, next(self._numbers), Result(work, None)))

    def close(self, *, at_once: bool = False) -> None:
        self.closed.append(at_once)

    def __enter__(self) -> FakeExecutor:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self.close(at_once=kind is not None)

    # --- outcomes

    def _results(self, work: Work) -> list[tuple[float, Result]]:
        each_s = self.seconds(work)
        if isinstance(work, Screen):
            return self._looks(work, each_s)
        if isinstance(work, Evaluate):
            return [(each_s, Result(work, self.verdict(work)))]
        gains = self._gains(work.task, work.baselines)
        if isinstance(gains, Exception):
            return [(each_s, Result(work, gains))]
        found = [
            accepted(gains[one.techniques[0]], one.source, **_common(work.task, one), reference_us=100.0)
            for one in work.baselines
        ]
        return [(each_s, Result(work, tuple(found)))]

    def _gains(self, task: Task, baselines: Sequence[Candidate]) -> Any:
        gain = self.gains(task.id) if callable(self.gains) else self.gains[task.id]
        return gain if isinstance(gain, Exception | Mapping) else {one.techniques[0]: gain for one in baselines}

    def _looks(self, work: Screen, each_s: float) -> list[tuple[float, Result]]:
        known = {one.candidate_sha256 for one in (*work.earlier, *work.history)}
        todo = [
            (one, candidate)
            for one in self.script[work.task.id]
            if (candidate := one.candidate(work.task)).sha256 not in known
        ]
        if not work.tunes:
            todo = [(one, candidate) for one, candidate in todo if one.compiler is not Compiles.VARIANTS]
        todo = sorted(todo, key=lambda pair: pair[0].compiler)[: max(0, work.budget - len(known))]
        results, after_s = [], 0.0
        for number, (one, candidate) in enumerate(todo):
            if isinstance(one.estimate, Exception):
                return [*results, (after_s + each_s, Result(work, one.estimate))]
            fields = {"estimate": one.estimate, "spread": 0.0, "memory_bytes": TAKEN_BYTES, **one.look}
            look = screened_of(work.task, candidate, correct=one.estimate is not None, **fields)
            left = min((compiles(later.source) for _, later in todo[number + 1 :]), default=None)
            after_s += each_s
            results.append((after_s, Result(work, look, is_last=False, left=left)))
        return [*results, (after_s, Result(work, None))]

    def verdict(self, work: Evaluate) -> Evaluation | Exception:
        task, candidate = work.task, work.candidate
        self.measured[task.id, candidate.sha256] += 1
        one = self._proposal(task, candidate)
        speedup = one.estimate if one.speedup is None else one.speedup
        if self.measured[task.id, candidate.sha256] > 1 and one.again is not None:
            speedup = one.again
        if isinstance(speedup, Exception):
            return speedup
        if one.is_rejected:
            return rejected(source=candidate.source, **_common(task, candidate), **one.verdict)
        fields = {"checks": work.settings.model_dump(include={"strict_fp32", "tf32_products"})} if work.settings else {}
        fields |= self._alongside(work, speedup)
        return accepted(speedup, candidate.source, **_common(task, candidate), **(fields | dict(one.verdict)))

    def _proposal(self, task: Task, candidate: Candidate) -> Proposal:
        script, name = self.script.get(task.id, ()), ", ".join(candidate.techniques) or candidate.policy
        same = [one for one in script if one.candidate(task).sha256 == candidate.sha256]
        return next(iter([*same, *(one for one in script if one.name == name)]), Proposal(name, 1.0))

    def _alongside(self, work: Evaluate, speedup: float) -> dict[str, Any]:
        """Fields of a final: what was timed beside the candidate."""
        stock = [one for one in work.alongside if one.policy == "baseline"]
        gains = self._gains(work.task, stock) if stock else {}
        speedups = {} if isinstance(gains, Exception) else {one.name_alongside: gains[one.techniques[0]] for one in stock}
        for other in set(work.alongside) - set(stock):
            proposal = self._proposal(work.task, other)
            speedups[other.name_alongside] = proposal.estimate if proposal.speedup is None else proposal.speedup
        if not speedups:
            return {}
        alongside_us = {name: (100.0 / one, 100.0 / one) for name, one in speedups.items()}
        own_us = (100.0 / speedup, 100.0 / speedup)
        return {
            "versus": {name: (speedup / one, 0.95 * speedup / one, 1.05 * speedup / one) for name, one in speedups.items()},
            "blocks": (TimingBlock(process=0, reference_us=(100.0, 100.0), candidate_us=own_us, alongside_us=alongside_us),),
            "scoring": Scoring(miss_probability=0.05),
        }


def _common(task: Task, candidate: Candidate) -> dict[str, Any]:
    return {
        "task": task.id,
        "task_sha256": task.sha256,
        "policy": candidate.policy,
        "techniques": candidate.techniques,
        "parent": candidate.parent,
    }
