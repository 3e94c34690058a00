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
from kernelwright.errors import CompilerMissingError, DisassemblerMissingError

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
        findings = [look_for(name) for name in PROBES]
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


def look_for(name: str) -> Finding:
    """Look for one of `PROBES`."""
    needed_for, probe = PROBES[name]
    try:
        return Finding(name, True, probe(), needed_for)
    except (_MissingError, CompilerMissingError, DisassemblerMissingError, ImportError) as missing:
        return Finding(name, False, str(missing), needed_for)


class _MissingError(Exception):
    """One thing is not there, or does not work."""


def _python() -> str:
    version = f"{platform.python_version()}, {sys.executable}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        raise _MissingError(version)
    return version


def _torch() -> str:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__}, {build}, {torch.get_num_threads()} threads"


def _gpus() -> str:
    try:
        import torch
    except ImportError:
        raise _MissingError("torch is missing") from None
    if not torch.cuda.is_available():
        raise _MissingError("torch finds no CUDA device")
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return "; ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in devices)


def _driver() -> str:
    return _first_line("nvidia-smi does not answer", "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _nvcc() -> str:
    from kernelwright.gpu.compilers import find_torch_nvcc

    return _release(find_torch_nvcc())


def _nvcc_for_sass() -> str:
    from kernelwright.gpu.compilers import find_nvcc

    return _release(find_nvcc())


def _release(nvcc: Path) -> str:
    """The line of a CUDA compiler's `--version` that has its release, and its path."""
    line = next((line for line in _output(str(nvcc), "--version") if "release" in line), None)
    if line is None:
        raise _MissingError(f"{nvcc} does not say its release")
    return f"{line}, {nvcc}"


def _compiler() -> str:
    named = os.environ.get("CXX")
    path = shutil.which(named) if named else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return _first_line("none", path, "--version")


def _ninja() -> str:
    path = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    return _first_line("none", path, "--version")


def _triton() -> str:
    return _version("triton", "not installed")


def _disassembler() -> str:
    from kernelwright.gpu.disassembler import installed_disassemblers

    tools = installed_disassemblers()
    if not tools:
        raise _MissingError("no nvdisasm on PATH nor beside Triton")
    return "; ".join(f"nvdisasm {'.'.join(map(str, tool.version))}, {tool.path}" for tool in tools)


def _models() -> str:
    version = _version("transformers", "transformers is not installed; the built-in policy needs no model")
    return f"transformers {version}"


PROBES: dict[str, tuple[str, Callable[[], str]]] = {
    "python": ("3.11 to 3.14 is wanted", _python),
    "torch": ("everything", _torch),
    "gpu": ("device cuda; on the CPU everything else works", _gpus),
    "driver": ("device cuda", _driver),
    "nvcc": ("candidates with CUDA C++ source", _nvcc),
    "nvcc for sass": ("launch files with CUDA C++ source", _nvcc_for_sass),
    "c++ compiler": ("candidates with C++ source, torch.compile", _compiler),
    "ninja": ("candidates with C++ or CUDA source", _ninja),
    "triton": ("Triton candidates", _triton),
    "disassembler": ("reading machine code", _disassembler),
    "local models": ("", _models),
}
"""Subjects of the search: the work that needs each, and the probe."""


def _version(package: str, missing: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise _MissingError(missing) from None


def _output(*command: str) -> list[str]:
    """Lines that a program prints; none when it cannot be run, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _first_line(missing: str, program: str | None, *arguments: str) -> str:
    lines = _output(program, *arguments) if program else []
    if not lines:
        raise _MissingError(missing)
    return lines[0]
