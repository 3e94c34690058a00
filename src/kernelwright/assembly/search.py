"""Tuning the schedule of one kernel: play, re-measure, prove, say what was learnt.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kernelwright
from kernelwright.assembly.agents import AGENTS, NEIGHBOURHOODS, PAPER_HORIZON, Table, agent_named, play
from kernelwright.assembly.arena import Arena, Verdict
from kernelwright.assembly.budget import Entry, Ledger, append_line
from kernelwright.assembly.explanation import lessons, shortest_moves, side_by_side
from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.gpu import disassemble
from kernelwright.records import RunDirectory, read_objects
from kernelwright.report.moves import KIND, write_moves_report
from kernelwright.sass import AnyMove, Program, Schedule, check_report, move_to_json
from kernelwright.sass.simulator import ideal_cycles, simulate

if TYPE_CHECKING:
    from kernelwright.gpu.launch_spec import Target

WEIGHED = 12
"""Best schedules of each agent's search that are weighed side by side before any is confirmed; our choice."""
CONFIRMATIONS_TRIED = 2
"""Schedules of each agent to confirm in fresh processes; our choice."""
_CLAIMED = ("kind", "original_sha256", "kernel", "agents", "seed", "moves", "horizon", "backend", "start")
_SCHEDULES, _CONFIRMATIONS = "schedules.jsonl", "confirmations.jsonl"
_WEIGHED, _TIMES = "weighed.json", "times.json"
_NOTE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class GameSettings:
    """How a kernel is tuned.

    Attributes:
        agents: who plays; each has the whole budget to itself, so that they can be compared.
        budget: schedules that each agent may measure, those of earlier runs in the same directory included.
        seed: where chance starts.
        moves: `paper` for CuAsmRL's swaps of memory instructions, `beyond` for moves of every kind.
        horizon: moves of an episode, for agents that play episodes.
        limit_s: seconds for each agent; None sets no limit.
        learn: whether the winner's moves are left out one by one and measured.
        start: moves from the original to the schedule where the search begins, such as an earlier winner's; not for PPO.
        network_device: where PPO's network is, as torch names devices: the processor as in CuAsmRL's code, or a GPU, where
            it works only while this process times nothing, nor another one that names the same `KERNELWRIGHT_GPU_TURNS`.
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
    """What tuning one kernel gave.

    Attributes:
        run: the run directory.
        best: the re-measurement of the winner; None when nothing held.
        agent: who found it; None when nothing held.
        summary: what `summary.json` holds.
    """

    run: Path
    best: Verdict | None
    agent: str | None
    summary: dict[str, Any]


Tell = Callable[[str], None]


def optimize_kernel(
    program: Program,
    arena: Arena,
    *,
    out: Path,
    name: str,
    settings: GameSettings | None = None,
    kernel_name: str | None = None,
    target: Target | None = None,
    tell: Tell | None = None,
) -> AssemblyResult:
    """Tune one kernel's schedule; run again with the same `out`, it goes on where it was.

    Args:
        program: the cubin.
        arena: where schedules are measured.
        out: the run directory.
        name: of the kernel, for people.
        settings: how it is tuned.
        kernel_name: which kernel of the cubin, when there are several.
        target: how the kernel is launched, for deploying the winner; None with a model.
        tell: told about progress.

    Raises:
        UsageError: `out` belongs to another run, or nothing can be moved.
        InfrastructureError: this machine cannot measure, or the checker refuses what the game produced.
    """
    settings = settings or GameSettings()
    say = tell or (lambda message: None)
    for agent in settings.agents:
        agent_named(agent)
    kernel = program.kernel(kernel_name)
    if not Schedule(kernel).movable_slots:
        raise UsageError(f"wanted something to move in {kernel.name}, found nothing; choose another kernel")
    run = RunDirectory(out)
    _claim(run, program, arena, name, kernel.name, settings)
    ledgers: dict[str, Ledger] = {}
    for agent in settings.agents:
        say(f"{agent} plays for {settings.budget} schedules")
        ledgers[agent] = _let_play(run, program, arena, agent, kernel.name, settings, say)
    tried = _confirm(run, arena, ledgers, say)
    chosen = _proven_winner(run, program, tried)
    summary = _summary(run, program, arena, name, kernel.name, settings, ledgers, tried, chosen)
    if chosen is not None:
        _write_winner(run, program, arena, chosen, settings, target, say)
    run.write_json("summary.json", summary)
    write_moves_report(run, run.path / "report.html")
    if chosen is None:
        return AssemblyResult(run.path, None, None, summary)
    return AssemblyResult(run.path, chosen.verdict, chosen.agent, summary)


@dataclass(frozen=True, slots=True)
class _Candidate:
    agent: str
    entry: Entry
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class _Chosen(_Candidate):
    verdict: Verdict


def _claim(run: RunDirectory, program: Program, arena: Arena, name: str, kernel: str, settings: GameSettings) -> None:
    """Write what this run is, or see that the directory is of the same run."""
    config = {
        "kind": KIND,
        "name": name,
        "kernel": kernel,
        "original_sha256": hashlib.sha256(program.image.data).hexdigest(),
        "architecture": program.image.architecture,
        "agents": list(settings.agents),
        "budget": settings.budget,
        "seed": settings.seed,
        "moves": settings.moves,
        "horizon": settings.horizon,
        "limit_s": settings.limit_s,
        "start": [move_to_json(move) for move in settings.start] or None,
        "backend": arena.backends[0].name,
        "unit": arena.backends[0].unit,
        "simulated": arena.is_simulated,
        "kernelwright": kernelwright.__version__,
    }
    run.claim(config, same=_CLAIMED, device="cpu" if arena.is_simulated else "cuda")
    run.write_bytes("original.cubin", program.image.data)


def _let_play(
    run: RunDirectory, program: Program, arena: Arena, agent: str, kernel: str, settings: GameSettings, say: Tell
) -> Ledger:
    best = 1.0
    watch = _Stopwatch(run, agent)

    def see(entry: Entry) -> None:
        nonlocal best
        watch.note(entry.number)
        relative = entry.measurement.relative
        if relative is not None and relative < best:
            best = relative
            say(f"{agent} {entry.number}/{settings.budget}: {1 / relative:.4f}x in the search, not confirmed yet")

    limit_s = None if settings.limit_s is None else max(0.0, settings.limit_s - watch.earlier_s)
    path = run.path / _SCHEDULES
    ledger = Ledger(program.kernel(kernel), arena.backends, settings.budget, agent, path, limit_s=limit_s, on_entry=see)
    if ledger.spent:
        say(f"{agent} resumes after {ledger.spent} schedules")
    if ledger.spent_by is None:
        arena.begin_search()
        directory = run.path / agent
        if agent == "ppo":
            directory.mkdir(exist_ok=True)
        table = Table(
            program, kernel, ledger, settings.seed, settings.moves, settings.horizon, directory, settings.start,
            settings.network_device,
        )  # fmt: skip
        play(agent, table)
        watch.note(ledger.spent, now=True)
    return ledger


class _Stopwatch:
    """Keeps on disk how long an agent has played, so that a run which is killed still knows."""

    def __init__(self, run: RunDirectory, agent: str) -> None:
        self._run = run
        self._agent = agent
        self._begin = self._noted = time.monotonic()
        self.earlier_s = float((run.read_json(_TIMES) or {}).get(agent, {}).get("seconds", 0.0))

    def note(self, schedules: int, now: bool = False) -> None:
        """Write the time so far, at most every other second unless it must be `now`."""
        clock = time.monotonic()
        if not now and clock - self._noted < _NOTE_EVERY_S:
            return
        self._noted = clock
        times = self._run.read_json(_TIMES) or {}
        times[self._agent] = {"seconds": self.earlier_s + clock - self._begin, "schedules": schedules}
        self._run.write_json(_TIMES, times)


def _confirm(run: RunDirectory, arena: Arena, ledgers: dict[str, Ledger], say: Tell) -> list[_Chosen]:
    """Measure the most promising schedules of every agent again, and return them with what that said."""
    known = _known_confirmations(run)
    found = [
        _Candidate(agent, entry, ledger.schedule_of(entry))
        for agent, ledger in ledgers.items()
        for entry in _most_promising(run, arena, agent, ledger, say)
    ]
    # Two agents may have found the same schedule; it is measured once.
    owed = list({candidate.entry.digest: candidate for candidate in found if candidate.entry.digest not in known}.values())
    if owed:
        say(f"confirming {len(owed)} schedules in fresh processes")
        for candidate, verdict in zip(owed, arena.confirm([c.schedule for c in owed]), strict=True):
            known[candidate.entry.digest] = verdict
            line = {"agent": candidate.agent, "number": candidate.entry.number, "digest": candidate.entry.digest}
            append_line(run.path / _CONFIRMATIONS, line | verdict.to_json())
    return [_Chosen(c.agent, c.entry, c.schedule, known[c.entry.digest]) for c in found]


def _best_held(tried: Sequence[_Chosen]) -> _Chosen | None:
    """Return the one with the highest lower end among those that are gains."""
    held = [candidate for candidate in tried if candidate.verdict.is_gain]
    return max(held, key=lambda candidate: candidate.verdict.low or 0.0, default=None)


def _proven_winner(run: RunDirectory, program: Program, tried: Sequence[_Chosen]) -> _Chosen | None:
    """Return the best that held, proven to be a legal re-schedule."""
    chosen = _best_held(tried)
    if chosen is None:
        return None
    report = check_report(program.image.data, chosen.schedule.cubin(program), disassemble)
    if not report.legal:
        raise InfrastructureError(
            f"wanted a legal schedule from legal moves, found {report.violations[0]}; keep {run.path} and report this"
        )
    return chosen


def _most_promising(run: RunDirectory, arena: Arena, agent: str, ledger: Ledger, say: Tell) -> list[Entry]:
    """Return the schedules to confirm: those that still look like a gain when the best of the search are weighed."""
    noted = run.read_json(_WEIGHED) or {}
    # A search that its time limit ended may have gone on since.
    if noted.get(agent, {}).get("schedules") != ledger.spent:
        best = ledger.best(WEIGHED)
        say(f"weighing the best {len(best)} schedules of {agent}")
        found = [(entry.number, arena.weigh(ledger.schedule_of(entry)).speedup) for entry in best]
        seemed = [[number, speedup] for number, speedup in found if speedup is not None and speedup > 1.0]
        noted[agent] = {"schedules": ledger.spent, "best": seemed}
        run.write_json(_WEIGHED, noted)
    ranked = sorted(noted[agent]["best"], key=lambda pair: (-pair[1], pair[0]))
    return [ledger.entries[number - 1] for number, _ in ranked[:CONFIRMATIONS_TRIED]]


def _known_confirmations(run: RunDirectory) -> dict[str, Verdict]:
    found = {}
    for line in read_objects(run.path / _CONFIRMATIONS):
        values: dict[str, Any] = {name: line.get(name) for name in Verdict.__slots__}
        found[line["digest"]] = Verdict(**values)
    return found


def _summary(
    run: RunDirectory,
    program: Program,
    arena: Arena,
    name: str,
    kernel: str,
    settings: GameSettings,
    ledgers: dict[str, Ledger],
    tried: Sequence[_Chosen],
    chosen: _Chosen | None,
) -> dict[str, Any]:
    times = run.read_json(_TIMES) or {}
    statuses: dict[str, int] = {}
    for ledger in ledgers.values():
        for entry in ledger.entries:
            statuses[entry.measurement.status] = statuses.get(entry.measurement.status, 0) + 1
    schedules = sum(ledger.spent for ledger in ledgers.values())
    seconds = sum(times.get(agent, {}).get("seconds", 0.0) for agent in ledgers)
    architecture = program.image.architecture
    original = Schedule(program.kernel(kernel))
    bound = ideal_cycles(original.kernel, architecture)
    cycles = simulate(original, architecture)
    return {
        "kind": KIND,
        "name": name,
        "kernel": kernel,
        "backend": arena.backends[0].name,
        "unit": arena.backends[0].unit,
        "simulated": arena.is_simulated,
        "best": None
        if chosen is None
        else {"agent": chosen.agent, "digest": chosen.entry.digest, **chosen.verdict.to_json()},
        "agents": {
            agent: _agent_summary(ledger, [candidate for candidate in tried if candidate.agent == agent])
            for agent, ledger in ledgers.items()
        },
        "statuses": statuses,
        "wrong_outputs": statuses.get("wrong-output", 0),
        "schedules_run": schedules,
        "schedules_per_second": schedules / seconds if seconds > 0 else None,
        "budget": settings.budget,
        "simulated_bound": {
            "simulated_cycles": cycles,
            "no_schedule_below": bound.cycles,
            "gain_at_most": cycles / bound.cycles,
            "limited_by": bound.limited_by,
            "limits": bound.limits,
        },
        "measured_on": arena.describe(),
    }


def _agent_summary(ledger: Ledger, tried: Sequence[_Chosen]) -> dict[str, Any]:
    best = ledger.best(1)
    held = _best_held(tried)
    relative = best[0].measurement.relative if best else None
    return {
        "schedules": ledger.spent,
        "stopped_by": ledger.stopped_by or ledger.spent_by or "exhausted",
        "best_in_search": None if relative is None else 1.0 / relative,
        "confirmed": None if held is None else {"number": held.entry.number, **held.verdict.to_json()},
        "tried": len(tried),
    }


def _write_winner(
    run: RunDirectory,
    program: Program,
    arena: Arena,
    chosen: _Chosen,
    settings: GameSettings,
    target: Target | None,
    say: Tell,
) -> None:
    """Write the winner's cubin and what it is made of; what each move is worth is measured once."""
    moves = shortest_moves(chosen.schedule)
    earlier = run.read_json("winner.json")
    worth: list[dict[str, Any]] | None = None
    if earlier is not None and earlier.get("digest") == chosen.entry.digest:
        worth = earlier["lessons"]
    if worth is None and settings.learn:
        say("leaving the winner's moves out one by one")
        worth = lessons(chosen.schedule, lambda schedule: arena.weigh(schedule).to_json())
    run.write_json(
        "winner.json",
        {
            "agent": chosen.agent,
            "digest": chosen.entry.digest,
            "verdict": chosen.verdict.to_json(),
            "moves": moves,
            "moved": chosen.schedule.moved,
            "lessons": worth,
            "blocks": side_by_side(chosen.schedule),
        },
    )
    tuned = chosen.schedule.cubin(program)
    if arena.is_simulated or target is None:
        run.write_bytes("simulated.cubin", tuned)
        return
    from kernelwright.deploy.deploy import Winner, write_winner

    provenance = {"run": run.path.name, "agent": chosen.agent, "moves": moves, "speedup": chosen.verdict.to_json()}
    write_winner(run.path, Winner(target, tuned, provenance))
