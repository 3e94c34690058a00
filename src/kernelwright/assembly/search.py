"""Tunes the schedule of one kernel: plays, measures again, proves, and explains the winner.

A search ends with a maximum over noise. So its best schedules are weighed side by side, the most promising are
measured again in fresh processes, and a winner is only one whose interval's lower end is above 1 + the A/A
noise floor, and which the checker proves to be a legal re-schedule.

A run directory holds

    config.json          what was asked, and on which machine code
    environment.json     where it ran
    schedules.jsonl      every schedule measured: agent, moves, digest, cost, baseline, status
    times.json           how long each agent has played
    weighed.json         the best of each search, timed side by side once more: which ones to confirm
    confirmations.jsonl  every re-measurement in fresh processes
    winner.json          the winner's moves, what each is worth, its listing before and after
    summary.json         the outcome
    report.html          all of it as one page
    original.cubin       what was played on
    target.json, tuned.cubin   the winner, for `kernelwright sass deploy`; only when it was measured on a GPU
    simulated.cubin            the winner of a model, which is no claim about any GPU
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelwright.assembly.agents import AGENTS, play, require_agent
from kernelwright.assembly.budget import NEIGHBOURHOODS, PAPER_HORIZON, AgentContext, Budget, Entry
from kernelwright.assembly.explanation import lessons, shortest_moves, side_by_side
from kernelwright.assembly.testbed import Game
from kernelwright.deploy.deploy import Winner, write_winner
from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.gpu import disassemble
from kernelwright.judge.schedules import Confirmation
from kernelwright.records import RunDirectory, read_objects
from kernelwright.report.moves import KIND, write_moves_report
from kernelwright.sass import AnyMove, Schedule, check_report, move_to_json
from kernelwright.sass.simulator import ideal_cycles, simulate
from kernelwright.version import __version__

WEIGHED = 12
"""Best schedules of each agent's search that are weighed side by side before any is confirmed; our choice."""
CONFIRMATIONS_TRIED = 2
"""Schedules of each agent to confirm in fresh processes; our choice."""
_CLAIMED = ("kind", "original_sha256", "kernel", "agents", "seed", "moves", "horizon", "backend", "start")
_CONFIRMATIONS = "confirmations.jsonl"
_WEIGHED, _TIMES = "weighed.json", "times.json"
_NOTE_EVERY_S = 2.0
_NUMBERS = ("speedup", "low", "high", "noise_floor", "baseline", "wrong", "processes")


@dataclass(frozen=True, slots=True)
class GameSettings:
    """Settings of a search; `AgentContext` describes those that agents share.

    Attributes:
        agents: names of agents; each has the whole budget to itself, so that they can be compared.
        budget: schedules that each agent may measure, those of earlier runs in the same directory included.
        limit_s: seconds for each agent; None sets no limit.
        learn: whether the winner's moves are left out one by one and measured.
        start: moves from the original to the schedule where the search begins, such as an earlier winner's; not for PPO.
        network_device: device of PPO's network: the processor as in CuAsmRL's code, or a GPU, where it works only while
            no
        process with the same `KERNELWRIGHT_GPU_TURNS` times anything.
    """

    agents: tuple[str, ...] = ("ppo",)
    budget: int = 1000
    seed: int = 0
    moves: str = "beyond"
    horizon: int = PAPER_HORIZON
    limit_s: float | None = None
    learn: bool = True
    start: tuple[AnyMove, ...] = ()
    network_device: str = "cpu"

    def __post_init__(self) -> None:
        if self.start and "ppo" in self.agents:
            raise UsageError("wanted agents that can begin at a given schedule, found ppo, which begins at the original")
        if not self.agents or len(set(self.agents)) != len(self.agents) or not set(self.agents) <= set(AGENTS):
            raise UsageError(f"wanted distinct agents out of {', '.join(AGENTS)}, found {', '.join(self.agents)}")
        if self.moves not in NEIGHBOURHOODS:
            raise UsageError(f"wanted moves out of {', '.join(NEIGHBOURHOODS)}, found {self.moves!r}")
        if self.budget < 1 or self.horizon < 1:
            raise UsageError(f"wanted a budget and a horizon of at least 1, found {self.budget} and {self.horizon}")


@dataclass(frozen=True, slots=True)
class AssemblyResult:
    """Outcome of tuning one kernel."""

    run: Path
    summary: dict[str, Any]
    """Content of `summary.json`."""
    best: Confirmation | None = None
    """The winner's re-measurement; None where no schedule held."""
    agent: str | None = None
    """Agent that found it."""
    tuned: bytes | None = None
    """The winner, proven to be a legal re-schedule."""


Log = Callable[[str], None]


def optimize_kernel(
    game: Game, *, out: Path, settings: GameSettings | None = None, log: Log | None = None
) -> AssemblyResult:
    """Tune one kernel's schedule; run again with the same run directory `out`, it goes on where it was.

    Raises:
        UsageError: `out` belongs to another run, or nothing can be moved.
        InfrastructureError: this machine cannot measure, or the checker refuses what the game produced.
    """
    settings = settings or GameSettings()
    for agent in settings.agents:
        require_agent(agent)
    if not Schedule(game.kernel).movable_slots:
        raise UsageError(f"wanted something to move in {game.kernel.name}, found nothing; choose another kernel")
    search = _Search(RunDirectory(out), game, settings, log or _silent)
    search.claim()
    budgets = {agent: search.play(agent) for agent in settings.agents}
    tried = search.confirm(budgets)
    chosen = search.proven_winner(tried)
    summary = search.summary(budgets, tried, chosen)
    if chosen is not None:
        search.write_winner(chosen)
    search.run.write_json("summary.json", summary)
    write_moves_report(search.run, search.run.path / "report.html")
    if chosen is None:
        return AssemblyResult(search.run.path, summary)
    return AssemblyResult(search.run.path, summary, chosen.verdict, chosen.agent, chosen.schedule.cubin(game.program))


@dataclass(frozen=True, slots=True)
class _Finalist:
    agent: str
    entry: Entry
    schedule: Schedule
    verdict: Confirmation


@dataclass(frozen=True, slots=True)
class _Search:
    """One run of `optimize_kernel`, step by step."""

    run: RunDirectory
    game: Game
    settings: GameSettings
    log: Log

    def claim(self) -> None:
        """Write the configuration of this run, or check that the directory is of the same run."""
        game, settings = self.game, self.settings
        image = game.program.image
        config = {
            "kind": KIND,
            "name": game.name,
            "kernel": game.kernel.name,
            "original_sha256": hashlib.sha256(image.data).hexdigest(),
            "architecture": image.architecture,
            "agents": list(settings.agents),
            "budget": settings.budget,
            "seed": settings.seed,
            "moves": settings.moves,
            "horizon": settings.horizon,
            "limit_s": settings.limit_s,
            "start": [move_to_json(move) for move in settings.start] or None,
            **self._measured_by(),
            "kernelwright": __version__,
        }
        self.run.claim(config, same=_CLAIMED, device="cpu" if game.testbed.is_simulated else "cuda")
        self.run.write_bytes("original.cubin", image.data)

    def _measured_by(self) -> dict[str, Any]:
        backend = self.game.testbed.backends[0]
        return {"backend": backend.name, "unit": backend.unit, "simulated": self.game.testbed.is_simulated}

    def play(self, agent: str) -> Budget:
        """Let one agent play until its budget is spent."""
        game, settings = self.game, self.settings
        self.log(f"{agent} plays for {settings.budget} schedules")
        budget = _WatchedBudget(self, agent)
        if budget.spent:
            self.log(f"{agent} resumes after {budget.spent} schedules")
        if budget.spent_by is None:
            game.testbed.begin_search()
            directory = self.run.path / agent
            if agent == "ppo":
                directory.mkdir(exist_ok=True)
            context = AgentContext(
                game.program, game.kernel.name, budget, settings.seed, settings.moves, settings.horizon, directory,
                settings.start, settings.network_device,
            )  # fmt: skip
            play(agent, context)
            budget.note_time()
        return budget

    def confirm(self, budgets: dict[str, Budget]) -> list[_Finalist]:
        """Measure the most promising schedules of every agent again, and return them with their verdicts."""
        known = {line["digest"]: read_confirmation(line) for line in read_objects(self.run.path / _CONFIRMATIONS)}
        found = [
            (agent, entry, budget.schedule_of(entry))
            for agent, budget in budgets.items()
            for entry in self._most_promising(agent, budget)
        ]
        # Two agents may have found the same schedule; it is measured once.
        pending = list({one[1].digest: one for one in found if one[1].digest not in known}.values())
        if pending:
            self.log(f"confirming {len(pending)} schedules in fresh processes")
            verdicts = self.game.testbed.confirm([schedule for _, _, schedule in pending])
            for (agent, entry, _), verdict in zip(pending, verdicts, strict=True):
                known[entry.digest] = verdict
                line = {"agent": agent, "number": entry.number, "digest": entry.digest}
                self.run.append_object(_CONFIRMATIONS, line | numbers_and_ratios_of(verdict))
        return [_Finalist(agent, entry, schedule, known[entry.digest]) for agent, entry, schedule in found]

    def _most_promising(self, agent: str, budget: Budget) -> list[Entry]:
        """Return the schedules to confirm: the best of the search that look faster when weighed again."""
        noted = self.run.read_json(_WEIGHED) or {}
        # A search that its time limit ended may have gone on since.
        if noted.get(agent, {}).get("schedules") != budget.spent:
            best = budget.best(WEIGHED)
            self.log(f"weighing the best {len(best)} schedules of {agent}")
            found = [(entry.number, self.game.testbed.weigh(budget.schedule_of(entry)).speedup) for entry in best]
            seemed = [[number, speedup] for number, speedup in found if speedup is not None and speedup > 1.0]
            noted[agent] = {"schedules": budget.spent, "best": seemed}
            self.run.write_json(_WEIGHED, noted)
        ranked = sorted(noted[agent]["best"], key=lambda pair: (-pair[1], pair[0]))
        return [budget.entries[number - 1] for number, _ in ranked[:CONFIRMATIONS_TRIED]]

    def proven_winner(self, tried: Sequence[_Finalist]) -> _Finalist | None:
        """Return the best that held, proven to be a legal re-schedule."""
        chosen = _best_held(tried)
        if chosen is None:
            return None
        program = self.game.program
        report = check_report(program.image.data, chosen.schedule.cubin(program), disassemble)
        if not report.legal:
            raise InfrastructureError(
                f"wanted a legal schedule from legal moves, found {report.violations[0]}; "
                f"keep {self.run.path} and report this"
            )
        return chosen

    def summary(self, budgets: dict[str, Budget], tried: Sequence[_Finalist], chosen: _Finalist | None) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
        times = self.run.read_json(_TIMES) or {}
        statuses = Counter(str(entry.measurement.status) for budget in budgets.values() for entry in budget.entries)
        schedules = sum(budget.spent for budget in budgets.values())
        seconds = sum(times.get(agent, {}).get("seconds", 0.0) for agent in budgets)
        architecture = self.game.program.image.architecture
        bound = ideal_cycles(self.game.kernel, architecture)
        cycles = simulate(Schedule(self.game.kernel), architecture)
        return {
            "kind": KIND,
            "name": self.game.name,
            "kernel": self.game.kernel.name,
            **self._measured_by(),
            "best": None
            if chosen is None
            else {"agent": chosen.agent, "digest": chosen.entry.digest, **numbers_of(chosen.verdict)},
            "agents": {
                agent: _agent_summary(budget, [one for one in tried if one.agent == agent])
                for agent, budget in budgets.items()
            },
            "statuses": dict(statuses),
            "wrong_outputs": statuses["wrong-output"],
            "schedules_run": schedules,
            "schedules_per_second": schedules / seconds if seconds > 0 else None,
            "budget": self.settings.budget,
            "simulated_bound": {
                "simulated_cycles": cycles,
                "no_schedule_below": bound.cycles,
                "gain_at_most": cycles / bound.cycles,
                "limited_by": bound.limited_by,
                "limits": bound.limits,
            },
            "measured_on": self.game.testbed.describe(),
        }

    def write_winner(self, chosen: _Finalist) -> None:
        """Write the winner's cubin, moves and listing; each move's worth is measured once."""
        testbed, target = self.game.testbed, self.game.target
        moves = shortest_moves(chosen.schedule)
        earlier = self.run.read_json("winner.json")
        worth: list[dict[str, Any]] | None = None
        if earlier is not None and earlier.get("digest") == chosen.entry.digest:
            worth = earlier["lessons"]
        if worth is None and self.settings.learn:
            self.log("leaving the winner's moves out one by one")
            worth = lessons(chosen.schedule, lambda schedule: numbers_of(testbed.weigh(schedule)))
        self.run.write_json(
            "winner.json",
            {
                "agent": chosen.agent,
                "digest": chosen.entry.digest,
                "verdict": numbers_of(chosen.verdict),
                "moves": moves,
                "moved": chosen.schedule.moved,
                "lessons": worth,
                "blocks": side_by_side(chosen.schedule),
            },
        )
        tuned = chosen.schedule.cubin(self.game.program)
        if testbed.is_simulated or target is None:
            self.run.write_bytes("simulated.cubin", tuned)
            return
        verdict = numbers_of(chosen.verdict)
        provenance = {"run": self.run.path.name, "agent": chosen.agent, "moves": moves, "speedup": verdict}
        write_winner(self.run.path, Winner(target, tuned, provenance))


class _WatchedBudget(Budget):
    """A budget that says what its agent finds, and keeps on disk how long it has played, also for a run that is killed."""

    def __init__(self, search: _Search, agent: str) -> None:
        self._search = search
        self._best = 1.0
        self._begin = self._noted = time.monotonic()
        self._earlier_s = float((search.run.read_json(_TIMES) or {}).get(agent, {}).get("seconds", 0.0))
        game, settings = search.game, search.settings
        limit_s = None if settings.limit_s is None else max(0.0, settings.limit_s - self._earlier_s)
        super().__init__(game.kernel, game.testbed.backends, settings.budget, agent, search.run, limit_s)

    def note(self, entry: Entry) -> None:
        """Write the time so far, at most every other second, and tell of a new best."""
        if time.monotonic() - self._noted >= _NOTE_EVERY_S:
            self.note_time()
        relative = entry.measurement.relative
        if relative is not None and relative < self._best:
            self._best = relative
            found = f"{1 / relative:.4f}x in the search, not confirmed yet"
            self._search.log(f"{self.agent} {entry.number}/{self.schedules}: {found}")

    def note_time(self) -> None:
        """Write the time that the agent has played."""
        self._noted = time.monotonic()
        times = self._search.run.read_json(_TIMES) or {}
        times[self.agent] = {"seconds": self._earlier_s + self._noted - self._begin, "schedules": self.spent}
        self._search.run.write_json(_TIMES, times)


def _silent(message: str) -> None:
    """Log nothing."""


def _best_held(tried: Sequence[_Finalist]) -> _Finalist | None:
    """Return the one with the highest lower end among those that are improvements."""
    held = [one for one in tried if one.verdict.is_improvement]
    return max(held, key=lambda one: one.verdict.low or 0.0, default=None)


def _agent_summary(budget: Budget, tried: Sequence[_Finalist]) -> dict[str, Any]:
    best = budget.best(1)
    held = _best_held(tried)
    relative = best[0].measurement.relative if best else None
    return {
        "schedules": budget.spent,
        "stopped_by": budget.stopped_by or budget.spent_by or "exhausted",
        "best_in_search": None if relative is None else 1.0 / relative,
        "confirmed": None if held is None else {"number": held.entry.number, **numbers_of(held.verdict)},
        "tried": len(tried),
    }


def numbers_of(confirmation: Confirmation) -> dict[str, Any]:
    """The numbers of a re-measurement as one JSON object."""
    numbers = {name: getattr(confirmation, name) for name in _NUMBERS}
    return {**numbers, "is_improvement": confirmation.is_improvement}


def numbers_and_ratios_of(confirmation: Confirmation) -> dict[str, Any]:
    """Its numbers and what they follow from, as one JSON object."""
    ratios = {"log_ratios": confirmation.log_ratios, "null_log_ratios": confirmation.null_log_ratios}
    return {**numbers_of(confirmation), **ratios}


def read_confirmation(values: Mapping[str, Any]) -> Confirmation:
    """The re-measurement whose `numbers_of` these are."""
    return Confirmation(*(values.get(name) for name in _NUMBERS))  # type: ignore[arg-type]
