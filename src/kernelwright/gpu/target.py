"""Finds the kernel that a name stands for: a cubin and how to launch it, from a file or from a Triton kernel.

A target is named in one of these ways:

    launch.toml, launch.json     a launch file with a cubin or CUDA source
    kernels.py, kernels.py:NAME  a Python file that defines `SPECS: dict[str, TritonSpec]`
    corpus:NAME                  a kernel of the built-in corpus
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Collection
from pathlib import Path

from kernelwright.errors import CompilationError, CompilerMissingError, UsageError
from kernelwright.files import BINARY_LIMIT_BYTES, read_regular
from kernelwright.gpu.compilers import compile_cuda
from kernelwright.gpu.launch_spec import LAUNCH_SUFFIXES, LaunchFile, Target, read_launch_file
from kernelwright.gpu.triton_spec import TritonSpec
from kernelwright.sass.elf import read_cubin

CORPUS = (
    "softmax", "rmsnorm", "layernorm", "gemm_leakyrelu", "batched_gemm", "fused_feed_forward", "attention_mma",
    "attention_wgmma", "sgemm", "row_sum",
)  # fmt: skip
"""Kernels of the built-in corpus, which `corpus.triton` defines; their names are known without Triton."""
_CORPUS_PREFIX = "corpus:"


def load_target(text: str, architecture: int) -> Target:
    """Return the target of a name; see the module's docstring.

    Args:
        architecture: compute capability times ten to compile for if something is compiled.

    Raises:
        UsageError: it cannot be found or read, or a compiler refused the kernel.
        ToolchainError: a compiler is missing, or refused a kernel of the corpus.
    """
    return find_target(text)(architecture)


def find_target(text: str) -> Callable[[int], Target]:
    """Look a target's name up and return its builder for an architecture.

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
    return functools.partial(_from_source, described, _text_of(source), source)


def compile_cubin(text: str, architecture: int) -> bytes:
    """Compile the source that a name stands for: CUDA C++ in a `.cu` file, or a target that is no cubin yet.

    Raises:
        UsageError, ToolchainError: as `load_target`; also where the target is compiled, for another architecture.
    """
    path = Path(text)
    if path.suffix == ".cubin":
        raise UsageError(f"Wanted source to compile, found {text}, which is machine code already. Use it as it is.")
    if path.suffix == ".cu":
        return _compiled_cuda(_text_of(path), architecture, (), path, "Correct the kernel.")
    target = load_target(text, architecture)
    require_architecture(target.architecture, text, architecture)
    return target.cubin


def require_architecture(found: int, text: str, wanted: int | None) -> None:
    """Raise UsageError where a target is machine code of another architecture than was asked for."""
    if wanted not in (None, found):
        raise UsageError(
            f"Wanted code for sm_{wanted}, found {text}, which is sm_{found} already. An architecture is chosen only for "
            "what is compiled here; leave it out."
        )


def _absent(text: str) -> str:
    """Say that a file is not there, and which kernel of the corpus may be meant."""
    near = difflib.get_close_matches(text, CORPUS, n=1)
    return f"there is no file {text}. " + (f"Did you mean {_CORPUS_PREFIX}{near[0]}?" if near else "Check the path.")


@functools.cache
def corpus_specs() -> dict[str, TritonSpec]:
    """The spec of every kernel of the built-in corpus, by its name. Needs Triton."""
    specs: dict[str, TritonSpec] = _executed(Path(__file__).with_name("corpus.triton")).SPECS
    return specs


def _from_corpus(name: str, architecture: int) -> Target:
    try:
        specs = corpus_specs()
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise CompilerMissingError(
            f"wanted Triton to compile {name}, found none; pip install 'kernelwright[triton]'"
        ) from error
    return specs[name].build(name, architecture)


def _words(error: CompilationError) -> str:
    return str(error).rstrip(".")


def _from_spec(spec: TritonSpec, name: str, path: Path, architecture: int) -> Target:
    try:
        return spec.build(name, architecture)
    except CompilationError as error:
        raise UsageError(f"Wanted a kernel that compiles in {path}; {_words(error)}. Correct it or its spec.") from error


def _from_source(described: LaunchFile, source: str, path: Path, architecture: int) -> Target:
    wanted = described.architecture or architecture
    advice = "Correct the kernel, or the launch file's `options` or `architecture`."
    return Target(described.spec(), _compiled_cuda(source, wanted, described.options, path, advice), wanted)


def _compiled_cuda(source: str, architecture: int, options: tuple[str, ...], path: Path, advice: str) -> bytes:
    try:
        return compile_cuda(source, architecture, options)
    except CompilationError as error:
        raise UsageError(f"Wanted a kernel that compiles in {path}; {_words(error)}. {advice}") from error


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
    if not path.is_file():
        raise UsageError(f"Wanted a Python file with kernel specs at {path}, found none. Check the path.")
    try:
        # What it prints is no result of ours: on standard output there is that alone.
        with contextlib.redirect_stdout(sys.stderr):
            module = _executed(path)
    except (Exception, SystemExit) as error:
        triton = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        do = "Install it with pip install 'kernelwright[triton]'." if triton else "Correct the file."
        raise UsageError(f"Wanted {path} to run, found {type(error).__name__}: {error}. {do}") from error
    specs = getattr(module, "SPECS", None)
    if not isinstance(specs, dict) or not specs or not all(isinstance(spec, TritonSpec) for spec in specs.values()):
        raise UsageError(
            f"Wanted `SPECS: dict[str, TritonSpec]` in {path}, found {type(specs).__name__}. Define it "
            "as examples/sass/bias_gelu.py does: machine code depends on the types of a kernel's arguments."
        )
    return specs


def _executed(path: Path) -> types.ModuleType:
    """The module of a Python file, whatever its suffix."""
    name = f"kernelwright_spec_{path.stem}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _see_that_it_is_there(names: Collection[str], name: str, text: str) -> None:
    if name not in names:
        raise UsageError(f"Wanted one of {', '.join(names)}, found {text!r}. Name one after a colon.")


def _text_of(path: Path) -> str:
    return _read(path).decode("utf-8", errors="replace")


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, BINARY_LIMIT_BYTES)
    except OSError as error:
        raise UsageError(f"Wanted a file at {path}, found: {error.strerror}. Check the path.") from error
