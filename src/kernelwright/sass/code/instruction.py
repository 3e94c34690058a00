"""Turns one listed SASS instruction into a typed one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernelwright.sass.code.control import CONTROL_MASK, ControlWord
from kernelwright.sass.code.listing import ListedInstruction
from kernelwright.sass.code.opcodes import Pipe, Traits, traits_of

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
        """Encoding without the control word: what the instruction does, not when."""
        return self.word & ~CONTROL_MASK

    @property
    def is_variable_latency(self) -> bool:
        """Whether only a scoreboard tells that it is complete."""
        return (
            self.traits.pipe is Pipe.VARIABLE
            or self.control.write_barrier is not None
            or self.control.read_barrier is not None
        )


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
