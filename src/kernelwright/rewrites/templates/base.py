"""Defines what a kernel template is, reads the text of kernels from the files beside this one, and lets templates compute
operators of a graph.
"""

from __future__ import annotations

import ast
import functools
import string
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import fx

from kernelwright.errors import CompilerMissingError
from kernelwright.gpu.compilers import find_torch_nvcc
from kernelwright.rewrites.graph import Editor
from kernelwright.rewrites.tracing import OperatorGraph

FOLDER = Path(__file__).parent


@functools.cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def kernel_text(*names: str, **values: object) -> str:
    """Text of files one after another, with a value at each place that is written `$name` or `${name}`.

    Raises:
        KeyError: a place has no value.
    """
    joined = "".join(map(_read, names))
    return string.Template(joined).substitute(values) if values else joined


@functools.cache
def knob_table(template: str) -> dict[str, Any]:
    """Knobs of a template that are worth a look, from `knobs.toml`."""
    table: dict[str, Any] = tomllib.loads(_read("knobs.toml"))[template]
    return table


def raw_literal(text: str) -> str:
    """Python text of a raw string that begins on a line of its own."""
    return f'r"""\n{text}"""'


def block(head: str, lines: Iterable[str]) -> list[str]:
    """Statements under the head of a loop, a function or a condition."""
    return [head, *(f"    {line}" for line in lines)]


MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a thread block can have on an H100 or H200."""

Sizes = TypeVar("Sizes")
Knobs = TypeVar("Knobs")


class CallTemplate(ABC, Generic[Sizes, Knobs]):
    """A kernel with knobs, a function of its own that takes the place of calls of one kind.

    Attributes:
        technique: Name under which candidates tell that they use it.
        function: Beginning of the names of emitted functions.
        operators: Calls that the kernel may take the place of.
        task_operators: Operators of which a task has at least one if the template can apply to it; empty for any.
        needs_nvcc: Whether the emitted text is CUDA C++.
        requires: Settings, as text of tests, without which the reference runs.
        caller: File with the text of an emitted function and its knobs.
        default: Knobs of a module whose names are compared with a task's.
    """

    technique: str
    function: ClassVar[str]
    operators: ClassVar[tuple[Any, ...]]
    task_operators: ClassVar[frozenset[str]] = frozenset()
    needs_nvcc: bool = False
    requires: ClassVar[tuple[str, ...]] = ()
    caller: str
    default: Knobs

    @abstractmethod
    def sizes_of(self, node: fx.Node) -> Sizes | None:
        """Sizes of a call; None where the kernel computes no such call, whatever its sizes."""

    @abstractmethod
    def refusal(self, sizes: Sizes) -> str | None:
        """The reason why the kernel does not take a call of these sizes; None if it does."""

    @abstractmethod
    def alternatives(self, sizes: Sizes) -> tuple[Knobs, ...]:
        """Knobs worth a look for a call of these sizes, the default first."""

    @abstractmethod
    def module(self, knobs: Knobs) -> str:
        """Text of a module that stands alone: its docstring, the kernel, and the functions that launch it."""

    @abstractmethod
    def values(self, kernel: TemplateKernel) -> dict[str, object]:
        """Values of the places in the caller's text, besides the names."""

    @abstractmethod
    def outputs(self, kernel: TemplateKernel, *inputs: Any) -> Any:
        """Outputs for fake tensors."""

    @abstractmethod
    def insert(self, editor: Editor, node: fx.Node, sizes: Sizes, kernel: TemplateKernel) -> None:
        """Put a call of the kernel in the place of a node."""

    def options(self, node: fx.Node, sizes: Sizes) -> tuple[Any, ...]:
        """Facts that the emitted function depends on besides the knobs."""
        return ()

    def identity(self, choices: tuple[Knobs, ...], options: tuple[Any, ...]) -> Hashable:
        """Equal for calls that share an emitted function."""
        return choices, options

    def finish(self, editor: Editor, kernels: Kernels) -> None:
        """Let kernels compute what follows them, where they can."""

    def builds_for(self, device: str) -> bool:
        """True where this machine can build the kernel for a device."""
        return device.startswith("cuda") and (not self.needs_nvcc or _finds_nvcc())

    def prologue(self, kernels: Sequence[TemplateKernel]) -> str:
        """Text that all emitted functions share: the module's, without its docstring."""
        return self.module(kernels[0].choices[0]).split('"""', 2)[2]

    def definition(self, kernel: TemplateKernel) -> str:
        """Text of an emitted function and its knobs."""
        return kernel_text(self.caller, name=kernel.__name__, upper=kernel.__name__.upper(), **self.values(kernel))


class TemplateKernel:
    """A call target of a graph: a function that a template emits.

    Args:
        template: Of the kernel.
        name: Of the emitted function.
        choices: Knobs, the default first; the source declares them (`records.knobs`).
        options: What else its text depends on.
    """

    device_test = "is_cuda"

    def __init__(
        self, template: CallTemplate[Any, Any], name: str, choices: tuple[Any, ...], options: tuple[Any, ...]
    ) -> None:
        self.__name__ = name
        self.template = template
        self.choices = choices
        self.options = options
        self.prologue = template.prologue
        self.requires = template.requires

    def __call__(self, *inputs: Any) -> Any:
        """Outputs for fake tensors."""
        return self.template.outputs(self, *inputs)

    def definition(self) -> str:
        """Text at module level that defines the function."""
        return self.template.definition(self)


class Kernels:
    """Kernels of one template in the graphs of one module; equal ones are made once."""

    def __init__(self, template: CallTemplate[Any, Any]) -> None:
        self._template = template
        self._made: dict[Hashable, TemplateKernel] = {}

    def kernel(self, choices: tuple[Any, ...], options: tuple[Any, ...] = ()) -> TemplateKernel:
        """The kernel of these knobs and options."""
        key = self._template.identity(choices, options)
        if key not in self._made:
            name = f"{self._template.function}_{len(self._made)}"
            self._made[key] = TemplateKernel(self._template, name, choices, options)
        return self._made[key]


def replace(template: CallTemplate[Any, Any], *graphs: OperatorGraph) -> int:
    """Let a template compute each call that it takes, in place; returns how many there were."""
    kernels, count = Kernels(template), 0
    for graph in graphs:
        editor = Editor(graph.graph, graph.mode)
        for node in editor.nodes(*template.operators):
            sizes = template.sizes_of(node)
            if sizes is None or template.refusal(sizes) is not None:
                continue
            kernel = kernels.kernel(template.alternatives(sizes), template.options(node, sizes))
            template.insert(editor, node, sizes, kernel)
            count += 1
        template.finish(editor, kernels)
        editor.sweep()
        graph.graph.lint()
    return count


def clash(template: CallTemplate[Any, Any], source: str) -> set[str]:
    """Names at the module level of a task's text that the template's text also binds, imports aside."""
    return {*names_in(source)} & names_in(template.module(template.default), imports=False)


@functools.lru_cache(maxsize=256)
def names_in(source: str, *, imports: bool = True) -> frozenset[str]:
    """Names that a module's own statements bind. Every task asks for those of the same templates."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names} if imports else set()
        else:
            inner: list[Any] = [item for item in ast.walk(node) if isinstance(item, ast.Name)]
            names |= {item.id for item in inner if isinstance(item.ctx, ast.Store)}
    return frozenset(names)


def _finds_nvcc() -> bool:
    """True where a compiler for CUDA C++ is found that fits PyTorch's CUDA."""
    try:
        find_torch_nvcc()
    except CompilerMissingError:
        return False
    return True
