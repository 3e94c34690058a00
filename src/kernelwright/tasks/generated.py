"""Generates tasks to train on: a source of values, one or two pointwise parts and a tail, most of which waste work.

The built-in suite has one task for each idea; training needs many. A family is a combination of parts, such as
`linear+mish+rms-norm` or `linear+mish+clamps+rms-norm`, and its tasks differ in size only. The parts are in
`data/families.toml`. A part has its wasteful spelling, which goes into the task, and others that compute the same, better,
no better or worse, which `variations` puts together for teachers of the supervised stage. None of them is trusted to be
right: the judge decides.

Tasks bound by the device (`device_bound_tasks`) take 0.3 to 3 ms on an H200, of which a CUDA graph saves next to nothing.
Their further parts are in `data/device_bound.toml`, in sizes at which memory or arithmetic is busy throughout, so that only
less work makes them faster. Some sources and tails are kept out of training altogether: half of the held-out tasks have one
of these.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kernelwright.records import Task

PREFIX = "families/"
DEVICE_BOUND = "device-bound/"
"""Beginning of the ids of `device_bound_tasks`."""

ROWS = (64, 512, 2048, 8192)
WIDTHS = (256, 512, 1024)
"""Sizes of families, from calls that are all launch overhead to ones that are bound by memory or arithmetic."""

MOST_SPELLINGS = 80
"""Combinations of spellings that are kept of a task, besides its own. Our choice."""
_WIDE_TAILS = ("as-is", "softmax", "rms-norm", "layer-norm", "unit-length", "shifted-softmax")
"""Tails that return whole rows."""
BLOCKS = (256, 1024, 4096)
"""Columns a Triton program takes at once in the pointwise template; all are right, not all are fast."""
WARPS = (1, 4, 16)


# --- parts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A step of a task: statements that read and write `y`, the rows of a matrix."""

    name: str
    about: str
    """Description in the task's docstring."""
    lines: tuple[str, ...]
    """The spelling in the task."""
    alternatives: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Other spellings, by technique, the best first; the later ones are right too and gain little or nothing."""
    triton: tuple[str, ...] | None = None
    """The same in Triton on a block `y` of one row, with its `mask`; None where Triton has no such form."""
    arguments: tuple[str, ...] = ()
    """Inputs of the task that it reads, which no other part of the task has."""
    inputs: tuple[str, ...] = ()
    """Expressions that draw them."""
    modules: tuple[str, ...] = ()
    """Statements of the constructor, which has `width` and `out`."""


@dataclass(frozen=True, slots=True)
class Source(Part):
    """The first step: makes `y` from the inputs."""

    arguments: tuple[str, ...] = ("x",)
    inputs: tuple[str, ...] = ("torch.randn(ROWS, OUT)",)
    kind: str = "elementwise"
    """Class of task, as in the built-in suite."""
    rows: str = "ROWS"
    """Rows of the matrix that it makes."""


P = TypeVar("P", bound=Part)
Parts = tuple[Part, ...]
"""A source, pointwise parts, a tail."""


def _read(kind: type[P], file: str, key: str) -> tuple[P, ...]:
    """The parts under a key of a file of `data`."""
    tables = tomllib.loads((Path(__file__).parent / "data" / file).read_text(encoding="utf-8"))[key]
    return tuple(kind(**{name: _frozen(value) for name, value in table.items()}) for table in tables)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(part) for name, part in value.items()}
    return tuple(value) if isinstance(value, list) else value


SOURCES = _read(Source, "families.toml", "sources")
POINTWISE = _read(Part, "families.toml", "pointwise")
TAILS = _read(Part, "families.toml", "tails")
_DEVICE_BOUND_SOURCES = _read(Source, "device_bound.toml", "sources")
_DEVICE_BOUND_TAILS = _read(Part, "device_bound.toml", "tails")
_BY_NAME: dict[str, Part] = {
    part.name: part for part in (*SOURCES, *POINTWISE, *TAILS, *_DEVICE_BOUND_SOURCES, *_DEVICE_BOUND_TAILS)
}


# --- families -------------------------------------------------------------------------------------------------------


def family_of(task: Task) -> str | None:
    """The family of a generated task, such as `linear+mish+rms-norm`; None for a task from elsewhere."""
    for prefix in (PREFIX, DEVICE_BOUND):
        if task.id.startswith(prefix):
            return task.id.removeprefix(prefix).rpartition("/")[0]
    return None


def family_tasks(count: int, seed: int = 0) -> list[Task]:
    """`count` tasks of as many different families; the same for the same seed."""
    chosen = random.Random(seed)
    short = list(itertools.product(SOURCES, POINTWISE, TAILS))
    # As many of the longer families as of the short ones, of which there are a tenth.
    long = [
        (source, *points, tail)
        for source, tail in itertools.product(SOURCES, TAILS)
        for points in chosen.sample(
            list(itertools.permutations([part for part in POINTWISE if part.lines], 2)), len(POINTWISE)
        )
    ]
    combinations = [parts for parts in [*short, *long] if _wastes(parts) and not _is_long(parts)]
    chosen.shuffle(combinations)
    return [
        _task(parts, chosen.choice(ROWS), chosen.choice(WIDTHS), chosen.choice(WIDTHS)) for parts in combinations[:count]
    ]


def _wastes(parts: Parts) -> bool:
    """True where something can be won without leaving PyTorch's operators, or by reading less."""
    return any(part.alternatives for part in parts) or parts[-1].name == "first-rows"


def _is_long(parts: Parts) -> bool:
    """True where scores among all rows would be computed for a tall matrix, which takes seconds on a CPU."""
    return _has_scores(parts) and parts[0].name in ("columns-reversed", "heads-in-loop")


def _has_scores(parts: Parts) -> bool:
    return any(part.name == "dead-scores" for part in parts)


def _task(parts: Parts, rows: int, width: int, out: int) -> Task:
    source = parts[0]
    if _has_scores(parts):
        rows = min(rows, 2048)
    if source.name in ("columns-reversed", "product-chain"):
        out = 256 if source.name == "columns-reversed" else 64
    return task_of(PREFIX, parts, (rows, width, out))


def task_of(prefix: str, parts: Parts, sizes: tuple[int, int, int]) -> Task:
    """The task that computes these parts one after the other, with the given `ROWS`, `WIDTH` and `OUT`."""
    source = parts[0]
    assert isinstance(source, Source)
    modules = ""
    if made := [line for part in parts for line in part.modules]:
        body = "".join(f"        {line}\n" for line in made)
        modules = f"    def __init__(self, width: int, out: int) -> None:\n        super().__init__()\n{body}\n"
    imports = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
    about = [part.about for part in parts]
    drawn = ", ".join(line for part in parts for line in part.inputs)
    text = (
        f'"""{source.kind}: generated; {", ".join(about)}."""\n\n{imports}\n'
        f"ROWS, WIDTH, OUT = {', '.join(map(str, sizes))}\n\n\n"
        f'class Model(nn.Module):\n    """{"; ".join([source.about.capitalize(), *about[1:]])}."""\n\n{modules}'
        f"{method('forward', _arguments(parts), [line for part in parts for line in part.lines])}\n\n"
        f"def get_inputs():\n    return [{drawn}]\n\n\n"
        f"def get_init_inputs():\n    return [{'WIDTH, OUT' if made else ''}]\n"
    )
    family = "+".join(part.name for part in parts)
    return Task(id=f"{prefix}{family}/{'x'.join(map(str, sizes))}", source=text, origin=prefix.rstrip("/"))


def _arguments(parts: Parts) -> tuple[str, ...]:
    return tuple(name for part in parts for name in part.arguments)


def method(name: str, arguments: tuple[str, ...], lines: list[str]) -> str:
    """A method that returns `y`."""
    body = "".join(f"        {line}\n" for line in [*lines, "return y"])
    return f"    def {name}(self, {', '.join(arguments)}):\n{body}"


# --- tasks bound by the device --------------------------------------------------------------------------------------

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
"""Pointwise parts with seven passes over memory or more: each task whose source is bound by memory has one."""
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
    by_arithmetic = [pair for pair in known if pair[0].name not in _MEMORY_SOURCES]
    # As many of either kind, as long as there are.
    mixed = [pair for both in itertools.zip_longest(by_memory, by_arithmetic) for pair in both if pair is not None]
    of_part = {name: [pair for pair in pairs if _new_parts(pair) == {name}] for name in (*NEW_SOURCES, *NEW_TAILS)}
    # The new parts in turn, so that each is in as many tasks as any other.
    new = [pair for turn in itertools.zip_longest(*of_part.values()) for pair in turn if pair is not None]
    wanted = [count, held_out - held_out // 2, held_out // 2]
    plan = mixed[: wanted[0] + wanted[1]] + new[: wanted[2]]
    tasks = iter([_drawn(pair, dice, miniature) for pair in plan])
    return DeviceBoundTasks(*(tuple(itertools.islice(tasks, size)) for size in wanted))


def _pairs() -> list[Pair]:
    sources = [part for part in (*SOURCES, *_DEVICE_BOUND_SOURCES) if part.name in _MEMORY_SOURCES or part.name in _SIZES]
    tails = [part for part in TAILS if part.name in _FAMILY_TAILS] + list(_DEVICE_BOUND_TAILS)
    # Two products in one task would take too long.
    return [(source, tail) for source in sources for tail in tails if source.name not in _SIZES or tail.name not in _SIZES]


def _new_parts(pair: Pair) -> set[str]:
    return {part.name for part in pair} & {*NEW_SOURCES, *NEW_TAILS}


def _drawn(pair: Pair, dice: random.Random, miniature: bool) -> Task:
    """A task of a structure, with pointwise parts and sizes drawn."""
    source, tail = pair
    every = [part for part in POINTWISE if part.name != "dead-scores"]
    heavy = [part for part in every if part.name in _HEAVY_POINTS]
    if source.name in _MEMORY_SOURCES:
        points = [dice.choice(heavy)]
        if dice.random() < _TWO_POINTS:
            points.append(dice.choice([part for part in every if part.lines and part not in points]))
    else:
        points = [dice.choice(every)]
    by_name = _SIZES.get(source.name) or _SIZES.get(tail.name)
    sizes = dice.choice(by_name or (_LARGE if len(points) == 1 else _MEDIUM))
    return task_of(DEVICE_BOUND, _fitted(source, *points, tail), MINIATURE if miniature else sizes)


def _fitted(source: Source, *parts: Part) -> Parts:
    """The parts, those after the source written for as many rows as it makes."""
    if source.rows == "ROWS":
        return source, *parts
    return source, *(
        replace(
            part,
            lines=_with_rows(part.lines, source.rows),
            inputs=_with_rows(part.inputs, source.rows),
            alternatives={technique: _with_rows(spelling, source.rows) for technique, spelling in part.alternatives.items()},
        )
        for part in parts
    )


def _with_rows(texts: tuple[str, ...], rows: str) -> tuple[str, ...]:
    return tuple(re.sub(r"\bROWS\b", rows, text) for text in texts)


# --- other ways to compute a task -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variation:
    """Another way to compute a generated task: text that stands below the task's own module."""

    techniques: tuple[str, ...]
    answer: str
    """Defines `class ModelNew(Model)`."""


def variations(task: Task, device: str) -> Iterator[Variation]:
    """Ways to compute a generated task, from a plain copy to kernels for `cuda`; none for other tasks."""
    parts = _parts(task)
    if parts is None:
        return
    source, arguments = parts[0], _arguments(parts)
    for spelling in _spellings(parts):
        techniques = tuple(name for names, _ in spelling for name in names)
        body = [line for _, lines in spelling for line in lines]
        yield Variation(techniques or ("copy-of-reference",), _new([method("forward", arguments, body)]))
        if not techniques and not any(part.modules for part in parts):
            wide = [f"{name} = {name}.double()" for name in arguments if name not in ("index", "picked")]
            yield Variation(("in-double",), _new([method("forward", arguments, [*wide, *body, "y = y.float()"])]))
    if parts[-1].name == "first-rows":
        for spelling in _spellings(parts):
            techniques = ("slice-early", *(name for names, _ in spelling for name in names))
            lines = [line for _, step in spelling[1:-1] for line in step]
            body = [*spelling[0][1], "y = y[:16]", *lines, "y = y.clone()"]
            yield Variation(techniques, _new([method("forward", source.arguments, body)]))
    if device.startswith("cuda"):
        yield from _kernels(parts)


Spelling = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""Techniques and statements of each part of a task."""


def _spellings(parts: Parts) -> list[Spelling]:
    """Ways to write all parts, the task's own first: always the same some where there are many."""
    each = [[((), part.lines), *(((name,), lines) for name, lines in part.alternatives.items())] for part in parts]
    own, *alternatives = itertools.product(*each)
    if len(alternatives) > MOST_SPELLINGS:
        alternatives = random.Random("+".join(part.name for part in parts)).sample(alternatives, MOST_SPELLINGS)
    return [own, *alternatives]


def _parts(task: Task) -> Parts | None:
    family = family_of(task)
    if family is None:
        return None
    source, *parts = (_BY_NAME[name] for name in family.split("+"))
    assert isinstance(source, Source)
    return _fitted(source, *parts)


def _kernels(parts: Parts) -> Iterator[Variation]:
    """The pointwise parts, or these and the tail, as one Triton kernel, after each way to write the source."""
    source, *middle, tail = parts
    if any(part.triton is None for part in middle):
        return
    arguments = _arguments(parts)
    pointwise = tuple(line for part in middle for line in part.triton or ())
    rest = list((list(tail.alternatives.values()) or [tail.lines])[0])
    for name, first in [*source.alternatives.items(), ("", source.lines)]:
        known = (name,) if name else ()
        if pointwise:
            for block in BLOCKS:
                call = [
                    "y = y.contiguous()",
                    "z = torch.empty_like(y)",
                    f"kernel[(triton.cdiv(y.numel(), {block}),)](y, z, y.numel(), BLOCK={block})",
                    "y = z",
                ]
                yield Variation(
                    (*known, f"triton-pointwise-{block}"),
                    _POINTWISE_KERNEL.format(body=_indented(pointwise))
                    + _new([method("forward", arguments, [*first, *call, *rest])]),
                )
        if tail.triton:
            wide = tail.name in _WIDE_TAILS
            made = "torch.empty_like(y)" if wide else "torch.empty(y.shape[0], 1, device=y.device, dtype=y.dtype)"
            store = "tl.store(z_ptr + row * columns + i, y, mask=mask)" if wide else "tl.store(z_ptr + row, y)"
            for warps in WARPS:
                call = [
                    "y = y.contiguous()",
                    f"z = {made}",
                    "columns = y.shape[1]",
                    f"kernel[(y.shape[0],)](y, z, columns, BLOCK=triton.next_power_of_2(columns), num_warps={warps})",
                    "y = z",
                ]
                yield Variation(
                    (*known, f"triton-rows-{warps}"),
                    _ROW_KERNEL.format(body=_indented((*pointwise, *tail.triton)), store=store)
                    + _new([method("forward", arguments, [*first, *call])]),
                )


def _indented(lines: tuple[str, ...]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _new(methods: list[str]) -> str:
    return "class ModelNew(Model):\n" + "\n".join(methods)


_POINTWISE_KERNEL = """import triton
import triton.language as tl


@triton.jit
def kernel(y_ptr, z_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    y = tl.load(y_ptr + i, mask=mask, other=0.0)
{body}    tl.store(z_ptr + i, y, mask=mask)


"""
_ROW_KERNEL = """import triton
import triton.language as tl


@triton.jit
def kernel(y_ptr, z_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < columns
    y = tl.load(y_ptr + row * columns + i, mask=mask, other=0.0)
{body}    {store}


"""
