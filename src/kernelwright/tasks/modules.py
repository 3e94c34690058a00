"""Makes the suite `modules`: modules of torchvision and transformers at two sizes each, as the user has them installed.

`modules-bf16` has the same with weights and inputs of bfloat16, in which networks are mostly run.

The modules are listed in `data/modules.toml`; none was written for this program or for a benchmark. A task constructs a
library's own module, in eval mode, with weights as its constructor draws them and without dropout: the judge compares
outputs in training mode too. Nothing is downloaded, and nothing is executed here.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.tasks.entries import SuiteEntry

LEVEL = 3
"""Level of every task: parts of networks."""

_SHAPES = {
    "images": "{batch}, {width}, {side}, {side}",
    "channels-last": "{batch}, {side}, {side}, {width}",
    "tokens": "{batch}, {side}, {width}",
}
"""Shapes of inputs by their names in `data/modules.toml`. The side of a sequence is its number of tokens."""

_TEXT = '''\
"""{names} of {library}, in eval mode."""

import torch
from {origin} import {names}
{further}

class Model(torch.nn.Module):
    def __init__(self, width, side):
        super().__init__()
        {build}
        self{cast}.eval()

    def forward(self, x):
        return {call}


def get_inputs():
    return [torch.randn({shape}){cast}]


def get_init_inputs():
    return [{width}, {side}]
'''
_ROTARY = """rotary = {0}RotaryEmbedding(config)
        cos, sin = rotary(torch.empty(0), torch.arange(side)[None])
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)"""


@dataclass(frozen=True, slots=True)
class _Module:
    """A library's module, and how a task constructs and calls it."""

    name: str
    origin: str
    """The Python module that it comes from."""
    names: str
    """Names that are imported from there: the class first."""
    small: Sequence[int]
    """Batch, width and side of one task."""
    large: Sequence[int]
    """The same of the other."""
    arguments: str
    """Arguments of the class's constructor."""
    shape: str = "images"
    call: str = "self.block(x)"
    config: str = ""
    """The configuration of a module of transformers, made first."""
    further: str = ""
    """Another import."""

    def source(self, size: Sequence[int], cast: str = "") -> str:
        """A task in KernelBench's format, its module and its input made of another type by `cast`."""
        batch, width, side = size
        build = [f"self.block = {self.names.partition(',')[0]}({self.arguments})"]
        if self.config:
            build.insert(0, f"config = {self.config}")
        if "RotaryEmbedding" in self.names:
            build.append(_ROTARY.format(self.names.rpartition(" ")[2].removesuffix("RotaryEmbedding")))
        return _TEXT.format(
            names=self.names,
            library=self.library,
            origin=self.origin,
            further=f"{self.further}\n" if self.further else "",
            build="\n        ".join(build),
            call=self.call,
            shape=_SHAPES[self.shape].format(batch=batch, width=width, side=side),
            width=width,
            side=side,
            cast=cast,
        )

    @property
    def library(self) -> str:
        """The package to install."""
        return self.origin.partition(".")[0]


MODULES = tuple(
    _Module(**table)
    for table in tomllib.loads((Path(__file__).parent / "data" / "modules.toml").read_text(encoding="utf-8"))["modules"]
)


CASTS = {"modules": "", "modules-bf16": ".bfloat16()"}
"""Text that makes a module and its inputs of each suite's type."""


def entries_from_libraries(levels: Sequence[int], suite: str = "modules") -> tuple[list[SuiteEntry], dict[str, str]]:
    """The tasks of the libraries that are installed, and by id why others are left out.

    Args:
        levels: Levels to keep; all tasks are of one.
        suite: One of `CASTS`.

    Raises:
        TaskError: neither library is installed.
    """
    libraries = {module.library for module in MODULES}
    missing = {library for library in libraries if importlib.util.find_spec(library) is None}
    if missing == libraries:
        raise TaskError(
            "Wanted modules of torchvision and transformers; neither is installed. Run pip install 'kernelwright[modules]'."
        )
    entries: list[SuiteEntry] = []
    left_out: dict[str, str] = {}
    for module in MODULES if LEVEL in levels else ():
        for name, size in (("small", module.small), ("large", module.large)):
            task_id = f"{suite}/level{LEVEL}/{module.name}-{name}"
            if module.library in missing:
                left_out[task_id] = f"{module.library} is not installed; run pip install 'kernelwright[modules]'"
                continue
            task = Task(id=task_id, source=module.source(size, CASTS[suite]), origin=f"{suite}:{module.name}-{name}")
            entries.append(SuiteEntry(task, level=LEVEL))
    return entries, left_out
