"""Draws random legal moves of every kind, for searches that need no fixed numbering of moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kernelwright.sass.code.program import Kernel
from kernelwright.sass.hazards.reuse import OPERAND_SLOTS
from kernelwright.sass.scheduling.moves import (
    MOVE_KINDS,
    AnyMove,
    ClusterMove,
    Move,
    ReuseEdit,
    StallEdit,
    YieldEdit,
)
from kernelwright.sass.scheduling.schedule import Schedule

_LONGEST_CLUSTER = 8
_FARTHEST_CLUSTER = 16
_TRIES_PER_KIND = 8
"""A kind that is seldom legal gets this many tries, or the others would crowd it out."""
_STALL_STEPS = (-2, -1, 1, 2)


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """Moves that a search may draw.

    Attributes:
        max_distance: slots by which one instruction may be moved at once; None is as far as is legal.
        memory_only: whether only memory instructions are chosen.
        hot_share: share of the draws that choose among instructions inside loops, if there are any.
    """

    kinds: tuple[str, ...] = MOVE_KINDS
    max_distance: int | None = None
    memory_only: bool = False
    hot_share: float = 0.8

    def draw(self, schedule: Schedule, rng: random.Random, attempts: int = 128) -> AnyMove | None:
        """Return a random legal move, or None when `attempts` draws found none."""
        slots = list(schedule.movable_slots)
        if self.memory_only:
            instructions = schedule.kernel.instructions
            slots = [s for s in slots if instructions[schedule.order[s]].traits.is_memory]
        if not slots:
            return None
        inside = loop_slots(schedule.kernel)
        hot = [s for s in slots if s in inside]
        for attempt in range(attempts):
            if attempt % _TRIES_PER_KIND == 0:
                kind = rng.choice(self.kinds)
            chosen = rng.choice(hot if hot and rng.random() < self.hot_share else slots)
            move = _DRAWS[kind](schedule, chosen, rng, self.max_distance)
            if move is not None and schedule.is_legal(move):
                return move
        return None


@lru_cache(maxsize=64)
def loop_slots(kernel: Kernel) -> frozenset[int]:
    """Return the slots of blocks from which control flow may come back to them."""
    inside: set[int] = set()
    for block in kernel.blocks:
        seen: set[int] = set()
        work = list(block.successors)
        while work:
            index = work.pop()
            if index not in seen:
                seen.add(index)
                work += kernel.blocks[index].successors
        # A lone branch to itself is the trap behind the last EXIT, not a loop.
        if block.index in seen and block.stop - block.start > 1:
            inside.update(range(block.start, block.stop))
    return frozenset(inside)


def _between(first: int, last: int, here: int, rng: random.Random) -> int | None:
    """Return a random number of [first, last] other than `here`, which is one of them."""
    if first >= last:
        return None
    drawn = rng.randrange(first, last)
    return drawn if drawn < here else drawn + 1


def _move(schedule: Schedule, slot: int, rng: random.Random, max_distance: int | None) -> AnyMove | None:
    window = schedule.window(slot)
    reach = len(schedule.order) if max_distance is None else max_distance
    target = _between(max(window[0], slot - reach), min(window[-1], slot + reach), slot, rng)
    return None if target is None else Move(slot, target)


def _cluster(schedule: Schedule, slot: int, rng: random.Random, max_distance: int | None) -> AnyMove | None:
    reach = _FARTHEST_CLUSTER if max_distance is None else max_distance
    return ClusterMove(slot, rng.randint(2, _LONGEST_CLUSTER), slot + rng.choice((-1, 1)) * rng.randint(1, reach))


_Draw = Callable[[Schedule, int, random.Random, int | None], AnyMove | None]
_DRAWS: dict[str, _Draw] = {
    "move": _move,
    "cluster": _cluster,
    "stall": lambda _schedule, slot, rng, _reach: StallEdit(slot, rng.choice(_STALL_STEPS)),
    "yield": lambda _schedule, slot, _rng, _reach: YieldEdit(slot),
    "reuse": lambda _schedule, slot, rng, _reach: ReuseEdit(slot, rng.choice(OPERAND_SLOTS)),
}
