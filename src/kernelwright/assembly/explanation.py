"""Explains a winning schedule: finds the fewest moves that lead there, and measures what each of them is worth.

A search's own list of moves goes back and forth. Here each instruction that really changed its place has one move, those
that travelled together are joined, and each such group is left out once to see what is lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernelwright.sass import (
    AnyMove,
    Block,
    HintEdit,
    Move,
    ReuseEdit,
    Schedule,
    ScoreboardEdit,
    StallEdit,
    YieldEdit,
    move_to_json,
)
from kernelwright.sass.instruction import hint_bits, hint_name
from kernelwright.sass.neighbours import loop_slots
from kernelwright.sass.reuse import OPERAND_SLOTS

MOST_GROUPS = 24
"""More groups than these are joined before they are left out one by one; our choice, since each is measured."""
_CROSSED_SHOWN = 8
_FILE_STEP = 8


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one instruction, which can be played whatever was played before.

    Attributes:
        index: the instruction, by its place in the original.
        kind: `move`, `stall`, `yield`, `reuse`, `hint` or `scoreboard`.
        behind: the instruction that a move leads behind, None for the front of its block.
        ahead: the instruction that a move leads before, None for the end of its block.
        amount: cycles of a stall, operand of a reuse, flips of a hint or of a scoreboard; 8 more for that of the sources.
    """

    index: int
    kind: str
    behind: int | None = None
    ahead: int | None = None
    amount: int = 0

    def move_on(self, schedule: Schedule) -> AnyMove | None:
        """Return the move that does this to `schedule` now, or None when nothing is to be done."""
        slot = schedule.slot_of(self.index)
        if self.kind == "stall":
            return StallEdit(slot, self.amount)
        if self.kind == "yield":
            return YieldEdit(slot)
        if self.kind == "reuse":
            return ReuseEdit(slot, self.amount)
        if self.kind == "hint":
            return HintEdit(slot, self.amount)
        if self.kind == "scoreboard":
            return ScoreboardEdit(slot, *divmod(self.amount, _FILE_STEP))
        block = _block_of(schedule, self.index)
        first = block.start if self.behind is None else schedule.slot_of(self.behind) + 1
        last = block.stop - 1 if self.ahead is None else schedule.slot_of(self.ahead) - 1
        if first <= slot <= last:
            return None
        # Taking the instruction out shifts what is behind its old place.
        first, last = (first - 1, last) if first > slot else (first, last + 1)
        window = schedule.window(slot)
        for target in range(max(first, window[0]), min(last, window[-1]) + 1):
            move = Move(slot, target)
            if schedule.is_legal(move):
                return move
        return Move(slot, first)


def steps_to(schedule: Schedule) -> list[Change]:
    """Return few steps from the original to a schedule, scoreboards and moves first, in an order that can be played.

    The list is empty when no such order was found; the schedule's own history still leads there.
    """
    remaining = _moved(schedule)
    trial = Schedule(schedule.original)
    found: list[Change] = []
    edits = _edits(schedule)
    # Other waits let instructions pass; an assignment that a new order needs first is made after the moves.
    late = [step for step in edits if step.kind != "scoreboard" or not _is_played(step, trial, found)]
    while remaining:
        left: list[int] = []
        unplaced = set(remaining)
        for index in remaining:
            step = _placing(schedule, index, unplaced)
            move = step.move_on(trial)
            if move is None:
                unplaced.discard(index)
                continue
            if not _is_played(step, trial, found):
                left.append(index)
                continue
            unplaced.discard(index)
        if len(left) == len(remaining):
            return []
        remaining = left
    for step in late:
        _is_played(step, trial, found)
    return found if trial.words() == schedule.words() else []


def _is_played(step: Change, trial: Schedule, found: list[Change]) -> bool:
    """Play a step and note it, if it is legal; return whether it is."""
    move = step.move_on(trial)
    if move is None or not trial.is_legal(move):
        return False
    trial.play(move)
    found.append(step)
    return True


def _placing(schedule: Schedule, index: int, unplaced: set[int]) -> Change:
    """Return the step that puts an instruction between the nearest two that have their place already."""
    slot = schedule.slot_of(index)
    block = _block_of(schedule, index)
    earlier = (schedule.order[s] for s in range(slot - 1, block.start - 1, -1))
    later = (schedule.order[s] for s in range(slot + 1, block.stop))
    behind = next((i for i in earlier if i not in unplaced), None)
    ahead = next((i for i in later if i not in unplaced), None)
    return Change(index, "move", behind, ahead)


def _block_of(schedule: Schedule, index: int) -> Block:
    return next(block for block in schedule.kernel.blocks if block.start <= index < block.stop)


def _moved(schedule: Schedule) -> list[int]:
    """Return as few instructions as possible that must move, in their new order."""
    moved: list[int] = []
    for block in schedule.kernel.blocks:
        order = schedule.order[block.start : block.stop]
        keep = set(_longest_rising(order))
        moved += [index for index in order if index not in keep]
    return moved


def _longest_rising(order: Sequence[int]) -> list[int]:
    """Return a longest rising subsequence."""
    tails: list[int] = []
    ends: list[int] = []
    before: dict[int, int | None] = {}
    for value in order:
        place = bisect_left(tails, value)
        before[value] = ends[place - 1] if place else None
        if place == len(tails):
            tails.append(value)
            ends.append(value)
        else:
            tails[place] = ends[place] = value
    rising: list[int] = []
    at: int | None = ends[-1] if ends else None
    while at is not None:
        rising.append(at)
        at = before[at]
    return rising[::-1]


def _edits(schedule: Schedule) -> list[Change]:
    steps = []
    for index in schedule.order:
        edit = schedule.edit_of(index)
        if edit.extra_stall:
            steps.append(Change(index, "stall", amount=edit.extra_stall))
        if edit.flips_yield:
            steps.append(Change(index, "yield"))
        steps += [Change(index, "reuse", amount=k) for k in OPERAND_SLOTS if edit.flips_reuse >> k & 1]
        if edit.flips_hint:
            steps.append(Change(index, "hint", amount=edit.flips_hint))
        steps += [
            Change(index, "scoreboard", amount=file * _FILE_STEP + flips)
            for file, flips in enumerate(edit.flips_scoreboard)
            if flips
        ]
    return steps


def played(schedule: Schedule, steps: Sequence[Change]) -> tuple[Schedule, int]:
    """Return a fresh schedule with these steps played on it, and the number of illegal ones, which are left out."""
    fresh = Schedule(schedule.original)
    refused = 0
    for step in steps:
        move = step.move_on(fresh)
        if move is None:
            continue
        if fresh.is_legal(move):
            fresh.play(move)
        else:
            refused += 1
    return fresh, refused


def grouped(steps: Sequence[Change], limit: int = MOST_GROUPS) -> list[list[Change]]:
    """Join steps of instructions that travel together, and then neighbours until there are at most `limit` groups."""
    groups: list[list[Change]] = []
    for step in steps:
        last = groups[-1][-1] if groups else None
        together = last is not None and step.kind == last.kind == "move" and step.behind == last.index
        if last is not None and together and step.index == last.index + 1:
            groups[-1].append(step)
        else:
            groups.append([step])
    while len(groups) > limit:
        smallest = min(range(len(groups) - 1), key=lambda i: len(groups[i]) + len(groups[i + 1]))
        groups[smallest : smallest + 2] = [groups[smallest] + groups[smallest + 1]]
    return groups


Weigh = Callable[[Schedule], dict[str, Any]]
"""Measures a schedule: `speedup`, `low`, `high` against the original; numbers may be None."""


def lessons(schedule: Schedule, weigh: Weigh) -> list[dict[str, Any]]:
    """Leave every group of the winner's steps out once and say what that loses.

    Each group is described, with the schedule's speedup without it (`without`).
    """
    found = []
    groups = grouped(steps_to(schedule))
    for number, group in enumerate(groups):
        others = [step for position, other in enumerate(groups) if position != number for step in other]
        without, refused = played(schedule, others)
        found.append({**_described(schedule, group), "also_undone": refused, "without": weigh(without)})
    return found


def _described(schedule: Schedule, group: Sequence[Change]) -> dict[str, Any]:
    """Describe a group of steps as data."""
    kernel = schedule.kernel
    inside = loop_slots(kernel)
    block = _block_of(schedule, group[0].index)
    changes = []
    for step in group:
        instruction = kernel.instructions[step.index]
        slot = schedule.slot_of(step.index)
        over = _crossed(schedule, step.index) if step.kind == "move" else []
        changes.append(
            {
                "kind": step.kind,
                "amount": step.amount,
                "hint": hint_name((instruction.word ^ hint_bits(step.amount)) & instruction.traits.hint_mask)
                if step.kind == "hint"
                else "",
                "text": instruction.text,
                "from_slot": step.index,
                "to_slot": slot,
                "direction": "" if step.kind != "move" else "down" if slot > step.index else "up",
                "over": [kernel.instructions[index].text for index in over[:_CROSSED_SHOWN]],
                "over_count": len(over),
            }
        )
    return {"block": block.index, "in_loop": block.start in inside, "changes": changes}


def _crossed(schedule: Schedule, index: int) -> list[int]:
    """Return the instructions that have changed sides with one instruction, in original order."""
    slot = schedule.slot_of(index)
    block = _block_of(schedule, index)
    return [
        other
        for other in range(block.start, block.stop)
        if other != index and (other < index) != (schedule.slot_of(other) < slot)
    ]


def side_by_side(schedule: Schedule) -> list[dict[str, Any]]:
    """Return every block that has changed: its listing before and after, line by line."""
    kernel = schedule.original
    inside = loop_slots(kernel)
    moved = set(_moved(schedule))
    controls = schedule.controls()
    blocks = []
    for block in kernel.blocks:
        slots = range(block.start, block.stop)
        before = [
            {"slot": i, "control": str(instruction.control), "text": instruction.text, "moved": i in moved}
            for i, instruction in enumerate(kernel.instructions[block.start : block.stop], block.start)
        ]
        after = [
            {
                "slot": schedule.order[s],
                "control": str(controls[s]),
                "text": kernel.instructions[schedule.order[s]].text,
                "moved": schedule.order[s] in moved,
                "recontrolled": controls[s] != kernel.instructions[schedule.order[s]].control,
            }
            for s in slots
        ]
        if any(line["slot"] != s or line["recontrolled"] for s, line in zip(slots, after, strict=True)):
            blocks.append({"block": block.index, "in_loop": block.start in inside, "before": before, "after": after})
    return blocks


def shortest_moves(schedule: Schedule) -> list[list[str | int]]:
    """Return moves that lead to a schedule, as JSON: the fewest that were found, or else its own history."""
    steps = steps_to(schedule)
    history = played(schedule, steps)[0].history if steps else schedule.history
    return [move_to_json(move) for move in history]
