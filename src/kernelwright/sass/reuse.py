"""States the rules of the operand cache: how long a `.reuse` bit may matter, and where one may be set.

A reuse bit keeps one source register of an instruction in a small cache for a later instruction that
reads the same register in the same operand slot. Dropping a bit is always correct. A bit stands where

1. the run from the instruction to that reader is the original one, or
2. the very next instruction is of the same opcode and reads the same register in the same operand slot,
   neither has a guard, the first writes none of the operand's registers and does not yield, and ptxas was
   seen to set this bit for this opcode and architecture. Nothing can then write the register between the read that fills
   the cache and the one that uses it up, and a result still outstanding has been waited for by the first.
   In the corpus there are 690 such places, and ptxas sets the bit in every one of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kernelwright.sass.instruction import MAX_STALL_WITHOUT_YIELD, ControlWord, Instruction
from kernelwright.sass.program import Kernel

OPERAND_SLOTS = range(3)
_OPERAND_SHIFTS = (24, 32, 64)
"""First bit of the 8-bit register field of operand slots a, b and c."""
_LONGEST_SPAN = 16
_WIDEST_OPERAND = 4
"""Registers of the widest source operand that can be kept: the A fragment of an HMMA."""
_KEEPABLE = {
    "FFMA": (0, 1, 2),
    "FMUL": (0, 1),
    "FADD": (0,),
    "HMMA": (0, 1),
    "IMAD": (0,),
    "IADD3": (0,),
    "LOP3": (0, 2),
    "LEA": (0, 1),
    "ISETP": (0, 1),
    "FSETP": (0,),
    "SHF": (0, 2),
}
"""Operand slots that ptxas 12.8 keeps for a direct follower of the same opcode, in the kernels looked at."""
_KEPT_NOWHERE = {120: frozenset({"HMMA"})}
"""Opcodes of which ptxas keeps nothing for an architecture, where it does for others.

ptxas 12.8 keeps no operand of any of the 216 HMMA for 12.0 that were looked at: it never puts two next to each other.
nvdisasm 12.8 and 13.2 cannot read one that keeps operand a and does not yield, whatever its stall (without a yield
they read b alone, with one more). nvdisasm 12.8 reads all other words that these rules make of the
corpus for 8.0 to 12.0. ptxas keeps for 10.0 and 12.0, too, what rule 2 allows (in 230 and 219 places, all of them).
"""
_KEPT_REGISTER = re.compile(r"\bR(\d+)\|?\.reuse")
_PLAIN_REGISTER = re.compile(r"^[-~]?\|?R(\d+)\|?$")


def reuse_spans(kernel: Kernel) -> dict[int, int]:
    """Return, for each instruction with reuse bits, how many followers must stay in place."""
    spans = {}
    stop_of = {i: block.stop for block in kernel.blocks for i in range(block.start, block.stop)}
    for index, instruction in enumerate(kernel.instructions):
        if not instruction.control.reuse:
            continue
        span = 1
        for slot, shift in enumerate(_OPERAND_SHIFTS):
            if instruction.control.reuse >> slot & 1:
                span = max(span, _reader_distance(kernel.instructions, index, shift, stop_of[index]))
        spans[index] = min(span, stop_of[index] - 1 - index)
    return spans


def _reader_distance(instructions: Sequence[Instruction], index: int, shift: int, stop: int) -> int:
    """Return the distance to the next reader of the kept operand, or the longest span if that is not clear."""
    register = instructions[index].word >> shift & 0xFF
    # Where one operand is a constant, another's register may be in its place.
    if str(register) not in _KEPT_REGISTER.findall(instructions[index].text):
        return _LONGEST_SPAN
    for reader in range(index + 1, min(stop, index + 1 + _LONGEST_SPAN)):
        # The same bits may as well be part of a constant.
        if instructions[reader].word >> shift & 0xFF == register and f"R{register}" in instructions[reader].uses:
            return reader - index
    return _LONGEST_SPAN


def same_run(order: Sequence[int], slot: int, span: int) -> bool:
    """Return whether the instruction in `slot` is followed by its original `span` followers."""
    index = order[slot]
    return order[slot : slot + span + 1] == list(range(index, index + span + 1))


def may_keep(first: Instruction, follower: Instruction, operand: int, architecture: int) -> bool:
    """Return whether `first` may keep source `operand` for the next instruction of its block, by rule 2."""
    if first.opcode != follower.opcode or operand not in _KEEPABLE.get(first.opcode, ()):
        return False
    if first.opcode in _KEPT_NOWHERE.get(architecture, ()):
        return False
    register = _register(first, operand)
    if register is None or register != _register(follower, operand):
        return False
    # A follower that is switched off would leave the operand in the cache for whoever comes later.
    if first.predicate is not None or follower.predicate is not None:
        return False
    kept = {f"R{register + i}" for i in range(_WIDEST_OPERAND)}
    return kept.isdisjoint(first.defs)


def _register(instruction: Instruction, operand: int) -> int | None:
    """Return the register in an operand slot, if its encoding and its text agree that there is one."""
    number = instruction.word >> _OPERAND_SHIFTS[operand] & 0xFF
    sources = [text for text in instruction.operands[1:] if not text.lstrip("!").startswith(("P", "UP"))]
    # The mark itself must not count, or an instruction would be read differently once it is set.
    match = _PLAIN_REGISTER.match(sources[operand].replace(".reuse", "")) if operand < len(sources) else None
    if match is None or int(match[1]) != number or f"R{number}" not in instruction.uses:
        return None
    return number


def allows_reuse(control: ControlWord) -> bool:
    """Return whether reuse bits have an encoding beside this stall and yield."""
    return not control.yields and 0 < control.stall <= MAX_STALL_WITHOUT_YIELD
