"""The operand cache: how long a `.reuse` bit may matter.

A reuse bit keeps one source register of an instruction in a small cache for a later instruction that
reads the same register in the same operand slot. A bit is kept only where the run from the
instruction to that reader is unchanged; dropping a bit is always correct.
"""

from __future__ import annotations

from kernelwright.sass.program import Kernel

_OPERAND_SHIFTS = (24, 32, 64)
"""First bit of the 8-bit register field of operand slots a, b and c."""
_LONGEST_SPAN = 16


def reuse_spans(kernel: Kernel) -> dict[int, int]:
    """Return, for each instruction with reuse bits, how many followers must stay in place."""
    spans = {}
    words = [i.word for i in kernel.instructions]
    stop_of = {i: block.stop for block in kernel.blocks for i in range(block.start, block.stop)}
    for index, instruction in enumerate(kernel.instructions):
        if not instruction.control.reuse:
            continue
        span = 1
        for slot, shift in enumerate(_OPERAND_SHIFTS):
            if instruction.control.reuse >> slot & 1:
                span = max(span, _reader_distance(words, index, shift, stop_of[index]))
        spans[index] = min(span, stop_of[index] - 1 - index)
    return spans


def _reader_distance(words: list[int], index: int, shift: int, stop: int) -> int:
    register = words[index] >> shift & 0xFF
    for reader in range(index + 1, min(stop, index + 1 + _LONGEST_SPAN)):
        if words[reader] >> shift & 0xFF == register:
            return reader - index
    return 1


def same_run(order: list[int], slot: int, span: int) -> bool:
    """Whether the instruction in `slot` is followed by its original `span` followers."""
    index = order[slot]
    return order[slot : slot + span + 1] == list(range(index, index + span + 1))
