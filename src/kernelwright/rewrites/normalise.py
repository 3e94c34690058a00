"""Brings a freshly exported graph into the form the rules expect: functional, and without bookkeeping operators."""

from __future__ import annotations

import operator
from typing import Any, cast

from torch import fx

from kernelwright.errors import InternalError
from kernelwright.rewrites.graph import argument, aten, is_call, is_mutable, is_tensor, value

BOOKKEEPING = (aten.detach, aten.detach_, aten.alias, aten.lift_fresh, aten.lift_fresh_copy)
"""Operators that only matter to autograd or to the exporter: their result is their input."""


class UntraceableError(InternalError):
    """A task has no operator graph that could be printed as source. The policy then only wraps the module."""


class CarriedStateError(UntraceableError):
    """A module leaves a tensor for its next call in an attribute: neither operators in one line nor a CUDA graph do that."""


class SharedStorageError(UntraceableError):
    """An operator writes to storage that another value shares: the exporter's functional form may still be printed."""


def normalise(graph: fx.Graph) -> None:
    """Remove bookkeeping and turn in-place operators on intermediates into ordinary ones.

    Only counters of buffers (`num_batches_tracked += 1`) stay in place, because they are seen from outside.

    Raises:
        SharedStorageError: an operator writes to storage that another value shares.
        UntraceableError: an operator writes to an input or a parameter, or has no functional form.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if is_call(node, *BOOKKEEPING):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is operator.getitem and is_call(node.args[0], aten.broadcast_tensors):
            _drop_broadcast(node)
        elif is_call(node, aten.to, aten.type_as):
            _simplify_conversion(node)
        elif str(node.target).startswith("aten._assert"):
            graph.erase_node(node)
        elif is_mutable(node):
            _make_functional(graph, node)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _scalars(node)
    _record_contract(graph)
    graph.lint()


def _drop_broadcast(pick: fx.Node) -> None:
    """Read what was broadcast together with others directly where its shape did not change."""
    together = cast(fx.Node, pick.args[0])
    source = cast(Any, together.args[0])[pick.args[1]]
    if value(source).shape == value(pick).shape:
        pick.replace_all_uses_with(source)
        pick.graph.erase_node(pick)
        if not together.users:
            pick.graph.erase_node(together)


def _simplify_conversion(node: fx.Node) -> None:
    """Drop a conversion to what a tensor already is, for which PyTorch returns the tensor; name the type of `type_as`."""
    source = cast(fx.Node, node.args[0])
    before, after = value(source), value(node)
    same = (before.dtype, before.device, before.stride()) == (after.dtype, after.device, after.stride())
    if same and not argument(node, "copy"):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
    elif is_call(node, aten.type_as) and before.device == after.device:
        node.target, node.args = aten.to.dtype, (source, after.dtype)


def _make_functional(graph: fx.Graph, node: fx.Node) -> None:
    target = node.args[0]
    if not is_tensor(target):
        raise UntraceableError(f"{node.target} writes to something that is no tensor")
    target = cast(fx.Node, target)
    if target.op == "placeholder":
        counts = target.meta.get("role") == "state" and is_call(node, aten.add_) and not node.users
        if counts and all(is_mutable(user) for user in target.users):
            return
        raise UntraceableError(f"{node.target} writes to {target.name}")
    if _shares_storage(target):
        raise SharedStorageError(f"{node.target} writes to storage that another value shares")
    name = cast(Any, node.target)._schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_"), None)
    overload = getattr(packet, cast(Any, node.target)._overloadname, None) if name.endswith("_") else None
    if overload is None or overload._schema.is_mutable:
        raise UntraceableError(f"{node.target} has no form that leaves its input alone")
    nodes = list(graph.nodes)
    later = set(nodes[nodes.index(node) + 1 :])
    node.target = overload
    target.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)


def _shares_storage(node: fx.Node) -> bool:
    """Whether another value may look at this one's storage: it is a view, or has views."""
    candidates = (node, *(user for user in node.users if is_tensor(user)))
    return any(is_view_call(item) and not is_mutable(item) for item in candidates)


def is_view_call(node: fx.Node) -> bool:
    """Whether a call's result may share storage with its first argument."""
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
    # These say nothing in their schema and may or may not copy.
    return aliases or is_call(node, aten.reshape, aten.flatten, aten.contiguous, aten.to, aten.expand_as)


def aliases_placeholder(node: fx.Node) -> bool:
    """Whether a value may share storage with an input or with state."""
    while node.op == "call_function" and is_view_call(node) and is_tensor(node.args[0]):
        node = cast(fx.Node, node.args[0])
    return node.op == "placeholder"


def _record_contract(graph: fx.Graph) -> None:
    """Remember what is promised about the outputs, before any rule changes how they are made."""
    output = next(node for node in graph.nodes if node.op == "output")
    output.meta["contract"] = [
        (value(item).stride(), aliases_placeholder(item)) if is_tensor(item) else None for item in output.args[0]
    ]


def _scalars(node: fx.Node) -> None:
    """Read a constant of one element as a Python number where that gives the same result type."""
    if not is_call(node, aten.add, aten.sub, aten.mul, aten.div, aten.min, aten.max, aten.minimum, aten.maximum):
        return
    if len(node.args) != 2 or not all(is_tensor(item) or isinstance(item, int | float) for item in node.args):
        return
    left, right = node.args
    if not (isinstance(right, fx.Node) and "constant" in right.meta and isinstance(left, fx.Node)):
        return
    if not (value(left).is_floating_point() and value(left).dim() and value(node).dtype == value(left).dtype):
        return
    number = right.meta["constant"]
    if is_call(node, aten.min, aten.minimum):
        node.target, node.args = aten.clamp_max.default, (left, number)
    elif is_call(node, aten.max, aten.maximum):
        node.target, node.args = aten.clamp_min.default, (left, number)
    else:
        node.args = (left, number)
