"""Bounds the cycles between two instructions that depend on one another or use one execution port.

Fixed-latency instructions depend on one another by the registers and the machine state that they read and write; distances
are the least over all paths of the control-flow graph.

Nothing in hardware checks these distances. The numbers are upper bounds: published measurements,
plus the largest distances seen in code that ptxas 12.8 made, rounded up. The rule that uses them is
always `new distance >= min(original distance, bound)`, so a bound that is too large costs freedom,
and a bypass which the assembler knows and this table does not stays intact.

A port accepts a warp's instruction every so many cycles. The distances below are the least that ptxas 12.8 leaves in any
of the kernels looked at (compute capabilities 8.0 to 9.0): 8 cycles between two MUFU in all of 230 pairs, 4 between two
loads, 2 between two integer operations. It is not known if hardware holds back what comes too early, so it is never
tried.

As with latencies, the rule is `new distance >= min(least original distance, table)`, where the least original distance is
over all pairs of the same two operations in the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kernelwright.sass.instruction import PREDICATE_FILE_WRITERS, Instruction
from kernelwright.sass.opcodes import Pipe
from kernelwright.sass.program import Block, Kernel, Worklist

SYNC = "sync"
"""Pseudo-register that every synchronising or warp-wide instruction reads and writes."""
FENCE = "fence"
"""Pseudo-register that every fence reads and writes and every memory access reads."""
PSEUDO_RESOURCES = frozenset({SYNC, FENCE})
_IN_ORDER_RESULTS = frozenset({"special-function", "constant", "double"})
_IN_ORDER_AMONG_THEMSELVES = frozenset({"LDS", "LDSM", "SHFL"})
_SHARED_ACCESSES = frozenset({"LDS", "LDSM", "STS", "STSM"})


def defs_of(instruction: Instruction) -> frozenset[str]:
    """Return the resources written."""
    return instruction.defs | _pseudo(instruction.traits.is_sync, instruction.traits.is_fence)


def uses_of(instruction: Instruction) -> frozenset[str]:
    """Return the resources read."""
    traits = instruction.traits
    return instruction.uses | _pseudo(traits.is_sync, bool(traits.reads or traits.writes))


def _pseudo(sync: bool, fence: bool) -> frozenset[str]:
    if sync and fence:
        return PSEUDO_RESOURCES
    return frozenset({SYNC} if sync else {FENCE} if fence else ())


def is_guarded(instruction: Instruction) -> bool:
    """Return whether a predicate may switch the instruction off, leaving old values in place."""
    return instruction.predicate is not None and not instruction.predicate.endswith("T")


def may_keep_old_values(instruction: Instruction) -> bool:
    """Return whether its definitions may leave earlier values: it can be switched off, or unpacks a mask of predicates."""
    return is_guarded(instruction) or instruction.opcode in PREDICATE_FILE_WRITERS


def touches_memory(instruction: Instruction) -> bool:
    """Return whether its order may matter for memory or for an in-order queue."""
    traits = instruction.traits
    return bool(traits.reads or traits.writes or traits.queue)


def memory_conflict(first: Instruction, second: Instruction) -> bool:
    """Return whether the order of two instructions' memory accesses may matter.

    Addresses are not compared: equal base registers do not prove that two threads' accesses are disjoint. Two
    asynchronous copies into shared memory have no order of their own.
    """
    a, b = first.traits, second.traits
    if first.opcode == "LDGSTS" and second.opcode == "LDGSTS":
        return False
    return not (a.writes.isdisjoint(b.reads | b.writes) and b.writes.isdisjoint(a.reads))


def vouches_for(earlier: Instruction, later: Instruction) -> bool:
    """Return whether a wait for `later` may stand for a wait for `earlier`.

    They share an in-order queue, and `earlier` lacks a scoreboard that `later` has.
    """
    queue = earlier.traits.queue
    if queue is None or queue != later.traits.queue:
        return False
    has = later.control
    if has.write_barrier is None and has.read_barrier is None:
        return False
    lacks = earlier.control
    return lacks.write_barrier is None or lacks.read_barrier is None


def vouches_for_result(earlier: Instruction, later: Instruction) -> bool:
    """Return whether `vouches_for` holds for the result of `earlier`, not only for the reading of its sources.

    ptxas lets a guarded operation vouch for reads. For results it was never seen to do so, and an operation that is
    switched off may complete at once. Nor was it seen to count on the order of results from memory of different kinds, or
    from global memory at all, where a hit overtakes a miss.
    """
    in_order = earlier.traits.queue in _IN_ORDER_RESULTS or (
        earlier.opcode == later.opcode and earlier.opcode in _IN_ORDER_AMONG_THEMSELVES
    )
    same_guard = later.predicate == earlier.predicate
    return in_order and vouches_for(earlier, later) and (same_guard or not is_guarded(later))


def is_read_before_written(reader: Instruction, writer: Instruction) -> bool:
    """Return whether a queue surely reads the sources of `reader` before a later `writer` writes its result.

    ptxas counts on that among accesses to shared memory and among special functions only.
    """
    if reader.traits.queue == writer.traits.queue == "special-function":
        return True
    return reader.opcode in _SHARED_ACCESSES and writer.opcode in _SHARED_ACCESSES


def orders_memory(instruction: Instruction) -> bool:
    """Return whether later memory accesses may have to wait for its completion: fences, atomics, strong loads."""
    return instruction.traits.is_fence or not instruction.traits.reads.isdisjoint(instruction.traits.writes)


LONGEST_CYCLES = 64
"""Longer than any fixed latency; the bound for pairs about which nothing is known."""

_SYNC_CYCLES = 16
"""A barrier holds a warp only some cycles after it issued; loads issued before that read too early. Six cycles is what ptxas
leaves between BAR and a load, and five is seen to fail on hardware."""
_UNIFORM_READ_CYCLES = 4
_STRANGE_READER_CYCLES = 16
"""Most cycles by which an instruction of unknown latency reads its operands earlier than ordinary arithmetic."""
_SHORT = frozenset({Pipe.ALU, Pipe.FMA, Pipe.IMAD, Pipe.HALF})
_RESULT_CYCLES = {
    Pipe.ALU: 6,
    Pipe.FMA: 6,
    Pipe.IMAD: 6,
    Pipe.HALF: 7,
    Pipe.SLOW: 14,
    Pipe.TENSOR: 33,
    Pipe.UNIFORM: 13,
    Pipe.COUPLED: 16,
    Pipe.VARIABLE: 0,
}


class Dependence(Enum):
    """Kind of dependence between two accesses of one resource, the first named first."""

    RAW = "raw"
    WAR = "war"
    WAW = "waw"


def bound_cycles(kind: Dependence, resource: str, producer: Instruction, consumer: Instruction) -> int:
    """Return an issue distance that is enough for any such pair; 0 where a scoreboard, not time, keeps the two apart."""
    if resource in PSEUDO_RESOURCES:
        return _SYNC_CYCLES
    pipe, reader = producer.traits.pipe, consumer.traits.pipe
    if kind is Dependence.WAR:
        return _read_cycles(resource, producer)
    if pipe not in _RESULT_CYCLES:
        return LONGEST_CYCLES
    if producer.is_variable_latency:
        return 0
    if resource.startswith("UP"):
        return 14
    if resource[0] == "P":
        is_guard = consumer.predicate is not None and consumer.predicate.lstrip("!") == resource
        return 6 if reader in _SHORT and not is_guard and pipe in _SHORT else 14
    if has_unknown_latency(consumer):
        return _RESULT_CYCLES[pipe] + _STRANGE_READER_CYCLES
    if pipe is Pipe.UNIFORM and reader is Pipe.UNIFORM:
        return 6
    if pipe in _SHORT and reader not in _SHORT:
        return 9
    return _RESULT_CYCLES[pipe]


def has_unknown_latency(instruction: Instruction) -> bool:
    """Return whether nothing is known of when the instruction reads and writes (barriers, HGMMA, ...)."""
    return instruction.traits.pipe not in _RESULT_CYCLES and instruction.traits.pipe is not Pipe.CONTROL


def hold_cycles(kind: Dependence, resource: str, producer: Instruction, strange: bool) -> int:
    """Return the largest bound that any consumer of this access, RAW for a definition and WAR for a use, could have.

    `strange` says that an instruction of unknown latency accesses the resource anywhere.
    """
    if resource in PSEUDO_RESOURCES:
        return _SYNC_CYCLES
    if kind is Dependence.WAR:
        return _read_cycles(resource, producer)
    pipe = producer.traits.pipe
    if pipe not in _RESULT_CYCLES:
        return LONGEST_CYCLES
    if producer.is_variable_latency:
        return 0
    return max(14, _RESULT_CYCLES[pipe] + (_STRANGE_READER_CYCLES if strange else 0))


def _read_cycles(resource: str, reader: Instruction) -> int:
    pipe = reader.traits.pipe
    if pipe is Pipe.TENSOR:
        return 8
    if pipe not in _RESULT_CYCLES:
        return LONGEST_CYCLES
    if resource.startswith("U"):
        return _UNIFORM_READ_CYCLES
    return 2


Distances = dict[tuple[int, int, str, Dependence], int]
"""(producer, consumer, resource, kind) -> least distance in cycles, where below `LONGEST_CYCLES`."""

_Access = tuple[str, int, bool]
"""Resource, instruction, whether it defines."""


def minimum_distances(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> Distances:
    """Return the least distance of every dependent pair that can be less than `LONGEST_CYCLES` apart.

    A guarded or partial definition does not hide earlier ones, so a pair is followed through it.
    """
    entry: list[dict[_Access, int]] = [{} for _ in blocks]
    work = Worklist(range(len(blocks)))
    for index in work:
        state = _walk(instructions, blocks[index], entry[index], None)
        for successor in blocks[index].successors:
            target = entry[successor]
            closer = {access: age for access, age in state.items() if age < target.get(access, LONGEST_CYCLES)}
            if closer:
                target.update(closer)
                work.add(successor)
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
    work = Worklist(range(len(blocks)))
    for index in work:
        block = blocks[index]
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
                work.add(successor)
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
