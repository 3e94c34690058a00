"""Plays the assembly game by search, and gives all agents one interface; PPO is in `kernelwright.assembly.ppo`.

An agent plays until its budget is spent. What it does follows from its seed and the costs alone, so a run that is repeated
on the same records repeats itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from kernelwright.assembly.context import AgentContext
from kernelwright.errors import BudgetSpentError, UsageError
from kernelwright.sass import AnyMove, Schedule
from kernelwright.sass.scheduling.sweeps import play_sweep
from kernelwright.sass.simulator import simulate

PAPER_TEMPERATURE = 1.0
PAPER_COOLING = 0.003
PAPER_LAST_TEMPERATURE = 0.05
"""Start, share lost a step and end of the temperature in CuAsmRL's code for simulated annealing."""
_PERCENT_PER_DEGREE = 0.2
"""Worth of a temperature of 1 in percent of the original's cost. Our choice: about what one good move gains."""
_IDLE_ROUNDS = 256
"""Rounds without a new schedule before a search gives up: the space may be exhausted. Schedules that an interrupted run paid
for are new to the one that goes on."""


Agent = Callable[[AgentContext], None]
"""Plays until nothing more comes to its mind, or ordinarily until `BudgetSpentError`."""


def play(name: str, context: AgentContext) -> None:
    """Let the agent of this name play until its budget is spent.

    Raises:
        UsageError: there is no such agent.
        InfrastructureError: the agent needs a package that is not installed.
    """
    agent = agent_named(name)
    with contextlib.suppress(BudgetSpentError):
        agent(context)


def agent_named(name: str) -> Agent:
    """Return the agent of this name.

    Raises:
        UsageError: there is none.
        InfrastructureError: it needs a package that is not installed.
    """
    if name == "ppo":
        from kernelwright.assembly.ppo import require_ppo_packages

        require_ppo_packages()
        return _play_ppo
    if name not in _SEARCHES:
        raise UsageError(f"wanted an agent out of {', '.join(AGENTS)}, found {name!r}")
    return _SEARCHES[name]


def _play_ppo(context: AgentContext) -> None:
    from kernelwright.assembly.ppo import PpoConfig, train

    train(context, PpoConfig(device=context.network_device))


@dataclass(slots=True)
class _Chain:
    """One of several searches side by side, with randomness of its own."""

    rng: random.Random
    schedule: Schedule
    relative: float = 1.0
    misses: int = 0
    proposed: int = 0
    is_guided: bool = False


def _chains(context: AgentContext) -> list[_Chain]:
    return [_Chain(random.Random(f"{context.seed}/{lane}"), context.schedule()) for lane in range(context.budget.lanes)]


def play_randomly(context: AgentContext) -> None:
    """Episodes of random legal moves from the start on, every schedule on the way measured."""
    chains = _chains(context)
    idle = 0
    while idle < _IDLE_ROUNDS:
        before = context.budget.asked
        for chain in chains:
            move = None
            if len(chain.schedule.history) - len(context.start) < context.horizon:
                move = context.neighbourhood.draw(chain.schedule, chain.rng)
            if move is None:
                chain.schedule = context.schedule()
                move = context.neighbourhood.draw(chain.schedule, chain.rng)
            if move is None:
                return
            chain.schedule.play(move)
        context.budget.measure_all([chain.schedule for chain in chains])
        idle = 0 if context.budget.asked > before else idle + 1


def climb(context: AgentContext) -> None:
    """Hill climbing: keep a random move if the schedule is cheaper for it, take it back otherwise.

    After `_PATIENCE` moves in vain, some more are played without looking at the cost.
    """
    _walk(context, _is_cheaper, kicks=True)


def _is_cheaper(chain: _Chain, relative: float) -> bool:
    return relative < chain.relative


def _play_one(context: AgentContext, chain: _Chain) -> int:
    """Play a random move and return 1, or 0 where there is none."""
    move = context.neighbourhood.draw(chain.schedule, chain.rng)
    if move is None:
        return 0
    chain.schedule.play(move)
    return 1


def climb_guided(context: AgentContext) -> None:
    """Hill climbing that often plays the cheapest of several random moves by a model, the simulated issue.

    The model costs no budget, and only measurements decide: also how often the model is asked, since on some kernels it
    knows better than chance and on others worse.
    """
    architecture = context.program.image.architecture
    # Kept and tried moves of both origins, as if one of two had been kept before any was tried.
    kept, tried = {True: 1, False: 1}, {True: 2, False: 2}

    def judge(chain: _Chain, relative: float) -> bool:
        better = relative < chain.relative
        kept[chain.is_guided] += better
        tried[chain.is_guided] += 1
        return better

    def propose(chain: _Chain) -> int:
        guided, random_rate = kept[True] / tried[True], kept[False] / tried[False]
        share = guided / (guided + random_rate)
        chain.is_guided = chain.rng.random() < min(max(share, _LEAST_SHARE), 1.0 - _LEAST_SHARE)
        if not chain.is_guided:
            return _play_one(context, chain)
        drawn = (context.neighbourhood.draw(chain.schedule, chain.rng) for _ in range(_GUIDED_CHOICES))
        moves = list(dict.fromkeys(move for move in drawn if move is not None))
        if not moves:
            return 0
        chain.schedule.play(min(moves, key=lambda move: _simulated(chain.schedule, move, architecture)))
        return 1

    _walk(context, judge, kicks=True, propose=propose)


def climb_in_sweeps(context: AgentContext) -> None:
    """Hill climbing in which every other proposal treats a stretch of like instructions alike; see `play_sweep`.

    A sweep is several moves and one schedule of the budget. CuAsmRL's game has none, so with its moves this is `climb`.
    """

    def propose(chain: _Chain) -> int:
        played = 0
        if context.moves == "beyond" and chain.rng.random() < _SWEEPS_SHARE:
            played = play_sweep(chain.schedule, chain.rng)
        return played or _play_one(context, chain)

    _walk(context, _is_cheaper, kicks=True, propose=propose)


def _simulated(schedule: Schedule, move: AnyMove, architecture: int) -> int:
    trial = schedule.copy()
    trial.play(move)
    return simulate(trial, architecture, warps=2, iterations=2)


_PATIENCE = 200
_KICK_MOVES = 3
_GUIDED_CHOICES = 6
_LEAST_SHARE = 0.2
"""Least share of the moves of `climb_guided`, for the model's choices and for random ones."""
_SWEEPS_SHARE = 0.5
"""Share of sweeps among the proposals of `climb_in_sweeps`. These five are our choice."""


def anneal(context: AgentContext) -> None:
    """Simulated annealing with CuAsmRL's temperatures.

    Whenever the last temperature is reached, it goes on at half the first one.
    """
    temperature = PAPER_TEMPERATURE

    def judge(chain: _Chain, relative: float) -> bool:
        nonlocal temperature
        worse = 100.0 * (relative - chain.relative) / _PERCENT_PER_DEGREE
        accepted = worse < 0 or chain.rng.random() < math.exp(-worse / temperature)
        temperature *= 1.0 - PAPER_COOLING
        if temperature <= PAPER_LAST_TEMPERATURE:
            temperature = PAPER_TEMPERATURE / 2
        return accepted

    _walk(context, judge, kicks=False)


def _walk(
    context: AgentContext,
    judge: Callable[[_Chain, float], bool],
    kicks: bool,
    propose: Callable[[_Chain], int] | None = None,
) -> None:
    """Walk from schedule to schedule, one proposal at a time, taking back what `judge` does not accept.

    A proposal plays moves and returns how many; none ends the walk.
    """
    propose = propose or functools.partial(_play_one, context)
    chains = _chains(context)
    # The original is measured already, and free.
    begin = context.budget.measure(chains[0].schedule).relative or 1.0
    for chain in chains:
        chain.relative = begin
    best: tuple[float, Schedule] = (begin, context.schedule())
    idle = 0
    while idle < _IDLE_ROUNDS:
        before = context.budget.asked
        for chain in chains:
            if kicks and chain.misses >= _PATIENCE:
                chain.schedule, chain.relative, chain.misses = best[1].copy(), math.inf, 0
                for _ in range(_KICK_MOVES - 1):
                    kick = context.neighbourhood.draw(chain.schedule, chain.rng)
                    if kick is not None:
                        chain.schedule.play(kick)
            chain.proposed = propose(chain)
            if not chain.proposed:
                return
        for chain, measurement in zip(chains, context.budget.measure_all([c.schedule for c in chains]), strict=True):
            relative = measurement.relative
            if relative is None or not judge(chain, relative):
                for _ in range(chain.proposed):
                    chain.schedule.undo()
                chain.misses += 1
                continue
            chain.misses = chain.misses + 1 if relative >= chain.relative else 0
            chain.relative = relative
            if relative < best[0]:
                best = (relative, chain.schedule.copy())
        idle = 0 if context.budget.asked > before else idle + 1


_SEARCHES: dict[str, Agent] = {
    "anneal": anneal,
    "greedy": climb,
    "guided": climb_guided,
    "random": play_randomly,
    "sweeps": climb_in_sweeps,
}
AGENTS = ("ppo", *_SEARCHES)
"""Names of the agents."""
