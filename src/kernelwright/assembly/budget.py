"""Keeps the measurement cache and the budget of a search, and what an agent plays with.

The unit of a budget is one measured schedule. No schedule is measured twice, and a measurement is written before its cost is
used. An agent follows from its seed and the costs alone, so a search that is run again goes on where it was.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelwright.assembly.backends import Backend, Measurement, Status, schedule_digest
from kernelwright.errors import BudgetSpentError, UsageError
from kernelwright.records import RunDirectory, read_objects
from kernelwright.sass import (
    MOVE_KINDS,
    AnyMove,
    Kernel,
    Neighbourhood,
    Program,
    Schedule,
    move_from_json,
    move_to_json,
)

SCHEDULES = "schedules.jsonl"
"""File of a run with every schedule measured, one a line."""
PAPER_HORIZON = 32
"""Moves of an episode in CuAsmRL's code."""
_WEIGHTED = (*MOVE_KINDS, *2 * ("move", "cluster"))
NEIGHBOURHOODS = {
    "paper": Neighbourhood(kinds=("move",), max_distance=1, memory_only=True, hot_share=0.0),
    "beyond": Neighbourhood(kinds=_WEIGHTED),
    **{f"without-{kind}": Neighbourhood(kinds=tuple(k for k in _WEIGHTED if k != kind)) for kind in MOVE_KINDS},
}
"""Moves are drawn three times as often as edits: in 28,000 schedules of seven kernels on an H200 such a draw
gained 1.6 times as much as an edit of control bits in the median, 0.8 to 5 times on single ones (docs/assembly-game.md)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One schedule that was measured.

    Attributes:
        number: 1 for the agent's first.
        parent: number of the entry from which `moves` lead to this one; 0 is the original.
    """

    number: int
    agent: str
    digest: str
    parent: int
    moves: tuple[AnyMove, ...]
    measurement: Measurement

    def to_json(self) -> dict[str, Any]:
        """Return the entry as one JSON object."""
        return {
            "number": self.number,
            "agent": self.agent,
            "digest": self.digest,
            "parent": self.parent,
            "moves": [move_to_json(move) for move in self.moves],
            "status": self.measurement.status,
            "cost": self.measurement.cost,
            "baseline": self.measurement.baseline,
            "detail": self.measurement.detail,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        """Return the entry that an object describes.

        Raises:
            KeyError, ValueError, UsageError: it spells none.
        """
        return cls(
            value["number"],
            value["agent"],
            value["digest"],
            value["parent"],
            tuple(move_from_json(move) for move in value["moves"]),
            Measurement(Status(value["status"]), value["cost"], value["baseline"], value["detail"]),
        )


class Budget:
    """Schedules that one agent may measure, and those it has measured.

    Args:
        backends: one for each GPU; a schedule goes to any one of them.
        schedules: number of schedules to measure, those already on disk included.
        run: where schedules are kept; those of this agent in it count as paid for. None keeps nothing.
        limit_s: seconds after which the budget counts as spent, too; None sets no limit.
        clock: seconds from any fixed point.

    Attributes:
        original: measurement of the kernel as it is; it costs no budget.
        entries: measured schedules, oldest first.
        stopped_by: `schedules` or `time` once something was refused.

    Raises:
        UsageError: the budget makes no sense, or there is no backend.
    """

    def __init__(
        self,
        kernel: Kernel,
        backends: Sequence[Backend],
        schedules: int,
        agent: str,
        run: RunDirectory | None = None,
        limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if schedules < 1 or not backends:
            raise UsageError(
                f"wanted a budget of at least one schedule and a backend, found {schedules} and {len(backends)}"
            )
        self.kernel = kernel
        self.schedules = schedules
        self.agent = agent
        self.entries: list[Entry] = []
        self.stopped_by: str | None = None
        self.name: str = backends[0].name
        self.unit: str = backends[0].unit
        self._run = run
        self.lanes = len(backends)
        """Number of schedules that may be measured at the same time."""
        self._free: queue.SimpleQueue[Backend] = queue.SimpleQueue()
        for backend in backends:
            self._free.put(backend)
        self._lock = threading.Lock()
        self._known: dict[str, Future[Measurement]] = {}
        self._asked: set[str] = set()
        self._clock = clock
        self._deadline = None if limit_s is None else clock() + limit_s
        original = Schedule(kernel)
        self._original_digest = schedule_digest(original)
        self.original = backends[0].measure(original)
        self._nodes: dict[tuple[int, AnyMove], int] = {}
        self._number_at: dict[int, int] = {0: 0}
        self._node_of: dict[int, int] = {0: 0}
        for entry in () if run is None else read_entries(run, agent):
            self._remember(entry.digest, entry.measurement)
            self.entries.append(entry)
            self._place(entry, self._node_of[entry.parent])
        self._taken = len(self.entries)

    @property
    def spent(self) -> int:
        """Schedules measured so far."""
        return len(self.entries)

    @property
    def asked(self) -> int:
        """Number of different schedules, the original aside, asked for since this budget was opened, paid for or not."""
        return len(self._asked)

    @property
    def spent_by(self) -> str | None:
        """Exhausted resource, `schedules` or `time`; None while another schedule may be measured."""
        if self._taken >= self.schedules:
            return "schedules"
        if self._deadline is not None and self._clock() >= self._deadline:
            return "time"
        return None

    def measure(self, schedule: Schedule) -> Measurement:
        """Return a schedule's measurement, and pay for it if it is new. The original is free.

        Raises:
            BudgetSpentError: it is new and there is no budget left.
        """
        digest = schedule_digest(schedule)
        if digest == self._original_digest:
            return self.original
        with self._lock:
            known = self._known.get(digest)
            if known is None:
                why = self.spent_by
                if why is not None:
                    self.stopped_by = why
                    raise BudgetSpentError(why)
                self._taken += 1
                mine: Future[Measurement] = Future()
                self._known[digest] = mine
            self._asked.add(digest)
        if known is not None:
            return known.result()
        try:
            result = self._measure(schedule)
        except BaseException as error:
            mine.set_exception(error)
            raise
        self._write(digest, schedule, result)
        mine.set_result(result)
        return result

    def measure_all(self, schedules: Sequence[Schedule]) -> list[Measurement]:
        """Measure several schedules side by side, in the order given.

        Raises:
            BudgetSpentError: there was not enough budget for all; those before it ended are on record.
        """
        if self.lanes == 1 or len(schedules) == 1:
            return [self.measure(schedule) for schedule in schedules]
        with ThreadPoolExecutor(self.lanes) as pool:
            futures = [pool.submit(self.measure, schedule) for schedule in schedules]
        return [future.result() for future in futures]

    def note(self, entry: Entry) -> None:
        """Take notice of a schedule that was measured now; nothing is done here."""

    def best(self, count: int = 1) -> list[Entry]:
        """Return the entries with the least cost that beat the original, best first."""
        good = [(relative, e) for e in self.entries if (relative := e.measurement.relative) is not None and relative < 1.0]
        return [entry for _, entry in sorted(good, key=lambda pair: (pair[0], pair[1].number))[:count]]

    def schedule_of(self, entry: Entry) -> Schedule:
        """Return an entry's schedule, all moves that lead to it from the original played anew."""
        path = [entry]
        while path[-1].parent:
            path.append(self.entries[path[-1].parent - 1])
        schedule = Schedule(self.kernel)
        for step in reversed(path):
            for move in step.moves:
                schedule.play(move)
        return schedule

    def _measure(self, schedule: Schedule) -> Measurement:
        backend = self._free.get()
        try:
            return backend.measure(schedule)
        finally:
            self._free.put(backend)

    def _remember(self, digest: str, measurement: Measurement) -> None:
        future: Future[Measurement] = Future()
        future.set_result(measurement)
        self._known[digest] = future

    def _write(self, digest: str, schedule: Schedule, measurement: Measurement) -> None:
        with self._lock:
            node, parent, played = 0, 0, 0
            for position, move in enumerate(schedule.history, 1):
                following = self._nodes.get((node, move))
                if following is None:
                    break
                node = following
                if node in self._number_at:
                    parent, played = self._number_at[node], position
            moves = tuple(schedule.history[played:])
            entry = Entry(len(self.entries) + 1, self.agent, digest, parent, moves, measurement)
            self.entries.append(entry)
            self._place(entry, self._node_of[parent])
            if self._run is not None:
                self._run.append_object(SCHEDULES, entry.to_json())
        self.note(entry)

    def _place(self, entry: Entry, node: int) -> None:
        """Remember which entry the moves played so far lead to, so that the next one need not repeat them."""
        for move in entry.moves:
            node = self._nodes.setdefault((node, move), len(self._nodes) + 1)
        self._number_at[node] = entry.number
        self._node_of[entry.number] = node


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Everything an agent plays with.

    Attributes:
        kernel_name: which kernel of `program`, when there are several.
        budget: measures schedules, and says how many are left.
        moves: `paper` for the swaps of memory instructions of CuAsmRL, `beyond` for moves of every kind.
        horizon: moves of an episode, for agents that play episodes.
        directory: folder for an agent's own files; None keeps none.
        start: moves from the original to the schedule where every search begins; PPO begins at the original.
        network_device: device of PPO's network, as torch names it.
    """

    program: Program
    kernel_name: str | None
    budget: Budget
    seed: int = 0
    moves: str = "beyond"
    horizon: int = PAPER_HORIZON
    directory: Path | None = None
    start: tuple[AnyMove, ...] = ()
    network_device: str = "cpu"

    @property
    def neighbourhood(self) -> Neighbourhood:
        """Moves that searches without a numbering of actions may make."""
        return NEIGHBOURHOODS[self.moves]

    def schedule(self) -> Schedule:
        """Return the schedule at which a search begins."""
        schedule = Schedule(self.program.kernel(self.kernel_name))
        for move in self.start:
            schedule.play(move)
        return schedule


def read_entries(run: RunDirectory, agent: str | None = None) -> Iterator[Entry]:
    """Yield the whole entries of a run, of one agent or of all; a torn line is a schedule to measure again."""
    for values in read_objects(run.path / SCHEDULES):
        try:
            entry = Entry.from_json(values)
        except (ValueError, KeyError, TypeError, UsageError):
            continue
        if agent is None or entry.agent == agent:
            yield entry
