"""Reads the output of `nvdisasm -c -hex -plr -lrm narrow`: instruction text, words and register live ranges.

The live-range table marks, for every instruction and every register of four files (GPR, PRED, UGPR,
UPRED), `^` defined, `v` used, `x` both and `:` live. That is an exact operand description, wide
operands, tensor-core fragments and hidden address pairs included, from the vendor's own decoder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kernelwright.errors import ListingError

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


def parse_listing(text: str) -> dict[str, ListedKernel]:
    """Parse a listing into kernels by name.

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
            current = kernels.setdefault(match[1], ListedKernel(match[1]))
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
