"""Decodes and encodes the scheduling control word of a 128-bit SASS instruction (compute capability 7.0 to 12.x).

The assembler, not the hardware, keeps dependent instructions apart. Bits 105 to 124 of every instruction tell the wait
before the next issue, the scoreboards of the result and the source operands, and those that must be empty before it
issues.

The layout was checked against the fields that nvdisasm 12.8 prints for sm_120, and against the words which `nvdisasm -b`
refuses to decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONTROL_SHIFT = 105
CONTROL_BITS = 20
CONTROL_MASK = ((1 << CONTROL_BITS) - 1) << CONTROL_SHIFT
WORD_MASK = (1 << 128) - 1
INSTRUCTION_BYTES = 16
MAX_STALL = 15
MAX_STALL_WITHOUT_YIELD = 11
LEAST_STALL_TO_YIELD = 2
"""ptxas yields with a stall of at least two; whether a yield itself costs a cycle then makes no difference."""
NO_SCOREBOARD_CODE = 7
SCOREBOARDS = range(6)


@dataclass(frozen=True, slots=True)
class ControlWord:
    """One instruction's scheduling control.

    Attributes:
        stall: cycles until the next instruction of this warp may issue; 0 drains the pipeline.
        yields: whether the scheduler may switch to another warp after this instruction (bit 109 is zero then).
        write_barrier: scoreboard that counts this instruction's result.
        read_barrier: scoreboard that counts the reading of its sources.
        wait_mask: bit i set: issue only when scoreboard i is empty.
        reuse: bits 0, 1, 2: keep source operand a, b, c in the operand cache.
    """

    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    wait_mask: int
    reuse: int

    @classmethod
    def decode(cls, word: int) -> ControlWord:
        """Read the control word out of a 128-bit instruction."""
        field = (word >> CONTROL_SHIFT) & ((1 << CONTROL_BITS) - 1)
        return cls(
            stall=field & 15,
            yields=not (field >> 4) & 1,
            write_barrier=_scoreboard((field >> 5) & 7),
            read_barrier=_scoreboard((field >> 8) & 7),
            wait_mask=(field >> 11) & 63,
            reuse=(field >> 17) & 7,
        )

    def encode(self, word: int) -> int:
        """Return `word` with its control bits replaced by these."""
        field = (
            self.stall
            | (not self.yields) << 4
            | _code(self.write_barrier) << 5
            | _code(self.read_barrier) << 8
            | self.wait_mask << 11
            | self.reuse << 17
        )
        return (word & ~CONTROL_MASK & WORD_MASK) | field << CONTROL_SHIFT

    def with_stall(self, stall: int) -> ControlWord:
        """Return this control word with another stall count.

        A stall above 11 exists only with `yields`, and operand reuse only without.
        """
        if stall == self.stall:
            return self
        if stall > MAX_STALL_WITHOUT_YIELD:
            return replace(self, stall=stall, yields=True, reuse=0)
        return replace(self, stall=stall)

    def is_encodable(self) -> bool:
        """Whether the hardware has an encoding for this combination of stall, yield and reuse."""
        if not 0 <= self.stall <= MAX_STALL:
            return False
        if not self.yields and (self.stall == 0 or self.stall > MAX_STALL_WITHOUT_YIELD):
            return False
        return not (self.reuse and (self.yields or self.stall == 0))

    def __str__(self) -> str:
        waits = "".join(str(i) if self.wait_mask >> i & 1 else "-" for i in SCOREBOARDS)
        reads = "-" if self.read_barrier is None else str(self.read_barrier)
        writes = "-" if self.write_barrier is None else str(self.write_barrier)
        reuse = "".join(name if self.reuse >> i & 1 else "-" for i, name in enumerate("abc"))
        return f"B{waits}:R{reads}:W{writes}:{'Y' if self.yields else '-'}:S{self.stall:02d}:{reuse}"


def _scoreboard(code: int) -> int | None:
    return None if code == NO_SCOREBOARD_CODE else code


def _code(scoreboard: int | None) -> int:
    return NO_SCOREBOARD_CODE if scoreboard is None else scoreboard
