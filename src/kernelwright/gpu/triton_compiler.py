"""Compiles Triton kernels to cubins for a named architecture, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernelwright.errors import CompilationError, CompilerMissingError, UsageError

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
