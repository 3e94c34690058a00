"""Describes a fused kernel as a small program: loads, pointwise steps, reductions and stores over one iteration space.

The iteration space is a tensor shape, of which some dimensions may be reduced. A value
lives at one of two levels: `full` has one element per point, `row` has one per point of the dimensions that
are not reduced. Both code generators print the same program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from kernelwright.errors import InternalError
from kernelwright.rewrites.graph import (
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
    """What a step of `POOLERS` takes its operand over; the steps before it are computed at each place of a window."""
    steps: list[LoopStep] = field(default_factory=list)
    loads: dict[int, Load] = field(default_factory=dict)
    values: dict[fx.Node, int] = field(default_factory=dict)
    """The step that computes each node of the group."""
    updates: dict[fx.Node, int] = field(default_factory=dict)
    """The step that computes what each running statistic becomes."""
    convolution: Geometry | None = None
    """What the step `convolution` computes of the first two loads."""

    @property
    def space(self) -> tuple[int, ...]:
        """The iteration space: the logical shape, dimension 1 split for group norm."""
        if self.split == 1:
            return self.logical
        return (self.logical[0], self.split, self.logical[1] // self.split, *self.logical[2:])

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
        """Whether a reduction finds the index of an element."""
        return any(step.name == "argmax" for step in self.steps)

    @property
    def converts(self) -> bool:
        """Whether a load is not of float32."""
        return any(load.dtype != DTYPE for load in self.loads.values())

    @property
    def is_of_float32(self) -> bool:
        """Whether it neither reads nor rounds to numbers of 16 bits."""
        rounded = any(step.name in ROUNDED.values() for step in self.steps)
        return not rounded and all(load.dtype not in ROUNDED for load in self.loads.values())

    @property
    def is_of_tiles(self) -> bool:
        """Whether it has neither windows nor scans nor a convolution, so that tiles of rows or columns compute it."""
        return not (self.windows or self.scans or self.convolution)

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
        found: list[str] = []
        for index, step in enumerate(self.steps):
            if step.name == "load":
                strides = self.refine(self.loads[index].strides)
                varies = not self.reduced or any(strides[dim] for dim in self.reduced)
                found.append(FULL if varies else ROW)
            elif step.name in REDUCERS:
                found.append(ROW)
            elif step.name == "convolution":
                found.append(FULL)
            else:
                inner = [found[item] for item in step.operands if isinstance(item, int)]
                found.append(FULL if FULL in inner or not self.reduced else ROW)
        return found

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
        """Whether a step divides a sum by a constant, and another step subtracts the result."""
        if self.steps[index].name != "div" or not any(step.name == "sub" and index in step.operands for step in self.steps):
            return False
        total, count = self.steps[index].operands
        return isinstance(total, int) and self.steps[total].name == "sum" and isinstance(count, float)


DTYPE = torch.float32
"""The one type that fused kernels compute in."""
ROUNDED = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Types that they also read and write, and the step that rounds to each."""
REAL = (DTYPE, *ROUNDED)
