"""Prints operators in Python: infix, a method, a function of `torch` or of `torch.nn.functional`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from kernelwright.rewrites.graph import (
    TABLES,
    argument,
    arguments,
    aten,
    is_call,
    is_tensor,
    packet_of,
    shape,
    without_steps,
)

_TABLES = TABLES["printing"]
INFIX: dict[Any, str] = {getattr(aten, name): sign for name, sign in _TABLES["infix"].items()}

METHODS: frozenset[str] = frozenset(_TABLES["methods"])

FUNCTIONAL: frozenset[str] = frozenset(_TABLES["functional"])

ORDERED: dict[Any, list[str]] = {getattr(aten, name): order for name, order in _TABLES["ordered"].items()}


def literal(item: Any) -> str:
    """Python text of a constant argument."""
    if isinstance(item, float) and not math.isfinite(item):
        return f'float("{item}")'
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(literal, item))}]"
    return str(item) if isinstance(item, torch.dtype | torch.memory_format | torch.layout) else repr(item)


class OpPrinter:
    """Writes one call as a Python expression.

    Args:
        names: Variables that hold the values of nodes so far; a placeholder without one is read by its expression.
        device: Text of the device on which new tensors are made.
    """

    def __init__(self, names: Mapping[fx.Node, str], device: str) -> None:
        self._names = names
        self._device = device

    def text(self, item: Any) -> str:
        """An argument: a node, a list with nodes in it, or a constant."""
        if isinstance(item, fx.Node):
            if item in self._names:
                return self._names[item]
            text = cast(str, item.meta["expression"])
            return f"{text[:-1]}, device={self._device})" if item.meta["role"] == "literal" else text
        if isinstance(item, list | tuple) and any(isinstance(part, fx.Node) for part in item):
            return "[" + ", ".join(map(self.text, item)) + "]"
        return self._device if isinstance(item, torch.device) else literal(item)

    def call(self, node: fx.Node) -> str:
        """The whole call."""
        target: Any = node.target
        if target is operator.getitem:
            return f"{self.text(node.args[0])}[{node.args[1]}]"
        packet = packet_of(node)
        if packet is None:
            return self._plain(target.__name__, node)
        if packet in INFIX and len(node.args) == 2 and not node.kwargs:
            return f"{self.text(node.args[0])} {INFIX[packet]} {self.text(node.args[1])}"
        if is_call(node, aten.rsub) and len(node.args) == 2:
            return f"{self.text(node.args[1])} - {self.text(node.args[0])}"
        if is_call(node, aten.slice) and is_tensor(node.args[0]):
            return self._slice(node)
        if packet in ORDERED:
            return self._ordered(ORDERED[packet], node)
        if is_call(node, aten.add_) and is_tensor(node.args[0]):
            return f"{self.text(node.args[0])}.add_({self._rest(node, 1)})"
        library, name = target._schema.name.split("::")
        if name == "mT":
            return f"{self.text(node.args[0])}.mT"
        text = self._usual(name, node) if library == "aten" else None
        if text is not None and _is_same(name, node):
            return text
        return self._plain(f"torch.ops.{library}.{name}.{target._overloadname}", node)

    def _usual(self, name: str, node: fx.Node) -> str | None:
        """The call as one would write it; None where Python has no function or method of this name."""
        if name in METHODS and is_tensor(node.args[0]) and hasattr(torch.Tensor, name):
            # A trace on a CPU finds a view where a GPU's attention, say, lays its output out in another way.
            return f"{self.text(node.args[0])}.{'reshape' if name == 'view' else name}({self._rest(node, 1)})"
        if name in FUNCTIONAL and hasattr(F, name):
            return f"F.{name}({self._named(node)})"
        function = getattr(torch, name, None)
        if type(function).__name__ == "builtin_function_or_method" or name in ("einsum", "stack", "cat"):
            return self._plain(f"torch.{name}", node)
        return None

    def _plain(self, name: str, node: fx.Node) -> str:
        return f"{name}({self._rest(node, 0)})"

    def _rest(self, node: fx.Node, start: int) -> str:
        parts = [self.text(item) for item in node.args[start:]]
        for key, item in node.kwargs.items():
            # pin_memory and a strided layout are what a factory does anyway.
            if key == "pin_memory" or item is None or item is torch.strided:
                continue
            parts.append(f"{key}={self._device if key == 'device' else self.text(item)}")
        return ", ".join(parts)

    def _named(self, node: fx.Node) -> str:
        names = list(arguments(node))
        parts = [
            self.text(item) if index < 1 or is_tensor(item) else f"{names[index]}={self.text(item)}"
            for index, item in enumerate(node.args)
        ]
        parts += [f"{key}={self.text(item)}" for key, item in node.kwargs.items()]
        return ", ".join(parts)

    def _ordered(self, function: list[str], node: fx.Node) -> str:
        given = arguments(node)
        parts = []
        name, *order = function
        for entry in order:
            keyword, equals, source = entry.partition("=")
            item = given.get(source or keyword)
            if equals and (item is None or (keyword in ("is_causal", "dropout_p", "enable_gqa") and not item)):
                continue
            parts.append(f"{keyword}={self.text(item)}" if equals else self.text(item))
        while parts and parts[-1] == "None":
            parts.pop()
        return f"{name}({', '.join(parts)})"

    def _slice(self, node: fx.Node) -> str:
        source = cast(fx.Node, node.args[0])
        dim = int(argument(node, "dim")) % len(shape(source))
        start, end, step = (argument(node, key) for key in ("start", "end", "step"))
        first = "" if start in (None, 0) else str(start)
        last = "" if end is None or end >= shape(source)[dim] else str(end)
        text = f"{first}:{last}" + (f":{step}" if step != 1 else "")
        return f"{self.text(source)}[{':, ' * dim}{text}]"


Described = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, type and device of a tensor."""


def _is_same(name: str, node: fx.Node) -> bool:
    """True where Python's function takes the operator's arguments and makes a result of its shape and type.

    `torch.einsum` knows no `path`, `Tensor.to` takes its memory format by keyword only, and the default reduction of
    `torch.kl_div` is none, where the operator's is the mean.
    """
    sources, result = node.all_input_nodes, node.meta.get("val")
    if result is None or not all(map(is_tensor, sources)):
        return True
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    names = {source: f"value_{index}" for index, source in enumerate(sources)}
    device = next((leaf.device for leaf in leaves), torch.device("cpu"))
    text = OpPrinter(names, repr(str(device)))._usual(name, node)
    return _makes(
        str(text),
        tuple(_described(source.meta["val"]) for source in sources),
        tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves),
    )


def _described(tensor: torch.Tensor) -> Described:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


@functools.lru_cache(maxsize=4096)
def _makes(text: str, sources: tuple[Described, ...], wanted: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> bool:
    """True where an expression over `value_0`, `value_1`, ... makes tensors of these shapes and types."""
    with without_steps(), FakeTensorMode():
        names: dict[str, Any] = {
            f"value_{index}": torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            for index, (sizes, strides, dtype, device) in enumerate(sources)
        }
        try:
            found = eval(text, {"torch": torch, "F": F, **names})
        except Exception:  # noqa: BLE001 - whatever a call raises that the operator's own does not, it is no spelling of it
            return False
    leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves) == wanted
