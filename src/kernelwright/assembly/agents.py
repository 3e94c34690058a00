"""Plays the assembly game by search, and gives all agents one interface; PPO is in `kernelwright.assembly.ppo`.

An agent plays until its budget is spent. Its play follows from its seed and the costs alone, so a run that is repeated
on the same records repeats itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from kernelwright.assembly.budget import AgentContext
from kernelwright.errors import BudgetSpentError, InfrastructureError, UsageError
from kernelwright.sass import AnyMove, Schedule
from kernelwright.sass.neighbours import play_sweep
from kernelwright.sass.simulator import simulate

PPO_PACKAGES = ("torch", "gymnasium", "stable_baselines3", "sb3_contrib")
PAPER_TEMPERATURE = 1.0
PAPER_COOLING = 0.003
PAPER_LAST_TEMPERATURE = 0.05
"""Start, share lost a step and end of the temperature in CuAsmRL's code for simulated annealing."""
_PERCENT_PER_DEGREE = 0.2
"""Worth of a temperature of 1 in percent of the original's cost. Our choice: about what one good move gains."""
_PATIENCE = 200
_KICK_MOVES = 3
_GUIDED_CHOICES = 6
_LEAST_SHARE = 0.2
"""Least share of the moves of `GuidedClimb`, for the model's choices and for random ones."""
_SWEEPS_SHARE = 0.5
"""Share of sweeps among the proposals of `SweepingClimb`. These five are our choice."""


@dataclass(slots=True)
class _Chain:
    """One of several searches side by side, with randomness of its own."""

    rng: random.Random
    schedule: Schedule
    relative: float = 1.0
    misses: int = 0
    proposed: int = 0
    is_guided: bool = False


class Agent(ABC):
    """Plays the game with one context, a chain of schedules for each that may be measured at the same time."""

    idle_rounds = 256
    """Rounds without a new schedule before a search gives up: the space may be exhausted. Schedules that an interrupted run
    paid for are new to the one that goes on."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        lanes = range(context.budget.lanes)
        self.chains = [_Chain(random.Random(f"{context.seed}/{lane}"), context.schedule()) for lane in lanes]

    def play(self) -> None:
        """Play until there is nothing new to measure; ordinarily until `BudgetSpentError`."""
        idle = 0
        while idle < self.idle_rounds:
            before = self.context.budget.asked
            if not self.play_round():
                return
            idle = 0 if self.context.budget.asked > before else idle + 1

    @abstractmethod
    def play_round(self) -> bool:
        """Measure one schedule of each chain; False where a chain has no move."""

    def draw(self, chain: _Chain) -> AnyMove | None:
        """A random legal move; None where there is none."""
        return self.context.neighbourhood.draw(chain.schedule, chain.rng)


class RandomPlay(Agent):
    """Episodes of random legal moves from the start on, every schedule on the way measured."""

    def play_round(self) -> bool:
        """Play one move of each episode, and begin those anew that have ended."""
        context = self.context
        for chain in self.chains:
            is_over = len(chain.schedule.history) - len(context.start) >= context.horizon
            move = None if is_over else self.draw(chain)
            if move is None:
                chain.schedule = context.schedule()
                move = self.draw(chain)
            if move is None:
                return False
            chain.schedule.play(move)
        context.budget.measure_all([chain.schedule for chain in self.chains])
        return True


class Climb(Agent):
    """Hill climbing: keep a random move if the schedule is cheaper for it, take it back otherwise.

    After `_PATIENCE` moves in vain, some more are played from the best schedule without looking at the cost.
    """

    has_kicks = True

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        # The original is measured already, and free.
        begin = context.budget.measure(self.chains[0].schedule).relative or 1.0
        for chain in self.chains:
            chain.relative = begin
        self._best: tuple[float, Schedule] = (begin, context.schedule())

    def play_round(self) -> bool:
        """Let each chain propose a schedule, and take back those that are not accepted."""
        for chain in self.chains:
            if self.has_kicks and chain.misses >= _PATIENCE:
                self._kick(chain)
            chain.proposed = self.propose(chain)
            if not chain.proposed:
                return False
        measurements = self.context.budget.measure_all([chain.schedule for chain in self.chains])
        for chain, measurement in zip(self.chains, measurements, strict=True):
            relative = measurement.relative
            if relative is None or not self.accepts(chain, relative):
                for _ in range(chain.proposed):
                    chain.schedule.undo()
                chain.misses += 1
                continue
            chain.misses = chain.misses + 1 if relative >= chain.relative else 0
            chain.relative = relative
            if relative < self._best[0]:
                self._best = (relative, chain.schedule.copy())
        return True

    def _kick(self, chain: _Chain) -> None:
        chain.schedule, chain.relative, chain.misses = self._best[1].copy(), math.inf, 0
        for _ in range(_KICK_MOVES - 1):
            kick = self.draw(chain)
            if kick is not None:
                chain.schedule.play(kick)

    def propose(self, chain: _Chain) -> int:
        """Play moves on the chain's schedule and return how many; 0 where there is none."""
        move = self.draw(chain)
        if move is None:
            return 0
        chain.schedule.play(move)
        return 1

    def accepts(self, chain: _Chain, relative: float) -> bool:
        """True where the chain goes on from the proposed schedule, whose cost over the original's is `relative`."""
        return relative < chain.relative


class GuidedClimb(Climb):
    """Hill climbing that often plays the cheapest of several random moves by a model, the simulated issue.

    The model costs no budget, and only measurements decide: also how often the model is asked, since on some kernels it
    knows better than chance and on others worse.
    """

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        # Kept and tried moves of both origins, as if one of two had been kept before any was tried.
        self._kept, self._tried = {True: 1, False: 1}, {True: 2, False: 2}

    def propose(self, chain: _Chain) -> int:
        """Play the model's choice or a random move, each as often as it has paid so far."""
        guided, by_chance = (self._kept[is_guided] / self._tried[is_guided] for is_guided in (True, False))
        share = guided / (guided + by_chance)
        chain.is_guided = chain.rng.random() < min(max(share, _LEAST_SHARE), 1.0 - _LEAST_SHARE)
        if not chain.is_guided:
            return super().propose(chain)
        drawn = (self.draw(chain) for _ in range(_GUIDED_CHOICES))
        costs = {move: self.simulated_cycles(chain.schedule, move) for move in dict.fromkeys(drawn) if move is not None}
        if not costs:
            return 0
        chain.schedule.play(min(costs, key=costs.__getitem__))
        return 1

    def accepts(self, chain: _Chain, relative: float) -> bool:
        """Keep what is cheaper, and count it for its origin."""
        is_cheaper = super().accepts(chain, relative)
        self._kept[chain.is_guided] += is_cheaper
        self._tried[chain.is_guided] += 1
        return is_cheaper

    def simulated_cycles(self, schedule: Schedule, move: AnyMove) -> int:
        """Cycles of the simulated issue after a move."""
        trial = schedule.copy()
        trial.play(move)
        return simulate(trial, self.context.program.image.architecture, warps=2, iterations=2)


class SweepingClimb(Climb):
    """Hill climbing in which every other proposal treats a stretch of like instructions alike; see `play_sweep`.

    A sweep is several moves and one schedule of the budget. CuAsmRL's game has none, so with its moves this is `Climb`.
    """

    def propose(self, chain: _Chain) -> int:
        """Play a sweep or a random move."""
        played = 0
        if self.context.moves == "beyond" and chain.rng.random() < _SWEEPS_SHARE:
            played = play_sweep(chain.schedule, chain.rng)
        return played or super().propose(chain)


class Anneal(Climb):
    """Simulated annealing with CuAsmRL's temperatures.

    Whenever the last temperature is reached, it goes on at half the first one.
    """

    has_kicks = False
    _temperature = PAPER_TEMPERATURE

    def accepts(self, chain: _Chain, relative: float) -> bool:
        """Keep what is cheaper, and what is dearer with a probability that falls with the temperature."""
        worse = 100.0 * (relative - chain.relative) / _PERCENT_PER_DEGREE
        accepted = worse < 0 or chain.rng.random() < math.exp(-worse / self._temperature)
        self._temperature *= 1.0 - PAPER_COOLING
        if self._temperature <= PAPER_LAST_TEMPERATURE:
            self._temperature = PAPER_TEMPERATURE / 2
        return accepted


_SEARCHES: dict[str, type[Agent]] = {
    "anneal": Anneal,
    "greedy": Climb,
    "guided": GuidedClimb,
    "random": RandomPlay,
    "sweeps": SweepingClimb,
}
AGENTS = ("ppo", *_SEARCHES)
"""Names of the agents."""


def play(name: str, context: AgentContext) -> None:
    """Let the agent of this name play until its budget is spent; raises as `require_agent`."""
    require_agent(name)
    with contextlib.suppress(BudgetSpentError):
        if name == "ppo":
            from kernelwright.assembly import ppo

            ppo.train(context, ppo.PpoConfig(device=context.network_device))
        else:
            _SEARCHES[name](context).play()


def require_agent(name: str) -> None:
    """Check that an agent can play.

    Raises:
        UsageError: there is none of this name.
        InfrastructureError: it needs a package that is not installed.
    """
    if name not in AGENTS:
        raise UsageError(f"wanted an agent out of {', '.join(AGENTS)}, found {name!r}")
    missing = [package for package in PPO_PACKAGES if importlib.util.find_spec(package) is None] if name == "ppo" else []
    if missing:
        raise InfrastructureError(
            f"Wanted the packages for PPO; found no {', '.join(missing)}. Run pip install 'kernelwright[game]', "
            "or choose another agent."
        )
