"""Plays several moves at once: what a run of like instructions can do together.

One move at a time is a small step where many instructions share a resource: a dozen shared-memory loads spread among
arithmetic, or all issued a little earlier, are a dozen moves of which each alone may cost time. A sweep draws a stretch of
instructions with one opcode in one block and treats them alike.
"""

from __future__ import annotations

import random

from kernelwright.sass.code.program import Block
from kernelwright.sass.scheduling.moves import Move, YieldEdit
from kernelwright.sass.scheduling.neighbours import loop_slots
from kernelwright.sass.scheduling.schedule import Schedule

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
    inside = loop_slots(schedule.kernel)
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
