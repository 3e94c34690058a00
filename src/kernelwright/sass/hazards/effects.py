"""Names the resources that an instruction reads and writes, registers and machine state alike."""

from __future__ import annotations

from kernelwright.sass.code.instruction import PREDICATE_FILE_WRITERS, Instruction

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
    """Whether a predicate may switch the instruction off, leaving old values in place."""
    return instruction.predicate is not None and not instruction.predicate.endswith("T")


def may_keep_old_values(instruction: Instruction) -> bool:
    """Whether its definitions may leave earlier values: it can be switched off, or unpacks a mask of predicates."""
    return is_guarded(instruction) or instruction.opcode in PREDICATE_FILE_WRITERS


def touches_memory(instruction: Instruction) -> bool:
    """Whether its order may matter for memory or for an in-order queue."""
    traits = instruction.traits
    return bool(traits.reads or traits.writes or traits.queue)


def memory_conflict(first: Instruction, second: Instruction) -> bool:
    """Whether the order of two instructions' memory accesses may matter.

    Addresses are not compared: equal base registers do not prove that two threads' accesses are disjoint. Two
    asynchronous copies into shared memory have no order of their own.
    """
    a, b = first.traits, second.traits
    if first.opcode == "LDGSTS" and second.opcode == "LDGSTS":
        return False
    return not (a.writes.isdisjoint(b.reads | b.writes) and b.writes.isdisjoint(a.reads))


def vouches_for(earlier: Instruction, later: Instruction) -> bool:
    """Whether a wait for `later` may stand for a wait for `earlier`.

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
    """Whether `vouches_for` holds for the result of `earlier`, not only for the reading of its sources.

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
    """Whether a queue surely reads the sources of `reader` before a later `writer` writes its result.

    ptxas counts on that among accesses to shared memory and among special functions only.
    """
    if reader.traits.queue == writer.traits.queue == "special-function":
        return True
    return reader.opcode in _SHARED_ACCESSES and writer.opcode in _SHARED_ACCESSES


def orders_memory(instruction: Instruction) -> bool:
    """Whether later memory accesses may have to wait for its completion: fences, atomics, strong loads."""
    return instruction.traits.is_fence or not instruction.traits.reads.isdisjoint(instruction.traits.writes)
