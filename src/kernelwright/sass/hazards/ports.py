"""Bounds how closely two instructions may follow each other into the same execution port.

A port accepts a warp's instruction every so many cycles. The distances below are the least that ptxas 12.8 leaves in any
of the kernels looked at (compute capabilities 8.0 to 9.0): 8 cycles between two MUFU in all of 230 pairs, 4 between two
loads, 2 between two integer operations. Whether hardware holds back what comes too early is not known, so it is never
tried.

As with latencies, the rule is `new distance >= min(least original distance, table)`, where the least original distance is
over all pairs of the same two operations in the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernelwright.sass.code.instruction import Instruction
from kernelwright.sass.code.opcodes import Pipe
from kernelwright.sass.code.program import Block, Kernel

_FAMILY_OF_PIPE = {
    Pipe.ALU: "alu",
    Pipe.FMA: "fma",
    Pipe.IMAD: "fma",
    Pipe.HALF: "fma",
    Pipe.SLOW: "slow",
    Pipe.TENSOR: "tensor",
    Pipe.UNIFORM: "uniform",
    Pipe.COUPLED: "uniform",
}
_FAMILY_OF_QUEUE = {"memory": "memory", "special-function": "special-function", "double": "slow"}
_FAMILY_OF_OPCODE = {
    "LDC": "constant",
    "LDCU": "constant",
    "S2UR": "constant",
    "S2R": "special-register",
    "LDGDEPBAR": "memory",
    "CS2R": "alu",
    # Seen spaced like both kinds of integer arithmetic; the stricter neighbours are multiply-adds.
    "VIADD": "fma",
}
_SPACING_CYCLES = {
    "alu": 2,
    "fma": 2,
    "slow": 12,
    "tensor": 8,
    "uniform": 2,
    "memory": 4,
    "special-function": 8,
    "constant": 8,
    "special-register": 4,
}
_WIDE_MULTIPLIES = ("WIDE", "HI")
_WIDE_CYCLES = 6
_SHARED_STORES = frozenset({"STS", "STSM"})
_AFTER_SHARED_STORE_CYCLES = 10
LONGEST_SPACING_CYCLES = max(*_SPACING_CYCLES.values(), _WIDE_CYCLES, _AFTER_SHARED_STORE_CYCLES)


@dataclass(frozen=True, slots=True)
class Port:
    """Execution port of an instruction, and the kind of operation it is there."""

    family: str
    operation: str

    @property
    def families(self) -> frozenset[str]:
        """Families whose instructions it must keep away from."""
        return frozenset({self.family, "uniform"}) if self.operation == "CS2R" else frozenset({self.family})


def port_of(instruction: Instruction) -> Port | None:
    """Return the port of an instruction, or None if no known port limits it."""
    traits = instruction.traits
    if instruction.predicate in ("!PT", "!UPT"):
        # Fillers against hardware faults are never executed and stand closer than anything else.
        return None
    family = _FAMILY_OF_OPCODE.get(instruction.opcode)
    if family is None and traits.queue is not None:
        family = _FAMILY_OF_QUEUE.get(traits.queue)
    if family is None:
        family = _FAMILY_OF_PIPE.get(traits.pipe)
    if family is None:
        return None
    wide = next((m for m in _WIDE_MULTIPLIES if instruction.opcode == "IMAD" and m in instruction.modifiers), "")
    return Port(family, instruction.opcode + wide)


def table_spacing(first: Port, second: Port) -> int:
    """Return a distance that is enough between any two such operations, 0 for different ports."""
    shared = first.families & second.families
    if not shared:
        return 0
    if first.operation.endswith(_WIDE_MULTIPLIES) or second.operation.endswith(_WIDE_MULTIPLIES):
        return _WIDE_CYCLES
    if first.operation in _SHARED_STORES and second.operation not in _SHARED_STORES:
        return _AFTER_SHARED_STORE_CYCLES
    return max(_SPACING_CYCLES[family] for family in shared)


Spacings = dict[tuple[Port, Port], int]
"""(earlier, later) -> distance in cycles."""


def least_spacings(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> dict[tuple[Port, Port], tuple[int, int]]:
    """Return the least distance of each pair of operations of one port over all paths, and the index of the later one.

    Pairs that are nowhere closer than the longest spacing are left out.
    """
    found: dict[tuple[Port, Port], tuple[int, int]] = {}
    ports = [port_of(i) for i in instructions]
    entry: list[dict[Port, int]] = [{} for _ in blocks]
    work = list(range(len(blocks)))
    while work:
        block = blocks[work.pop()]
        time = 0
        last = {port: -age for port, age in entry[block.index].items()}
        for i in range(block.start, block.stop):
            port = ports[i]
            if port is not None:
                for earlier, issued in last.items():
                    distance = time - issued
                    if earlier.families & port.families and distance < LONGEST_SPACING_CYCLES:
                        key = (earlier, port)
                        found[key] = min((distance, i), found.get(key, (distance, i)))
                last[port] = time
            time += max(1, instructions[i].control.stall)
        for successor in block.successors:
            target = entry[successor]
            closer = {
                port: time - issued
                for port, issued in last.items()
                if time - issued < target.get(port, LONGEST_SPACING_CYCLES)
            }
            if closer:
                target.update(closer)
                work.append(successor)
    return found


def required_spacings(kernel: Kernel) -> Spacings:
    """Return the distances that every schedule of a kernel must keep, for operations it contains."""
    seen = least_spacings(kernel.instructions, kernel.blocks)
    farthest = (LONGEST_SPACING_CYCLES, 0)
    ports = {p for i in kernel.instructions if (p := port_of(i)) is not None}
    return {
        (first, second): min(seen.get((first, second), farthest)[0], table_spacing(first, second))
        for first in ports
        for second in ports
        if first.families & second.families
    }
