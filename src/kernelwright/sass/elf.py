"""Finds what re-scheduling needs in a cubin: its code sections and the side tables that name instructions.

`kernelwright.sass.identity` reads the ELF container: candidates carry that module, so it needs the standard library
alone. pyelftools agrees with it section by section, but takes 30 times as long, and raises OverflowError and MemoryError
on damaged files.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelwright.errors import CubinError
from kernelwright.sass.identity import ELF_HEADER, ELF_SECTION, NO_BITS, cubin_sections
from kernelwright.sass.instruction import INSTRUCTION_BYTES

EM_CUDA = 190
_RELOCATIONS = re.compile(r"\.rela?\.(?!debug_|nv_debug)")
_EXECUTABLE = 4
"""Flag of a section that holds code."""
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities times ten whose code was looked at."""
_FORMAT_SIZED = 4
_FATBINARY = b"\x50\xed\x55\xba"
"""Format byte of an `.nv.info` entry that carries a 16-bit payload size."""

INSTRUCTION_OFFSET_ATTRIBUTES = {
    0x1C: "EXIT",
    0x1D: "S2RCTAID",
    0x25: "LD_CACHEMOD",
    0x27: "ATOM_SYS",
    0x28: "COOP_GROUP",
    0x2D: "ATOMF16_EMUL",
    0x31: "INT_WARP_WIDE",
    0x34: "INDIRECT_BRANCH_TARGETS",
    0x39: "MBARRIER",
    0x3A: "COROUTINE",
    0x44: "UNUSED_LOAD_BYTE",
    0x46: "SYSCALL",
    0x47: "SW_WAR_MEMBAR_SYS",
    0x57: "STACK_CANARY",
    0x59: "LOCAL_CTA_ASYNC_STORE",
}
"""`.nv.info` attributes whose payload names instructions by their offset in the code section."""


@contextlib.contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Add the file's name to a CubinError raised inside."""
    try:
        yield
    except CubinError as error:
        raise CubinError(f"{error}; the file is {path}") from error


@dataclass(frozen=True, slots=True)
class CubinSection:
    """Name of an ELF section, and place of its bytes in the file."""

    name: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CodeSection:
    """The code of one kernel.

    Attributes:
        listed_offsets: code offsets that a side table mentions.
        has_relocations: whether the loader patches this code.
    """

    kernel: str
    section: CubinSection
    listed_offsets: frozenset[int]
    has_relocations: bool


@dataclass(frozen=True, slots=True)
class CubinImage:
    """A parsed cubin: its bytes, its architecture number and its code sections.

    Attributes:
        is_patched: whether the loader writes addresses into code or data, so that one kernel may call another.
    """

    data: bytes
    architecture: int
    code: tuple[CodeSection, ...]
    is_patched: bool

    def code_bytes(self, code: CodeSection) -> bytes:
        """Return a kernel's code."""
        section = code.section
        return self.data[section.offset_bytes : section.offset_bytes + section.size_bytes]


def read_cubin(data: bytes) -> CubinImage:
    """Parse a cubin.

    Raises:
        CubinError: the bytes are no 64-bit CUDA ELF file with 128-bit instructions, or for an unsupported architecture.
    """
    if data[:4] == _FATBINARY:
        raise CubinError("wanted a cubin, found a fatbinary; take one out with `cuobjdump --extract-elf all`")
    if len(data) < ELF_HEADER.size or data[:4] != b"\x7fELF":
        raise CubinError(f"wanted a cubin (an ELF file), found {len(data)} bytes without an ELF header")
    header = ELF_HEADER.unpack_from(data)
    machine, flags = header[2], header[7]
    if data[4] != 2 or data[5] != 1 or machine != EM_CUDA:
        raise CubinError(f"wanted a 64-bit little-endian CUDA ELF file, found ELF machine {machine}")
    try:
        found = cubin_sections(data)
    except ValueError as error:
        raise CubinError(str(error)) from error
    tables = [header[5] + header[9] * header[10], header[6] + header[11] * header[12]]
    if not header[5] or not header[10]:
        raise CubinError("wanted a linked cubin, found one without program headers; link it, as by nvlink")
    if rest := len(data) - max(*tables, *(offset + size for _, kind, offset, size, _ in found if kind != NO_BITS)):
        raise CubinError(f"wanted a cubin alone, found {rest} more bytes behind its last section; cut them off")
    # The architecture moved to another byte of e_flags when the ABI version changed.
    architecture = (flags >> 8) & 0xFF if data[8] >= 8 else flags & 0xFF
    if architecture not in ARCHITECTURES:
        known = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
        raise CubinError(f"wanted a cubin for one of {known}, found one for sm_{architecture}; compile it for one of these")
    sections = {name: CubinSection(name, offset, size) for name, kind, offset, size, _ in found if kind != NO_BITS}
    code = tuple(_code_section(data, sections, s) for n, s in sections.items() if n.startswith(".text."))
    if not code:
        raise CubinError("wanted a cubin with kernels, found no .text section")
    return CubinImage(data, architecture, code, any(s.size_bytes and _RELOCATIONS.match(n) for n, s in sections.items()))


def without_code(data: bytes, kernels: Collection[str]) -> bytes:
    """Return a cubin whose sections of these kernels are marked as data, so that a disassembler passes them by."""
    marked = bytearray(data)
    table = ELF_HEADER.unpack_from(data)[6]
    for index, (name, *_) in enumerate(cubin_sections(data) if kernels else ()):
        if name.removeprefix(".text.") in kernels and name.startswith(".text."):
            at = table + index * ELF_SECTION.size
            name_offset, kind, flags, *rest = ELF_SECTION.unpack_from(data, at)
            ELF_SECTION.pack_into(marked, at, name_offset, kind, flags & ~_EXECUTABLE, *rest)
    return bytes(marked)


def _code_section(data: bytes, sections: dict[str, CubinSection], section: CubinSection) -> CodeSection:
    kernel = section.name.removeprefix(".text.")
    if section.size_bytes % INSTRUCTION_BYTES or not section.size_bytes:
        raise CubinError(
            f"wanted 16-byte instructions in {section.name}, found {section.size_bytes} bytes; "
            "compute capabilities below 7.0 are not supported"
        )
    info = sections.get(f".nv.info.{kernel}")
    listed: set[int] = set()
    if info is not None:
        payload = data[info.offset_bytes : info.offset_bytes + info.size_bytes]
        for attribute, value in _info_entries(payload):
            if attribute not in INSTRUCTION_OFFSET_ATTRIBUTES:
                continue
            # Some tables mix offsets with other words; a word that only looks like an offset costs
            # one needlessly pinned instruction, never a wrong schedule.
            for (word,) in struct.iter_unpack("<I", value[: len(value) // 4 * 4]):
                if word < section.size_bytes and word % INSTRUCTION_BYTES == 0:
                    listed.add(word)
    relocations = [sections.get(f".rel{a}{section.name}") for a in ("", "a")]
    return CodeSection(kernel, section, frozenset(listed), any(r is not None and r.size_bytes for r in relocations))


def _info_entries(payload: bytes) -> list[tuple[int, bytes]]:
    """Return (attribute, value) of each entry of an `.nv.info` section."""
    entries = []
    position = 0
    while position + 4 <= len(payload):
        form, attribute, size = struct.unpack_from("<BBH", payload, position)
        position += 4
        if form == _FORMAT_SIZED:
            if position + size > len(payload):
                raise CubinError("wanted whole .nv.info entries, found one that runs past its section")
            entries.append((attribute, payload[position : position + size]))
            position += size
    return entries
