"""Prints what the C++ and the Triton kernels share: a program's steps, and the Python function that launches it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from kernelwright.rewrites.fusion.program import DTYPE, Dim, LoopProgram, Operand, Signature, nest_of
from kernelwright.rewrites.templates.base import block

BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "gt": ">",
    "lt": "<",
    "ge": ">=",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
}


class FusedKernel(ABC):
    """A program and the Python function that launches it; `strides` are those of the traced inputs."""

    neutral: ClassVar[dict[str, str]]
    """Text of each reduction's neutral element."""
    helpers: str = ""
    """Text of functions that it needs beside those that all kernels share."""

    def __init__(self, name: str, program: LoopProgram, signature: Signature, strides: tuple[tuple[int, ...], ...]) -> None:
        self.__name__ = name
        self.program = program
        self.signature = signature
        self.strides = strides
        self.nest = nest_of(program, signature)
        self.load_steps = list(program.loads)
        self.inputs = [f"in{index}" for index in range(len(strides))]
        self.outputs = [f"out{index}" for index in range(len(signature.stores))]
        self.given_names = [f"x{index}" for index in range(len(strides))]
        """Names of the arguments of the Python function."""
        self.fresh = [f"y{index}" for index in range(len(signature.stores) - len(signature.updates))]
        """Names of what it returns."""
        self.written = [*self.fresh, *(self.given_names[index] for index in signature.updates)]
        """Names of the tensors that the kernel writes to."""
        self.full_stores = [(number, step) for number, (step, full, _) in enumerate(signature.stores) if full]
        self.row_stores = [(number, step) for number, (step, full, _) in enumerate(signature.stores) if not full]

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of what it does beyond fusing operators."""
        return ()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Its outputs as fake tensors."""
        # Stores into arguments, which have no type here, come last.
        fresh = zip(self.signature.stores, self.signature.dtypes, strict=False)
        outputs = tuple(inputs[0].new_empty(sizes, dtype=dtype) for (_, _, sizes), dtype in fresh)
        return outputs[0] if len(outputs) == 1 else outputs

    @abstractmethod
    def definition(self) -> str:
        """Text at module level that defines the Python function."""

    def text(self) -> str:
        """All of its own text, by which equal kernels are found."""
        return self.definition()

    @abstractmethod
    def _printed(self) -> str:
        """The kernel itself, by the kind of its nest."""

    @abstractmethod
    def _literal(self, number: float) -> str:
        """A constant."""

    @abstractmethod
    def _function(self, name: str, operands: Sequence[str]) -> str:
        """A pointwise operation that is no infix operator."""

    @abstractmethod
    def _assign(self, index: int, text: str) -> str:
        """The statement that gives a step its value."""

    def _name_of(self, index: int) -> str:
        return self.program.steps[index].name

    def _type_of(self, index: int) -> torch.dtype:
        """Type of a partial result of a reduction."""
        return torch.int64 if self._name_of(index) == "argmax" else DTYPE

    def _neutral(self, index: int) -> str:
        """The value that a reduction starts from."""
        return self.neutral[self._name_of(index)]

    def _tensor(self, number: int) -> str:
        """The argument behind a load (by its order) or, beyond the loads, behind a store."""
        loads = len(self.load_steps)
        return self.inputs[self.signature.loads[number][0]] if number < loads else self.outputs[number - loads]

    @staticmethod
    def _numbered(prefix: str, dims: Sequence[Dim]) -> list[str]:
        """Index names of nested loops."""
        return [f"{prefix}{index}" for index in range(len(dims))]

    def _operand(self, item: Operand) -> str:
        return f"v{item}" if isinstance(item, int) else self._literal(item)

    def _reduced(self, index: int) -> str:
        """The operand of a reduction."""
        return self._operand(self.program.steps[index].operands[0])

    def _step(self, index: int) -> str:
        """The statement that evaluates a pointwise step."""
        step = self.program.steps[index]
        operands = [self._operand(item) for item in step.operands]
        if step.name in BINARY:
            return self._assign(index, f"{operands[0]} {BINARY[step.name]} {operands[1]}")
        return self._assign(index, self._function(step.name, operands))

    @abstractmethod
    def _load(self, index: int, at: Any) -> str:
        """The statement that reads what a step loads at a place in the loops."""

    def _steps(self, indices: Iterable[int], at: Any) -> list[str]:
        """Statements for steps that reduce nothing, at a place in the loops."""
        return [self._load(index, at) if self._name_of(index) == "load" else self._step(index) for index in indices]

    def _empty(self, size: str, dtype: torch.dtype = DTYPE) -> str:
        """A new tensor on the device of the first input, which may be of another type."""
        return f"x0.new_empty({size}{f', dtype={dtype}' if dtype != DTYPE or self.program.converts else ''})"

    def _launcher(self, statements: Sequence[str]) -> list[str]:
        """The Python function around the statements that launch its kernels, from `given_names` to `written`."""
        names, outs = self.given_names, self.fresh
        body = [f"{name} = _laid_out({name}, {strides})" for name, strides in zip(names, self.strides, strict=True)]
        for out, (_, _, size), dtype in zip(outs, self.signature.stores, self.signature.dtypes, strict=False):
            body.append(f"{out} = {self._empty(str(list(size)), dtype)}")
        return block(f"def {self.__name__}({', '.join(names)}):", [*body, *statements, f"return {', '.join(outs)}"])
