"""Generates tasks: a source of values, one or two pointwise parts and a tail, each wasting work in its own way or not.

The built-in suite has one task for each idea; training needs many. A family is a combination of parts, such as
`linear+mish+rms-norm` or `linear+mish+clamps+rms-norm`, and its tasks differ in size only. A part knows its wasteful
spelling, which goes into the task, and others that compute the same, better, no better or worse, which `variations` puts
together for teachers of the supervised stage. None of them is trusted to be right: the judge decides.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kernelwright.records import Task
from kernelwright.tasks.generated import device_bound_parts
from kernelwright.tasks.generated.family_parts import POINTWISE, SOURCES, TAILS, Part, Source

PREFIX = "families/"
DEVICE_BOUND = "device-bound/"
"""Beginning of the ids of those that `device_bound.py` generates."""

ROWS = (64, 512, 2048, 8192)
WIDTHS = (256, 512, 1024)
"""Sizes are drawn from these: from calls that are all launch overhead to ones that are bound by memory or arithmetic."""


MOST_SPELLINGS = 80
"""Combinations of spellings that are kept of a task, besides its own. Our choice."""
Parts = tuple[Part, ...]
"""A source, pointwise parts, a tail."""
_WIDE_TAILS = ("as-is", "softmax", "rms-norm", "layer-norm", "unit-length", "shifted-softmax")
"""Tails that return whole rows."""
BLOCKS = (256, 1024, 4096)
"""Columns a Triton program takes at once in the pointwise template; all are right, not all are fast."""
WARPS = (1, 4, 16)


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
    """Whether something can be won without leaving PyTorch's operators, or by reading less."""
    return any(part.others for part in parts) or parts[-1].name == "first-rows"


def _is_long(parts: Parts) -> bool:
    """Whether scores among all rows would be computed for a tall matrix, which takes seconds on a CPU."""
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


@dataclass(frozen=True, slots=True)
class Variation:
    """Another way to compute a generated task: text that stands below the task's own module."""

    techniques: tuple[str, ...]
    answer: str
    """Defines `class ModelNew(Model)`."""


def variations(task: Task, device: str) -> Iterator[Variation]:
    """Ways to compute a generated task, from a plain copy to kernels for `cuda`; none for others."""
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
    """Ways to spell all parts, the task's own first; where there are many, some of them, always the same."""
    each = [[((), part.lines), *(((name,), lines) for name, lines in part.others.items())] for part in parts]
    own, *others = itertools.product(*each)
    if len(others) > MOST_SPELLINGS:
        others = random.Random("+".join(part.name for part in parts)).sample(others, MOST_SPELLINGS)
    return [own, *others]


def _parts(task: Task) -> Parts | None:
    family = family_of(task)
    if family is None:
        return None
    return tuple(_BY_NAME[name] for name in family.split("+"))


_BY_NAME: dict[str, Part] = {
    part.name: part for part in (*SOURCES, *POINTWISE, *TAILS, *device_bound_parts.SOURCES, *device_bound_parts.TAILS)
}


def _kernels(parts: Parts) -> Iterator[Variation]:
    """The pointwise parts, or these and the tail, as one Triton kernel, after each way to spell the source."""
    source, *middle, tail = parts
    if any(part.triton is None for part in middle):
        return
    arguments = _arguments(parts)
    pointwise = tuple(line for part in middle for line in part.triton or ())
    rest = list((list(tail.others.values()) or [tail.lines])[0])
    for name, first in [*source.others.items(), ("", source.lines)]:
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
