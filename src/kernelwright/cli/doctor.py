"""`kernelwright doctor`: what this machine can do, found by looking and never by assuming."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from kernelwright.cli.commands import OptionsCommand
from kernelwright.cli.options import json_option
from kernelwright.cli.output import emit_json, printable

PROBE_LIMIT_S = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """Presence of one thing."""

    name: str
    present: bool
    found: str
    """Version, path or what is missing."""
    needed_for: str = ""
    """Work that needs it; shown when it is missing."""


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Say what this machine can do: Python, torch, GPUs, compilers, disassembler, isolation, models.

    Always ends with 0: a missing part is an answer, not a failure.
    """

    as_json: bool = json_option()

    def __call__(self) -> None:
        findings = [probe() for probe in PROBES]
        isolation = isolation_here()
        if self.as_json:
            emit_json({"findings": [asdict(finding) for finding in findings], "isolation": isolation})
            return
        for finding in findings:
            mark = "yes" if finding.present else "no "
            hint = "" if finding.present or not finding.needed_for else f" (needed for {finding.needed_for})"
            click.echo(f"{mark}  {finding.name:<14} {printable(finding.found)}{hint}")
        click.echo("\nIsolation of candidates:")
        for name, state in isolation.items():
            click.echo(f"     {name:<18} {printable(state)}")


command = OptionsCommand("doctor", DoctorCommand, short_help="Say what this machine can do.")


def isolation_here() -> dict[str, str]:
    """Which parts of the isolation of candidates this machine has."""
    from kernelwright.judge.isolation.sandbox import ARCHITECTURES, landlock_abi

    abi = landlock_abi()
    return {
        "landlock": f"ABI {abi}" if abi else "not available: candidates can read this user's files",
        "landlock_signals": "scoped" if abi >= 6 else "by seccomp",
        "landlock_network": "TCP refused" if abi >= 4 else "by seccomp",
        "seccomp": "filter" if platform.machine() in ARCHITECTURES else f"no filter for {platform.machine()}",
        "capabilities": "dropped",
        "session": "killed whole; memory and process count watched",
        "user": "root without capabilities" if os.geteuid() == 0 else f"uid {os.geteuid()}",
    }


def _python() -> Finding:
    usable = (3, 11) <= sys.version_info[:2] <= (3, 14)
    return Finding("python", usable, f"{platform.python_version()}, {sys.executable}", "3.11 to 3.14 is wanted")


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", False, str(error), "everything")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", True, f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")


def _gpus() -> Finding:
    needed = "device cuda; on the CPU everything else works"
    try:
        import torch
    except ImportError:
        return Finding("gpu", False, "torch is missing", needed)
    if not torch.cuda.is_available():
        return Finding("gpu", False, "torch finds no CUDA device", needed)
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in devices]
    return Finding("gpu", True, "; ".join(names))


def _driver() -> Finding:
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    version = _first_line(*query)
    return Finding("driver", version is not None, version or "nvidia-smi does not answer", "device cuda")


def _nvcc() -> Finding:
    from kernelwright.gpu.compilers import find_torch_nvcc

    return _compiler_of("nvcc", find_torch_nvcc, "candidates with CUDA C++ source")


def _nvcc_for_sass() -> Finding:
    from kernelwright.gpu.compilers import find_nvcc

    return _compiler_of("nvcc for sass", find_nvcc, "launch files with CUDA C++ source")


def _compiler_of(name: str, find: Callable[[], Path], needed: str) -> Finding:
    from kernelwright.errors import CompilerMissingError

    try:
        path = find()
    except CompilerMissingError as error:
        return Finding(name, False, str(error), needed)
    version = _release(str(path))
    found = f"{version}, {path}" if version else f"{path} does not say its release"
    return Finding(name, version is not None, found, needed)


def _compiler() -> Finding:
    named = os.environ.get("CXX")
    path = shutil.which(named) if named else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    version = _first_line(path, "--version") if path else None
    return Finding("c++ compiler", version is not None, version or "none", "candidates with C++ source, torch.compile")


def _ninja() -> Finding:
    path = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    version = _first_line(path, "--version") if path else None
    return Finding("ninja", version is not None, version or "none", "candidates with C++ or CUDA source")


def _triton() -> Finding:
    version = _version("triton")
    return Finding("triton", version is not None, version or "not installed", "Triton candidates")


def _disassembler() -> Finding:
    from kernelwright.errors import DisassemblerMissingError
    from kernelwright.gpu.disassembler import installed_disassemblers

    needed = "reading machine code"
    try:
        tools = installed_disassemblers()
    except DisassemblerMissingError as error:
        return Finding("disassembler", False, str(error), needed)
    found = [f"nvdisasm {'.'.join(map(str, tool.version))}, {tool.path}" for tool in tools]
    words = "; ".join(found) or "no nvdisasm on PATH nor beside Triton"
    return Finding("disassembler", bool(found), words, needed)


def _models() -> Finding:
    version = _version("transformers")
    found = f"transformers {version}" if version else "transformers is not installed; the built-in policy needs no model"
    return Finding("local models", version is not None, found)


PROBES: tuple[Callable[[], Finding], ...] = (
    _python, _torch, _gpus, _driver, _nvcc, _nvcc_for_sass, _compiler, _ninja, _triton, _disassembler, _models,
)  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> list[str]:
    """Lines that a program prints; none when it cannot be run, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _first_line(*command: str) -> str | None:
    return next(iter(_output(*command)), None)


def _release(path: str) -> str | None:
    """The line of a CUDA tool's `--version` that has its release."""
    return next((line for line in _output(path, "--version") if "release" in line), None)
