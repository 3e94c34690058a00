"""Compiles CUDA C++ to cubins with nvcc, without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernelwright.errors import CompilationError, CompilerMissingError, ToolchainError

ENVIRONMENT_VARIABLE = "KERNELWRIGHT_NVCC"
TOOLKIT = Path("/usr/local/cuda")
"""Default directory of the CUDA toolkit."""
_TIMEOUT_S = 300.0


def find_nvcc() -> Path:
    """Return the nvcc for cubins of our own: `KERNELWRIGHT_NVCC`, then PATH, then the CUDA toolkit.

    Raises:
        CompilerMissingError: there is none.
    """
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        if Path(named).is_file():
            return Path(named)
        raise CompilerMissingError(f"wanted the nvcc that {ENVIRONMENT_VARIABLE} names, found no file {named}; correct it")
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home) / "bin" / "nvcc"
    raise CompilerMissingError(f"wanted nvcc, found none; install the CUDA toolkit or name it in {ENVIRONMENT_VARIABLE}")


def find_torch_nvcc() -> Path:
    """Return the nvcc that torch compiles candidates with: of CUDA_HOME or CUDA_PATH, else on PATH, else the toolkit's.

    Source of the order: `_find_cuda_home` of torch 2.13's `torch.utils.cpp_extension`.

    Raises:
        CompilerMissingError: there is none.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = None if home else shutil.which("nvcc")
    found = Path(on_path) if on_path else Path(home or TOOLKIT) / "bin" / "nvcc"
    if found.is_file():
        return found
    raise CompilerMissingError(
        f"wanted nvcc for torch, found no file {found}; install the CUDA toolkit or name it in CUDA_HOME"
    )


def compile_cuda(
    source: str, architecture: int, options: Sequence[str] = (), *, nvcc: Path | None = None, feature: str = ""
) -> bytes:
    """Compile CUDA C++ to a cubin.

    Args:
        source: the text of a translation unit; kernels are easiest to name when they are `extern "C"`.
        architecture: compute capability times ten.
        options: further options of nvcc, such as `-O3` or `-maxrregcount=64`.
        feature: suffix of an architecture with its own features, such as "a" for sm_90a.

    Raises:
        CompilerMissingError: there is no nvcc.
        CompilationError: nvcc refused the source.
        ToolchainError: something ended nvcc.
    """
    compiler = nvcc or find_nvcc()
    with tempfile.TemporaryDirectory(prefix="kernelwright-nvcc-") as folder:
        text, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        text.write_text(source, encoding="utf-8")
        command = [str(compiler), "-cubin", f"-arch=sm_{architecture}{feature}", *options, "-o", str(cubin), str(text)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise CompilerMissingError(f"wanted to run {compiler}, found: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise CompilationError(f"wanted a cubin within {_TIMEOUT_S:.0f} s, found nvcc still running") from error
        if done.returncode < 0:
            raise ToolchainError(f"wanted a cubin, found {compiler} ended by signal {-done.returncode}")
        if done.returncode != 0 or not cubin.is_file():
            complaint = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
            complaint = complaint.replace(f"{folder}/", "")
            raise CompilationError(f"wanted a cubin for sm_{architecture}{feature}, found: {complaint}")
        return cubin.read_bytes()
