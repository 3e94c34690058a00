"""Identifies a cubin apart from its debug information, and carries a schedule over to another build of it.

A compiler writes the path and the lines of the source into the file, so the same kernel has other bytes
when its source moves or gains a comment. Only the rest runs. The identity hashes that rest, and a
tuned schedule is put into any cubin of the same identity by replacing the code sections alone.

Standard library only: the text of this module is also pasted into candidates that carry a tuned kernel.
"""

from __future__ import annotations

import hashlib
import struct

ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
NO_BITS = 8
_CODE_PREFIX = ".text."
_DEBUG_PREFIXES = (".debug_", ".nv_debug", ".rela.debug_", ".rela.nv_debug", ".rel.debug_", ".rel.nv_debug")


def cubin_identity(cubin: bytes) -> str:
    """Return the hex SHA-256 of everything in a cubin but debug information and where sections lie.

    Raises:
        ValueError: the bytes are not a whole 64-bit ELF file.
    """
    digest = hashlib.sha256()
    # The flags of the header name the architecture.
    digest.update(struct.pack("<I", ELF_HEADER.unpack_from(cubin)[7] if len(cubin) >= ELF_HEADER.size else 0))
    for name, kind, _, size, payload in cubin_sections(cubin):
        if not name.startswith(_DEBUG_PREFIXES):
            for part in (name.encode(), struct.pack("<IQ", kind, size), payload):
                digest.update(struct.pack("<Q", len(part)))
                digest.update(part)
    return digest.hexdigest()


def code_of(cubin: bytes) -> dict[str, bytes]:
    """Return the bytes of every code section by its name.

    Raises:
        ValueError: the bytes are not a whole 64-bit ELF file.
    """
    return {name: payload for name, _, _, _, payload in cubin_sections(cubin) if name.startswith(_CODE_PREFIX)}


def transplant(cubin: bytes, code: dict[str, bytes]) -> bytes:
    """Return `cubin` with its code sections replaced by `code`, which another build's `code_of` gave.

    Raises:
        ValueError: the sections are not the same in name and size, or the bytes are not an ELF file.
    """
    result = bytearray(cubin)
    found = {name: (offset, size) for name, _, offset, size, _ in cubin_sections(cubin) if name.startswith(_CODE_PREFIX)}
    if {name: size for name, (_, size) in found.items()} != {name: len(text) for name, text in code.items()}:
        raise ValueError(f"wanted code for {sorted(found)}, found {sorted(code)} or code of another size")
    for name, (offset, size) in found.items():
        result[offset : offset + size] = code[name]
    return bytes(result)


def cubin_sections(cubin: bytes) -> list[tuple[str, int, int, int, bytes]]:
    """Return (name, type, offset, size in bytes, contents) of each section, in file order."""
    if len(cubin) < ELF_HEADER.size or cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"wanted a 64-bit ELF file, found {len(cubin)} bytes without its header")
    _, _, _, _, _, _, table, _, _, _, _, entry, count, names_index = ELF_HEADER.unpack_from(cubin)
    if entry != ELF_SECTION.size or names_index >= count or table + count * entry > len(cubin):
        raise ValueError("wanted a whole ELF file, found no section table in it (truncated?)")
    raw = [ELF_SECTION.unpack_from(cubin, table + index * entry) for index in range(count)]
    names = cubin[raw[names_index][4] : raw[names_index][4] + raw[names_index][5]]
    sections = []
    for name_offset, kind, _, _, offset, size, *_ in raw:
        if kind != NO_BITS and offset + size > len(cubin):
            raise ValueError("wanted a whole ELF file, found a section that lies beyond its end (truncated?)")
        end = names.find(b"\0", name_offset)
        if end < 0:
            raise ValueError("wanted section names, found one outside the string table")
        name = names[name_offset:end].decode("utf-8", errors="replace")
        payload = b"" if kind == NO_BITS else cubin[offset : offset + size]
        sections.append((name, kind, offset, size, payload))
    return sections
