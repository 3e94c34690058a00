"""Finds which wait protects which consumer, by abstract interpretation of the six scoreboards.

A variable-latency instruction counts its result on a write scoreboard and the reading of its sources on a read
scoreboard. A later instruction that waits for an empty scoreboard knows that it is done, and so does every instruction
after that one. The analysis follows every outstanding result and read (a token) through the control-flow graph, and notes
the waits that cleared it and the instructions that relied on them.

In an in-order queue, an earlier operation without a scoreboard is done once a later one is known to be. The assembler
relies on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from kernelwright.sass.instruction import Instruction
from kernelwright.sass.latency import (
    FENCE,
    is_read_before_written,
    orders_memory,
    vouches_for,
    vouches_for_result,
)
from kernelwright.sass.program import Block, Kernel, Worklist

SETTLE_CYCLES = 2
"""A scoreboard counts an instruction only from this many cycles after its issue."""
SAFE_SETTLE_CYCLES = 8
"""Long enough for any instruction; see `settle_cycles`."""
_QUICK_TO_SETTLE = frozenset({"LDC", "LDS", "MUFU", "SHFL"})
_READS_UNIFORM_AT_ISSUE = frozenset({"LDG", "LDS", "LDSM", "LDL", "STS", "STSM", "STL"})


class TokenKind(Enum):
    """Outstanding part of an instruction: its result, or the reading of its sources."""

    RESULT = "result"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Token:
    """A result not yet written, or sources not yet read, of the instruction at index `producer`."""

    producer: int
    kind: TokenKind


@dataclass(slots=True)
class _Pending:
    clears: int
    age: int


@dataclass(slots=True)
class ScoreboardFacts:
    """Outcome of the analysis.

    Attributes:
        unprotected: (producer, consumer, kind) without a wait between the two. In code the assembler made, this means
        that the analysis does not know the mechanism.
        cleared: (token, waiter): least cycles from the producer to the waiter that clears the token, at most
        `SAFE_SETTLE_CYCLES`.
        relied: (waiter, consumer) in one block: the consumer relies on the waiter having waited.
        overlapping: (producer, access): a memory access issues while a fence, an atomic operation or a strong load may
        not be complete. Where the assembler allows that, it is fine.
        outstanding: (token, anchor): the token may be outstanding when a fence, a store, a synchronising or a control
        instruction issues.
    """

    unprotected: set[tuple[int, int, TokenKind]] = field(default_factory=set)
    cleared: dict[tuple[Token, int], int] = field(default_factory=dict)
    relied: set[tuple[int, int]] = field(default_factory=set)
    overlapping: set[tuple[int, int]] = field(default_factory=set)
    outstanding: set[tuple[Token, int]] = field(default_factory=set)


_State = dict[Token, _Pending]

Assignment = tuple[int, bool, int]
"""Instruction, whether its read scoreboard is meant, and the number of the scoreboard."""


Settle = Callable[[Token, int], int]
"""(token, waiter) -> cycles after the producer's issue from which the wait counts."""


def _briefly(_token: Token, _waiter: int) -> int:
    return SETTLE_CYCLES


def analyse_scoreboards(
    instructions: Sequence[Instruction], blocks: Sequence[Block], settle: Settle = _briefly
) -> ScoreboardFacts:
    """Run the analysis to its fixed point over all paths; a wait earlier than `settle` leaves the token outstanding."""
    entry: dict[int, _State] = {0: {}}
    work = Worklist(entry)
    for index in work:
        state = _copy(entry[index])
        block = blocks[index]
        for i in range(block.start, block.stop):
            _step(instructions, i, state, settle)
        for successor in block.successors:
            if successor not in entry:
                entry[successor] = _copy(state)
                work.add(successor)
            elif _merge(entry[successor], state):
                work.add(successor)
    facts = ScoreboardFacts()
    for block in blocks:
        _collect(instructions, block, _copy(entry.get(block.index, {})), settle, facts)
    return facts


@lru_cache(maxsize=256)
def reassign(kernel: Kernel, assignments: frozenset[Assignment]) -> Kernel | None:
    """Return the kernel with other scoreboards and the waits that they need, or None if the model does not explain it.

    No wait is dropped. A consumer that is left without one gets a wait for the scoreboard that now counts its producer.
    """
    if not assignments:
        return kernel
    instructions = list(kernel.instructions)
    for index, is_read, number in assignments:
        changed = {"read_barrier" if is_read else "write_barrier": number}
        instructions[index] = _recontrolled(instructions[index], **changed)
    before = analyse_scoreboards(kernel.instructions, kernel.blocks)
    if any(may_not_count(kernel, index, number) for index, _, number in assignments) or crowded(kernel, instructions):
        return None
    while True:
        facts = analyse_scoreboards(instructions, kernel.blocks)
        missing = {(Token(producer, kind), consumer) for producer, consumer, kind in facts.unprotected - before.unprotected}
        missing |= facts.outstanding & before.cleared.keys()
        for producer, access in facts.overlapping - before.overlapping:
            missing |= {(token, access) for token in tokens_of(instructions[producer], producer)}
        if not missing:
            break
        # A wait of the first consumer behind the producer may do for the others.
        first = min(missing, key=lambda pair: (pair[1] <= pair[0].producer, pair[1]))
        for token, consumer in (pair for pair in missing if pair[1] == first[1]):
            mask = tokens_of(instructions[token.producer], token.producer)[token]
            waits = instructions[consumer].control.wait_mask
            if not mask or waits & mask == mask:
                return None
            instructions[consumer] = _recontrolled(instructions[consumer], wait_mask=waits | mask)
    block_of = {i: block.index for block in kernel.blocks for i in range(block.start, block.stop)}
    for (token, waiter), age in facts.cleared.items():
        is_new = (token, waiter) not in before.cleared
        # Inside a block new distances are kept; over its edges only the assembler's are.
        crosses = block_of[token.producer] != block_of[waiter] or waiter <= token.producer
        if is_new and crosses and age < settle_cycles(instructions[token.producer]):
            return None
    return replace(kernel, instructions=tuple(instructions), assembled=kernel)


def _recontrolled(instruction: Instruction, **changes: Any) -> Instruction:
    control = replace(instruction.control, **changes)
    return replace(instruction, control=control, word=control.encode(instruction.word))


def may_not_count(kernel: Kernel, index: int, number: int) -> bool:
    """Return whether an instruction is fixed or synchronises, or a DEPBAR counts on its scoreboard or the new one.

    A DEPBAR with a count relies on which operations are on its scoreboard, and in which order they end.
    """
    instruction = kernel.instructions[index]
    own = {instruction.control.write_barrier, instruction.control.read_barrier, number}
    named = {i.operands[0] for i in kernel.instructions if i.opcode == "DEPBAR" and i.operands}
    return (
        index in kernel.fixed or instruction.traits.is_sync or not named.isdisjoint(f"SB{scoreboard}" for scoreboard in own)
    )


def crowded(kernel: Kernel, instructions: Sequence[Instruction]) -> bool:
    """Return whether more instructions of some block count on one scoreboard than the assembler let count on any."""
    return _most_on_one(kernel, instructions) > _most_on_one(kernel, kernel.instructions)


def _most_on_one(kernel: Kernel, code: Sequence[Instruction]) -> int:
    """Return the most instructions of one block that count on one scoreboard."""
    counts = Counter(
        (block.index, scoreboard)
        for block in kernel.blocks
        for instruction in code[block.start : block.stop]
        for scoreboard in {instruction.control.write_barrier, instruction.control.read_barrier} - {None}
    )
    return max(counts.values(), default=0)


def settle_cycles(producer: Instruction) -> int:
    """Return the cycles after its issue from which a wait for the producer's scoreboard is surely seen.

    ptxas waits two cycles after some opcodes; the others keep the longer time, below which it was never seen to wait.
    """
    return SETTLE_CYCLES if producer.opcode in _QUICK_TO_SETTLE else SAFE_SETTLE_CYCLES


def waits_of(instruction: Instruction) -> int:
    """Return the mask of scoreboards that are empty once this instruction has issued."""
    mask = instruction.control.wait_mask
    if instruction.opcode == "DEPBAR" and len(instruction.operands) >= 2:
        scoreboard, count = instruction.operands[:2]
        if scoreboard.startswith("SB") and scoreboard[2:].isdigit() and count.strip() == "0x0":
            mask |= 1 << int(scoreboard[2:])
    return mask


def tokens_of(instruction: Instruction, index: int) -> dict[Token, int]:
    """Return the tokens an instruction makes outstanding, each with the mask of scoreboards that count it."""
    if not instruction.is_variable_latency:
        return {}
    result, read = _counting(instruction)
    tokens = {Token(index, TokenKind.READ): read}
    if instruction.defs or result:
        tokens[Token(index, TokenKind.RESULT)] = result
    return tokens


def _counting(instruction: Instruction) -> tuple[int, int]:
    """Return the masks of scoreboards that count its result and the reading of its sources."""
    control = instruction.control
    result = 0 if control.write_barrier is None else 1 << control.write_barrier
    # Sources are read before the result is written, so the write scoreboard covers both.
    return result, result | (0 if control.read_barrier is None else 1 << control.read_barrier)


def late_reads(instruction: Instruction) -> frozenset[str]:
    """Return the registers that a variable-latency instruction may read after its issue.

    Predicates are read at issue: ptxas overwrites them one cycle later. So are uniform registers by accesses to shared
    and local memory, and by loads from global memory, whose descriptor ptxas builds anew for each cache policy. Bulk copies
    have them on a scoreboard, and of others nothing is known.
    """
    files = ("R",) if instruction.opcode in _READS_UNIFORM_AT_ISSUE else ("R", "UR")
    return frozenset(name for name in instruction.uses if name.startswith(files))


def _step(instructions: Sequence[Instruction], index: int, state: _State, settle: Settle) -> None:
    instruction = instructions[index]
    waits = waits_of(instruction)
    if waits:
        for token in [t for t, p in state.items() if p.clears & waits and p.age >= settle(t, index)]:
            del state[token]
    new = tokens_of(instruction, index)
    if new:
        _cover(instructions, instruction, state)
        for token, mask in new.items():
            state[token] = _Pending(mask, 0)
    elapsed = max(1, instruction.control.stall)
    for pending in state.values():
        if pending.age < SAFE_SETTLE_CYCLES:
            pending.age = min(SAFE_SETTLE_CYCLES, pending.age + elapsed)


def _cover(instructions: Sequence[Instruction], later: Instruction, state: _State) -> None:
    """Let a later operation of an in-order queue vouch for earlier ones without a scoreboard of their own."""
    result, read = _counting(later)
    for token, pending in state.items():
        earlier = instructions[token.producer]
        is_result = token.kind is TokenKind.RESULT
        own = earlier.control.write_barrier if is_result else earlier.control.read_barrier
        if own is not None or not vouches_for(earlier, later):
            continue
        if not is_result:
            pending.clears |= read
        elif vouches_for_result(earlier, later):
            pending.clears |= result


def _collect(
    instructions: Sequence[Instruction], block: Block, state: _State, settle: Settle, facts: ScoreboardFacts
) -> None:
    """Walk one block from its entry state and note what happens."""
    guards: dict[str, set[int]] = {}
    for i in range(block.start, block.stop):
        instruction = instructions[i]
        waits = waits_of(instruction)
        accesses_memory = bool(instruction.traits.reads or instruction.traits.writes)
        is_anchor = instruction.traits.is_sync or bool(instruction.traits.writes)
        for token, pending in state.items():
            if pending.clears & waits and pending.age >= settle(token, i):
                facts.cleared[token, i] = min(pending.age, facts.cleared.get((token, i), pending.age))
                for name in registers_of(instructions, token):
                    guards.setdefault(name, set()).add(i)
                if orders_memory(instructions[token.producer]):
                    guards.setdefault(FENCE, set()).add(i)
                continue
            if is_anchor:
                facts.outstanding.add((token, i))
            if _hazard(instructions, token, instruction):
                facts.unprotected.add((token.producer, i, token.kind))
            if accesses_memory and orders_memory(instructions[token.producer]):
                facts.overlapping.add((token.producer, i))
        _step(instructions, i, state, settle)
        for name in instruction.defs | instruction.uses | ({FENCE} if accesses_memory else set()):
            for guard in guards.get(name, ()):
                if guard != i:
                    facts.relied.add((guard, i))
        for name in instruction.defs:
            if name in guards and name not in instruction.uses:
                del guards[name]


def registers_of(instructions: Sequence[Instruction], token: Token) -> frozenset[str]:
    """Return the registers that a token makes unsafe: to touch (RESULT) or to overwrite (READ)."""
    producer = instructions[token.producer]
    return producer.defs if token.kind is TokenKind.RESULT else late_reads(producer)


def _hazard(instructions: Sequence[Instruction], token: Token, consumer: Instruction) -> bool:
    unsafe = registers_of(instructions, token)
    if token.kind is TokenKind.RESULT:
        return not unsafe.isdisjoint(consumer.uses | consumer.defs)
    if is_read_before_written(instructions[token.producer], consumer):
        return False
    return not unsafe.isdisjoint(consumer.defs)


def _copy(state: _State) -> _State:
    return {token: _Pending(p.clears, p.age) for token, p in state.items()}


def _merge(into: _State, other: _State) -> bool:
    """Join two states: outstanding on either path, cleared only by what clears on both."""
    changed = False
    for token, pending in other.items():
        mine = into.get(token)
        if mine is None:
            into[token] = _Pending(pending.clears, pending.age)
            changed = True
            continue
        clears, age = mine.clears & pending.clears, min(mine.age, pending.age)
        if (clears, age) != (mine.clears, mine.age):
            mine.clears, mine.age = clears, age
            changed = True
    return changed
