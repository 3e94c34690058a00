"""Bounds the cycles that must separate two dependent fixed-latency instructions.

Nothing in hardware checks these distances. The numbers are upper bounds: published measurements,
plus the largest distances seen in code that ptxas 12.8 made, rounded up. The rule that uses them is
always `new distance >= min(original distance, bound)`, so a bound that is too large costs freedom,
and a bypass which the assembler knows and this table does not stays intact.
"""

from __future__ import annotations

from enum import Enum

from kernelwright.sass.code.instruction import Instruction
from kernelwright.sass.code.opcodes import Pipe
from kernelwright.sass.hazards.effects import PSEUDO_RESOURCES

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
    """Whether nothing is known of when the instruction reads and writes (barriers, HGMMA, ...)."""
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
