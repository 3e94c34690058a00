"""Plans a program's loops: merges dimensions where every tensor allows it, and orders the passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kernelwright.rewrites.fusion.groups import Signature
from kernelwright.rewrites.fusion.program import FULL, REDUCERS, ROW, LoopProgram, LoopStep, Operand
from kernelwright.rewrites.graph import contiguous_strides

TRANSCENDENTAL = frozenset({"exp", "log", "tanh", "erf", "log1p", "expm1", "sin", "cos"})
POINTWISE, ROWS, COLUMNS, WHOLE = "pointwise", "rows", "columns", "whole"


@dataclass(frozen=True, slots=True)
class Dim:
    """One loop: its length and, for each tensor, the elements between two of its iterations."""

    size: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nest:
    """Loops of a program. Tensors are its loads, then its stores."""

    outer: tuple[Dim, ...]
    reduced: tuple[Dim, ...]
    inner: tuple[Dim, ...]
    kind: str
    """`pointwise`, or which dimensions are reduced: the innermost (`rows`), outer ones (`columns`), all (`whole`)."""

    @property
    def lanes(self) -> Dim:
        """The innermost loop, which vector lanes run along."""
        if self.kind == POINTWISE:
            return self.outer[-1]
        return self.inner[-1] if self.kind == COLUMNS else self.reduced[-1]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in nested loops."""

    dims: tuple[Dim, ...]
    names: tuple[str, ...]
    """Name of each loop's index."""
    masks: Mapping[str, Sequence[Dim]] = field(default_factory=dict)
    """Tests that an access needs where it varies along some of these loops."""


def nest_of(program: LoopProgram, signature: Signature) -> Nest:
    """Merge the iteration space's dimensions into as few loops as the strides allow."""
    space = program.space
    strides = [item for _, item in signature.loads]
    for _, full, _ in signature.stores:
        if full:
            strides.append(contiguous_strides(space))
        else:
            dense = contiguous_strides(tuple(1 if dim in program.reduced else size for dim, size in enumerate(space)))
            strides.append(tuple(0 if dim in program.reduced else item for dim, item in enumerate(dense)))
    last = max(program.reduced, default=len(space))
    kept = [dim for dim in range(len(space)) if dim not in program.reduced]
    segments = [dim for dim in kept if dim < last], program.reduced, [dim for dim in kept if dim > last]
    outer, reduced, inner = (_merge(space, strides, dims) for dims in segments)
    none = Dim(1, (0,) * len(strides))
    if not program.reduced:
        return Nest(outer or (none,), (), (), POINTWISE)
    reduced = reduced or (none,)
    if inner:
        return Nest(outer, reduced, inner, COLUMNS)
    return Nest(outer, reduced, (), ROWS if outer else WHOLE)


def dense_nest(program: LoopProgram) -> tuple[Nest, Signature]:
    """The nest of a program whose loads lie as they were traced and whose stores are dense."""
    signature = Signature(
        tuple((0, program.refine(load.strides)) for load in program.loads.values()),
        tuple((index, True, ()) for index in program.values.values()),
    )
    return nest_of(program, signature), signature


def stores_everything(program: LoopProgram) -> bool:
    """Whether a value of full size is used outside the program, as one pass of a whole reduction cannot provide."""
    return any(
        program.level_of_shape(tuple(node.meta["val"].shape)) == FULL
        for node in program.values
        if any(user not in program.values for user in node.users)
    )


def _merge(space: tuple[int, ...], strides: list[tuple[int, ...]], dims: Iterable[int]) -> tuple[Dim, ...]:
    merged: list[Dim] = []
    for dim in dims:
        if space[dim] == 1:
            continue
        here = Dim(space[dim], tuple(item[dim] for item in strides))
        if merged and all(outer == inner * here.size for outer, inner in zip(merged[-1].strides, here.strides, strict=True)):
            merged[-1] = Dim(merged[-1].size * here.size, here.strides)
        else:
            merged.append(here)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Pass:
    """One loop over the reduced dimensions."""

    computes: tuple[int, ...]
    """Full-level steps it evaluates, in order."""
    reduces: tuple[int, ...]
    """Reductions it feeds; empty in the last pass, which stores."""
    rows_after: tuple[int, ...]
    """Row-level steps that can be evaluated once it is over."""


@dataclass(frozen=True, slots=True)
class LoopSchedule:
    """Passes of a program with reductions, and what is kept between them."""

    rows_before: tuple[int, ...]
    passes: tuple[Pass, ...]
    cached: tuple[int, ...]
    """Expensive full-level steps that more than one pass needs."""
    levels: tuple[str, ...]


def pairs_of(program: LoopProgram) -> dict[int, int]:
    """Reductions of distances from the result of another reduction, by their indices: one pass can compute both.

    They are the sum of squared distances from the mean, and the sum of exponentials of distances from the maximum.
    """
    pairs = dict[int, int]()
    for index, step in enumerate(program.steps):
        inner = program.step_of(step.operands[0] if step.name == "sum" else 0.0)
        if inner.name not in ("mul", "exp") or len(set(inner.operands)) > 1:
            continue
        distance = program.step_of(inner.operands[0])
        if distance.name != "sub":
            continue
        source, centre = distance.operands
        if inner.name == "mul":
            divided = program.step_of(centre)
            if divided.name != "div" or divided.operands[1] != float(program.count()):
                continue
            centre = divided.operands[0]
        if isinstance(centre, int) and program.step_of(centre) == LoopStep(
            "sum" if inner.name == "mul" else "max", (source,)
        ):
            pairs[index] = centre
    return pairs


def schedule(program: LoopProgram, stored: tuple[int, ...], pairs: Mapping[int, int] = MappingProxyType({})) -> LoopSchedule:
    """Order the passes: every reduction in the first one that knows its operand; the last one writes the `stored` steps.

    A reduction of `pairs` is computed in the pass of the one that it is paired with, out of the same operand.
    """
    levels = program.levels()
    after: list[int] = []
    for index, step in enumerate(program.steps):
        inner = max((after[item] for item in step.operands if isinstance(item, int)), default=0)
        after.append(after[pairs[index]] if index in pairs else inner + 1 if step.name in REDUCERS else inner)
    last = max(after)
    targets = [
        tuple(index for index, step in enumerate(program.steps) if step.name in REDUCERS and after[index] == number)
        for number in range(1, last + 1)
    ]
    roots: list[list[Operand]] = [
        [item for index in group for item in program.steps[pairs.get(index, index)].operands] for group in targets
    ]
    roots.append(list(stored))
    wanted = [_needed(program, levels, items) for items in roots]
    cached = tuple(
        index
        for index, step in enumerate(program.steps)
        if levels[index] == FULL and step.name in TRANSCENDENTAL and sum(index in need for need in wanted) > 1
    )
    rows = [
        tuple(
            index
            for index, step in enumerate(program.steps)
            if levels[index] == ROW and step.name not in REDUCERS and after[index] == number
        )
        for number in range(last + 1)
    ]
    passes = []
    seen: set[int] = set()
    for number, need in enumerate(wanted):
        known = frozenset(seen & set(cached))
        needed = _needed(program, levels, roots[number], known)
        seen |= set(need)
        passes.append(Pass(needed, targets[number] if number < last else (), rows[number + 1] if number < last else ()))
    # A stored value may be the same along every row; it is still written in a pass of its own.
    if not stored:
        passes.pop()
    return LoopSchedule(rows[0], tuple(passes), cached, tuple(levels))


def _needed(
    program: LoopProgram, levels: list[str], roots: list[int | float], known: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Full-level steps that the roots depend on, in order; known ones are listed and not looked behind."""
    found: set[int] = set()
    queue = [item for item in roots if isinstance(item, int)]
    while queue:
        index = queue.pop()
        if index in found or levels[index] != FULL:
            continue
        found.add(index)
        if index not in known:
            queue += [item for item in program.steps[index].operands if isinstance(item, int)]
    return tuple(sorted(found))


def points(dims: tuple[Dim, ...]) -> int:
    """Iterations of nested loops."""
    return math.prod(dim.size for dim in dims)


def evaluated_again(program: LoopProgram, passes: tuple[Pass, ...], number: int) -> tuple[int, ...]:
    """The full-level steps of a pass when nothing is kept from earlier ones."""
    found = set(passes[number].computes)
    earlier = {index for item in passes[:number] for index in item.computes}
    queue = list(found)
    while queue:
        for operand in program.steps[queue.pop()].operands:
            if isinstance(operand, int) and operand in earlier and operand not in found:
                found.add(operand)
                queue.append(operand)
    return tuple(sorted(found))
