"""Describes a fused kernel as a small program: loads, pointwise steps, reductions and stores over one iteration space.

The iteration space is a tensor shape, of which some dimensions may be reduced. A value
lives at one of two levels: `full` has one element per point, `row` has one per point of the dimensions that
are not reduced. Both code generators print the same program.
Its loops are as few as the tensors' strides allow, and its passes are ordered by what each reduction needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import fx

from kernelwright.errors import InternalError
from kernelwright.rewrites.graph import (
    contiguous_strides,
    is_tensor,
    scalar,
    shape,
    value,
)
from kernelwright.rewrites.rules.convolution import Geometry

FULL, ROW = "full", "row"
Operand = int | float
"""A step's number, or an immediate constant (always a float)."""

REDUCERS = frozenset({"sum", "max", "min", "argmax"})
POOLERS = {"window_max": "max", "window_sum": "sum"}
"""Steps that combine their operand over the window of a point, and how."""
SCANS = {"cumsum": "sum", "cumprod": "product", "cumsum_reversed": "sum"}
"""Steps that combine what comes up to a point along the last dimension, and how."""

TRANSCENDENTAL = frozenset({"exp", "log", "tanh", "erf", "log1p", "expm1", "sin", "cos"})
POINTWISE, ROWS, COLUMNS, WHOLE = "pointwise", "rows", "columns", "whole"


class UnsupportedError(InternalError):
    """This call cannot be a step of a fused kernel."""


@dataclass(frozen=True, slots=True)
class LoopStep:
    """One value of the program."""

    name: str
    """`load`, a pointwise operation, or a reduction in `REDUCERS`."""
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Position of a load in its tensor: `index * step + shift` along each dimension, and `outside` beyond `sizes`."""

    shifts: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    outside: float


@dataclass(frozen=True, slots=True)
class Load:
    """Source of a `load` step: a node's tensor by strides over the logical shape, 0 where it is broadcast."""

    node: fx.Node
    strides: tuple[int, ...]
    offset: int = 0
    """Elements before the one at index 0 of every dimension."""
    window: Window | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of what it reads: booleans and numbers of 16 bits become float32."""
        return cast(torch.dtype, getattr(self.node.meta.get("val"), "dtype", DTYPE))


@dataclass(frozen=True, slots=True)
class Pooled:
    """Windows side by side, of which a point of the iteration space has one."""

    before: tuple[int, ...]
    """Shape of the nodes that are computed at each place of a window."""
    window: tuple[int, ...]
    """Places of a window along each of the last dimensions."""


@dataclass(frozen=True, slots=True)
class Multiplied:
    """Operands of a program's product: rows of the left one by columns of the right one."""

    left: fx.Node
    length: int
    """Terms of a sum."""
    along: int
    """Elements of a right operand between two terms."""
    batched: bool
    """True where each index of the first dimension has a right operand of its own."""


@dataclass(slots=True)
class LoopProgram:
    """Steps over an iteration space, built up node by node."""

    logical: tuple[int, ...]
    """Shape of the nodes."""
    split: int = 1
    """Groups of a group norm, into which dimension 1 is split."""
    reduced: tuple[int, ...] = ()
    """Reduced dimensions of the iteration space: a contiguous range, all but dimension 1, or nothing."""
    pooled: Pooled | None = None
    """Windows of a step of `POOLERS`; the steps before it are computed at each place of a window."""
    steps: list[LoopStep] = field(default_factory=list)
    loads: dict[int, Load] = field(default_factory=dict)
    values: dict[fx.Node, int] = field(default_factory=dict)
    """The step that computes each node of the group."""
    updates: dict[fx.Node, int] = field(default_factory=dict)
    """The step that computes what each running statistic becomes."""
    convolution: Geometry | None = None
    """Arguments of the step `convolution`, which takes the first two loads."""
    multiplied: Multiplied | None = None
    """Operands of the step `product`."""

    @property
    def space(self) -> tuple[int, ...]:
        """The iteration space: the logical shape, dimension 1 split for group norm."""
        if self.split == 1:
            return self.logical
        return (self.logical[0], self.split, self.logical[1] // self.split, *self.logical[2:])

    @property
    def rows(self) -> tuple[int, ...]:
        """Dimensions that loops keep apart from those before: the reduced ones, or the columns of products."""
        return (len(self.space) - 1,) if self.multiplied else self.reduced

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes a node may have at full size: that of the result, and that before a pool."""
        return (self.logical, self.pooled.before) if self.pooled else (self.logical,)

    def level_of_shape(self, sizes: tuple[int, ...]) -> str | None:
        """At which level a tensor of this shape lives; None when it does not fit."""
        for logical in self.shapes:
            if sizes == logical:
                return FULL
            keep = tuple(1 if dim in self.reduced else size for dim, size in enumerate(logical))
            drop = tuple(size for dim, size in enumerate(logical) if dim not in self.reduced)
            if self.reduced and self.split == 1 and sizes in (keep, drop):
                return ROW
        return None

    def add(self, name: str, *operands: Operand) -> int:
        """A step; equal steps are shared."""
        step = LoopStep(name, operands)
        if step in self.steps:
            return self.steps.index(step)
        self.steps.append(step)
        return len(self.steps) - 1

    def step_of(self, item: Operand) -> LoopStep:
        """The step behind an operand; one without a name for a constant."""
        return self.steps[item] if isinstance(item, int) else LoopStep("", ())

    @property
    def windows(self) -> list[Load]:
        """Loads whose position may lie outside their tensor."""
        return [load for load in self.loads.values() if load.window is not None]

    @property
    def scans(self) -> list[int]:
        """Steps that are scans."""
        return [index for index, step in enumerate(self.steps) if step.name in SCANS]

    @property
    def finds_indices(self) -> bool:
        """True where a reduction finds the index of an element."""
        return any(step.name == "argmax" for step in self.steps)

    @property
    def converts(self) -> bool:
        """True where a load is not of float32."""
        return any(load.dtype != DTYPE for load in self.loads.values())

    @property
    def is_of_float32(self) -> bool:
        """True where it neither reads nor rounds to numbers of 16 bits."""
        rounded = any(step.name in ROUNDED.values() for step in self.steps)
        return not rounded and all(load.dtype not in ROUNDED for load in self.loads.values())

    def load(self, node: fx.Node, strides: Sequence[int], offset: int = 0, window: Window | None = None) -> int:
        """A step that reads an outside tensor."""
        wanted = Load(node, tuple(strides), offset, window)
        for index, load in self.loads.items():
            if load == wanted:
                return index
        self.steps.append(LoopStep("load", ()))
        self.loads[len(self.steps) - 1] = wanted
        return len(self.steps) - 1

    def levels(self) -> list[str]:
        """The level of every step: a load is per row when it does not vary along the reduced dimensions."""
        levels: list[str] = []
        for index, step in enumerate(self.steps):
            if step.name == "load":
                strides = self.refine(self.loads[index].strides)
                varies = not self.reduced or any(strides[dim] for dim in self.reduced)
                levels.append(FULL if varies else ROW)
            elif step.name in REDUCERS:
                levels.append(ROW)
            elif step.name == "convolution":
                levels.append(FULL)
            else:
                inner = [levels[item] for item in step.operands if isinstance(item, int)]
                levels.append(FULL if FULL in inner or not self.reduced else ROW)
        return levels

    def refine(self, strides: Sequence[int]) -> tuple[int, ...]:
        """Strides over the logical shape as strides over the iteration space."""
        if self.split == 1:
            return tuple(strides)
        return (strides[0], strides[1] * (self.logical[1] // self.split), *strides[1:])

    def operand(self, item: Any, level: str) -> Operand:
        """A node or number as an operand of a step of this level.

        Raises:
            UnsupportedError: it is neither a number, nor in the group, nor loadable.
        """
        if not isinstance(item, fx.Node):
            number = scalar(item)
            if number is None:
                raise UnsupportedError("an argument is no number")
            return number
        if not is_tensor(item) or value(item).dtype not in (*REAL, torch.bool):
            raise UnsupportedError("an operand is neither of real numbers nor boolean")
        if item in self.values:
            full = self.level_of_shape(shape(item)) == FULL
            if not full and len(shape(item)) != len(self.logical) and math.prod(shape(item)) > 1 and level != ROW:
                raise UnsupportedError("a reduced value is broadcast along another dimension")
            return self.values[item]
        return self._outside(item, level)

    def _outside(self, item: fx.Node, level: str) -> int:
        sizes, strides = shape(item), value(item).stride()
        rank = len(self.logical)
        if level == FULL:
            if len(sizes) > rank:
                raise UnsupportedError("an operand has more dimensions")
            lead = rank - len(sizes)
            full = [0] * lead + [0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)]
            if any(size not in (1, want) for size, want in zip(sizes, self.logical[lead:], strict=True)):
                raise UnsupportedError("an operand does not broadcast")
            return self.load(item, full)
        if math.prod(sizes) == 1:
            return self.load(item, (0,) * rank)
        after = self.logical[max(self.reduced) + 1 :]
        if len(sizes) <= len(after) and self.split == 1 and sizes == after[len(after) - len(sizes) :]:
            # Dimensions behind the reduced ones are alike whether these are kept or not.
            return self.load(item, (*(0,) * (rank - len(sizes)), *strides))
        if self.level_of_shape(sizes) != ROW or self.split != 1:
            raise UnsupportedError("an operand does not fit the reduced shape")
        kept = iter(strides if len(sizes) != rank else [s for d, s in enumerate(strides) if d not in self.reduced])
        return self.load(item, [0 if dim in self.reduced else next(kept) for dim in range(rank)])

    def count(self) -> int:
        """Points of each row."""
        return math.prod(self.space[dim] for dim in self.reduced)

    def is_subtracted_mean(self, index: int) -> bool:
        """True where a step divides a sum by a constant, and another step subtracts the result."""
        if self.steps[index].name != "div" or not any(step.name == "sub" and index in step.operands for step in self.steps):
            return False
        total, count = self.steps[index].operands
        return isinstance(total, int) and self.steps[total].name == "sum" and isinstance(count, float)


DTYPE = torch.float32
"""The one type that fused kernels compute in."""
ROUNDED = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Types that they also read and write, and the step that rounds to each."""
REAL = (DTYPE, *ROUNDED)


@dataclass(frozen=True, slots=True)
class Signature:
    """Reads and writes of a kernel, as its printers need them."""

    loads: tuple[tuple[int, tuple[int, ...]], ...]
    """Argument and strides over the iteration space of each load step, in order."""
    stores: tuple[tuple[int, bool, tuple[int, ...]], ...]
    """Step of each output, whether it is written per point (else per row), and its shape."""
    updates: tuple[int, ...] = ()
    """Arguments that the last stores are written into."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Type of each store but those into arguments."""

    def is_index(self, number: int) -> bool:
        """True where a store is of indices."""
        return number < len(self.dtypes) and self.dtypes[number] == torch.int64


class KernelMaker(Protocol):
    """Makes kernels of programs."""

    def accepts(self, program: LoopProgram) -> bool:
        """True where there is a kernel for a program of this shape."""

    def kernel(self, program: LoopProgram, signature: Signature, inputs: list[fx.Node]) -> Any:
        """The call target that computes a program of these inputs."""


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
    rows = program.rows
    last = max(rows, default=len(space))
    kept = [dim for dim in range(len(space)) if dim not in rows]
    segments = [dim for dim in kept if dim < last], rows, [dim for dim in kept if dim > last]
    outer, reduced, inner = (_merge(space, strides, dims) for dims in segments)
    none = Dim(1, (0,) * len(strides))
    if not rows:
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
    """True where a value of full size is used outside the program, as one pass of a whole reduction cannot provide."""
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
    return LoopSchedule(rows[0], tuple(passes), cached)


def _needed(
    program: LoopProgram, levels: list[str], roots: list[int | float], known: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Full-level steps that the roots depend on, in order; known ones are listed and not looked behind."""
    needed: set[int] = set()
    queue = [item for item in roots if isinstance(item, int)]
    while queue:
        index = queue.pop()
        if index in needed or levels[index] != FULL:
            continue
        needed.add(index)
        if index not in known:
            queue += [item for item in program.steps[index].operands if isinstance(item, int)]
    return tuple(sorted(needed))


def points(dims: tuple[Dim, ...]) -> int:
    """Iterations of nested loops."""
    return math.prod(dim.size for dim in dims)


def evaluated_again(program: LoopProgram, passes: tuple[Pass, ...], number: int) -> tuple[int, ...]:
    """The full-level steps of a pass when nothing is kept from earlier ones."""
    again = set(passes[number].computes)
    earlier = {index for item in passes[:number] for index in item.computes}
    queue = list(again)
    while queue:
        for operand in program.steps[queue.pop()].operands:
            if isinstance(operand, int) and operand in earlier and operand not in again:
                again.add(operand)
                queue.append(operand)
    return tuple(sorted(again))
