"""Writes operator graphs as the text of a module that defines `ModelNew`.

The reference's classes are kept as they are and `ModelNew` inherits from `Model`: the same constructor, the
same parameters from the same seed, the same `state_dict`. Only `forward` is new. It reads live parameters in
each call, and runs `Model.forward` for anything other than what it was written for.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    aten,
    contiguous_strides,
    has_effect,
    is_call,
    is_tensor,
    numel,
    packet_of,
    value,
)
from kernelwright.rewrites.printing import OpPrinter, literal
from kernelwright.rewrites.tracing import OperatorGraph, Trace, aliases_placeholder
from kernelwright.rewrites.wrappers import GUARD

LARGE = 1 << 14
"""Values of at least this many elements are deleted as soon as nobody reads them any more."""

DESCRIPTION = "The reference with another `forward` for the traced shapes and types; else `Model.forward` runs."
REFERENCE_NOTE = Path(__file__).with_name("templates").joinpath("reference_note.py.txt").read_text(encoding="utf-8").strip()
"""Text at module level for what tells a user that the reference runs."""
_PARTS = """\
def forward(self, *args, **kwargs):
    $conditionself.__dict__["last_path"] = "optimized"
    parts = [(self.get_submodule(path), run) for path, run in self._parts]
    for part, run in parts:
        part.__dict__["forward"] = functools.partial(run, self, part)
    try:
        return super().forward(*args, **kwargs)
    finally:
        for part, _ in parts:
            part.__dict__.pop("forward", None)
"""
RESPELLED = "The reference's operators in other words"
"""Opening of the description of a rewrite that saves a compiler nothing. For readers: labels come from the record."""

_MOVES = re.compile(r"self\.\w+ = self\.\w+\.to\(\w+\.device\)")
"""An attribute's move to the device of an input."""

HIDDEN_FUNCTIONS = frozenset({"get_inputs", "get_init_inputs"})


class GeneratedKernel(Protocol):
    """A call target that brings its own source."""

    __name__: str
    device_test: str
    """The tensor attribute that says whether it can run there: `is_cpu` or `is_cuda`."""

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """The outputs for fake tensors."""

    def definition(self) -> str:
        """Text at module level that defines a function of this name."""

    @staticmethod
    def prologue(kernels: Sequence[Any]) -> str:
        """Text at module level that all kernels of this kind share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The text of one straight-line `forward` and what it needs around it."""

    lines: tuple[str, ...]
    helpers: tuple[Any, ...]
    """Functions whose source is copied to module level."""
    kernels: tuple[GeneratedKernel, ...]


def keep_contract(graph: OperatorGraph) -> None:
    """Give the outputs the strides and the fresh storage that the reference's outputs have."""
    editor = Editor(graph.graph, graph.mode)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    results = list(cast(Sequence[Any], output.args[0]))
    # How the answer of fused attention lies is up to the kernel that PyTorch chooses; what comes of it lies likewise.
    unsure = any(is_call(node, aten.scaled_dot_product_attention) for node in graph.graph.nodes)
    for index, (item, contract) in enumerate(zip(results, output.meta["contract"], strict=True)):
        if contract is None:
            continue
        strides, aliases = contract
        dense = strides == contiguous_strides(tuple(value(item).shape))
        if (value(item).stride() != strides and _matters(value(item), strides)) or (unsure and dense and not aliases):
            if dense:
                results[index] = editor.call(output, aten.contiguous.default, item)
            else:
                results[index] = editor.call(output, aten.copy.default, _empty(editor, output, item, strides), item)
        elif not aliases and aliases_placeholder(item):
            results[index] = editor.call(output, aten.clone.default, item)
    output.args = (tuple(results),)
    editor.sweep()


def _matters(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """True where other strides are another layout: those of dimensions of size 1 are meaningless."""
    return any(size > 1 and have != want for size, have, want in zip(tensor.shape, tensor.stride(), strides, strict=True))


def _empty(editor: Editor, before: fx.Node, like: fx.Node, strides: tuple[int, ...]) -> fx.Node:
    return editor.call(before, aten.new_empty_strided.default, like, list(value(like).shape), list(strides))


def body(trace: Trace, graph: OperatorGraph) -> Body:
    """Print one graph as Python lines, ending in `return`."""
    tensors = [item.name for item in trace.inputs if item.shape is not None]
    device = f"{tensors[0]}.device" if tensors else "next(self.parameters()).device"
    names: dict[fx.Node, str] = {}
    taken = {"self", "whole", "torch", "F", "nn", *(name.strip("*") for name in _parameters(trace))}
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    taken.update(str(getattr(node.target, "__name__", "")) for node in nodes)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    last_use: dict[fx.Node, fx.Node] = {}
    for node in [*nodes, output]:
        for source in node.all_input_nodes:
            last_use[source] = node

    printer = OpPrinter(names, device)
    lines: list[str] = []
    helpers: dict[Any, None] = {}
    kernels: dict[GeneratedKernel, None] = {}
    for node in nodes:
        target: Any = node.target
        expression = printer.call(node)
        if inspect.isfunction(target):
            helpers[target] = None
        elif packet_of(node) is None and not inspect.isbuiltin(target):
            kernels[target] = None
        dying = [source for source in node.all_input_nodes if last_use[source] is node and source in names]
        if has_effect(node) and not node.users:
            lines.append(expression)
        else:
            names[node] = _variable(node, dying, names, taken)
            lines.append(f"{names[node]} = {expression}")
        dead = [
            names[source]
            for source in dying
            if names[source] != names.get(node) and is_tensor(source) and numel(source) >= LARGE
        ]
        taken.difference_update(names[source] for source in dying if names[source] != names.get(node))
        if dead:
            lines.append(f"del {', '.join(dead)}")
    results = [printer.text(item) for item in cast(Sequence[Any], output.args[0])]
    lines.append(f"return {_structure(graph.output_spec, iter(results))}")
    return Body(lines=tuple(lines), helpers=tuple(helpers), kernels=tuple(kernels))


def _variable(node: fx.Node, dying: list[fx.Node], names: dict[fx.Node, str], taken: set[str]) -> str:
    """A name for a result: that of a value which ends here, so that its memory ends too, or a new one."""
    same = [source for source in dying if is_tensor(source) and is_tensor(node) and numel(source) >= LARGE]
    if same:
        return names[same[0]]
    count = 1
    while (name := "y" if count == 1 else f"y{count}") in taken:
        count += 1
    taken.add(name)
    return name


def _structure(spec: Any, results: Any) -> str:
    """Text of the outputs in the reference's structure of tuples, lists and dictionaries."""
    if spec.is_leaf():
        return str(next(results))
    parts = [_structure(child, results) for child in spec.children()]
    if spec.type is tuple:
        return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"
    if spec.type is list:
        return "[" + ", ".join(parts) + "]"
    return "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(spec.context, parts, strict=True)) + "}"


@functools.lru_cache(maxsize=16)
def reference_source(source: str) -> str:
    """The task's text without its input makers: classes, constants and imports, comments kept.

    Raises:
        SyntaxError: it is not Python.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    drop: set[int] = set()
    for index, node in enumerate(tree.body):
        hidden = isinstance(node, ast.FunctionDef) and node.name in HIDDEN_FUNCTIONS
        hidden |= isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if hidden or docstring or future:
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(item.lineno for item in decorators)])
            drop.update(range(first, (node.end_lineno or node.lineno) + 1))
    kept = [line for number, line in enumerate(lines, 1) if number not in drop]
    return "\n".join(kept).strip("\n")


@functools.lru_cache(maxsize=16)
def future_import(source: str) -> str:
    """The import that makes a task's annotations text, where the task has it.

    A candidate has none of its own: KernelBench's harness puts statements before a candidate, where it would be an error.
    """
    line = "from __future__ import annotations"
    return line if any(ast.unparse(node) == line for node in ast.parse(source).body) else ""


def moved_attributes(source: str) -> list[str]:
    """Statements at the beginning of the reference's `forward` that leave an attribute on an input's device, as
    `self.h0 = self.h0.to(x.device)`: without them each call would copy it there anew, which no CUDA graph can hold."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Model"]
    methods = (node for one in classes for node in one.body)
    forward = next((node for node in methods if isinstance(node, ast.FunctionDef) and node.name == "forward"), None)
    found: list[str] = []
    for node in forward.body if forward else []:
        text = ast.unparse(node)
        if _MOVES.fullmatch(text):
            found.append(text)
        elif not isinstance(node, ast.Expr):  # a docstring
            break
    return found


def _guards(trace: Trace, extra: Iterable[str]) -> list[str]:
    tests = list(extra)
    if trace.init_inputs is not None:
        tests.insert(0, "self._is_as_traced")
    if trace.only is not None:
        tests.append("self.training" if trace.only else "not self.training")
    for item in trace.inputs:
        parameter, parts = item.parameter.strip("*"), [one.name for one in trace.inputs if one.parameter == item.parameter]
        if item.default == "None" and item.shape is not None:
            tests.append(f"{parameter} is not None")
        if item.name != parameter:
            tests.append(f"len({parameter}) == {len(parts)}")
        if item.name != parameter != item.parameter:
            keys = ", ".join(name.removeprefix(parameter).strip("[]") for name in parts)
            tests.append(f"{parameter}.keys() == {{{keys}}}")
        if item.shape is None:
            function = callable(item.constant)
            same = "is" if function or item.constant is None or isinstance(item.constant, bool) else "=="
            tests.append(f"{item.name} {same} {item.default if function else repr(item.constant)}")
        else:
            tests += [f"{item.name}.shape == {item.shape}", f"{item.name}.dtype is {item.dtype}"]
            tests.append(f"{item.name}.stride() == {item.strides}" if item.strides else f"{item.name}.is_contiguous()")
    return list(dict.fromkeys(tests))


def _kernel_guards(trace: Trace, kernel: GeneratedKernel) -> list[str]:
    """A kernel has no derivative and works on one kind of device."""
    tensors = [item.name for item in trace.inputs if item.shape is not None]
    return ["not torch.is_grad_enabled()", *(f"{name}.{kernel.device_test}" for name in tensors[:1])]


def _listed(given: str) -> str:
    """Arguments of a call as those of a list: keywords as pairs."""
    return re.sub(r"\*\*(\w+)", r"*\1.items()", given)


def _constructor(trace: Trace) -> list[str]:
    """A constructor that tells whether its arguments are those of the trace, however they are given."""
    if trace.init_inputs is None:
        return []
    traced = ", ".join(map(literal, trace.init_inputs))
    return [
        "def __init__(self, *args, **kwargs):",
        "    super().__init__(*args, **kwargs)",
        f"    self._is_as_traced = _constructed(*args, **kwargs) == _constructed({traced})",
        "    if not self._is_as_traced:",
        f"        _note_reference(self, {{{f'arguments ({traced})'!r}: lambda: False}}, [*args, *kwargs.items()], 3)",
        "",
    ]


def _handover(condition: str, given: str) -> list[str]:
    """Lines that give other calls to the reference, and note which way a call went."""
    return [
        f"if not {condition}:",
        f"    self._runs_reference({given})",
        f"    return super().forward({given})",
        'self.__dict__["last_path"] = "optimized"',
    ]


def _reference_note(guards: Sequence[str], given: str) -> list[str]:
    """The method that notes a call of the reference. Tests are made in order: later ones rely on earlier ones."""
    tests = [f"        {guard!r}: lambda: {guard}," for guard in guards]
    return [
        f"def _runs_reference(self, {given}):",
        "    tests = {",
        *tests,
        "    }",
        f"    _note_reference(self, tests, [{_listed(given)}])",
        "",
    ]


def signature(trace: Trace) -> str:
    """The arguments of `forward` as text, without `self`."""
    return ", ".join(name if default is None else f"{name}={default}" for name, default in _parameters(trace).items())


def _parameters(trace: Trace) -> dict[str, str | None]:
    """The arguments of `forward` and the text of their defaults; several inputs may be parts of one."""
    return {item.parameter: item.default for item in trace.inputs}


def module(
    source: str,
    trace: Trace,
    graphs: tuple[OperatorGraph, ...],
    techniques: Sequence[str],
    *,
    respelled: bool = False,
    captured: bool = False,
) -> str:
    """The whole candidate.

    Args:
        source: The task's text.
        trace: Origin of the graphs.
        graphs: The rewritten graphs for train and for eval mode, of each part in turn. They are changed: outputs get their
        contract.
        techniques: Names of changes, for the reader.
        respelled: True where it is the reference's arithmetic in other words, which the text then says.
        captured: True where a CUDA graph will hold it. A method, `GUARD`, then tells which calls the code is for; the
        reference has the others, which a graph may be unable to hold.
    """
    for graph in graphs:
        keep_contract(graph)
    traces = (trace, *trace.others)
    bodies = [body(one, graph) for one, graph in zip((one for one in traces for _ in range(2)), graphs, strict=True)]
    kernels = {kernel.__name__: kernel for part in bodies for kernel in part.kernels}
    helpers = {helper.__name__: helper for part in bodies for helper in part.helpers}
    kinds: dict[Any, list[GeneratedKernel]] = {}
    for kernel in kernels.values():
        kinds.setdefault(kernel.prologue, []).append(kernel)
    split = (
        [_part(*given) for given in enumerate(zip(traces, bodies[::2], bodies[1::2], strict=True))] if trace.paths else []
    )
    lines, has_note = (_with_parts(traces), True) if split else _whole(source, trace, bodies, captured)
    parts = [
        f'"""A drop-in for the reference module below.\n\nDone: {", ".join(techniques)}.\n"""',
        future_import(source),
        reference_source(source),
        "import torch\nimport torch.nn.functional as F",
        REFERENCE_NOTE if has_note else "",
        *(inspect.getsource(helper).strip() for helper in helpers.values()),
        *(prologue(members).strip() for prologue, members in kinds.items()),
        *(kernel.definition().strip() for kernel in kernels.values()),
        *(["import functools", *split] if split else []),
        "class ModelNew(Model):",
    ]
    description = f"{RESPELLED}. {DESCRIPTION}" if respelled else DESCRIPTION
    class_body = [f'"""{description}"""', "", *(["last_path = None", ""] if has_note else []), *lines]
    parts[-1] += "\n" + textwrap.indent("\n".join(class_body), "    ")
    return "\n\n".join(part for part in parts if part) + "\n"


def _tests(trace: Trace, training: Body, evaluation: Body) -> list[str]:
    """Conditions of the calls for which the lines were written."""
    kernels = list(dict.fromkeys((*training.kernels, *evaluation.kernels)))
    settings = dict.fromkeys(one for kernel in kernels for one in getattr(kernel, "requires", ()))
    return _guards(trace, [*_kernel_guards(trace, kernels[0]), *settings] if kernels else [])


def _in_modes(training: Body, evaluation: Body) -> Sequence[str]:
    if training.lines == evaluation.lines:
        return training.lines
    return ["if self.training:", *(f"    {line}" for line in training.lines), *evaluation.lines]


def _whole(source: str, trace: Trace, bodies: Sequence[Body], captured: bool) -> tuple[list[str], bool]:
    """The methods of `ModelNew`, and whether they need what notes calls of the reference."""
    guards, given = _tests(trace, *bodies), ", ".join(_parameters(trace))
    wanted = ", ".join(filter(None, ["self", signature(trace)]))
    condition = f"({' and '.join(guards)})"
    guard = [f"def {GUARD}({wanted}):", f"    return {condition}", ""] if guards and captured else []
    if guard:
        condition = f"self.{GUARD}({given})"
    forward = [*(_handover(condition, given) if guards else []), *moved_attributes(source), *_in_modes(*bodies)]
    note = _reference_note(guards, given) if guards else []
    return [*_constructor(trace), *guard, *note, f"def forward({wanted}):", *(f"    {line}" for line in forward)], bool(
        guards
    )


def _part(index: int, written: tuple[Trace, Body, Body]) -> str:
    """A function that runs in the place of a submodule's `forward`, `self`, and notes in the whole where that runs."""
    trace, *bodies = written
    guards, given = _tests(replace(trace, init_inputs=None), *bodies), ", ".join(_parameters(trace))
    tests = [f"            {guard!r}: lambda: {guard}," for guard in guards]
    return "\n".join(
        [
            f"def _part_{index}(whole, self, {signature(trace)}):",
            f"    if not ({' and '.join(guards)}):",
            "        tests = {",
            *tests,
            "        }",
            f"        _note_reference(whole, tests, [{_listed(given)}])",
            f"        return type(self).forward(self, {given})",
            *(f"    {line}" for line in _in_modes(*bodies)),
        ]
    )


def _with_parts(traces: Sequence[Trace]) -> list[str]:
    """The methods of a `ModelNew` whose submodules run other code while it is called; each keeps its own `forward`."""
    paths = [f"    ({path!r}, _part_{index})," for index, one in enumerate(traces) for path in one.paths]
    condition = (
        "if not self._is_as_traced:\n        return super().forward(*args, **kwargs)\n    " if traces[0].init_inputs else ""
    )
    return [*_constructor(traces[0]), "_parts = (", *paths, ")", "", *_PARTS.replace("$condition", condition).splitlines()]


def copy_graph(graph: OperatorGraph) -> OperatorGraph:
    """A copy that can be rewritten while the original stays as it was traced."""
    duplicate = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        copied = duplicate.node_copy(node, lambda item: mapping[item])
        copied.meta = dict(node.meta)
        mapping[node] = copied
    return OperatorGraph(graph=duplicate, mode=graph.mode, output_spec=graph.output_spec)


def uses(graph: OperatorGraph, *packets: Any) -> bool:
    """True where a graph has a call of one of these operators."""
    return bool(Editor(graph.graph, graph.mode).nodes(*packets))
