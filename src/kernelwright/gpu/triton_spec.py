"""Describes a Triton kernel in one configuration, and compiles it into a target that can be launched alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelwright.errors import UsageError
from kernelwright.gpu.compilers import compile_triton
from kernelwright.gpu.launch_spec import Argument, ScalarArgument, Target, TensorArgument, triton_launch

_SPECIALISED_MULTIPLE = 16
"""Divisor of integers and addresses that Triton promises to the compiler."""


@dataclass(frozen=True, slots=True)
class TritonSpec:
    """A Triton kernel in one configuration, and the arguments it is run on.

    Attributes:
        arguments: its run-time arguments, in any order, by the names of its parameters.
        grid: thread blocks along up to three axes.
        constants: values of its compile-time arguments.
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
        spec = triton_launch(
            name, compiled.name, self.grid, compiled.num_warps, compiled.shared_bytes, kept, **self.settings
        )
        return Target(spec, compiled.cubin, architecture)


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
