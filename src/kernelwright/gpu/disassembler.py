"""Finds an nvdisasm that can read a cubin, and runs it.

Cubins come in two container formats: up to CUDA 12 (ELF ABI version 7) and from CUDA 13 (version 8).
On compute capabilities below 10.0 an nvdisasm prints register live ranges only for its own generation's
format, so the match is checked before it runs. An nvdisasm of CUDA 13 goes by the file's header alone: it is
given an older cubin under a header of its own format, and prints what that of CUDA 12 does. The Triton wheel ships an
nvdisasm beside its ptxas, which is the first to be tried (of CUDA 12.8 in 3.6, of 13.1 beside a ptxas of 12.8
in 3.7); the PyPI package nvidia-cuda-nvdisasm has one for cubins of nvcc 13.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernelwright.errors import DisassemblerMismatchError, DisassemblerMissingError, DisassemblyError

ENVIRONMENT_VARIABLE = "KERNELWRIGHT_NVDISASM"
_LISTING_OPTIONS = ("-c", "-hex", "-plr", "-lrm", "narrow")
_TIMEOUT_S = 120.0
_OS_ABI_BYTE, _ABI_VERSION_BYTE = 7, 8
_FLAGS = struct.Struct("<I")
_FLAGS_OFFSET = 48
_ELF_HEADER_BYTES = 64
_NEW_OS_ABI = 0x41
_NEW_FORMAT = 8
_NEW_FORMAT_MAJOR = 13
_ANY_GENERATION_ARCHITECTURE = 100
_OLDEST_ARCHITECTURE_OF_13 = 75


@dataclass(frozen=True, slots=True)
class Disassembler:
    """An nvdisasm executable and its CUDA release, such as (12, 8)."""

    path: Path
    version: tuple[int, int]

    @classmethod
    def for_cubin(cls, cubin: bytes) -> Disassembler:
        """Return the first installed nvdisasm of the cubin's own generation, or else the first that can read it.

        Raises:
            DisassemblerMissingError: none is installed, or the one that the environment names does not run.
            DisassemblerMismatchError: none of those installed fits.
        """
        installed = installed_disassemblers()
        if not installed:
            raise DisassemblerMissingError(
                "wanted nvdisasm, found none; pip install 'kernelwright[triton]' (Triton's wheel ships one), "
                f"put the CUDA toolkit on PATH, or name one in {ENVIRONMENT_VARIABLE}"
            )
        readers = [candidate for candidate in installed if candidate.fits(cubin)]
        if readers:
            return next((candidate for candidate in readers if not candidate._needs_new_header(cubin)), readers[0])
        found = ", ".join(f"{d.path} ({d.version[0]}.{d.version[1]})" for d in installed)
        wanted = "13 or later" if _is_new_format(cubin) else "12"
        raise DisassemblerMismatchError(
            f"wanted nvdisasm of CUDA {wanted} for this cubin, found {found}; name a fitting one in {ENVIRONMENT_VARIABLE}"
        )

    def fits(self, cubin: bytes) -> bool:
        """True where this nvdisasm prints live ranges for the cubin, under another header if need be."""
        architecture = _architecture(cubin)
        if _is_new_format(cubin):
            return architecture >= _ANY_GENERATION_ARCHITECTURE or self.version[0] >= _NEW_FORMAT_MAJOR
        return not self._needs_new_header(cubin) or _OLDEST_ARCHITECTURE_OF_13 <= architecture < _ANY_GENERATION_ARCHITECTURE

    def _needs_new_header(self, cubin: bytes) -> bool:
        return self.version[0] >= _NEW_FORMAT_MAJOR and not _is_new_format(cubin)

    def listing(self, cubin: bytes) -> str:
        """Return the disassembly with encodings and register live ranges.

        Raises:
            DisassemblyError: nvdisasm failed on the file.
            DisassemblerMissingError: the executable is gone.
        """
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(_under_new_header(cubin) if self._needs_new_header(cubin) else cubin)
            file.flush()
            try:
                done = subprocess.run(
                    [str(self.path), *_LISTING_OPTIONS, file.name],
                    capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                raise DisassemblerMissingError(f"wanted to run {self.path}, found: {error}") from error
            except subprocess.TimeoutExpired as error:
                raise DisassemblyError(
                    f"wanted a disassembly within {_TIMEOUT_S:.0f} s, found {self.path.name} still running"
                ) from error
            if done.returncode != 0:
                complaint = done.stderr.decode(errors="replace").replace(file.name, "the cubin").strip()
                first = complaint.splitlines()[0] if complaint else f"exit status {done.returncode}"
                raise DisassemblyError(f"wanted a cubin that {self.path.name} can read, found: {first}")
        return done.stdout.decode(errors="replace")


def disassemble(cubin: bytes) -> str:
    """Return the listing of a cubin by the first fitting nvdisasm; see `Disassembler`."""
    return Disassembler.for_cubin(cubin).listing(cubin)


def installed_disassemblers() -> tuple[Disassembler, ...]:
    """Return every nvdisasm found, in order of preference, each once.

    `KERNELWRIGHT_NVDISASM` comes first, then Triton's, then that of the package nvidia-cuda-nvdisasm, then PATH, then the
    CUDA toolkit.

    Raises:
        DisassemblerMissingError: `KERNELWRIGHT_NVDISASM` names no nvdisasm that runs.
    """
    tools: dict[Path, Disassembler] = {}
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        chosen = _at(Path(named))
        if chosen is None:
            raise DisassemblerMissingError(
                f"wanted the nvdisasm that {ENVIRONMENT_VARIABLE} names, found none that runs at {named}; "
                "correct or unset it"
            )
        tools[chosen.path] = chosen
    for path in _candidates():
        tool = _at(path)
        if tool is not None:
            tools.setdefault(tool.path, tool)
    return tuple(tools.values())


def _at(path: Path) -> Disassembler | None:
    """Return the nvdisasm at a path, or None where there is none that runs."""
    version = _version(path.resolve()) if path.is_file() else None
    return None if version is None else Disassembler(path.resolve(), version)


def _candidates() -> Iterator[Path]:
    triton = importlib.util.find_spec("triton")
    for location in (triton.submodule_search_locations or []) if triton else []:
        yield Path(location) / "backends" / "nvidia" / "bin" / "nvdisasm"
    nvidia = importlib.util.find_spec("nvidia")
    for location in (nvidia.submodule_search_locations or []) if nvidia else []:
        yield from sorted(Path(location).glob("cu[0-9]*/bin/nvdisasm"))
    if on_path := shutil.which("nvdisasm"):
        yield Path(on_path)
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "bin" / "nvdisasm"


@lru_cache(maxsize=32)
def _version(path: Path) -> tuple[int, int] | None:
    """Return the CUDA release an nvdisasm states, or None if it does not run."""
    try:
        done = subprocess.run([str(path), "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(rb"release (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None


def _is_new_format(cubin: bytes) -> bool:
    return len(cubin) > _ABI_VERSION_BYTE and cubin[_ABI_VERSION_BYTE] >= _NEW_FORMAT


def _architecture(cubin: bytes) -> int:
    """Return the compute capability times ten, 0 if the header is cut off.

    Not imported from `kernelwright.sass`: the process that runs schedules imports this module and needs a quick start.
    """
    if len(cubin) < _ELF_HEADER_BYTES:
        return 0
    # The architecture moved to another byte of e_flags when the ABI version changed.
    return cubin[_FLAGS_OFFSET + 1] if _is_new_format(cubin) else cubin[_FLAGS_OFFSET]


def _under_new_header(cubin: bytes) -> bytes:
    """Return a cubin of the old format as one that says it is of the new one; code and side tables stay as they are.

    To be read, never to be loaded. Found by comparing what ptxas 12.8 and 13.1 make of the same PTX. Listings of 97
    cubins for compute capabilities 8.0 to 9.0 (38,026 instructions, side tables, calls and jumps included) by
    nvdisasm 13.1 and 13.2 under this header were those of 12.8, apart from the lines that name the architecture.
    """
    if not _architecture(cubin):
        return cubin
    changed = bytearray(cubin)
    changed[_OS_ABI_BYTE] = _NEW_OS_ABI
    changed[_ABI_VERSION_BYTE] = _NEW_FORMAT
    _FLAGS.pack_into(changed, _FLAGS_OFFSET, _architecture(cubin) << 8)
    return bytes(changed)
