"""Finding an nvdisasm of the right generation and running it.

Cubins come in two container formats: up to CUDA 12 (ELF ABI version 7) and from CUDA 13 (version 8).
An nvdisasm prints register live ranges only for its own generation's format on compute capabilities
below 10.0, and silently leaves them out otherwise, so the match is checked before it runs. The Triton
wheel ships an nvdisasm beside its ptxas, which is the first to be tried; the PyPI package
nvidia-cuda-nvdisasm has one for cubins of nvcc 13.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernelwright.toolchain.errors import DisassemblerMismatch, DisassemblerMissing, DisassemblyRejected

ENVIRONMENT_VARIABLE = "KERNELWRIGHT_NVDISASM"
_LISTING_OPTIONS = ("-c", "-hex", "-plr", "-lrm", "narrow")
_TIMEOUT_S = 120.0
_ABI_VERSION_BYTE = 8
_NEW_FORMAT = 8
_NEW_FORMAT_MAJOR = 13
_ANY_GENERATION_ARCHITECTURE = 100


@dataclass(frozen=True, slots=True)
class Disassembler:
    """An nvdisasm executable.

    Attributes:
        path: the executable.
        version: its CUDA release, for example (12, 8).
    """

    path: Path
    version: tuple[int, int]

    @classmethod
    def for_cubin(cls, cubin: bytes) -> Disassembler:
        """Return the first installed nvdisasm whose generation fits the cubin.

        Raises:
            DisassemblerMissing: none is installed, or the one that the environment names does not run.
            DisassemblerMismatch: none of those installed fits.
        """
        installed = installed_disassemblers()
        if not installed:
            raise DisassemblerMissing(
                "wanted nvdisasm, found none; install triton==3.6.0 (its wheel ships one), put the CUDA "
                f"toolkit on PATH, or name one in {ENVIRONMENT_VARIABLE}"
            )
        for candidate in installed:
            if candidate.fits(cubin):
                return candidate
        found = ", ".join(f"{d.path} ({d.version[0]}.{d.version[1]})" for d in installed)
        wanted = "13 or later" if _is_new_format(cubin) else "12"
        raise DisassemblerMismatch(
            f"wanted nvdisasm of CUDA {wanted} for this cubin, found {found}; name a fitting one in "
            f"{ENVIRONMENT_VARIABLE}"
        )

    def fits(self, cubin: bytes) -> bool:
        """Whether this nvdisasm prints live ranges for the cubin's container format."""
        if _is_new_format(cubin):
            either = _architecture(cubin) >= _ANY_GENERATION_ARCHITECTURE
            return either or self.version[0] >= _NEW_FORMAT_MAJOR
        return self.version[0] < _NEW_FORMAT_MAJOR

    def listing(self, cubin: bytes) -> str:
        """Return the disassembly with encodings and register live ranges.

        Raises:
            DisassemblyRejected: nvdisasm failed on the file.
            DisassemblerMissing: the executable is gone.
        """
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            try:
                done = subprocess.run(
                    [str(self.path), *_LISTING_OPTIONS, file.name],
                    capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                raise DisassemblerMissing(f"wanted to run {self.path}, found: {error}") from error
            except subprocess.TimeoutExpired as error:
                raise DisassemblyRejected(
                    f"wanted a disassembly within {_TIMEOUT_S:.0f} s, found {self.path.name} still running"
                ) from error
            if done.returncode != 0:
                complaint = done.stderr.decode(errors="replace").replace(file.name, "the cubin").strip()
                first = complaint.splitlines()[0] if complaint else f"exit status {done.returncode}"
                raise DisassemblyRejected(f"wanted a cubin that {self.path.name} can read, found: {first}")
        return done.stdout.decode(errors="replace")


def disassemble(cubin: bytes) -> str:
    """Return the listing of a cubin by the first fitting nvdisasm; see `Disassembler`."""
    return Disassembler.for_cubin(cubin).listing(cubin)


def installed_disassemblers() -> tuple[Disassembler, ...]:
    """Return every nvdisasm found, in order of preference, each once.

    `KERNELWRIGHT_NVDISASM` comes first, then Triton's, then that of the package nvidia-cuda-nvdisasm, then PATH,
    then the CUDA toolkit.

    Raises:
        DisassemblerMissing: what `KERNELWRIGHT_NVDISASM` names is no nvdisasm that runs.
    """
    found: dict[Path, Disassembler] = {}
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        chosen = _at(Path(named))
        if chosen is None:
            raise DisassemblerMissing(
                f"wanted the nvdisasm that {ENVIRONMENT_VARIABLE} names, found none that runs at {named}; "
                "correct or unset it"
            )
        found[chosen.path] = chosen
    for path in _candidates():
        tool = _at(path)
        if tool is not None:
            found.setdefault(tool.path, tool)
    return tuple(found.values())


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
    """Return the compute capability times ten of a new-format cubin, 0 if the header is cut off."""
    return cubin[49] if len(cubin) > 49 else 0
