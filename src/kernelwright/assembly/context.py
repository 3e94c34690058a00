"""Gives an agent what it plays with: the kernel, the budget, the moves it may make and its seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelwright.assembly.budget import Budget
from kernelwright.sass import MOVE_KINDS, AnyMove, Neighbourhood, Program, Schedule

PAPER_HORIZON = 32
"""Moves of an episode in CuAsmRL's code."""
_OFTENER = ("move", "cluster")
NEIGHBOURHOODS = {
    "paper": Neighbourhood(kinds=("move",), max_distance=1, memory_only=True, hot_share=0.0),
    "beyond": Neighbourhood(kinds=(*MOVE_KINDS, *2 * _OFTENER)),
}
"""Kinds of `_OFTENER` are drawn three times as often as others: in 28,000 schedules of seven kernels on an H200 such a draw
gained 1.6 times as much as an edit of control bits in the median, 0.8 to 5 times on single ones (docs/assembly-game.md)."""


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
