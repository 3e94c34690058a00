"""Draws random legal moves of every kind, for searches that need no fixed numbering of moves, and several at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kernelwright.sass.instruction import NO_SCOREBOARD_CODE, hint_flips
from kernelwright.sass.program import Block, Kernel
from kernelwright.sass.reuse import OPERAND_SLOTS
from kernelwright.sass.schedule import (
    MOVE_KINDS,
    AnyMove,
    ClusterMove,
    HintEdit,
    Move,
    ReuseEdit,
    Schedule,
    ScoreboardEdit,
    StallEdit,
    YieldEdit,
)

_LONGEST_CLUSTER = 8
_FARTHEST_CLUSTER = 16
_TRIES_PER_KIND = 8
"""A kind that is seldom legal gets this many tries, or the others would crowd it out."""
_STALL_STEPS = (-2, -1, 1, 2)
_SCOREBOARD_SHARE = 0.125
"""Share of such draws that are made: the constraints of all blocks are derived anew."""


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
        inside = loop_slots(schedule.original) if self.hot_share else frozenset()
        hot = [s for s in slots if s in inside]
        for attempt in range(attempts):
            if attempt % _TRIES_PER_KIND == 0:
                kind = rng.choice(self.kinds)
            chosen = rng.choice(hot if hot and rng.random() < self.hot_share else slots)
            move = _DRAWS[kind](schedule, chosen, rng, self.max_distance)
            if move is not None and schedule.is_legal(move):
                return move
        return None


ANY_MOVE = Neighbourhood(kinds=("move",), hot_share=0.0)
"""Single instructions anywhere, as far as is legal."""


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


def _hint(schedule: Schedule, slot: int, rng: random.Random, _reach: int | None) -> AnyMove | None:
    """Draw a hint of the next instruction behind `slot` that may have one."""
    slots = [s for s in schedule.movable_slots if schedule.kernel.instructions[schedule.order[s]].traits.hint_mask]
    if not slots:
        return None
    chosen = next((s for s in slots if s >= slot), slots[0])
    instruction = schedule.kernel.instructions[schedule.order[chosen]]
    wanted = rng.choice((0, *hint_flips(instruction)))
    return HintEdit(chosen, wanted ^ schedule.edit_of(schedule.order[chosen]).flips_hint)


def _scoreboard(schedule: Schedule, slot: int, rng: random.Random, _reach: int | None) -> AnyMove | None:
    """Draw another scoreboard for the next instruction behind `slot` that counts on one, for a share of the calls."""
    if rng.random() > _SCOREBOARD_SHARE:
        return None
    kernel = schedule.kernel
    for chosen in schedule.movable_slots:
        control = kernel.instructions[schedule.order[chosen]].control
        files = [file for file, number in enumerate((control.write_barrier, control.read_barrier)) if number is not None]
        if chosen >= slot and files:
            return ScoreboardEdit(chosen, rng.choice(files), rng.randint(1, NO_SCOREBOARD_CODE))
    return None


_Draw = Callable[[Schedule, int, random.Random, int | None], AnyMove | None]
_DRAWS: dict[str, _Draw] = {
    "move": _move,
    "cluster": _cluster,
    "stall": lambda _schedule, slot, rng, _reach: StallEdit(slot, rng.choice(_STALL_STEPS)),
    "yield": lambda _schedule, slot, _rng, _reach: YieldEdit(slot),
    "reuse": lambda _schedule, slot, rng, _reach: ReuseEdit(slot, rng.choice(OPERAND_SLOTS)),
    "hint": _hint,
    "scoreboard": _scoreboard,
}


_GAPS = (0, 1, 2, 3, 4, 6)
_FARTHEST_SHIFT = 8
_LONGEST = 16
_ATTEMPTS = 32
_NEARER_TRIES = 3
"""Slots nearer to the old one that are tried when the wanted one is not legal. These are our choice."""


def play_sweep(schedule: Schedule, rng: random.Random, hot_share: float = 0.8) -> int:
    """Play a random sweep of legal moves and return their number, 0 when `_ATTEMPTS` draws changed nothing.

    A stretch of instructions with one opcode is shifted by some slots, laid out with a gap between each two (none gathers
    them), or has its yields flipped. `hot_share` of the draws choose a block inside a loop, if there is one.
    """
    inside = loop_slots(schedule.original)
    movable = set(schedule.movable_slots)
    every, hot = [], []
    for block in schedule.kernel.blocks:
        if kinds := _kinds(schedule, block, movable):
            every.append(kinds)
            if block.start in inside:
                hot.append(kinds)
    for _ in range(_ATTEMPTS if every else 0):
        kinds = rng.choice(hot if hot and rng.random() < hot_share else every)
        indices = kinds[rng.choice(sorted(kinds))]
        count = rng.randint(2, min(len(indices), _LONGEST))
        first = rng.randint(0, len(indices) - count)
        played = _SWEEPS[rng.randrange(len(_SWEEPS))](schedule, indices[first : first + count], rng)
        if played:
            return played
    return 0


def _kinds(schedule: Schedule, block: Block, movable: set[int]) -> dict[str, list[int]]:
    """Return a block's movable instructions by opcode, in their present order; only opcodes that occur twice."""
    found: dict[str, list[int]] = {}
    for slot in range(block.start, block.stop):
        if slot in movable:
            index = schedule.order[slot]
            found.setdefault(schedule.kernel.instructions[index].opcode, []).append(index)
    return {opcode: indices for opcode, indices in found.items() if len(indices) > 1}


def _shift(schedule: Schedule, indices: list[int], rng: random.Random) -> int:
    distance = rng.choice((-1, 1)) * rng.randint(1, _FARTHEST_SHIFT)
    # The foremost goes first, so that nothing of the stretch is in another's way.
    ordered = indices if distance < 0 else indices[::-1]
    return sum(_bring(schedule, index, schedule.slot_of(index) + distance) for index in ordered)


def _lay_out(schedule: Schedule, indices: list[int], rng: random.Random) -> int:
    stride = 1 + rng.choice(_GAPS)
    if rng.random() < 0.5:
        base = schedule.slot_of(indices[0])
        wanted = [(index, base + number * stride) for number, index in enumerate(indices)]
    else:
        base = schedule.slot_of(indices[-1])
        wanted = [(index, base - number * stride) for number, index in enumerate(indices[::-1])]
    return sum(_bring(schedule, index, slot) for index, slot in wanted[1:])


def _flip_yields(schedule: Schedule, indices: list[int], _rng: random.Random) -> int:
    played = 0
    for index in indices:
        edit = YieldEdit(schedule.slot_of(index))
        if schedule.is_legal(edit):
            schedule.play(edit)
            played += 1
    return played


_SWEEPS = (_shift, _lay_out, _lay_out, _flip_yields)


def _bring(schedule: Schedule, index: int, wanted: int) -> int:
    """Move an instruction to a slot, or as near as is legal; return how many moves that took, 0 or 1."""
    slot = schedule.slot_of(index)
    window = schedule.window(slot)
    target = min(max(wanted, window[0]), window[-1])
    for _ in range(_NEARER_TRIES):
        if target == slot:
            break
        if schedule.is_legal(Move(slot, target)):
            schedule.play(Move(slot, target))
            return 1
        target += 1 if target < slot else -1
    return 0
