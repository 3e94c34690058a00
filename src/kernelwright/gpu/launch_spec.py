"""Describes how a kernel is launched, in types that fit in a TOML or JSON file.

A launch file names a cubin, or CUDA source to make one from, beside the description:

    cubin = "sgemm.cubin"          # or: source = "sgemm.cu" with architecture = 90 and options = ["-O3"]
    name = "sgemm"
    entry = "sgemm"
    grid = [32, 32, 1]
    block = [16, 16, 1]

    [[arguments]]
    kind = "tensor"
    name = "a"
    dtype = "fp32"
    shape = [512, 512]

    [[arguments]]
    kind = "scalar"
    name = "n"
    type = "i32"
    value = 512
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kernelwright.config import build, in_file, read_toml
from kernelwright.errors import UsageError
from kernelwright.files import TEXT_LIMIT_BYTES, read_regular
from kernelwright.gpu import KNOWN_ARCHITECTURES

Dtype = Literal["fp16", "bf16", "fp32", "fp64", "i8", "u8", "i16", "i32", "i64", "i1"]
ScalarType = Literal["i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "i1", "fp16", "bf16", "fp32", "fp64"]

ELEMENT_BYTES: dict[str, int] = {
    "i1": 1, "i8": 1, "u8": 1, "fp16": 2, "bf16": 2, "i16": 2, "fp32": 4, "i32": 4, "fp64": 8, "i64": 8,
}  # fmt: skip
WARP_SIZE = 32
LAUNCH_SUFFIXES = (".toml", ".json")
"""Suffixes of launch files."""
_SPELLINGS = {"u1": "i1", "f16": "fp16", "f32": "fp32", "f64": "fp64"}
"""Triton's other names for types."""
_LARGEST_TENSOR_BYTES = 1 << 36
_MAX_THREADS = 1024


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorArgument(_Spec):
    """A pointer to device memory of its own."""

    kind: Literal["tensor"] = "tensor"
    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    """Elements along each axis; the memory is contiguous."""
    role: Literal["input", "output", "inout"] = "input"
    """Outputs are compared; a pure output holds 0xFF bytes before every checked launch."""
    init: Literal["normal", "uniform", "integers", "zeros", "ones"] = "normal"
    """Distribution of the contents: N(0, scale), U[low, high), whole numbers in [low, high), or a constant."""
    scale: float = 1.0
    low: float = 0.0
    high: float = 1.0

    @property
    def size_bytes(self) -> int:
        """Bytes of memory."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @model_validator(mode="after")
    def _is_possible(self) -> TensorArgument:
        if not self.shape or min(self.shape) < 1 or self.size_bytes > _LARGEST_TENSOR_BYTES:
            raise ValueError(f"wanted axes of 1 or more and at most {_LARGEST_TENSOR_BYTES} bytes, found shape {self.shape}")
        if self.init in ("uniform", "integers") and not self.low < self.high:
            raise ValueError(f"wanted low < high, found {self.low} and {self.high}")
        return self


class ScalarArgument(_Spec):
    """A number passed by value."""

    kind: Literal["scalar"] = "scalar"
    name: str
    type: ScalarType = "i32"
    value: int | float


class NullArgument(_Spec):
    """A null pointer, such as the scratch pointers at the end of every Triton kernel."""

    kind: Literal["null"] = "null"
    name: str


Argument = Annotated[TensorArgument | ScalarArgument | NullArgument, Field(discriminator="kind")]


class LaunchSpec(_Spec):
    """Launch of one kernel: geometry, arguments, and the rule for comparing outputs."""

    name: str
    """Name for people and for directories."""
    entry: str
    """The kernel's name in the cubin."""
    grid: tuple[int, int, int]
    """Thread blocks along x, y, z."""
    block: tuple[int, int, int]
    """Threads of a block along x, y, z."""
    shared_bytes: int = Field(default=0, ge=0)
    """Dynamic shared memory of a block."""
    arguments: tuple[Argument, ...]
    deterministic: bool = True
    """True where two launches on the same inputs give the same bits; then outputs must be equal bit by bit."""
    rtol: float = Field(default=0.0, ge=0)
    """Relative tolerance of a kernel that is not deterministic."""
    atol: float = Field(default=0.0, ge=0)
    """Absolute tolerance of a kernel that is not deterministic."""
    input_sets: int = Field(default=3, ge=1, le=64)
    """Distinct sets of inputs and outputs that timed launches rotate through."""
    cold_l2: bool = False
    """True where the level-2 cache is overwritten before each timed launch."""

    @model_validator(mode="after")
    def _is_possible(self) -> LaunchSpec:
        if min(self.grid) < 1 or min(self.block) < 1 or math.prod(self.block) > _MAX_THREADS:
            raise ValueError(f"wanted a grid and a block of 1 to {_MAX_THREADS} threads, found {self.grid} and {self.block}")
        if not any(isinstance(a, TensorArgument) and a.role != "input" for a in self.arguments):
            raise ValueError("wanted a tensor whose role is output or inout, found none: nothing could be checked")
        if not self.deterministic and not (self.rtol or self.atol):
            raise ValueError("wanted rtol or atol for a kernel that is not deterministic, found neither")
        names = [argument.name for argument in self.arguments]
        if len(set(names)) != len(names):
            raise ValueError(f"wanted distinct argument names, found {names}")
        return self

    @property
    def signature(self) -> str:
        """Types and sizes that every launch shares; part of the key a tuned kernel is kept under."""
        types = [
            f"*{argument.dtype}" if isinstance(argument, TensorArgument) else argument.type
            for argument in self.arguments
            if not isinstance(argument, NullArgument)
        ]
        return launch_signature(self.entry, types, math.prod(self.block), self.shared_bytes)

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """The tensors, in order."""
        return tuple(argument for argument in self.arguments if isinstance(argument, TensorArgument))

    @property
    def outputs(self) -> tuple[TensorArgument, ...]:
        """The tensors that are compared, in order."""
        return tuple(tensor for tensor in self.tensors if tensor.role != "input")


class LaunchFile(LaunchSpec):
    """A launch spec in a file, with the cubin's origin: either `cubin` or `source`."""

    cubin: str | None = None
    """Path of the cubin, relative to the file."""
    source: str | None = None
    """Path of CUDA C++ to compile with nvcc, relative to the file."""
    architecture: int | None = None
    """Compute capability times ten to compile `source` for; the GPU's own when it is not given."""
    options: tuple[str, ...] = ()
    """Options of nvcc."""

    @field_validator("architecture")
    @classmethod
    def _exists(cls, architecture: int | None) -> int | None:
        if architecture is not None and architecture not in KNOWN_ARCHITECTURES:
            raise ValueError(f"wanted one of {', '.join(map(str, KNOWN_ARCHITECTURES))}")
        return architecture

    @model_validator(mode="after")
    def _names_one_origin(self) -> LaunchFile:
        if (self.cubin is None) == (self.source is None):
            raise ValueError("wanted either `cubin` or `source`, found both or neither")
        return self

    def spec(self) -> LaunchSpec:
        """The description alone."""
        return LaunchSpec.model_validate(self.model_dump(include=set(LaunchSpec.model_fields)))


@dataclass(frozen=True, slots=True)
class Target:
    """A kernel that can be run: the machine code the compiler made, and how to launch it."""

    spec: LaunchSpec
    cubin: bytes
    architecture: int


@dataclass(slots=True)
class KernelLaunch:
    """A kernel as a computation launched it.

    Attributes:
        function: name of the Triton function.
        target: what can be tuned; None when the launch cannot be described.
        reason: why it cannot be described; empty otherwise.
        count: number of launches of this kernel on this grid.
    """

    function: str
    target: Target | None
    reason: str = ""
    count: int = 1


def triton_launch(
    name: str,
    entry: str,
    grid: Sequence[int],
    num_warps: int,
    shared_bytes: int,
    arguments: Sequence[Argument],
    **settings: Any,
) -> LaunchSpec:
    """Describe a launch by Triton, which passes two scratch pointers behind the arguments."""
    x, y, z = (*grid, 1, 1, 1)[:3]
    return LaunchSpec(
        name=name,
        entry=entry,
        grid=(x, y, z),
        block=(WARP_SIZE * num_warps, 1, 1),
        shared_bytes=shared_bytes,
        arguments=(*arguments, NullArgument(name="global_scratch"), NullArgument(name="profile_scratch")),
        **settings,
    )


def launch_signature(entry: str, types: Sequence[str], threads: int, shared_bytes: int) -> str:
    """Spell a launch: entry, Triton's types of run-time arguments, threads and dynamic shared memory of a block."""
    return f"{entry}({', '.join(types)}) threads={threads} shared={shared_bytes}"


def plain_type(kind: str) -> str:
    """Return this module's spelling of a Triton type: no promise of constness, one name for each type."""
    if kind.startswith("*"):
        return "*" + plain_type(kind.removeprefix("*k") if kind.startswith("*k") else kind[1:])
    return _SPELLINGS.get(kind, kind)


def signature_of(kernel: Any) -> str:
    """Return the launch signature of Triton's `CompiledKernel`."""
    types = [plain_type(str(kind)) for kind in kernel.src.signature.values() if kind != "constexpr"]
    metadata = kernel.metadata
    return launch_signature(metadata.name, types, WARP_SIZE * metadata.num_warps, metadata.shared)


def read_launch_file(path: Path) -> LaunchFile:
    """Read a launch file, TOML or JSON by its suffix.

    Raises:
        ConfigError: it is missing, or a field is unknown, missing or impossible.
        UsageError: it is neither TOML nor JSON.
    """
    with in_file(path):
        return build(LaunchFile, _values(path))


def _values(path: Path) -> dict[str, Any]:
    if path.suffix == ".toml":
        return read_toml(path)
    if path.suffix != ".json":
        raise UsageError(f"Wanted a launch file that ends in .toml or .json, found {path}. Rename it.")
    try:
        values = json.loads(read_regular(path, TEXT_LIMIT_BYTES))
    except OSError as error:
        raise UsageError(f"Wanted a launch file at {path}, found: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise UsageError(f"Wanted JSON in {path}, found: {error}. Correct the file.") from error
    if not isinstance(values, dict):
        raise UsageError(f"Wanted one JSON object in {path}, found {type(values).__name__}. Correct the file.")
    return values
