"""Defines the moves of the game as data, and spells them in JSON.

Slots are those of the schedule at the moment the move is played, so a list of moves replays from the
original order only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernelwright.errors import MoveError


@dataclass(frozen=True, slots=True)
class Move:
    """Take the instruction in slot `source` to slot `target`; those in between shift by one."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ClusterMove:
    """Take the `count` instructions from slot `source` on together, the first of them to slot `target`."""

    source: int
    count: int
    target: int


@dataclass(frozen=True, slots=True)
class StallEdit:
    """Change by `cycles` what the instruction in `slot` stalls beyond the least stall of the rules."""

    slot: int
    cycles: int


@dataclass(frozen=True, slots=True)
class YieldEdit:
    """Flip whether the instruction in `slot` yields."""

    slot: int


@dataclass(frozen=True, slots=True)
class ReuseEdit:
    """Flip whether the instruction in `slot` keeps its source operand 0, 1 or 2 for its follower."""

    slot: int
    operand: int


AnyMove = Move | ClusterMove | StallEdit | YieldEdit | ReuseEdit
_KINDS: dict[str, type[AnyMove]] = {
    "move": Move,
    "cluster": ClusterMove,
    "stall": StallEdit,
    "yield": YieldEdit,
    "reuse": ReuseEdit,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
MOVE_KINDS = tuple(_KINDS)
"""Names of the kinds of moves, as JSON spells them."""


def inverse_of(move: AnyMove) -> AnyMove:
    """Return the move that takes another one back; a flip is its own inverse."""
    match move:
        case Move(source, target):
            return Move(target, source)
        case ClusterMove(source, count, target):
            return ClusterMove(target, count, source)
        case StallEdit(slot, cycles):
            return StallEdit(slot, -cycles)
    return move


def kind_of(move: AnyMove) -> str:
    """Return the name of a move's kind."""
    return _NAMES[type(move)]


def move_to_json(move: AnyMove) -> list[str | int]:
    """Return a move as a list: its kind, then its numbers, such as `["cluster", 4, 2, 9]`."""
    return [kind_of(move), *(getattr(move, name) for name in move.__slots__)]


def move_from_json(value: object) -> AnyMove:
    """Return the move that such a list spells.

    Raises:
        MoveError: it spells none.
    """
    if isinstance(value, Sequence) and not isinstance(value, str) and value and value[0] in MOVE_KINDS:
        kind = _KINDS[value[0]]
        numbers = value[1:]
        if len(numbers) == len(kind.__slots__) and all(type(n) is int for n in numbers):
            return kind(*numbers)
    raise MoveError(f"wanted a move such as ['move', 3, 7], found {value!r}")
