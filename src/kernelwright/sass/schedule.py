"""A kernel's schedule as a game state: legal moves, undo, derived stall counts, and the new cubin.

A move takes one instruction to another slot of its segment. Which moves are legal, and the stall
count of every instruction, are functions of the order alone, so the same order always gives the same
bytes whatever path led there, and the original order gives the original bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kernelwright.sass.control import MAX_STALL, ControlWord
from kernelwright.sass.dependences import BlockConstraints, constrain
from kernelwright.sass.errors import MoveError
from kernelwright.sass.program import Kernel, Program
from kernelwright.sass.reuse import reuse_spans, same_run


@dataclass(frozen=True, slots=True)
class Move:
    """Take the instruction in slot `source` to slot `target`; those in between shift by one."""

    source: int
    target: int

    def inverse(self) -> Move:
        """The move that takes it back."""
        return Move(self.target, self.source)


class Schedule:
    """The current order and timing of one kernel.

    Attributes:
        kernel: the original kernel.
        order: for each slot, the index of the original instruction in it.
        history: moves played, oldest first.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.constraints: tuple[BlockConstraints, ...] = constrain(kernel)
        self.order: list[int] = list(range(len(kernel.instructions)))
        self.history: list[Move] = []
        self._slot = list(self.order)
        self._stalls: list[int] = [i.control.stall for i in kernel.instructions]
        self._spans = reuse_spans(kernel)
        self._segment_of: dict[int, tuple[BlockConstraints, int, int]] = {
            slot: (constraints, start, stop)
            for constraints in self.constraints
            for start, stop in constraints.segments
            for slot in range(start, stop)
        }

    @property
    def movable_slots(self) -> tuple[int, ...]:
        """Slots whose instruction may be taken elsewhere, in order."""
        return tuple(sorted(self._segment_of))

    @property
    def issue_cycles(self) -> int:
        """Sum of all stall counts: cycles to issue every instruction once with no other delay."""
        return sum(max(1, stall) for stall in self._stalls)

    def slot_of(self, index: int) -> int:
        """Return where the instruction with this original index is now."""
        return self._slot[index]

    def window(self, slot: int) -> range:
        """Return the slots to which dependences let the instruction in `slot` go (itself included)."""
        segment = self._segment_of.get(slot)
        if segment is None:
            return range(slot, slot + 1)
        constraints, low, high = segment
        index = self.order[slot]
        first = max((self._slot[u] + 1 for u in constraints.predecessors[index]), default=low)
        last = min((self._slot[v] - 1 for v in constraints.successors[index]), default=high - 1)
        return range(max(low, first), min(high - 1, last) + 1)

    def is_legal(self, move: Move) -> bool:
        """Whether `move` keeps every dependence and has stall counts that satisfy every distance."""
        return move.source != move.target and self._retimed(move) is not None

    def legal_moves(self, max_distance: int | None = None, memory_only: bool = False) -> Iterator[Move]:
        """Yield legal moves.

        Args:
            max_distance: only moves of at most this many slots; 1 gives CuAsmRL's swaps.
            memory_only: only moves of memory instructions, as in CuAsmRL.
        """
        for slot in self._segment_of:
            if memory_only and not self.kernel.instructions[self.order[slot]].traits.is_memory:
                continue
            for target in self.window(slot):
                if max_distance is None or abs(target - slot) <= max_distance:
                    move = Move(slot, target)
                    if self.is_legal(move):
                        yield move

    def random_move(
        self,
        rng: random.Random,
        attempts: int = 64,
        max_distance: int | None = None,
        memory_only: bool = False,
    ) -> Move | None:
        """Return a random legal move, or None when `attempts` draws found none.

        Args:
            rng: where chance comes from.
            attempts: how many moves to try.
            max_distance: as in `legal_moves`.
            memory_only: as in `legal_moves`.
        """
        slots = list(self._segment_of)
        if memory_only:
            slots = [s for s in slots if self.kernel.instructions[self.order[s]].traits.is_memory]
        if not slots:
            return None
        for _ in range(attempts):
            source = rng.choice(slots)
            window = self.window(source)
            first, last = window[0], window[-1]
            if max_distance is not None:
                first, last = max(first, source - max_distance), min(last, source + max_distance)
            if first == last:
                continue
            target = rng.randrange(first, last)
            move = Move(source, target if target < source else target + 1)
            if self.is_legal(move):
                return move
        return None

    def play(self, move: Move) -> None:
        """Make a legal move.

        Raises:
            MoveError: the move is not legal here.
        """
        if move.source == move.target or (retimed := self._retimed(move)) is None:
            raise MoveError(f"wanted a legal move, found {move.source} -> {move.target}, which is not")
        self._apply(move, retimed)
        self.history.append(move)

    def undo(self) -> Move:
        """Take the last move back and return it.

        Raises:
            MoveError: no move was played.
        """
        if not self.history:
            raise MoveError("wanted a move to undo, found an empty history")
        move = self.history.pop()
        retimed = self._retimed(move.inverse())
        if retimed is None:
            raise AssertionError("the order before a legal move must be legal")
        self._apply(move.inverse(), retimed)
        return move

    def controls(self) -> list[ControlWord]:
        """Return the control word of each slot's instruction as it will be written."""
        instructions = self.kernel.instructions
        result = []
        for slot, index in enumerate(self.order):
            control = instructions[index].control
            if control.reuse and not same_run(self.order, slot, self._spans[index]):
                control = replace(control, reuse=0)
            result.append(control.with_stall(self._stalls[slot]))
        return result

    def words(self) -> list[int]:
        """Return the 128-bit word of every slot."""
        return [
            control.encode(self.kernel.instructions[index].word)
            for index, control in zip(self.order, self.controls(), strict=True)
        ]

    def cubin(self, program: Program) -> bytes:
        """Return `program`'s cubin with this kernel's new schedule."""
        return program.with_words({self.kernel.name: self.words()})

    @property
    def moved(self) -> int:
        """How many instructions are not in their original slot."""
        return sum(slot != index for slot, index in enumerate(self.order))

    def _retimed(self, move: Move) -> list[int] | None:
        """Return the stalls of the whole block after `move`, or None when the move is illegal."""
        segment = self._segment_of.get(move.source)
        if segment is None or move.target not in self.window(move.source):
            return None
        constraints = segment[0]
        block = constraints.block
        order = self.order[block.start : block.stop]
        order.insert(move.target - block.start, order.pop(move.source - block.start))
        return retime(order, constraints)

    def _apply(self, move: Move, stalls: list[int]) -> None:
        block = self._segment_of[move.source][0].block
        self.order.insert(move.target, self.order.pop(move.source))
        for slot in range(min(move.source, move.target), max(move.source, move.target) + 1):
            self._slot[self.order[slot]] = slot
        self._stalls[block.start : block.stop] = stalls


def retime(order: Sequence[int], constraints: BlockConstraints) -> list[int] | None:
    """Return the least stall counts for a block's instructions in `order`, or None if there are none.

    The order must already respect every predecessor relation.
    """
    floors, gaps, after_entry = constraints.floors, constraints.gap_before, constraints.after_entry
    predecessors = constraints.predecessors
    ports, spacings = constraints.ports, constraints.spacings
    latest: list[int | None] = [None] * len(spacings)
    stalls = [floors[i] for i in order]
    issued: dict[int, int] = {}
    time = 0
    for position, index in enumerate(order):
        if position:
            gap = gaps.get(index)
            if gap is not None and gap > stalls[position - 1]:
                time += gap - stalls[position - 1]
                stalls[position - 1] = gap
        needed = after_entry[index]
        for u, cycles in predecessors[index].items():
            earliest = issued[u] + cycles
            if earliest > needed:
                needed = earliest
        port = ports.get(index)
        if port is not None:
            for earlier, cycles in spacings[port]:
                neighbour = latest[earlier]
                if neighbour is not None and issued[neighbour] + cycles > needed:
                    needed = issued[neighbour] + cycles
        if needed > time:
            missing = needed - time
            if position and stalls[position - 1] + missing <= MAX_STALL:
                stalls[position - 1] += missing
                time = needed
            else:
                demands = dict(predecessors[index])
                for earlier, cycles in spacings[port] if port is not None else ():
                    neighbour = latest[earlier]
                    if neighbour is not None:
                        demands[neighbour] = max(cycles, demands.get(neighbour, 0))
                delayed = _delay(order[:position], stalls, issued, time, demands, after_entry[index])
                if delayed is None:
                    return None
                time = delayed
        if port is not None:
            latest[port] = index
        issued[index] = time
        time += stalls[position]
    # The last instruction usually transfers control; its own stall is left as it is.
    last = order[-1]
    tail = stalls[-1]
    demands = {i: cycles - tail for i, cycles in constraints.before_exit.items() if i != last}
    begin = _delay(order[:-1], stalls, issued, issued[last], demands, constraints.duration - tail)
    return None if begin is None or tail < constraints.before_exit[last] else stalls


def _delay(
    earlier: Sequence[int],
    stalls: list[int],
    issued: dict[int, int],
    time: int,
    demands: Mapping[int, int],
    not_before: int,
) -> int | None:
    """Raise stalls of `earlier` until the instruction after them issues late enough.

    The latest instruction absorbs the delay first. Distances that already hold only grow.

    Args:
        earlier: the instructions before it, in order; `stalls` and `issued` are changed for them.
        stalls: stall counts by position.
        issued: issue times by instruction.
        time: its issue time now.
        demands: for each u in `earlier`: least distance from u.
        not_before: least issue time.

    Returns:
        Its new issue time, or None when no stall counts satisfy the demands.
    """
    for position in range(len(earlier) - 1, -2, -1):
        needed = max([not_before] + [issued[u] + cycles for u, cycles in demands.items()])
        if needed <= time:
            return time
        if position < 0:
            break
        added = min(MAX_STALL - stalls[position], needed - time)
        if added > 0:
            stalls[position] += added
            time += added
            for i in earlier[position + 1 :]:
                issued[i] += added
    return None
