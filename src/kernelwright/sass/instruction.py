"""Reads the output of `nvdisasm -c -hex -plr -lrm narrow` into typed instructions, each with its scheduling control word.

The control word is part of every 128-bit SASS instruction (compute capability 7.0 to 12.x). The assembler, not the
hardware, keeps dependent instructions apart: bits 105 to 124 tell the wait before the next issue, the scoreboards of the
result and the source operands, and those that must be empty before it issues. The layout was checked against the fields
that nvdisasm 12.8 prints for sm_120, and against the words which `nvdisasm -b` refuses to decode.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from kernelwright.errors import ListingError
from kernelwright.sass.opcodes import EVICTION_SHIFT, EVICTIONS, PREFETCH_SHIFT, PREFETCHES, Pipe, Traits, traits_of

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
        """Return whether the hardware has an encoding for this combination of stall, yield and reuse."""
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


_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+),")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_x_[0-9]+|\.L_[A-Za-z0-9_]+|\$[^\s:]+):")
_FILES = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}


@dataclass(slots=True)
class ListedInstruction:
    """One instruction of a listing.

    Attributes:
        address: offset in the code section, bytes.
        has_marks: whether a live-range table gave `defs` and `uses`.
    """

    address: int
    text: str
    word: int
    defs: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    has_marks: bool = False


@dataclass(slots=True)
class ListedKernel:
    """Instructions and label addresses of one code section of a listing."""

    name: str
    instructions: list[ListedInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse_listing(text: str, without: Collection[str] = ()) -> dict[str, ListedKernel]:
    """Parse a listing into kernels by name, `without` some.

    Raises:
        ListingError: an instruction is cut off, or no live ranges were printed.
    """
    kernels: dict[str, ListedKernel] = {}
    current: ListedKernel | None = None
    columns: list[tuple[str, int]] | None = None
    titles: list[str] = []
    pending: tuple[int, str, int] | None = None
    waiting_labels: list[str] = []
    for line in text.splitlines():
        if match := _SECTION.match(line):
            current = None if match[1] in without else kernels.setdefault(match[1], ListedKernel(match[1]))
            columns, titles, pending, waiting_labels = None, [], None, []
            continue
        if current is None:
            continue
        body, _, table = line.partition("// ")
        if pending is not None:
            second = _SECOND_HALF.match(body)
            if second is None:
                raise ListingError(f"wanted the second half of the instruction at {pending[0]:#x}, found {body!r}")
            instruction = ListedInstruction(pending[0], pending[1], pending[2] | int(second[1], 16) << 64)
            if columns is not None and table.startswith("|"):
                instruction.defs, instruction.uses = _marks(table, columns)
                instruction.has_marks = True
            current.instructions.append(instruction)
            for label in waiting_labels:
                current.labels[label] = instruction.address
            waiting_labels = []
            pending = None
        elif match := _INSTRUCTION.match(body):
            pending = (int(match[1], 16), _strip(match[2]), int(match[3], 16))
        elif match := _LABEL.match(body):
            waiting_labels.append(match[1])
        elif table.startswith("|"):
            if "#" in table:
                columns = _columns(table, titles)
            elif any(name in table for name in _FILES):
                titles = [cell.strip() for cell in table.strip("| \n").split("|")]
    if pending is not None:
        raise ListingError(f"wanted a whole listing, found one that ends inside the instruction at {pending[0]:#x}")
    return kernels


def _strip(text: str) -> str:
    """Drop the semicolon and the scheduling notes that nvdisasm appends for newer architectures."""
    text = text.strip().lstrip("{").strip()
    text = re.sub(r"\s+[&?][A-Za-z_].*$", "", text.rstrip("}").rstrip().rstrip(";").rstrip())
    return text.rstrip(";").rstrip()


def _columns(header: str, titles: list[str]) -> list[tuple[str, int]]:
    """Return (register file, position of its register 0) for each panel of the table."""
    found = []
    position = 0
    for index, cell in enumerate(header.rstrip().strip("|").split("|")):
        start = position + 1
        position = start + len(cell)
        mark = cell.find("#")
        if mark >= 0 and index < len(titles) and titles[index] in _FILES:
            found.append((_FILES[titles[index]], start + mark + 2))
    return found


def _marks(table: str, columns: list[tuple[str, int]]) -> tuple[frozenset[str], frozenset[str]]:
    defs = set()
    uses = set()
    for file, start in columns:
        end = table.find("|", start)
        for number, mark in enumerate(table[start : end if end >= 0 else len(table)]):
            if mark in "^x":
                defs.add(f"{file}{number}")
            if mark in "vx":
                uses.add(f"{file}{number}")
    return frozenset(defs), frozenset(uses)


_SYNTAX = re.compile(r"^(?:@(!?)(U?P(?:\d+|T))\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Za-z0-9_]+)*)\s*(.*)$")
_REGISTER = re.compile(r"(?<![\w.$`])(UR|UP|R|P|B)(\d+)\b")
_CODE_ADDRESS = re.compile(r"`\([^)]*\)")
_PREDICATE_FILES = {"PR": "P", "UPR": "UP"}
_PREDICATES = range(7)
PREDICATE_FILE_WRITERS = frozenset({"R2P", "UR2UP"})
"""Opcodes that write those predicates of a file that a mask names."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction as it stands in a cubin.

    Attributes:
        address: offset in the code section, bytes.
        word: the 128-bit encoding.
        predicate: guard such as "P0" or "!UP1".
        opcode: first part of the mnemonic, for example "LDG"; `modifiers` are the others, for example ("E", "128").
        uses: registers read, the guard included; with a guard also `defs`, whose old values survive when it is false.
        is_certain: whether the operand text and the live ranges agree; if not, it must not move.
    """

    address: int
    word: int
    text: str
    predicate: str | None
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    control: ControlWord
    defs: frozenset[str]
    uses: frozenset[str]
    traits: Traits
    is_certain: bool

    @property
    def payload(self) -> int:
        """Encoding without control word and cache hints: what the instruction does, not when, nor what caches keep."""
        return self.word & ~(CONTROL_MASK | self.traits.hint_mask)

    @property
    def hint(self) -> int:
        """Bits of the encoding that only advise the caches."""
        return self.word & self.traits.hint_mask

    @property
    def plain_text(self) -> tuple[object, ...]:
        """Parts of the text that hints and reuse bits leave alone."""
        modifiers = tuple(m for m in self.modifiers if not self.traits.hint_mask or m not in (*EVICTIONS, *PREFETCHES))
        return self.predicate, self.opcode, modifiers, tuple(operand.replace(".reuse", "") for operand in self.operands)

    @property
    def is_variable_latency(self) -> bool:
        """Return whether only a scoreboard tells that it is complete."""
        return (
            self.traits.pipe is Pipe.VARIABLE
            or self.control.write_barrier is not None
            or self.control.read_barrier is not None
        )


def hint_bits(flips: int) -> int:
    """Return the bits of an encoding that a `HintEdit` of these flips changes: eviction in bits 0 to 2, then prefetching."""
    return (flips & 7) << EVICTION_SHIFT | flips >> 3 << PREFETCH_SHIFT


def hint_flips(instruction: Instruction) -> tuple[int, ...]:
    """Return the flips that lead to every other hint an instruction may have.

    "Last use" is none of them: PTX promises nothing of the data afterwards.
    """
    mask, word = instruction.traits.hint_mask, instruction.word
    return tuple(
        flips
        for flips in range(1, 32)
        if mask and not hint_bits(flips) & ~mask and has_safe_eviction(word ^ hint_bits(flips))
    )


def hint_name(word: int) -> str:
    """Return the modifiers that the cache hint of a global load adds to its text, such as "EL.LTC128B"; "none" without."""
    names = EVICTIONS[word >> EVICTION_SHIFT & 7], PREFETCHES[word >> PREFETCH_SHIFT & 3]
    return ".".join(name for name in names if name) or "none"


def has_safe_eviction(word: int) -> bool:
    """Return whether the eviction policy of a global access is one that leaves its meaning alone."""
    code = word >> EVICTION_SHIFT & 7
    return code < len(EVICTIONS) and EVICTIONS[code] != "LU"


def parse_instruction(listed: ListedInstruction, architecture: int) -> Instruction:
    """Turn a listed instruction of an architecture into a typed one, cross-checking text against live ranges."""
    match = _SYNTAX.match(listed.text)
    control = ControlWord.decode(listed.word)
    if match is None:
        unknown = traits_of("?", (), (), architecture)
        return Instruction(
            listed.address, listed.word, listed.text, None, "?", (), (), control,
            listed.defs, listed.uses | listed.defs, unknown, is_certain=False,
        )  # fmt: skip
    negation, guard, opcode, dotted, rest = match.groups()
    modifiers = tuple(dotted.split(".")[1:])
    operands = tuple(part.strip() for part in _split(rest)) if rest else ()
    named = {f"{file}{number}" for file, number in _REGISTER.findall(_CODE_ADDRESS.sub("", listed.text))}
    defs = set(listed.defs)
    uses = set(listed.uses)
    is_certain = all(name in defs or name in uses or name[0] == "B" for name in named)
    if not is_certain:
        defs |= named
        uses |= named
    # Convergence barriers are in no live-range table; both directions is the safe reading.
    barriers = {name for name in named if name[0] == "B"}
    defs |= barriers
    uses |= barriers
    for operand in operands:
        # "PR" stands for the whole predicate file, which the live ranges leave out.
        if (file := _PREDICATE_FILES.get(operand.split(".")[0])) is not None:
            uses |= {f"{file}{number}" for number in _PREDICATES}
            if opcode in PREDICATE_FILE_WRITERS:
                defs |= {f"{file}{number}" for number in _PREDICATES}
    if opcode == "LDGSTS":
        # Its predicate operand selects zero-fill and is read only, though it is marked as both.
        defs = {name for name in defs if name[0] != "P"}
    if guard is not None and guard[-1] != "T":
        uses |= defs
    return Instruction(
        address=listed.address,
        word=listed.word,
        text=listed.text,
        predicate=None if guard is None else negation + guard,
        opcode=opcode,
        modifiers=modifiers,
        operands=operands,
        control=control,
        defs=frozenset(defs),
        uses=frozenset(uses),
        traits=traits_of(opcode, modifiers, operands, architecture),
        is_certain=is_certain,
    )


def _split(text: str) -> list[str]:
    """Split operands at top-level commas."""
    parts = [""]
    depth = 0
    for character in text:
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
