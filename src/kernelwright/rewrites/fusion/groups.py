"""Finds operators that one kernel can compute, and puts the kernel into the graph."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import fx

from kernelwright.rewrites.fusion.lowerings import ALONG_THE_OUTPUT, LOWERINGS, ROW_OPERATORS, lower, pooled_of
from kernelwright.rewrites.fusion.products import FEW, PRODUCTS
from kernelwright.rewrites.fusion.program import FULL, KernelMaker, LoopProgram, Signature, UnsupportedError
from kernelwright.rewrites.graph import (
    Editor,
    aten,
    contiguous_strides,
    dtype,
    has_effect,
    is_call,
    is_mutable,
    is_random,
    is_tensor,
    packet_of,
    shape,
    value,
)

MOST_KERNELS = 32
"""Different kernels in one module: each costs build time, and the largest save most."""
MOST_MEMBERS = 40
"""Operators in one kernel: compile time grows faster than what more of them save."""
SMALLEST = 2048
"""Points in the iteration space below which a kernel of its own is not worth its launch."""


WORTH_ALONE_ON_GPU = (*ROW_OPERATORS, *ALONG_THE_OUTPUT, aten.batch_norm)
"""Operators whose own kernel may be slower than a specialised one. One that is pointwise is at the memory's speed there."""
ACTIVATIONS = (
    aten.mish,
    aten.gelu,
    aten.silu,
    aten.softplus,
    aten.elu,
    aten.selu,
    aten.sigmoid,
    aten.tanh,
    aten.erf,
    aten.exp,
    aten.log,
    aten.leaky_relu,
    aten.hardswish,
    aten.hardsigmoid,
)
"""Functions of one tensor that take more than one instruction."""
WORTH_ALONE = (*WORTH_ALONE_ON_GPU, *ACTIVATIONS)
"""The same on a CPU, with expensive functions."""


@dataclass(slots=True, eq=False)
class FusionGroup:
    """Nodes that one program computes."""

    program: LoopProgram
    members: list[fx.Node] = field(default_factory=list)

    def outputs(self) -> list[fx.Node]:
        """Members that somebody outside reads."""
        return [node for node in self.members if any(user not in self.members for user in node.users)]


def _try(group: FusionGroup, node: fx.Node, positions: dict[fx.Node, int], maker: KernelMaker) -> FusionGroup | None:
    """The group with one more node; None when the node does not fit."""
    old = group.program
    pooled = pooled_of(node, old) if node.args and node.args[0] in old.values else None
    program = LoopProgram(shape(node) if pooled else old.logical, old.split, old.reduced, pooled or old.pooled)
    members = sorted([*group.members, node], key=positions.__getitem__)
    if len(members) > MOST_MEMBERS:
        return None
    try:
        for member in members:
            lower(program, member)
    except UnsupportedError:
        return None
    if program.multiplied is not None and not _follows(program, members):
        return None
    bigger = FusionGroup(program, members)
    inside = set(members)
    # What is computed at each place of a window is nowhere written.
    before = (member for member in members if program.pooled and shape(member)[2:] == program.pooled.before[2:])
    if any(user not in inside for member in before for user in member.users):
        return None
    needed = [positions[load.node] for load in program.loads.values()]
    users = [positions[user] for member in members for user in member.users if user not in inside]
    # The kernel stands after the last value it reads and before the first reader of what it writes.
    if needed and users and max(needed) >= min(users):
        return None
    return bigger if maker.accepts(program) else None


def _follows(program: LoopProgram, members: list[fx.Node]) -> bool:
    """True where a kernel of a product gains by computing the others with it.

    The library's product is quicker than ours: of many rows only an activation is worth it (1.05 to 1.6 of cuBLAS's time
    without one, on an H200). What a norm makes of its rows in float32 is left to the norm's own kernel, which reads less.
    """
    assert program.multiplied is not None
    rows, (_, *others) = math.prod(program.logical[:-1]), members
    active = not others or rows <= FEW or is_call(others[0], *ACTIVATIONS)
    return active and all(dtype(member) == dtype(program.multiplied.left) for member in members)


def find(graph: fx.Graph, maker: KernelMaker, alone: tuple[Any, ...]) -> list[FusionGroup]:
    """Groups worth a kernel: at least two operators, or one of those that are worth a kernel `alone`."""
    nodes = list(graph.nodes)
    positions = {node: index for index, node in enumerate(nodes)}
    groups: list[FusionGroup] = []
    member_of: dict[fx.Node, FusionGroup] = {}
    for node in nodes:
        packet = packet_of(node)
        if node.op != "call_function" or not is_tensor(node):
            continue
        if not value(node).is_contiguous() and value(node).stride() != contiguous_strides(shape(node)):
            continue
        if not any(packet in known for known in (LOWERINGS, ROW_OPERATORS, ALONG_THE_OUTPUT, PRODUCTS)):
            continue
        near = list(dict.fromkeys(member_of[source] for source in node.all_input_nodes if source in member_of))
        joined = _join(near, node, positions, maker)
        if joined is None:
            over: Any = node.args[0] if packet in ROW_OPERATORS else node
            joined = _try(FusionGroup(LoopProgram(shape(over))), node, positions, maker)
        if joined is None:
            continue
        # A group is gone only when all of it went into the new one.
        groups = [group for group in groups if not set(group.members) <= set(joined.members)] + [joined]
        for member in joined.members:
            member_of[member] = joined
    worth = [group for group in groups if _is_large(group.program) and (len(group.members) >= 2 or _is_alone(group, alone))]
    largest = sorted(worth, key=lambda group: -math.prod(group.program.logical) * len(group.members))
    kinds = list(dict.fromkeys(map(_kind, largest)))[:MOST_KERNELS]
    kept = [group for group in worth if _kind(group) in kinds]
    while (cycle := _in_cycle(nodes, kept)) is not None:
        kept = [group for group in kept if group is not cycle]
    return kept


def _is_large(program: LoopProgram) -> bool:
    """True where there is enough to do. A model of 16 bits that decodes a token is launches, however small."""
    return math.prod(program.logical) >= SMALLEST or not program.is_of_float32


def _is_alone(group: FusionGroup, operators: tuple[Any, ...]) -> bool:
    """True where one operator is worth a kernel: one of these, or a product of few rows, which memory limits."""
    program = group.program
    few = program.multiplied is not None and math.prod(program.logical[:-1]) <= FEW
    return few or is_call(group.members[0], *operators)


def _kind(group: FusionGroup) -> tuple[Any, ...]:
    """Equal for groups of one kernel, such as those of a model's equal layers."""
    program = group.program
    loads = tuple((load.strides, load.offset, load.window, load.dtype) for load in program.loads.values())
    stored = tuple(program.values[node] for node in group.outputs())
    return program.logical, program.split, program.reduced, tuple(program.steps), loads, stored


def _in_cycle(nodes: list[fx.Node], groups: list[FusionGroup]) -> FusionGroup | None:
    """A group that, as one node, would wait for itself through another group; the smallest of those."""
    owner: dict[fx.Node, Any] = {node: node for node in nodes}
    owner.update({member: group for group in groups for member in group.members})
    waits: dict[Any, set[Any]] = {}
    for node in nodes:
        sources = {owner[source] for source in node.all_input_nodes}
        waits.setdefault(owner[node], set()).update(sources - {owner[node]})
    while ready := {item for item, sources in waits.items() if not sources}:
        for item in ready:
            del waits[item]
        for sources in waits.values():
            sources.difference_update(ready)
    stuck = [group for group in groups if group in waits]
    return min(stuck, key=lambda group: len(group.members), default=None)


def _join(near: list[FusionGroup], node: fx.Node, positions: dict[fx.Node, int], maker: KernelMaker) -> FusionGroup | None:
    """The largest group made of the node and the groups it reads from."""
    if len(near) > 1:
        merged: FusionGroup | None = near[0]
        for member in (*(member for other in near[1:] for member in other.members), node):
            merged = _try(merged, member, positions, maker) if merged is not None else None
        if merged is not None:
            return merged
    tried = (_try(group, node, positions, maker) for group in sorted(near, key=lambda item: -len(item.members)))
    return next((group for group in tried if group is not None), None)


def replace_group(
    editor: Editor,
    group: FusionGroup,
    maker: KernelMaker,
    replaced: dict[fx.Node, fx.Node],
) -> fx.Node:
    """Put a kernel in the place of a group's nodes, and note in `replaced` what now stands for each node that is gone.

    Returns:
        The kernel's call.
    """
    program = group.program
    nodes_read = [replaced.get(load.node, load.node) for load in program.loads.values()]
    inputs = list(dict.fromkeys(nodes_read))
    outputs = group.outputs()
    loads = tuple(
        (inputs.index(node), program.refine(load.strides))
        for node, load in zip(nodes_read, program.loads.values(), strict=True)
    )
    stores = tuple((program.values[node], program.level_of_shape(shape(node)) == FULL, shape(node)) for node in outputs)
    stores += tuple((step, False, shape(statistic)) for statistic, step in program.updates.items())
    dtypes = tuple(value(node).dtype for node in outputs)
    kernel = maker.kernel(program, Signature(loads, stores, tuple(map(inputs.index, program.updates)), dtypes), inputs)
    # Other groups may still have to move before it: `order` puts everything right at the end.
    before = group.members[-1]
    result = editor.call(before, kernel, *inputs)
    single = len(outputs) == 1
    results = [result] if single else [editor.pick(before, result, index) for index in range(len(outputs))]
    for node, new in zip(outputs, results, strict=True):
        node.replace_all_uses_with(new)
        replaced[node] = new
    for node in reversed(group.members):
        editor.graph.erase_node(node)
    return result


def order(graph: fx.Graph, updates: Mapping[fx.Node, Iterable[fx.Node]] = MappingProxyType({})) -> None:
    """Put the nodes into an order in which everything is made before it is read, changing little.

    Calls with an effect and random ones keep their order among themselves. Kernels that write to tensors, which `updates`
    has, only stay before other calls that write to those: if all had to wait for them, two kernels could wait on each other.
    """
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    waits = {node: set(node.all_input_nodes) for node in nodes}
    loose: set[fx.Node] = set()
    for kernel, tensor in ((kernel, tensor) for kernel, tensors in updates.items() for tensor in tensors):
        later = sorted((user for user in tensor.users if is_mutable(user)), key=place.__getitem__)
        for first, second in itertools.pairwise([kernel, *later]):
            waits[second].add(first)
        loose.update(later)
    waits[nodes[-1]] |= loose
    effects = [node for node in nodes if node.op != "call_function" or has_effect(node) or is_random(node)]
    for first, second in itertools.pairwise(node for node in effects if node not in loose):
        waits[second].add(first)
    users: dict[fx.Node, list[fx.Node]] = {}
    for node, sources in waits.items():
        for source in sources:
            users.setdefault(source, []).append(node)
    ready = [place[node] for node in nodes if not waits[node]]
    heapq.heapify(ready)
    anchor: fx.Node | None = None
    while ready:
        node = nodes[heapq.heappop(ready)]
        if anchor is not None:
            anchor.append(node)
        anchor = node
        for user in users.get(node, ()):
            waits[user].discard(node)
            if not waits[user]:
                heapq.heappush(ready, place[user])
