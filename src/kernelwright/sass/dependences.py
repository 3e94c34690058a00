"""Derives from a basic block's original order what every new order must respect.

Every constraint has the form "v issues at least `cycles` after u", with u and v in one block, or at
least so many cycles after the block begins or before it ends. Order is the case of zero cycles:
distinct instructions of a warp never issue in the same cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kernelwright.sass.instruction import SCOREBOARDS, Instruction
from kernelwright.sass.latency import (
    LONGEST_CYCLES,
    LONGEST_SPACING_CYCLES,
    Dependence,
    Port,
    bound_cycles,
    defs_of,
    has_unknown_latency,
    hold_cycles,
    may_keep_old_values,
    memory_conflict,
    port_of,
    required_spacings,
    touches_memory,
    uses_of,
    vouches_for,
)
from kernelwright.sass.program import Block, Kernel, Worklist
from kernelwright.sass.scoreboards import (
    ScoreboardFacts,
    analyse_scoreboards,
    settle_cycles,
    waits_of,
)

Spacings = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class BlockConstraints:
    """Constraints on one block; instructions are named by their index in the kernel, times are in cycles.

    Attributes:
        predecessors: for v: {u: cycles}: v issues at least `cycles` after u, and after it in order.
        successors: for u: every v that must stay behind it.
        after_entry: for v: least time from the block's begin to v.
        before_exit: for u: least time from u to the block's end.
        duration: least time that the block takes.
        gap_before: for synchronising or pinned v: least stall of whatever precedes it.
        floors: least stall of each instruction: 1 or 2 where a dependence explains the original stall, else the original.
        drains: instructions with a stall of zero, which holds until the pipeline is empty: no other stall replaces it.
        segments: maximal runs [start, stop) of movable slots.
        ports: for each instruction with a known execution port: the number of its operation.
        spacings: for each operation's number: (earlier operation, least distance from it).
    """

    block: Block
    predecessors: dict[int, dict[int, int]]
    successors: dict[int, frozenset[int]]
    after_entry: dict[int, int]
    before_exit: dict[int, int]
    duration: int
    gap_before: dict[int, int]
    floors: dict[int, int]
    drains: frozenset[int]
    segments: tuple[tuple[int, int], ...]
    ports: dict[int, int]
    spacings: Spacings


@lru_cache(maxsize=64)
def constrain(kernel: Kernel) -> tuple[BlockConstraints, ...]:
    """Derive the constraints of every block of a kernel."""
    instructions = kernel.instructions
    facts = analyse_scoreboards(instructions, kernel.blocks)
    assembled = kernel.assembled
    known = facts if assembled is None else analyse_scoreboards(assembled.instructions, kernel.blocks)
    strange = frozenset().union(*(i.uses | i.defs for i in instructions if has_unknown_latency(i)))
    remaining = _remaining_at_entry(kernel, strange)
    operations, spacings = _numbered_operations(kernel)
    by_block: list[list[tuple[int, int, int]]] = [[] for _ in kernel.blocks]
    owner = [block.index for block in kernel.blocks for _ in range(block.start, block.stop)]
    # What protects such a pair is not known, so nothing in its blocks is touched.
    frozen = {owner[i] for producer, consumer, _ in facts.unprotected for i in (producer, consumer)}
    for u, v, cycles in _scoreboard_order(instructions, facts, known):
        if owner[u] == owner[v] and u < v:
            by_block[owner[u]].append((u, v, cycles))
    result = []
    for block in kernel.blocks:
        whole = range(block.start, block.stop) if block.index in frozen else ()
        pinned, ordered = kernel.fixed.union(whole), by_block[block.index]
        result.append(_block(instructions, block, ordered, remaining[block.index], pinned, strange, operations, spacings))
    return tuple(result)


def issue_times(instructions: Sequence[Instruction], block: Block) -> list[int]:
    """Return the cycle at which each instruction of a block issues, counted from its begin, and last the block's end."""
    times = [0]
    for i in range(block.start, block.stop):
        times.append(times[-1] + max(1, instructions[i].control.stall))
    return times


def accesses(instructions: Sequence[Instruction], order: Sequence[int]) -> Iterator[tuple[int, int, str, Dependence]]:
    """Yield (earlier, later, resource, kind) for every dependence between instructions of a block.

    A guarded or partial definition does not hide the ones before it.
    """
    last_defs: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    for i in order:
        instruction = instructions[i]
        defs, uses = defs_of(instruction), uses_of(instruction)
        for name in uses:
            for u in last_defs.get(name, ()):
                yield u, i, name, Dependence.RAW
        for name in defs:
            for u in last_defs.get(name, ()):
                yield u, i, name, Dependence.WAW
            for u in readers.get(name, ()):
                yield u, i, name, Dependence.WAR
        for name in defs:
            if may_keep_old_values(instruction):
                last_defs.setdefault(name, []).append(i)
            else:
                last_defs[name] = [i]
            readers[name] = []
        for name in uses:
            readers.setdefault(name, []).append(i)


def _scoreboard_order(
    instructions: Sequence[Instruction], facts: ScoreboardFacts, known: ScoreboardFacts
) -> Iterator[tuple[int, int, int]]:
    """Yield (earlier, later, cycles) for producers before waiters, and waiters before what relies on the wait.

    The assembler's own distances, `known`, are enough for its own waits.
    """
    for token, waiter in facts.cleared:
        enough = settle_cycles(instructions[token.producer])
        yield token.producer, waiter, min(known.cleared.get((token, waiter), enough), enough)
    for waiter, consumer in facts.relied:
        yield waiter, consumer, 1


def _pairwise(instructions: Sequence[Instruction], block: Block) -> Iterator[tuple[int, int]]:
    """Yield pairs whose order matters for memory or for an in-order queue."""
    touching = [i for i in range(block.start, block.stop) if touches_memory(instructions[i])]
    for position, u in enumerate(touching):
        for v in touching[position + 1 :]:
            first, second = instructions[u], instructions[v]
            if memory_conflict(first, second) or vouches_for(first, second):
                yield u, v


def _identical(instructions: Sequence[Instruction], block: Block) -> Iterator[tuple[int, int]]:
    """Yield neighbouring occurrences of the same instruction: swapping them would change nothing."""
    latest: dict[int, int] = {}
    for i in range(block.start, block.stop):
        payload = instructions[i].payload
        if payload in latest:
            yield latest[payload], i
        latest[payload] = i


def _register_edges(instructions: Sequence[Instruction], block: Block, times: Sequence[int]) -> dict[int, dict[int, int]]:
    edges: dict[int, dict[int, int]] = {i: {} for i in range(block.start, block.stop)}
    for u, v, name, kind in accesses(instructions, range(block.start, block.stop)):
        distance = times[v - block.start] - times[u - block.start]
        cycles = min(distance, bound_cycles(kind, name, instructions[u], instructions[v]))
        edges[v][u] = max(edges[v].get(u, 1), cycles)
    return edges


_Remaining = dict[tuple[str, bool], int]
"""(resource, whether a definition) -> cycles for which the access still binds later instructions."""


def _remaining_at_entry(kernel: Kernel, strange: frozenset[str]) -> list[_Remaining]:
    """Return what earlier blocks' fixed-latency accesses still demand at each block's begin."""
    entry: list[_Remaining] = [{} for _ in kernel.blocks]
    work = Worklist(range(len(kernel.blocks)))
    for index in work:
        block = kernel.blocks[index]
        duration = issue_times(kernel.instructions, block)[-1]
        out = {key: left - duration for key, left in entry[block.index].items() if left > duration}
        for key, left in _holds_at_exit(kernel.instructions, block, strange).items():
            out[key] = max(out.get(key, 0), left)
        for successor in block.successors:
            target = entry[successor]
            grown = {key: left for key, left in out.items() if left > target.get(key, 0)}
            if grown:
                target.update(grown)
                work.add(successor)
    return entry


def _holds_at_exit(instructions: Sequence[Instruction], block: Block, strange: frozenset[str]) -> _Remaining:
    times = issue_times(instructions, block)
    out: _Remaining = {}
    for i in range(block.start, block.stop):
        elapsed = times[-1] - times[i - block.start]
        for key, cycles in _holds(instructions[i], strange):
            if cycles > elapsed:
                out[key] = max(out.get(key, 0), cycles - elapsed)
    return out


def _holds(instruction: Instruction, strange: frozenset[str]) -> Iterator[tuple[tuple[str, bool], int]]:
    """Yield what an instruction demands of later ones: (resource, is definition), cycles.

    Scoreboards and execution ports count as resources: an instruction that counts on a scoreboard defines it, one that
    waits uses it, and every instruction of a port's family does both.
    """
    for name in defs_of(instruction):
        yield (name, True), hold_cycles(Dependence.RAW, name, instruction, name in strange)
    for name in uses_of(instruction):
        yield (name, False), hold_cycles(Dependence.WAR, name, instruction, name in strange)
    port = port_of(instruction)
    for family in port.families if port is not None else ():
        yield (family, True), LONGEST_SPACING_CYCLES
    for scoreboard in (instruction.control.write_barrier, instruction.control.read_barrier):
        if scoreboard is not None:
            yield (f"SB{scoreboard}", True), settle_cycles(instruction)


def _awaited(instruction: Instruction) -> frozenset[str]:
    mask = waits_of(instruction)
    return frozenset(f"SB{i}" for i in SCOREBOARDS if mask >> i & 1)


def _block(
    instructions: Sequence[Instruction],
    block: Block,
    ordered: Sequence[tuple[int, int, int]],
    remaining: _Remaining,
    pinned: frozenset[int],
    strange: frozenset[str],
    operations: dict[Port, int],
    spacings: Spacings,
) -> BlockConstraints:
    times = issue_times(instructions, block)
    edges = _register_edges(instructions, block, times)
    for u, v, cycles in ordered:
        edges[v][u] = max(edges[v].get(u, 1), cycles)
    for u, v in (*_pairwise(instructions, block), *_identical(instructions, block)):
        edges[v].setdefault(u, 1)
    after_entry: dict[int, int] = {}
    before_exit: dict[int, int] = {}
    gap_before: dict[int, int] = {}
    slots = range(block.start, block.stop)
    ports = {i: operations[port] for i in slots if (port := port_of(instructions[i])) is not None}
    for i in slots:
        instruction = instructions[i]
        since = times[i - block.start]
        defs, uses = defs_of(instruction), uses_of(instruction) | _awaited(instruction)
        if (port := port_of(instruction)) is not None:
            uses |= port.families
        needed = max(
            (left for (name, is_def), left in remaining.items() if name in defs or (is_def and name in uses)),
            default=0,
        )
        after_entry[i] = min(since, needed)
        held = max((cycles for _, cycles in _holds(instruction, strange)), default=0)
        before_exit[i] = min(times[-1] - since, held)
        if (instruction.traits.is_sync or i in pinned) and i > block.start:
            gap_before[i] = since - times[i - block.start - 1]
    floors = _floors(instructions, block, times, edges, after_entry, gap_before, pinned, ports, spacings)
    successors: dict[int, set[int]] = {i: set() for i in edges}
    for v, sources in edges.items():
        for u in sources:
            successors[u].add(v)
    return BlockConstraints(
        block=block,
        predecessors=edges,
        successors={u: frozenset(vs) for u, vs in successors.items()},
        after_entry=after_entry,
        before_exit=before_exit,
        duration=min(times[-1], LONGEST_CYCLES),
        gap_before=gap_before,
        floors=floors,
        drains=frozenset(i for i in slots if instructions[i].control.stall == 0),
        segments=_segments(block, pinned),
        ports=ports,
        spacings=spacings,
    )


def _floors(
    instructions: Sequence[Instruction],
    block: Block,
    times: Sequence[int],
    edges: dict[int, dict[int, int]],
    after_entry: dict[int, int],
    gap_before: dict[int, int],
    pinned: frozenset[int],
    ports: dict[int, int],
    spacings: Spacings,
) -> dict[int, int]:
    """Return the least stall of each instruction: the original where nothing known explains it."""
    floors = {}
    latest: dict[int, int] = {}
    for i in range(block.start, block.stop):
        original = max(1, instructions[i].control.stall)
        begin = times[i - block.start]
        if i in ports:
            latest[ports[i]] = begin
        follower = i + 1
        floors[i] = original
        if i in pinned or instructions[i].traits.is_sync or follower == block.stop:
            continue
        earliest = [after_entry[follower], begin + gap_before.get(follower, 1)]
        earliest += [times[u - block.start] + cycles for u, cycles in edges[follower].items()]
        if follower in ports:
            earliest += [latest[p] + cycles for p, cycles in spacings[ports[follower]] if p in latest]
        if max(earliest) == begin + original:
            floors[i] = 1
    return floors


def _numbered_operations(kernel: Kernel) -> tuple[dict[Port, int], Spacings]:
    """Number the kernel's operations, and return for each what it must keep away from."""
    required = required_spacings(kernel)
    ports = sorted({port for pair in required for port in pair}, key=str)
    numbers = {port: number for number, port in enumerate(ports)}
    spacings: list[list[tuple[int, int]]] = [[] for _ in ports]
    for (first, second), cycles in required.items():
        spacings[numbers[second]].append((numbers[first], cycles))
    return numbers, tuple(tuple(earlier) for earlier in spacings)


def _segments(block: Block, pinned: frozenset[int]) -> tuple[tuple[int, int], ...]:
    segments = []
    start = block.start
    for i in range(block.start, block.stop + 1):
        if i == block.stop or i in pinned:
            if i - start > 1:
                segments.append((start, i))
            start = i + 1
    return tuple(segments)
