"""What is tuned: a cubin and how to launch it, from a file or from a Triton kernel.

A target is named in one of these ways:

    launch.toml, launch.json     a launch file with a cubin or CUDA source
    kernels.py, kernels.py:NAME  a Python file that defines `SPECS: dict[str, TritonSpec]`
    corpus:NAME                  a kernel of the built-in corpus
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelwright.errors import UsageError
from kernelwright.files import BINARY_LIMIT_BYTES, read_regular
from kernelwright.gpu import compile_triton
from kernelwright.gpu.corpus import CORPUS
from kernelwright.gpu.errors import CompilationFailed, CompilerMissing
from kernelwright.gpu.launch_spec import (
    LAUNCH_SUFFIXES,
    WARP_SIZE,
    Argument,
    LaunchFile,
    LaunchSpec,
    NullArgument,
    ScalarArgument,
    TensorArgument,
    read_launch_file,
)
from kernelwright.gpu.nvcc import compile_cuda
from kernelwright.sass.code.elf import read_cubin

_CORPUS_PREFIX = "corpus:"
_SPECIALISED_MULTIPLE = 16
"""Triton promises the compiler that integers and addresses that are divisible by 16 stay so."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kernel that can be run: the machine code the compiler made, and how to launch it."""

    spec: LaunchSpec
    cubin: bytes
    architecture: int


@dataclass(frozen=True, slots=True)
class TritonSpec:
    """A Triton kernel in one configuration, and what it is run on.

    Attributes:
        kernel: the `@triton.jit` function.
        arguments: its run-time arguments, in any order, by the names of its parameters.
        grid: thread blocks along up to three axes.
        constants: values of its compile-time arguments.
        num_warps: warps of a thread block.
        num_stages: depth of software pipelining.
        settings: further fields of `LaunchSpec`, such as `deterministic` or `cold_l2`.
    """

    kernel: Any
    arguments: Sequence[Argument]
    grid: tuple[int, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, name: str, architecture: int) -> Target:
        """Compile for an architecture, specialised as Triton's own launcher would be for these arguments.

        Raises:
            UsageError: arguments are missing or unknown, or the kernel cannot be launched alone.
            ToolchainError: Triton is missing or refused the kernel.
        """
        by_name = {argument.name: argument for argument in self.arguments}
        names: list[str] = self.kernel.arg_names
        if set(names) != set(by_name) | set(self.constants) or set(by_name) & set(self.constants):
            raise UsageError(
                f"Wanted an argument or a constant for each of {names}, found {[*by_name]} and {[*self.constants]}."
            )
        run_time = [by_name[name] for name in names if name in by_name]
        # Triton compiles an integer argument that is 1 into the code.
        ones = [a.name for a in run_time if isinstance(a, ScalarArgument) and a.type in ("i32", "i64") and a.value == 1]
        kept = [argument for argument in run_time if argument.name not in ones]
        compiled = compile_triton(
            self.kernel,
            {argument.name: _triton_type(argument) for argument in kept},
            {**self.constants, **dict.fromkeys(ones, 1)},
            architecture,
            self.num_warps,
            self.num_stages,
            frozenset(argument.name for argument in kept if _is_aligned(argument)),
        )
        if compiled.scratch_bytes:
            raise UsageError(
                f"Wanted a kernel that needs no scratch memory, found {name} to need {compiled.scratch_bytes} bytes; "
                "it can only be launched by Triton."
            )
        grid = (*self.grid, 1, 1, 1)
        spec = LaunchSpec(
            name=name,
            entry=compiled.name,
            grid=(grid[0], grid[1], grid[2]),
            block=(WARP_SIZE * compiled.num_warps, 1, 1),
            shared_bytes=compiled.shared_bytes,
            arguments=(*kept, NullArgument(name="global_scratch"), NullArgument(name="profile_scratch")),
            **self.settings,
        )
        return Target(spec, compiled.cubin, architecture)


def load_target(text: str, architecture: int) -> Target:
    """Return what a target's name means; see the module's docstring.

    Args:
        text: the name.
        architecture: compute capability times ten to compile for where something is compiled.

    Raises:
        UsageError: it cannot be found or read, or a compiler refused the kernel.
        ToolchainError: a compiler is missing, or refused a kernel of the corpus.
    """
    return find_target(text)(architecture)


def find_target(text: str) -> Callable[[int], Target]:
    """Look a target's name up and return what makes it for an architecture, as `load_target` does.

    Raises:
        UsageError: it cannot be found or read.
    """
    if text.startswith(_CORPUS_PREFIX):
        kernel = text.removeprefix(_CORPUS_PREFIX)
        _see_that_it_is_there(CORPUS, kernel, text)
        return functools.partial(_from_corpus, kernel)
    file, _, name = text.partition(":")
    path = Path(file)
    if path.suffix == ".py":
        specs = read_specs(path)
        chosen = name or (next(iter(specs)) if len(specs) == 1 else "")
        _see_that_it_is_there(specs, chosen, text)
        return functools.partial(_from_spec, specs[chosen], chosen, path)
    path = Path(text)
    if path.suffix not in LAUNCH_SUFFIXES and not path.exists():
        raise UsageError(f"Wanted a launch file, a Python file with kernel specs or {_CORPUS_PREFIX}NAME; {_absent(text)}")
    described = read_launch_file(path)
    if described.cubin is not None:
        cubin = _read(path.parent / described.cubin)
        target = Target(described.spec(), cubin, read_cubin(cubin).architecture)
        return lambda architecture: target
    source = path.parent / (described.source or "")
    return functools.partial(_from_source, described, _read(source).decode("utf-8", errors="replace"), source)


def _absent(text: str) -> str:
    """What to say of a file that is not there: maybe it is a kernel of the corpus."""
    near = difflib.get_close_matches(text, CORPUS, n=1)
    return f"there is no file {text}. " + (f"Did you mean {_CORPUS_PREFIX}{near[0]}?" if near else "Check the path.")


def _from_corpus(name: str, architecture: int) -> Target:
    try:
        from kernelwright.gpu.corpus.specs import corpus_specs

        specs = corpus_specs()
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise CompilerMissing(f"wanted Triton to compile {name}, found none; pip install 'kernelwright[triton]'") from error
    return specs[name].build(name, architecture)


def _words(error: CompilationFailed) -> str:
    return str(error).rstrip(".")


def _from_spec(spec: TritonSpec, name: str, path: Path, architecture: int) -> Target:
    try:
        return spec.build(name, architecture)
    except CompilationFailed as error:
        raise UsageError(f"Wanted a kernel that compiles in {path}; {_words(error)}. Correct it or its spec.") from error


def _from_source(described: LaunchFile, source: str, path: Path, architecture: int) -> Target:
    wanted = described.architecture or architecture
    try:
        cubin = compile_cuda(source, wanted, described.options)
    except CompilationFailed as error:
        advice = "Correct the kernel, or the launch file's `options` or `architecture`."
        raise UsageError(f"Wanted a kernel that compiles in {path}; {_words(error)}. {advice}") from error
    return Target(described.spec(), cubin, wanted)


def save_target(target: Target, folder: Path) -> Path:
    """Write a target as a cubin and a launch file that `load_target` reads; return the launch file."""
    folder.mkdir(parents=True, exist_ok=True)
    described = LaunchFile(**target.spec.model_dump(), cubin=f"{target.spec.name}.cubin")
    (folder / f"{target.spec.name}.cubin").write_bytes(target.cubin)
    path = folder / f"{target.spec.name}.json"
    path.write_text(described.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")
    return path


def read_specs(path: Path) -> dict[str, TritonSpec]:
    """Run a Python file and return its `SPECS`.

    Raises:
        UsageError: there is no such file, it fails, or it defines no specs.
    """
    name = f"kernelwright_spec_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if found is None or found.loader is None:
        raise UsageError(f"Wanted a Python file with kernel specs at {path}, found none. Check the path.")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        # What it prints is no result of ours: on standard output there is that alone.
        with contextlib.redirect_stdout(sys.stderr):
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"Wanted {path} to run, found {type(error).__name__}: {error}. Correct the file.") from error
    specs = getattr(module, "SPECS", None)
    if not isinstance(specs, dict) or not specs or not all(isinstance(spec, TritonSpec) for spec in specs.values()):
        raise UsageError(f"Wanted `SPECS: dict[str, TritonSpec]` in {path}, found {type(specs).__name__}. Define it.")
    return specs


def _see_that_it_is_there(names: Collection[str], name: str, text: str) -> None:
    if name not in names:
        raise UsageError(f"Wanted one of {', '.join(names)}, found {text!r}. Name one after a colon.")


def _triton_type(argument: Argument) -> str:
    if isinstance(argument, TensorArgument):
        return f"*{argument.dtype}"
    if isinstance(argument, ScalarArgument):
        return argument.type
    raise UsageError(f"Wanted tensors and scalars as arguments of a Triton kernel, found the null pointer {argument.name}.")


def _is_aligned(argument: Argument) -> bool:
    if isinstance(argument, TensorArgument):
        return True
    return (
        isinstance(argument, ScalarArgument)
        and argument.type in ("i32", "i64")
        and int(argument.value) % _SPECIALISED_MULTIPLE == 0
    )


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, BINARY_LIMIT_BYTES)
    except OSError as error:
        raise UsageError(f"Wanted a file at {path}, found: {error.strerror}. Check the path in the launch file.") from error
