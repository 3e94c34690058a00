"""Holds a kernel's schedule as a state of a game: its moves, which of them are legal, undo, stall counts, and the new cubin.

A state is an order of every basic block, and for some instructions an edit: a longer stall, a flipped yield, a flipped
reuse bit, another cache hint. Legal moves and control words are functions of the state alone, so a state gives the same
bytes whatever path led there, and the original state gives the original bytes.

Moves are data with a form in JSON. Their slots are those of the schedule at the moment the move is played, so a list of
moves replays from the original order only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kernelwright.errors import MoveError
from kernelwright.sass.dependences import BlockConstraints, constrain
from kernelwright.sass.instruction import (
    LEAST_STALL_TO_YIELD,
    MAX_STALL,
    MAX_STALL_WITHOUT_YIELD,
    NO_SCOREBOARD_CODE,
    SCOREBOARDS,
    ControlWord,
    hint_bits,
    hint_flips,
)
from kernelwright.sass.program import Kernel, Program
from kernelwright.sass.reuse import OPERAND_SLOTS, allows_reuse, may_keep, reuse_spans, same_run
from kernelwright.sass.scoreboards import reassign

_NOTHING_EXTRA: Mapping[int, int] = {}


def retime(
    order: Sequence[int], constraints: BlockConstraints, extra: Mapping[int, int] = _NOTHING_EXTRA
) -> list[int] | None:
    """Return the least stall counts for a block's instructions in `order`, or None if there are none.

    Args:
        order: the block's instructions; must already respect every predecessor relation.
        extra: cycles by which an instruction is to stall longer than its least stall. Distances that
        hold with less stall hold with more, so this only takes slack from what is added elsewhere.
    """
    floors, gaps, after_entry = constraints.floors, constraints.gap_before, constraints.after_entry
    predecessors = constraints.predecessors
    ports, spacings = constraints.ports, constraints.spacings
    drains = constraints.drains
    latest: list[int | None] = [None] * len(spacings)
    stalls = [floors[i] for i in order]
    if extra:
        stalls = [stall + extra.get(i, 0) for stall, i in zip(stalls, order, strict=True)]
        if max(stalls) > MAX_STALL:
            return None
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
            if position and stalls[position - 1] + missing <= MAX_STALL and order[position - 1] not in drains:
                stalls[position - 1] += missing
                time = needed
            else:
                demands = dict(predecessors[index])
                for earlier, cycles in spacings[port] if port is not None else ():
                    neighbour = latest[earlier]
                    if neighbour is not None:
                        demands[neighbour] = max(cycles, demands.get(neighbour, 0))
                delayed = _delay(order[:position], stalls, issued, time, demands, after_entry[index], drains)
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
    begin = _delay(order[:-1], stalls, issued, issued[last], demands, constraints.duration - tail, drains)
    if begin is None or tail < constraints.before_exit[last]:
        return None
    return [0 if i in drains else stall for i, stall in zip(order, stalls, strict=True)] if drains else stalls


def _delay(
    earlier: Sequence[int],
    stalls: list[int],
    issued: dict[int, int],
    time: int,
    demands: Mapping[int, int],
    not_before: int,
    drains: frozenset[int],
) -> int | None:
    """Raise stalls of `earlier` until the instruction after them issues late enough; the latest absorbs the delay first.

    Distances that already hold only grow. `stalls`, by position, and `issued`, by instruction, are changed in place.

    Args:
        time: issue time of the instruction now.
        demands: for each u in `earlier`: least distance from u.
        not_before: least issue time.
        drains: instructions whose stall cannot be raised.

    Returns:
        The new issue time, or None when no stall counts satisfy the demands.
    """
    for position in range(len(earlier) - 1, -2, -1):
        needed = max([not_before] + [issued[u] + cycles for u, cycles in demands.items()])
        if needed <= time:
            return time
        if position < 0:
            break
        if earlier[position] in drains:
            continue
        added = min(MAX_STALL - stalls[position], needed - time)
        if added > 0:
            stalls[position] += added
            time += added
            for i in earlier[position + 1 :]:
                issued[i] += added
    return None


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


@dataclass(frozen=True, slots=True)
class HintEdit:
    """Flip bits of the cache hint of the global load or store in `slot`; see `kernelwright.sass.instruction.hint_flips`."""

    slot: int
    flips: int


@dataclass(frozen=True, slots=True)
class ScoreboardEdit:
    """Flip bits of the number of the scoreboard on which the instruction in `slot` counts.

    Attributes:
        file: 0 for the scoreboard of its result, 1 for that of reading its sources.
    """

    slot: int
    file: int
    flips: int


AnyMove = Move | ClusterMove | StallEdit | YieldEdit | ReuseEdit | HintEdit | ScoreboardEdit
_KINDS: dict[str, type[AnyMove]] = {
    "move": Move,
    "cluster": ClusterMove,
    "stall": StallEdit,
    "yield": YieldEdit,
    "reuse": ReuseEdit,
    "hint": HintEdit,
    "scoreboard": ScoreboardEdit,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
MOVE_KINDS = tuple(_KINDS)
"""Names of the kinds of moves in JSON."""


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
    """Parse a move from its JSON list.

    Raises:
        MoveError: it is not a valid move.
    """
    if isinstance(value, Sequence) and not isinstance(value, str) and value and value[0] in MOVE_KINDS:
        kind = _KINDS[value[0]]
        numbers = value[1:]
        if len(numbers) == len(kind.__slots__) and all(type(n) is int for n in numbers):
            return kind(*numbers)
    raise MoveError(f"wanted a move such as ['move', 3, 7], found {value!r}")


@dataclass(frozen=True, slots=True)
class Edit:
    """Deliberate changes of one instruction's control word.

    Attributes:
        extra_stall: cycles beyond the least stall, 0 or more.
        flips_yield: whether it yields where the original does not, or the other way round.
        flips_reuse: mask of operands that are kept where they would not be, or the other way round.
        flips_hint: bits of the cache hint that differ from the original's.
        flips_scoreboard: bits of the numbers of its scoreboards that differ: of the result, of reading its sources.
    """

    extra_stall: int = 0
    flips_yield: bool = False
    flips_reuse: int = 0
    flips_hint: int = 0
    flips_scoreboard: tuple[int, int] = (0, 0)


_NO_EDIT = Edit()


class Schedule:
    """Current order and timing of one kernel.

    Attributes:
        original: the kernel as the assembler wrote it.
        kernel: the same with the scoreboards of this schedule.
        order: for each slot, the index of the original instruction in it.
        history: moves played, oldest first.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.original = kernel
        self.order: list[int] = list(range(len(kernel.instructions)))
        self.history: list[AnyMove] = []
        self._edits: dict[int, Edit] = {}
        self._slot = list(self.order)
        self._stalls: list[int] = [i.control.stall for i in kernel.instructions]
        self._spans = reuse_spans(kernel)
        self._keepable_of: dict[tuple[int, int], int] = {}
        self._adopt(kernel)

    def _adopt(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.constraints: tuple[BlockConstraints, ...] = constrain(kernel)
        self._segment_of: dict[int, tuple[BlockConstraints, int, int]] = {
            slot: (constraints, start, stop)
            for constraints in self.constraints
            for start, stop in constraints.segments
            for slot in range(start, stop)
        }
        self._movable = tuple(sorted(self._segment_of))

    @property
    def movable_slots(self) -> tuple[int, ...]:
        """Slots of instructions that may be taken elsewhere, in order."""
        return self._movable

    @property
    def issue_cycles(self) -> int:
        """Sum of all stall counts: cycles to issue every instruction once with no other delay."""
        return sum(max(1, stall) for stall in self._stalls)

    def slot_of(self, index: int) -> int:
        """Return the present slot of the instruction with this original index."""
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

    def is_legal(self, move: AnyMove) -> bool:
        """Return whether `move` changes something, keeps every dependence and has control words that satisfy all rules."""
        return self._outcome(move) is not None

    def legal_moves(self, max_distance: int | None = None, memory_only: bool = False) -> Iterator[Move]:
        """Yield legal moves, of memory instructions only if asked; a `max_distance` of 1 slot gives CuAsmRL's swaps."""
        for slot in self._segment_of:
            if memory_only and not self.kernel.instructions[self.order[slot]].traits.is_memory:
                continue
            for target in self.window(slot):
                if max_distance is None or abs(target - slot) <= max_distance:
                    move = Move(slot, target)
                    if self.is_legal(move):
                        yield move

    def play(self, move: AnyMove) -> None:
        """Make a legal move.

        Raises:
            MoveError: the move is not legal here.
        """
        outcome = self._outcome(move)
        if outcome is None:
            raise MoveError(f"wanted a legal move, found {move_to_json(move)}, which is not")
        self._apply(outcome)
        self.history.append(move)

    def undo(self) -> AnyMove:
        """Take the last move back and return it.

        Raises:
            MoveError: no move was played.
        """
        if not self.history:
            raise MoveError("wanted a move to undo, found an empty history")
        move = self.history.pop()
        outcome = self._outcome(inverse_of(move), must_change=False)
        if outcome is None:
            raise AssertionError("the state before a legal move must be legal")
        self._apply(outcome)
        return move

    def copy(self) -> Schedule:
        """Return an independent schedule in the same state with the same history."""
        twin = object.__new__(Schedule)
        twin.__dict__ |= self.__dict__
        twin.order, twin.history = list(self.order), list(self.history)
        twin._slot, twin._stalls, twin._edits = list(self._slot), list(self._stalls), dict(self._edits)
        return twin

    def edit_of(self, index: int) -> Edit:
        """Return the edit of the instruction with this original index."""
        return self._edits.get(index, _NO_EDIT)

    def control(self, slot: int) -> ControlWord:
        """Return the control word of the instruction in a slot as it will be written."""
        return self._control(slot, self.edit_of(self.order[slot]))

    def controls(self) -> list[ControlWord]:
        """Return the control word of each slot's instruction as it will be written."""
        return [self.control(slot) for slot in range(len(self.order))]

    def words(self) -> list[int]:
        """Return the 128-bit word of every slot."""
        words = []
        for slot, index in enumerate(self.order):
            instruction = self.kernel.instructions[index]
            control = self.control(slot)
            word = instruction.word ^ hint_bits(self.edit_of(index).flips_hint)
            words.append(word if control is instruction.control else control.encode(word))
        return words

    def cubin(self, program: Program) -> bytes:
        """Return `program`'s cubin with this kernel's new schedule."""
        return program.with_words({self.kernel.name: self.words()})

    @property
    def moved(self) -> int:
        """Number of instructions outside their original slot."""
        return sum(slot != index for slot, index in enumerate(self.order))

    def _control(self, slot: int, edit: Edit) -> ControlWord:
        index = self.order[slot]
        original = self.kernel.instructions[index].control
        undisturbed = self._is_undisturbed(slot)
        if undisturbed and edit is _NO_EDIT and self._stalls[slot] == original.stall:
            return original
        control = replace(original, reuse=0).with_stall(self._stalls[slot])
        # Flips hold only while they make sense: elsewhere the instruction is as the original has it.
        if edit.flips_yield and LEAST_STALL_TO_YIELD <= control.stall <= MAX_STALL_WITHOUT_YIELD:
            control = replace(control, yields=not original.yields)
        if allows_reuse(control):
            keepable = self._keepable(slot)
            kept = original.reuse if undisturbed else keepable
            control = replace(control, reuse=(kept ^ edit.flips_reuse) & (kept | keepable))
        return control

    def _is_undisturbed(self, slot: int) -> bool:
        """Return whether the instruction in `slot` has its original followers, as far as its operands are kept for them."""
        index = self.order[slot]
        if index in self._spans:
            return same_run(self.order, slot, self._spans[index])
        segment = self._segment_of.get(slot)
        at_end = segment is None or slot + 1 == segment[0].block.stop
        return at_end or self.order[slot + 1] == index + 1

    def _keepable(self, slot: int) -> int:
        """Return the mask of operands that the instruction in `slot` may keep for its present follower.

        ptxas keeps every one of them, so a new pair of neighbours does, too.
        """
        segment = self._segment_of.get(slot)
        if segment is None or slot + 1 >= segment[0].block.stop:
            return 0
        pair = self.order[slot], self.order[slot + 1]
        if pair not in self._keepable_of:
            first, follower = (self.kernel.instructions[index] for index in pair)
            self._keepable_of[pair] = sum(
                1 << k for k in OPERAND_SLOTS if may_keep(first, follower, k, self.kernel.architecture)
            )
        return self._keepable_of[pair]

    def _outcome(self, move: AnyMove, must_change: bool = True) -> _Outcome | None:
        """Return what `move` leads to, or None when it is illegal."""
        if isinstance(move, Move):
            if move.target not in self.window(move.source) or move.source == move.target:
                return None
            return self._reordered(move.source, 1, move.target)
        if isinstance(move, ClusterMove):
            return self._reordered(move.source, move.count, move.target) if self._fits(move) else None
        if move.slot not in self._segment_of:
            return None
        index = self.order[move.slot]
        edit = self.edit_of(index)
        if isinstance(move, StallEdit):
            if move.cycles == 0 or edit.extra_stall + move.cycles < 0:
                return None
            block = self._segment_of[move.slot][0]
            extra = self._extra(block) | {index: edit.extra_stall + move.cycles}
            stalls = retime(self.order[block.block.start : block.block.stop], block, extra)
            if stalls is None:
                return None
            unchanged = stalls == self._stalls[block.block.start : block.block.stop]
            if must_change and unchanged:
                return None
            return _Outcome(block, None, stalls, index, replace(edit, extra_stall=extra[index]))
        if isinstance(move, HintEdit):
            flips = edit.flips_hint ^ move.flips
            if move.flips <= 0 or (flips and flips not in hint_flips(self.kernel.instructions[index])):
                return None
            return _Outcome(self._segment_of[move.slot][0], None, None, index, replace(edit, flips_hint=flips))
        if isinstance(move, ScoreboardEdit):
            return self._recounted(index, edit, move)
        if isinstance(move, YieldEdit):
            changed = replace(edit, flips_yield=not edit.flips_yield)
        elif move.operand in OPERAND_SLOTS:
            changed = replace(edit, flips_reuse=edit.flips_reuse ^ 1 << move.operand)
        else:
            return None
        if must_change and self._control(move.slot, edit) == self._control(move.slot, changed):
            return None
        return _Outcome(self._segment_of[move.slot][0], None, None, index, changed)

    def _recounted(self, index: int, edit: Edit, move: ScoreboardEdit) -> _Outcome | None:
        if move.file not in (0, 1) or move.flips not in range(1, NO_SCOREBOARD_CODE + 1):
            return None
        flips = list(edit.flips_scoreboard)
        flips[move.file] ^= move.flips
        changed = replace(edit, flips_scoreboard=(flips[0], flips[1]))
        assignments = set()
        for i, other in (self._edits | {index: changed}).items():
            control = self.original.instructions[i].control
            for file, number in enumerate((control.write_barrier, control.read_barrier)):
                if other.flips_scoreboard[file] and number is not None:
                    assignments.add((i, bool(file), number ^ other.flips_scoreboard[file]))
                elif other.flips_scoreboard[file]:
                    return None
        if any(number not in SCOREBOARDS for *_, number in assignments):
            return None
        kernel = reassign(self.original, frozenset(assignments))
        if kernel is None:
            return None
        stalls: list[int] = []
        for constraints in constrain(kernel):
            block = constraints.block
            order = self.order[block.start : block.stop]
            is_ordered = all(self._slot[u] < self._slot[v] for v in order for u in constraints.predecessors[v])
            timed = retime(order, constraints, self._extra(constraints)) if is_ordered else None
            if timed is None:
                return None
            stalls += timed
        return _Outcome(self._segment_of[move.slot][0], None, stalls, index, changed, kernel)

    def _fits(self, move: ClusterMove) -> bool:
        """Return whether dependences let the run go there."""
        segment = self._segment_of.get(move.source)
        if segment is None or move.count < 1 or move.source == move.target:
            return False
        constraints, low, high = segment
        first, last = min(move.source, move.target), max(move.source, move.target) + move.count
        if first < low or last > high:
            return False
        run = self.order[move.source : move.source + move.count]
        if move.target > move.source:
            crossed = self.order[move.source + move.count : last]
            return all(constraints.successors[index].isdisjoint(crossed) for index in run)
        crossed = self.order[first : move.source]
        return all(constraints.successors[index].isdisjoint(run) for index in crossed)

    def _reordered(self, source: int, count: int, target: int) -> _Outcome | None:
        constraints = self._segment_of[source][0]
        start, stop = constraints.block.start, constraints.block.stop
        order = self.order[start:stop]
        run = order[source - start : source - start + count]
        del order[source - start : source - start + count]
        order[target - start : target - start] = run
        stalls = retime(order, constraints, self._extra(constraints))
        return None if stalls is None else _Outcome(constraints, order, stalls, None, None)

    def _extra(self, constraints: BlockConstraints) -> dict[int, int]:
        block = constraints.block
        return {
            index: edit.extra_stall
            for index, edit in self._edits.items()
            if edit.extra_stall and block.start <= index < block.stop
        }

    def _apply(self, outcome: _Outcome) -> None:
        block = outcome.constraints.block
        if outcome.kernel is not None:
            self._adopt(outcome.kernel)
            self._stalls = list(outcome.stalls or ())
        elif outcome.stalls is not None:
            self._stalls[block.start : block.stop] = outcome.stalls
        if outcome.order is not None:
            self.order[block.start : block.stop] = outcome.order
            for slot, index in enumerate(outcome.order, block.start):
                self._slot[index] = slot
        if outcome.index is not None and outcome.edit is not None:
            if outcome.edit == _NO_EDIT:
                self._edits.pop(outcome.index, None)
            else:
                self._edits[outcome.index] = outcome.edit


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Effect of a legal move: the new order and stalls of one block, and one instruction's edit; None is as before.

    With a new `kernel` the stalls are those of all its blocks.
    """

    constraints: BlockConstraints
    order: list[int] | None
    stalls: list[int] | None
    index: int | None
    edit: Edit | None
    kernel: Kernel | None = None
