"""Proves that one cubin is a legal re-schedule of another, or says why it is not (translation validation).

Nothing the game remembers is used. Both cubins are disassembled, instructions are matched by their payload, and every
property is derived again from the bytes: order of dependent accesses, scoreboards and issue distances over all paths, and
the encodability of every control word.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

from kernelwright.errors import ToolchainError, UsageError
from kernelwright.sass.elf import CubinImage, read_cubin, without_code
from kernelwright.sass.instruction import INSTRUCTION_BYTES, LEAST_STALL_TO_YIELD, has_safe_eviction
from kernelwright.sass.latency import (
    FENCE,
    SYNC,
    bound_cycles,
    defs_of,
    least_spacings,
    memory_conflict,
    minimum_distances,
    required_spacings,
    touches_memory,
    uses_of,
    vouches_for,
)
from kernelwright.sass.program import Disassembler, Kernel, assemble_program
from kernelwright.sass.reuse import OPERAND_SLOTS, may_keep, reuse_spans, same_run
from kernelwright.sass.scoreboards import Token, TokenKind, analyse_scoreboards, crowded, may_not_count, settle_cycles

_CONTROL_RULES = {
    "pinned": "takes part in a move of a pinned slot",
    "control": "has a control word with no encoding, or drains the pipeline where the other does not",
    "stall": "synchronises or is pinned, and stalls less than before",
    "write-barrier": "has a write scoreboard that it may not have",
    "read-barrier": "has a read scoreboard that it may not have",
    "wait": "no longer waits as before",
    "yield": "yields, or no longer does, with a stall so short that the yield itself may cost a cycle",
    "hint": "has a cache hint that may change its meaning",
    "reuse": "keeps an operand for a changed follower",
}
_RESOURCE_KINDS = {
    "P": "predicate",
    "U": "uniform",
    "B": "convergence-barrier",
    SYNC[0]: "sync-order",
    FENCE[0]: "barrier-crossing",
}
"""Kind of an order violation by the first letter of the resource; other resources go by dependence."""


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One reason why a schedule is not legal.

    Attributes:
        kind: what is broken; docs/sass.md lists the kinds.
        address: code offset in the mutated kernel, bytes (file offset for kind "container").
    """

    kind: str
    address: int
    detail: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The outcome of a check: violations (none means legal) and how many instructions moved."""

    violations: tuple[Violation, ...]
    moved: int

    @property
    def legal(self) -> bool:
        """Return whether the mutated cubin is a legal re-schedule."""
        return not self.violations


def check(original: bytes, mutated: bytes, disassemble: Disassembler) -> list[Violation]:
    """Return every violation found in `mutated` as a re-schedule of `original`; see `check_report`."""
    return list(check_report(original, mutated, disassemble).violations)


def check_report(original: bytes, mutated: bytes, disassemble: Disassembler) -> CheckReport:
    """Decide whether `mutated` is a legal re-schedule of `original`.

    Raises:
        CubinError: one of the two is not a readable cubin.
        ListingError: the disassembler is of another generation than the cubin's assembler.
        KernelwrightError: whatever `disassemble` raises on `original`.
    """
    first, second = read_cubin(original), read_cubin(mutated)
    container = _container_violations(first, second)
    if container:
        return CheckReport(tuple(container), 0)
    # Bytes outside the code are equal, so a kernel of equal code is itself; large cubins have many.
    pairs = () if first.is_patched else zip(first.code, second.code, strict=True)
    same = [a.kernel for a, b in pairs if first.code_bytes(a) == second.code_bytes(b)]
    with ThreadPoolExecutor(2) as pool:
        listings = [pool.submit(disassemble, without_code(cubin, same)) for cubin in (original, mutated)]
    before = assemble_program(first, listings[0].result(), same)
    try:
        after = assemble_program(second, listings[1].result(), same)
    except (ToolchainError, UsageError) as error:
        # The same disassembler has just read the original, so the mutated code is at fault.
        return CheckReport((Violation("encoding", 0, f"the mutated code is not readable: {error}"),), 0)
    violations: list[Violation] = []
    moved = 0
    for old, new in zip(before.kernels, after.kernels, strict=True):
        found, count = _check_kernel(old, new)
        if len(first.code) > 1:
            found = [replace(v, detail=f"{old.name}: {v.detail}") for v in found]
        violations += found
        tail = len(old.instructions) * INSTRUCTION_BYTES
        if first.code_bytes(old.code)[tail:] != second.code_bytes(new.code)[tail:]:
            violations.append(Violation("changed-instruction", tail, f"the padding of {old.name} has changed"))
        moved += count
    return CheckReport(tuple(sorted(set(violations))), moved)


def _container_violations(first: CubinImage, second: CubinImage) -> list[Violation]:
    """Everything outside the code sections must be the same bytes."""
    if first.architecture != second.architecture:
        detail = f"the two cubins are for different architectures, sm_{first.architecture} and sm_{second.architecture}"
        return [Violation("container", 0, detail)]
    if [c.section for c in first.code] != [c.section for c in second.code]:
        return [Violation("container", 0, "the two cubins do not have the same code sections")]
    position = 0
    spans = sorted((c.section.offset_bytes, c.section.size_bytes) for c in first.code)
    for offset, size in [*spans, (max(len(first.data), len(second.data)), 0)]:
        if first.data[position:offset] != second.data[position:offset]:
            return [Violation("container", position, "bytes outside the code sections differ")]
        position = offset + size
    return []


def _check_kernel(old: Kernel, new: Kernel) -> tuple[list[Violation], int]:
    tail = len(old.instructions) * INSTRUCTION_BYTES
    if len(new.instructions) != len(old.instructions):
        return [Violation("encoding", tail, f"{new.name} has another number of instructions")], 0
    order, violations = _match(old, new)
    if violations:
        return violations, 0
    moved = sum(slot != index for slot, index in enumerate(order))
    out_of_order: list[Violation] = []
    for start, stop in _permuted_runs(order):
        out_of_order += _register_order(old, order, start, stop)
        out_of_order += _pair_order(old, order, start, stop)
    violations = _control_violations(old, new, order) + out_of_order
    # Timing and scoreboards of a wrong order mean nothing; then the order alone is reported.
    if not out_of_order:
        violations += _scoreboard_violations(old, new, order)
        violations += _distance_violations(old, new, order)
        violations += _spacing_violations(old, new)
    return violations, moved


def _permuted_runs(order: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the shortest runs [start, stop) of slots that hold their own instructions in another order."""
    start = highest = 0
    for slot, index in enumerate(order):
        highest = max(highest, index)
        if highest == slot:
            if slot > start:
                yield start, slot + 1
            start = slot + 1


def _match(old: Kernel, new: Kernel) -> tuple[list[int], list[Violation]]:
    """Return the original instruction in each slot of the mutated kernel, and what does not match."""
    violations: list[Violation] = []
    order: list[int] = []
    elsewhere = {i.payload for i in old.instructions}
    for block in old.blocks:
        waiting: dict[int, deque[int]] = defaultdict(deque)
        for i in range(block.start, block.stop):
            waiting[old.instructions[i].payload].append(i)
        for slot in range(block.start, block.stop):
            instruction = new.instructions[slot]
            candidates = waiting.get(instruction.payload)
            if candidates:
                # Legal schedules keep identical instructions in order.
                order.append(candidates.popleft())
            else:
                kind, reason = "changed-instruction", "is nowhere in the original"
                if instruction.payload in elsewhere:
                    kind, reason = "crossed-block", "is not in this block of the original, or fewer times"
                violations.append(Violation(kind, instruction.address, f"`{instruction.text}` {reason}"))
                order.append(slot)
    if not violations:
        for slot, index in enumerate(order):
            a, b = old.instructions[index], new.instructions[slot]
            if (a.defs, a.uses) != (b.defs, b.uses):
                violations.append(Violation("def-use", b.address, f"`{b.text}` reads or writes other registers than before"))
    return order, violations


def _control_violations(old: Kernel, new: Kernel, order: list[int]) -> list[Violation]:
    violations = []
    spans = reuse_spans(old)
    ends = {block.stop for block in old.blocks}
    undisturbed = {s for s, i in enumerate(order) if i in spans and same_run(order, s, spans[i])}
    for slot, index in enumerate(order):
        before, after = old.instructions[index], new.instructions[slot]
        a, b = before.control, after.control
        broken = {
            "pinned": index != slot and (index in old.fixed or slot in old.fixed),
            "control": a != b and (not b.is_encodable() or (a.stall == 0) != (b.stall == 0)),
            "stall": b.stall < a.stall and (index in old.fixed or old.instructions[index].traits.is_sync),
            "write-barrier": _counts_wrongly(old, index, a.write_barrier, b.write_barrier),
            "read-barrier": _counts_wrongly(old, index, a.read_barrier, b.read_barrier),
            "wait": a.wait_mask & ~b.wait_mask,
            "yield": a.yields != b.yields and b.stall < LEAST_STALL_TO_YIELD,
            "hint": before.hint != after.hint
            and (before.plain_text != after.plain_text or not has_safe_eviction(after.word)),
            "reuse": _keeps_wrongly(new, slot, a.reuse if slot in undisturbed else 0, ends),
        }
        violations += [
            Violation(kind, after.address, f"`{after.text}` {_CONTROL_RULES[kind]}: {a} became {b}")
            for kind, is_broken in broken.items()
            if is_broken
        ]
    violations += _pinned_crossings(old, order)
    if crowded(old, new.instructions):
        detail = "more instructions of a block count on one scoreboard than in any block of the original"
        violations.append(Violation("write-barrier", 0, detail))
    return violations


def _counts_wrongly(old: Kernel, index: int, before: int | None, after: int | None) -> bool:
    """Return whether an instruction counts on a scoreboard on which it may not; the waits are proven apart."""
    return before != after and (before is None or after is None or may_not_count(old, index, after))


def _keeps_wrongly(new: Kernel, slot: int, explained: int, ends: set[int]) -> bool:
    """Return whether a reuse bit outside the mask `explained` is not one that `may_keep` allows in this place."""
    instruction = new.instructions[slot]
    unexplained = instruction.control.reuse & ~explained
    if not unexplained:
        return False
    if slot + 1 in ends:
        return True
    # The disassembler has the last word on which operands there are to be kept.
    if instruction.text.count(".reuse") != instruction.control.reuse.bit_count():
        return True
    follower = new.instructions[slot + 1]
    return any(unexplained >> k & 1 and not may_keep(instruction, follower, k, new.architecture) for k in OPERAND_SLOTS)


def _pinned_crossings(old: Kernel, order: list[int]) -> list[Violation]:
    """Nothing may change sides with respect to an instruction that is pinned to its address."""
    violations = []
    for slot, index in enumerate(order):
        low, high = sorted((slot, index))
        crossed = next((i for i in range(low + 1, high) if i in old.fixed), None)
        if crossed is not None:
            violations.append(
                Violation(
                    "pinned",
                    slot * INSTRUCTION_BYTES,
                    f"`{old.instructions[index].text}` crosses the pinned `{old.instructions[crossed].text}`",
                )
            )
    return violations


def _register_order(old: Kernel, order: list[int], start: int, stop: int) -> list[Violation]:
    """Compare the sequence of accesses of every resource in a run of slots.

    Instructions never leave their run, so equal sequences in every run are an equal def-use graph.
    """
    rank = {order[slot]: slot for slot in range(start, stop)}
    violations = []
    writers: dict[str, list[int]] = defaultdict(list)
    readers: dict[str, list[int]] = defaultdict(list)
    for i in range(start, stop):
        for name in defs_of(old.instructions[i]):
            writers[name].append(i)
        for name in uses_of(old.instructions[i]):
            readers[name].append(i)
    for name, defining in writers.items():
        for first, second in pairwise(defining):
            if rank[first] > rank[second]:
                violations.append(_order_violation(old, "waw", name, first, second, rank[second]))
        # Where the definitions keep their order, a reader can only have left the two between which it stood.
        for reader in readers.get(name, ()):
            behind = bisect_left(defining, reader)
            for writer in defining[max(0, behind - 1) : behind]:
                if rank[writer] > rank[reader]:
                    violations.append(_order_violation(old, "raw", name, writer, reader, rank[reader]))
            behind = bisect(defining, reader)
            for writer in defining[behind : behind + 1]:
                if rank[writer] < rank[reader]:
                    violations.append(_order_violation(old, "war", name, reader, writer, rank[writer]))
    return violations


def _order_violation(old: Kernel, kind: str, name: str, first: int, second: int, slot: int) -> Violation:
    a, b = old.instructions[first], old.instructions[second]
    return Violation(
        _RESOURCE_KINDS.get(name[0], kind),
        slot * INSTRUCTION_BYTES,
        f"`{b.text}` must stay behind `{a.text}` ({kind.upper()} on {name})",
    )


def _pair_order(old: Kernel, order: list[int], start: int, stop: int) -> list[Violation]:
    violations = []
    touching = [s for s in range(start, stop) if touches_memory(old.instructions[order[s]])]
    for position, slot in enumerate(touching):
        for later in touching[position + 1 :]:
            if order[slot] < order[later]:
                continue
            first, second = old.instructions[order[later]], old.instructions[order[slot]]
            detail = f"`{second.text}` must stay behind `{first.text}`"
            address = slot * INSTRUCTION_BYTES
            if memory_conflict(first, second):
                opcodes = {first.opcode, second.opcode}
                if opcodes == {"LDGSTS", "LDGDEPBAR"}:
                    kind = "ldgsts-group"
                elif first.traits.is_fence or second.traits.is_fence:
                    kind = "barrier-crossing"
                else:
                    kind = "memory-order"
                violations.append(Violation(kind, address, detail))
            elif vouches_for(first, second):
                violations.append(Violation("queue-order", address, f"{detail}: it vouches for it"))
    return violations


def _scoreboard_violations(old: Kernel, new: Kernel, order: list[int]) -> list[Violation]:
    before = analyse_scoreboards(old.instructions, old.blocks)

    def settle(token: Token, waiter: int) -> int:
        """A wait counts from when it did in the original, and otherwise only when it surely does."""
        enough = settle_cycles(new.instructions[token.producer])
        known = before.cleared.get((Token(order[token.producer], token.kind), order[waiter]), enough)
        return min(known, enough)

    hasty = analyse_scoreboards(new.instructions, old.blocks).unprotected
    after = analyse_scoreboards(new.instructions, old.blocks, settle)
    violations = []
    for token, anchor in after.outstanding:
        if (Token(order[token.producer], token.kind), order[anchor]) in before.cleared:
            p, c = new.instructions[token.producer], new.instructions[anchor]
            detail = f"`{c.text}` no longer waits for `{p.text}` at {p.address:#x}, and may order more than registers"
            violations.append(Violation("wait", c.address, detail))
    for producer, access in after.overlapping:
        if (order[producer], order[access]) not in before.overlapping:
            p, c = new.instructions[producer], new.instructions[access]
            detail = f"`{c.text}` issues before `{p.text}` at {p.address:#x} is surely complete"
            violations.append(Violation("wait", c.address, detail))
    for producer, consumer, kind in after.unprotected:
        if (order[producer], order[consumer], kind) in before.unprotected:
            # What protects the pair is not known; it still does if nothing around it has changed.
            violations += _changes_around(old, new, (producer, consumer))
            continue
        p, c = new.instructions[producer], new.instructions[consumer]
        what = "result" if kind is TokenKind.RESULT else "reading of the sources"
        if (producer, consumer, kind) in hasty:
            violation, reason = "wait", f"does not wait for the {what} of"
        else:
            violation, reason = "stall", f"waits too soon for the {what} of"
        violations.append(Violation(violation, c.address, f"`{c.text}` {reason} `{p.text}` at {p.address:#x}"))
    return violations


def _changes_around(old: Kernel, new: Kernel, indices: tuple[int, ...]) -> list[Violation]:
    return [
        Violation("unexplained", new.instructions[i].address, "the block relies on a wait that is not understood")
        for block in old.blocks
        if any(block.start <= index < block.stop for index in indices)
        for i in range(block.start, block.stop)
        if new.instructions[i].word != old.instructions[i].word
    ]


def _distance_violations(old: Kernel, new: Kernel, order: list[int]) -> list[Violation]:
    before = minimum_distances(old.instructions, old.blocks)
    after = minimum_distances(new.instructions, old.blocks)
    violations = []
    for (u, v, name, kind), cycles in after.items():
        producer, consumer = new.instructions[u], new.instructions[v]
        original = before.get((order[u], order[v], name, kind))
        # Where the original kept them so far apart that the analysis lost sight of them, the bound decides.
        bound = bound_cycles(kind, name, producer, consumer)
        required = bound if original is None else min(original, bound)
        if cycles < required:
            violations.append(
                Violation(
                    "stall",
                    consumer.address,
                    f"`{consumer.text}` issues {cycles} cycles after `{producer.text}` "
                    f"at {producer.address:#x}, needs {required} ({kind.value.upper()} on {name})",
                )
            )
    return violations


def _spacing_violations(old: Kernel, new: Kernel) -> list[Violation]:
    required = required_spacings(old)
    return [
        Violation(
            "port",
            new.instructions[index].address,
            f"`{new.instructions[index].text}` issues {cycles} cycles after {first.operation}, "
            f"their {first.family} port needs {required[first, second]}",
        )
        for (first, second), (cycles, index) in least_spacings(new.instructions, old.blocks).items()
        if cycles < required[first, second]
    ]
