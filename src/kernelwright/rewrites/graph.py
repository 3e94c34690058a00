"""Reads and edits an operator graph: an `fx.Graph` of ATen calls in which every node knows its shape.

The rewrite rules see a task through these few functions. Each node made here is evaluated on fake tensors at once, so its
shape, dtype and strides are always known and a rewrite that would change a shape fails where it is made.
"""

from __future__ import annotations

import contextlib
import math
import operator
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("operators.toml").read_text(encoding="utf-8"))
"""Tables of operators by their names in ATen."""
Operator = Any
"""An ATen overload (`aten.relu.default`), an overload packet (`aten.relu`) or a helper function."""


def named(names: Iterable[str]) -> tuple[Operator, ...]:
    """The overload packets of ATen with these names."""
    return tuple(getattr(aten, name) for name in names)


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor a node stands for."""
    return cast(torch.Tensor, node.meta["val"])


def shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor."""
    return tuple(value(node).shape)


def numel(node: fx.Node) -> int:
    """The number of elements of a node's tensor."""
    return value(node).numel()


def is_tensor(item: Any) -> bool:
    """True where `item` is a node that stands for one tensor."""
    return isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor)


def is_float(node: fx.Node) -> bool:
    """True where a node's tensor is of floating point."""
    return value(node).is_floating_point()


def is_call(item: Any, *packets: Operator) -> bool:
    """True where `item` is a call of one of these operators, in any overload."""
    if not isinstance(item, fx.Node) or item.op != "call_function":
        return False
    packet = getattr(item.target, "overloadpacket", item.target)
    return packet in packets or item.target in packets


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an ATen call by their schema's names, defaults included."""
    schema = cast(Any, node.target)._schema
    bound: dict[str, Any] = {}
    for index, parameter in enumerate(schema.arguments):
        if index < len(node.args) and not parameter.kwarg_only:
            bound[parameter.name] = node.args[index]
        elif parameter.name in node.kwargs:
            bound[parameter.name] = node.kwargs[parameter.name]
        elif parameter.has_default_value():
            bound[parameter.name] = parameter.default_value
    return bound


def argument(node: fx.Node, name: str) -> Any:
    """One argument of an ATen call by its schema's name; None when the schema has no such argument."""
    return arguments(node).get(name)


def overload(node: fx.Node) -> str:
    """The overload's name of an ATen call, such as `dim`; empty for any other call."""
    return str(getattr(node.target, "_overloadname", ""))


def packet_of(node: fx.Node) -> Operator | None:
    """The overload packet of an ATen call, such as `aten.relu`; None for any other node."""
    return getattr(node.target, "overloadpacket", None)


def number(item: Any) -> float | None:
    """A Python number as a float; None for anything else."""
    return float(item) if isinstance(item, int | float) and not isinstance(item, bool) else None


def scalar(item: Any) -> float | None:
    """The number `item` is: a Python number, or a node marked as a constant of one element."""
    return float(item.meta["constant"]) if isinstance(item, fx.Node) and "constant" in item.meta else number(item)


def stretch_of(node: Any, dim: int) -> tuple[fx.Node, int] | None:
    """The tensor that a slice without gaps along a dimension is of, and where it begins; None for anything else."""
    if not is_call(node, aten.slice):
        return None
    source, given, rank = cast(fx.Node, node.args[0]), arguments(node), len(shape(node))
    if int(given["dim"]) % rank != dim or given["step"] != 1:
        return None
    first = int(given["start"] or 0)
    return source, first if first >= 0 else max(0, first + shape(source)[dim])


def read_once(item: Any, *packets: Operator) -> fx.Node | None:
    """`item` when it is a node with exactly one user; with operators given, only a call of one of those."""
    if not isinstance(item, fx.Node) or len(item.users) != 1:
        return None
    return item if not packets or is_call(item, *packets) else None


def operands(node: Any, *packets: Operator) -> tuple[Any, Any] | None:
    """Both arguments of a plain call with two; with operators given, only of a call of one of those."""
    if not isinstance(node, fx.Node) or len(node.args) != 2 or node.kwargs or (packets and not is_call(node, *packets)):
        return None
    return node.args[0], node.args[1]


def operand_nodes(node: Any, *packets: Operator) -> tuple[fx.Node, fx.Node] | None:
    """`operands` when both are tensors."""
    found = operands(node, *packets)
    return found if found and all(map(is_tensor, found)) else None


def padded_shape(node: fx.Node, rank: int) -> tuple[int, ...]:
    """The shape of a node's tensor with leading dimensions of size 1, as it broadcasts to a rank."""
    return (1,) * (rank - len(shape(node))) + shape(node)


def dtype(node: fx.Node) -> torch.dtype:
    """The type of a node's elements."""
    return value(node).dtype


def dims_of(item: Any, rank: int) -> tuple[int, ...] | None:
    """Normalised, sorted dimensions of a `dim` argument (number, list or None, which means all)."""
    if item is None or item == []:
        return tuple(range(rank))
    items = [item] if isinstance(item, int) else list(item)
    if not all(isinstance(dim, int) for dim in items):
        return None
    return tuple(sorted(dim % rank for dim in items)) if rank else ()


def numbers(item: Any, count: int) -> tuple[int, ...]:
    """A stride-like argument for each of `count` spatial dimensions; empty when it is empty."""
    if isinstance(item, int):
        return (item,) * count
    items = tuple(cast(Any, item))
    return items * count if len(items) == 1 else items


def is_random(node: fx.Node) -> bool:
    """True where a node draws random numbers."""
    if node.op != "call_function":
        return False
    if is_call(node, aten.dropout, aten.feature_dropout, aten.alpha_dropout):
        return bool(argument(node, "train")) and float(argument(node, "p")) > 0
    if is_call(node, aten.rrelu):
        return bool(argument(node, "training"))
    if is_call(node, aten.scaled_dot_product_attention):
        return float(argument(node, "dropout_p")) > 0
    if is_call(node, aten.gru, aten.lstm, aten.rnn_tanh, aten.rnn_relu):
        return bool(argument(node, "train")) and float(argument(node, "dropout")) > 0
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_mutable(node: fx.Node) -> bool:
    """True where an ATen call writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def has_effect(node: fx.Node) -> bool:
    """True where a call changes something besides making its result: a buffer, or state of a norm."""
    if node.op != "call_function":
        return node.op in ("output", "placeholder")
    if is_mutable(node):
        return True
    if is_call(node, aten.batch_norm):
        return bool(argument(node, "training")) and argument(node, "running_mean") is not None
    if is_call(node, aten.instance_norm):
        return bool(argument(node, "use_input_stats")) and argument(node, "running_mean") is not None
    return False


def _fake(item: Any) -> Any:
    """An argument of a call with the fake tensor of a node in its place."""
    return item.meta["val"] if isinstance(item, fx.Node) else item


class Editor:
    """Changes a graph in place and keeps every node's fake tensor, `meta["val"]`, up to date."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode

    def nodes(self, *packets: Operator) -> list[fx.Node]:
        """The calls in the graph, in order; with operators given, only calls of those."""
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        return [node for node in calls if is_call(node, *packets)] if packets else calls

    def call(self, before: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new call placed before a node; the operator raises when it does not take these shapes."""
        with self.mode, without_steps():
            result = target(*fx.node.map_aggregate(args, _fake), **fx.node.map_aggregate(kwargs, _fake))
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, kwargs, name=_short_name(target))
        node.meta["val"] = result
        return node

    def again(self, before: fx.Node, call: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of the same operator with other arguments."""
        return self.call(before, cast(Callable[..., Any], call.target), *args, **kwargs)

    def reshape(self, before: fx.Node, source: fx.Node, sizes: Iterable[int]) -> fx.Node:
        """A tensor in another shape."""
        return self.call(before, aten.reshape.default, source, list(sizes))

    def pick(self, before: fx.Node, source: fx.Node, index: int) -> fx.Node:
        """One of the results of a call that has several."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(operator.getitem, (source, index))
        node.meta["val"] = source.meta["val"][index]
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of `old` read `new`; AssertionError where shape or dtype would change, a fault of the rule."""
        if value(old).shape != value(new).shape or value(old).dtype != value(new).dtype:
            raise AssertionError(
                f"A rule replaces {old.format_node()} of {value(old).shape} {value(old).dtype} "
                f"by {new.format_node()} of {value(new).shape} {value(new).dtype}."
            )
        old.replace_all_uses_with(new)
        self._drop(old)

    def _drop(self, node: fx.Node) -> None:
        """Erase a node nobody reads, then whatever only it read."""
        if node.users or node.op != "call_function" or has_effect(node) or is_random(node):
            return
        sources = list(node.all_input_nodes)
        self.graph.erase_node(node)
        for source in sources:
            # A source may have gone already as the source of another one.
            if source.graph is self.graph and not source._erased:
                self._drop(source)

    def sweep(self) -> int:
        """Erase dead calls, and count them without picks of one result among several.

        A dead random call goes only when no live one follows, which keeps the random stream.
        """
        erased = 0
        live_random = False
        for node in reversed(list(self.graph.nodes)):
            if node.op != "call_function":
                continue
            if node.users or has_effect(node):
                live_random |= is_random(node)
            elif not (is_random(node) and live_random):
                self.graph.erase_node(node)
                erased += node.target is not operator.getitem
        return erased


def _short_name(target: Any) -> str:
    """A node name without the overload: `mean`, not `mean_dim`."""
    schema = getattr(target, "_schema", None)
    return str(schema.name.split("::")[1]) if schema is not None else str(target.__name__)


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense row-major tensor."""
    return tuple(math.prod(sizes[index + 1 :]) for index in range(len(sizes)))


def _channels_last(item: Any) -> Any:
    """A 4-d tensor in channels-last layout; anything else as it is."""
    is_image = isinstance(item, torch.Tensor) and item.dim() == 4
    return item.contiguous(memory_format=torch.channels_last) if is_image else item


def can_be_channels_last(graph: fx.Graph, mode: FakeTensorMode) -> bool:
    """True where every `view` still is one when 4-d inputs and state are in channels-last layout."""
    values: dict[fx.Node, Any] = {}
    with mode, without_steps(), torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = _channels_last(node.meta.get("val"))
            elif node.op == "call_function":
                arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = node.target(*arguments[0], **arguments[1])
                except Exception:  # noqa: BLE001 - of any other call, what it says of fake tensors is no reason
                    return not is_call(node, aten.view)
    return True


def _lstm_layer(inp: Any, hidden: Any, params: Any, has_biases: bool, reverse: bool = False) -> Any:
    return _outputs(inp, hidden[0]), tuple(torch.empty_like(state) for state in hidden)


def _rnn_layer(inp: Any, hidden: Any, params: Any, has_biases: bool, hidden_fn: Any, reverse: bool = False) -> Any:
    return _outputs(inp, hidden), torch.empty_like(hidden)


def _outputs(inp: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One output of the state's size for each step and sequence."""
    return inp.new_empty((inp.shape[0], inp.shape[1], state.shape[-1]))


@contextlib.contextmanager
def without_steps() -> Iterator[None]:
    """Infer shapes of recurrent layers without their time steps. No effect where PyTorch has other internals.

    On fake tensors PyTorch decomposes an LSTM or GRU into one set of operators per step and layer, only to learn the shape
    of the result: a minute for 512 steps of 6 layers. While this context is open, a layer is one step.
    """
    replaced = {}
    for name, layer in (("one_layer_lstm", _lstm_layer), ("one_layer_rnn", _rnn_layer)):
        if hasattr(decompositions, name):
            replaced[name] = getattr(decompositions, name)
            setattr(decompositions, name, layer)
    try:
        yield
    finally:
        for name, layer in replaced.items():
            setattr(decompositions, name, layer)
