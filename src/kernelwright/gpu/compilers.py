"""Compiles Triton kernels and CUDA C++ to cubins for a named architecture, without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelwright.errors import CompilationError, CompilerMissingError, ToolchainError, UsageError

# --- Triton -----------------------------------------------------------------------------------------------------------


ARCHITECTURES = (80, 86, 89, 90)
"""Compute capabilities, times ten, for which the machine-code tools are tested."""
KNOWN_ARCHITECTURES = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
"""Compute capabilities, times ten, with the instruction format that is read here; not every compiler serves each."""
_WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel as Triton compiled it.

    Attributes:
        shared_bytes: dynamic shared memory of a thread block.
        scratch_bytes: device memory the launcher must provide.
    """

    name: str
    architecture: int
    cubin: bytes
    ptx: str
    num_warps: int
    shared_bytes: int
    scratch_bytes: int = 0


def compile_triton(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    architecture: int,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: frozenset[str] = frozenset(),
) -> CompiledKernel:
    """Compile a `@triton.jit` function for an architecture that need not be present.

    Args:
        signature: argument name -> Triton type, such as "*fp16" or "i32", without the constants.
        constants: values of the `tl.constexpr` arguments.
        architecture: compute capability times ten.
        num_stages: depth of software pipelining.
        aligned: arguments promised to be divisible by 16.

    Raises:
        UsageError: there is no such architecture.
        CompilerMissingError: Triton is not installed.
        CompilationError: Triton or ptxas refused the kernel.
    """
    if architecture not in KNOWN_ARCHITECTURES:
        # LLVM ends the process over a number that it does not know.
        known = ", ".join(map(str, KNOWN_ARCHITECTURES))
        raise UsageError(f"wanted a compute capability times ten out of {known}, found {architecture}; name one of them")
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise CompilerMissingError(f"wanted Triton, found none ({error}); pip install 'kernelwright[triton]'") from error
    names: list[str] = function.arg_names
    if set(names) != set(signature) | set(constants):
        raise CompilationError(f"wanted types or values for {names}, found {[*signature, *constants]}")
    source = ASTSource(
        fn=function,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sorted(aligned)},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, _WARP_SIZE), options=options)
    # Triton's failures share no base class, and a refused kernel must not end the caller.
    except Exception as error:
        raise CompilationError(
            f"wanted {function.__name__} for sm_{architecture}, found: {str(error).strip() or repr(error)}"
        ) from error
    return CompiledKernel(
        name=compiled.metadata.name,
        architecture=architecture,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        num_warps=compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        scratch_bytes=sum(getattr(compiled.metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")),
    )


# --- nvcc -------------------------------------------------------------------------------------------------------------


NVCC_VARIABLE = "KERNELWRIGHT_NVCC"
TOOLKIT = Path("/usr/local/cuda")
"""Default directory of the CUDA toolkit."""
_NVCC_TIMEOUT_S = 300.0


def find_nvcc() -> Path:
    """Return the nvcc for cubins of our own: `KERNELWRIGHT_NVCC`, then PATH, then the CUDA toolkit.

    Raises:
        CompilerMissingError: there is none.
    """
    if named := os.environ.get(NVCC_VARIABLE):
        if Path(named).is_file():
            return Path(named)
        raise CompilerMissingError(f"wanted the nvcc that {NVCC_VARIABLE} names, found no file {named}; correct it")
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home) / "bin" / "nvcc"
    raise CompilerMissingError(f"wanted nvcc, found none; install the CUDA toolkit or name it in {NVCC_VARIABLE}")


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


def compile_cuda(source: str, architecture: int, options: Sequence[str] = ()) -> bytes:
    """Compile CUDA C++ to a cubin.

    Args:
        source: the text of a translation unit; kernels are easiest to name when they are `extern "C"`.
        architecture: compute capability times ten.
        options: further options of nvcc, such as `-O3` or `-maxrregcount=64`.

    Raises:
        CompilerMissingError: there is no nvcc.
        CompilationError: nvcc refused the source.
        ToolchainError: something ended nvcc.
    """
    compiler = find_nvcc()
    with tempfile.TemporaryDirectory(prefix="kernelwright-nvcc-") as folder:
        text, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        text.write_text(source, encoding="utf-8")
        command = [str(compiler), "-cubin", f"-arch=sm_{architecture}", *options, "-o", str(cubin), str(text)]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=_NVCC_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise CompilerMissingError(f"wanted to run {compiler}, found: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise CompilationError(f"wanted a cubin within {_NVCC_TIMEOUT_S:.0f} s, found nvcc still running") from error
        if done.returncode < 0:
            raise ToolchainError(f"wanted a cubin, found {compiler} ended by signal {-done.returncode}")
        if done.returncode != 0 or not cubin.is_file():
            complaint = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
            complaint = complaint.replace(f"{folder}/", "")
            raise CompilationError(f"wanted a cubin for sm_{architecture}, found: {complaint}")
        return cubin.read_bytes()
