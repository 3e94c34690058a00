"""Finds the least issue distance between dependent instructions over all paths of the control-flow graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernelwright.sass.code.instruction import Instruction
from kernelwright.sass.code.program import Block
from kernelwright.sass.hazards.effects import defs_of, may_keep_old_values, uses_of
from kernelwright.sass.hazards.latency import LONGEST_CYCLES, Dependence

Distances = dict[tuple[int, int, str, Dependence], int]
"""(producer, consumer, resource, kind) -> least distance in cycles, where below `LONGEST_CYCLES`."""

_Access = tuple[str, int, bool]
"""Resource, instruction, whether it defines."""


def minimum_distances(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> Distances:
    """Return the least distance of every dependent pair that can be less than `LONGEST_CYCLES` apart.

    A guarded or partial definition does not hide earlier ones, so a pair is followed through it.
    """
    entry: list[dict[_Access, int]] = [{} for _ in blocks]
    work = list(range(len(blocks)))
    while work:
        index = work.pop()
        state = _walk(instructions, blocks[index], entry[index], None)
        for successor in blocks[index].successors:
            target = entry[successor]
            closer = {access: age for access, age in state.items() if age < target.get(access, LONGEST_CYCLES)}
            if closer:
                target.update(closer)
                work.append(successor)
    found: Distances = {}
    for block in blocks:
        _walk(instructions, block, entry[block.index], found)
    return found


def _walk(
    instructions: Sequence[Instruction], block: Block, entry: dict[_Access, int], found: Distances | None
) -> dict[_Access, int]:
    """Walk one block; return ages of the accesses alive at its end, and note distances in `found`."""
    time = 0
    alive: dict[str, dict[tuple[int, bool], int]] = {}
    for (name, producer, defines), age in entry.items():
        alive.setdefault(name, {})[producer, defines] = -age
    for i in range(block.start, block.stop):
        instruction = instructions[i]
        defs, uses = defs_of(instruction), uses_of(instruction)
        for name in defs | uses:
            accesses = alive.get(name)
            if accesses is None:
                accesses = alive[name] = {}
            if found is not None:
                for (producer, defines), issued in accesses.items():
                    distance = time - issued
                    for kind in _kinds(defines, name in defs, name in uses) if distance < LONGEST_CYCLES else ():
                        key = (producer, i, name, kind)
                        found[key] = min(distance, found.get(key, distance))
            if name in defs and not may_keep_old_values(instruction):
                accesses.clear()
        for name in uses:
            alive[name][i, False] = time
        for name in defs:
            alive[name][i, True] = time
        time += max(1, instruction.control.stall)
    return {
        (name, producer, defines): time - issued
        for name, accesses in alive.items()
        for (producer, defines), issued in accesses.items()
        if time - issued < LONGEST_CYCLES
    }


def _kinds(first_defines: bool, defines: bool, uses: bool) -> Iterator[Dependence]:
    if first_defines and uses:
        yield Dependence.RAW
    if defines:
        yield Dependence.WAW if first_defines else Dependence.WAR
