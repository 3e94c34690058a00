"""Generates tasks whose time is the device's: work of 0.3 to 3 ms on an H200, of which a CUDA graph saves next to nothing.

They are put together as those of `families.py` are, in sizes at which memory or arithmetic is busy throughout, so that
only less work makes them faster. Some sources and tails are kept out of training altogether: half of the held-out tasks
have one of these.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from kernelwright.records import Task
from kernelwright.tasks.generated import device_bound_parts, family_parts
from kernelwright.tasks.generated.families import DEVICE_BOUND, Parts, family_of, task_of
from kernelwright.tasks.generated.family_parts import Part, Source

Sizes = tuple[int, int, int]
"""`ROWS`, `WIDTH` and `OUT`."""

MINIATURE: Sizes = (64, 32, 64)
"""Sizes of the same tasks for a CPU: they show that a run works, and nothing about speed."""

NEW_SOURCES = ("kronecker", "linear-attention", "permutation-product", "interleaved")
NEW_TAILS = ("group-norm", "cosine", "joined-sum", "column-mean-of-product", "reversed-scan", "entropy")
"""Parts that no training task has."""

_LARGE: tuple[Sizes, ...] = ((16384, 512, 4096), (32768, 512, 2048), (8192, 512, 8192))
_MEDIUM: tuple[Sizes, ...] = ((8192, 512, 4096), (16384, 512, 2048), (32768, 512, 1024))
_SQUARE: tuple[Sizes, ...] = ((8192, 512, 2048), (16384, 512, 1024))
_SIZES: dict[str, tuple[Sizes, ...]] = {
    "diagonal-left": ((8192, 512, 8192), (16384, 512, 2048)),
    "diagonal-right": _SQUARE,
    "kronecker": _SQUARE,
    "permutation-product": _SQUARE,
    "scan-by-product": _SQUARE,
    "summed-products": ((16384, 512, 1024), (4096, 512, 2048)),
    "product-chain": ((8192, 1024, 64), (16384, 1024, 64)),
    "one-hot": ((16384, 1024, 2048), (16384, 1024, 1024)),
    "repeated-mean": _MEDIUM,
    "linear": ((16384, 256, 2048), (32768, 512, 1024)),
    "shared-products": ((16384, 1024, 1024), (16384, 512, 2048)),
    "low-rank": ((16384, 1024, 2048), (16384, 512, 2048)),
    "gated-product": ((16384, 512, 2048), (8192, 1024, 2048)),
    "attention": ((65536, 512, 64), (32768, 1024, 64)),
    "causal-attention": ((65536, 512, 64), (32768, 1024, 64)),
    "linear-attention": ((65536, 1024, 64), (131072, 512, 64)),
    "mean-of-product": _MEDIUM,
    "sum-of-linear": _MEDIUM,
    "column-mean-of-product": _MEDIUM,
    "row-dots": ((4096, 512, 2048), (4096, 512, 1024)),
}
"""Sizes of tasks with a part that multiplies or repeats; all others are bound by memory, and take a matrix of 256 MiB, or of
128 MiB with two pointwise parts."""
_MEMORY_SOURCES = ("input", "transposed-twice", "permuted-blocks", "interleaved", "joined-halves", "outer-sum")
_FAMILY_TAILS = ("softmax", "log-sum-exp", "rms-norm", "layer-norm", "unit-length", "variance", "row-sum", "scanned-sum")
_HEAVY_POINTS = (
    "gelu-formula",
    "silu",
    "hard-swish",
    "no-ops",
    "clamps",
    "affine-chain",
    "common-terms",
    "mish",
    "softsign",
)
"""Those that take seven passes over memory or more: each task whose source is bound by memory has one."""
_TWO_POINTS = 0.4
"""Share of the tasks bound by memory that have a second pointwise part. Our choice."""

Pair = tuple[Source, Part]
"""A structure: a source and a tail."""


@dataclass(frozen=True, slots=True)
class DeviceBoundTasks:
    """The tasks of one seed."""

    train: tuple[Task, ...]
    known: tuple[Task, ...]
    """Held-out tasks whose source and tail are each in training tasks, but not together."""
    new: tuple[Task, ...]
    """Held-out tasks with a source or a tail that no training task has."""


def device_bound_tasks(count: int, held_out: int, seed: int = 0, *, miniature: bool = False) -> DeviceBoundTasks:
    """`count` tasks to train on and `held_out` others, half of them with a new part; the same for the same seed.

    No two have the same structure. With `miniature` they have the same parts in sizes for a CPU.
    """
    dice = random.Random(seed)
    pairs = _pairs()
    dice.shuffle(pairs)
    known = [pair for pair in pairs if not _new_parts(pair)]
    by_memory = [pair for pair in known if pair[0].name in _MEMORY_SOURCES]
    others = [pair for pair in known if pair[0].name not in _MEMORY_SOURCES]
    # As many of either kind, as long as there are.
    mixed = [pair for both in itertools.zip_longest(by_memory, others) for pair in both if pair is not None]
    of_part = {name: [pair for pair in pairs if _new_parts(pair) == {name}] for name in (*NEW_SOURCES, *NEW_TAILS)}
    # The new parts in turn, so that each is in as many tasks as any other.
    new = [pair for turn in itertools.zip_longest(*of_part.values()) for pair in turn if pair is not None]
    wanted = [count, held_out - held_out // 2, held_out // 2]
    plan = mixed[: wanted[0] + wanted[1]] + new[: wanted[2]]
    tasks = iter([_drawn(pair, dice, miniature) for pair in plan])
    return DeviceBoundTasks(*(tuple(itertools.islice(tasks, size)) for size in wanted))


def structure_of(task: Task) -> str | None:
    """Source and tail of a task bound by the device, such as `low-rank+softmax`; None for a task from elsewhere."""
    family = family_of(task) if task.id.startswith(DEVICE_BOUND) else None
    return None if family is None else f"{family.partition('+')[0]}+{family.rpartition('+')[2]}"


def _pairs() -> list[Pair]:
    sources = [
        part
        for part in (*family_parts.SOURCES, *device_bound_parts.SOURCES)
        if part.name in _MEMORY_SOURCES or part.name in _SIZES
    ]
    tails = [part for part in family_parts.TAILS if part.name in _FAMILY_TAILS] + list(device_bound_parts.TAILS)
    # Two products in one task would take too long.
    return [(source, tail) for source in sources for tail in tails if source.name not in _SIZES or tail.name not in _SIZES]


def _new_parts(pair: Pair) -> set[str]:
    return {part.name for part in pair} & {*NEW_SOURCES, *NEW_TAILS}


def _drawn(pair: Pair, dice: random.Random, miniature: bool) -> Task:
    """A task of a structure, with pointwise parts and sizes drawn."""
    source, tail = pair
    every = [part for part in family_parts.POINTWISE if part.name != "dead-scores"]
    heavy = [part for part in every if part.name in _HEAVY_POINTS]
    if source.name in _MEMORY_SOURCES:
        points = [dice.choice(heavy)]
        if dice.random() < _TWO_POINTS:
            points.append(dice.choice([part for part in every if part.lines and part not in points]))
    else:
        points = [dice.choice(every)]
    by_name = _SIZES.get(source.name) or _SIZES.get(tail.name)
    sizes = dice.choice(by_name or (_LARGE if len(points) == 1 else _MEDIUM))
    parts: Parts = (source, *points, tail)
    return task_of(DEVICE_BOUND, parts, MINIATURE if miniature else sizes)
