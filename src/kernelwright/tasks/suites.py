"""Finds tasks by name: one by its file or id, or a suite, such as the built-in one, KernelBench or CUDA-L1's release.

The built-in suite is the `.task` files of `data`, each the Python text of one task in KernelBench's format. The first line
of its docstring says its class, before the colon, and what bounds it. Sizes are small enough for one CPU core: an eager
forward takes about 0.3 to 30 ms. Inputs are signed and outputs depend on all of them, so that no constant passes for a
solution.

The suite `modules` has modules of torchvision and transformers at two sizes each, as the user has them installed;
`modules-bf16` has the same with weights and inputs of bfloat16, in which networks are mostly run.

The modules are listed in `data/modules.toml`; none was written for this program or for a benchmark. A task constructs a
library's own module, in eval mode, with weights as its constructor draws them and without dropout: the judge compares
outputs in training mode too. Nothing is downloaded, and nothing is executed here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.tasks.entries import Suite, SuiteEntry, chosen_tasks, near_names
from kernelwright.tasks.published import entries_from_checkout, entries_from_hub, entries_from_release, entries_from_tasks
from kernelwright.tasks.source import bundled, check_task_source, read_source

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


CLASS_LEVELS: dict[str, int] = {
    "gemm": 1,
    "gemm-extreme": 1,
    "elementwise": 1,
    "softmax": 1,
    "norm": 1,
    "pooling": 1,
    "reduction": 1,
    "convolution": 1,
    "scan": 1,
    "loss": 1,
    "gemm+pointwise": 2,
    "gemm+reduce": 2,
    "gemm+norm": 2,
    "conv+pointwise": 2,
    "conv+pool": 2,
    "conv+norm": 2,
    "mlp": 3,
    "rnn": 3,
    "attention": 3,
    "cnn-block": 3,
    "network": 3,
    "state-space": 3,
    "netvlad": 3,
}
"""Level of each class of built-in task, as in KernelBench: 1 an operation, 2 a few of them, 3 a network."""

_DIRECTORY = Path(__file__).parent / "data"


@cache
def builtin_names() -> tuple[str, ...]:
    """Ids of the built-in tasks, in alphabetical order."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.task")))


def builtin_tasks() -> list[Task]:
    """Every task of the built-in suite, in alphabetical order."""
    return [builtin_task(name) for name in builtin_names()]


def builtin_task(name: str) -> Task:
    """One task of the built-in suite.

    Raises:
        TaskError: there is none of this name; the message names close ones.
    """
    names = builtin_names()
    if name not in names:
        raise TaskError(
            f"Wanted a task: a Python file, one of the {len(names)} built-in ids, or an id such as "
            f"kernelbench/level1/1 with --path; found {name!r}, which is none of them." + near_names(name, names)
        )
    source = (_DIRECTORY / f"{name}.task").read_text(encoding="utf-8")
    return Task(id=name, source=source, origin=f"builtin:{name}")


def task_class(task: Task) -> str | None:
    """The class of a built-in task, such as `gemm+reduce`; None for a task from elsewhere."""
    try:
        docstring = ast.get_docstring(ast.parse(task.source))
    except SyntaxError:
        return None
    kind, colon, _ = (docstring or "").partition(":")
    return kind if colon and kind in CLASS_LEVELS else None


def builtin_entries(levels: Sequence[int]) -> list[SuiteEntry]:
    """The built-in tasks of some levels, in alphabetical order."""
    entries = []
    for task in builtin_tasks():
        kind = task_class(task)
        level = CLASS_LEVELS[kind] if kind else None
        if level in levels:
            entries.append(SuiteEntry(task, level=level))
    return entries


_PLACES = {
    "kernelbench": "a checkout of KernelBench",
    "cuda-l1": "a JSON lines file of CUDA-L1's release",
    "robust-kbench": "a checkout of robust-kbench",
}
SUITE_NAMES = ("builtin", *CASTS, *_PLACES)
_LEVEL = re.compile(r"level(\d{1,3})/")


def load_task(name_or_path: str, path: Path | None = None) -> Task:
    """A task from a Python file, by its id in the built-in suite, or by an id that records of another suite show.

    Args:
        name_or_path: A file, or an id such as `diag_matmul`, `modules/level3/bert-attention` or `kernelbench/level1/1`.
        path: The suite of an id that does not come with the package: a checkout, or a file of CUDA-L1's release.

    Raises:
        TaskError: there is no such file or id, or the file is not a task.
    """
    suite, _, rest = name_or_path.partition("/")
    level = _LEVEL.match(rest)
    if suite in SUITE_NAMES and rest and not Path(name_or_path).exists():
        if path is None and (what := _PLACES.get(suite)):
            raise TaskError(f"Wanted {what}, from which {name_or_path} is taken; found no path. Name it with --path.")
        loaded = load_suite(suite, path=path, levels=(int(level[1]),)) if level else load_suite(suite, path=path)
        return chosen_tasks(loaded, [rest]).entries[0].task
    if path is not None:
        raise TaskError(
            f"Wanted an id such as kernelbench/level1/1 or cuda-l1/level1/1 beside --path; found {name_or_path!r}. "
            "Name such an id, or leave --path out."
        )
    file = Path(name_or_path)
    try:
        is_file = bool(name_or_path) and (file.suffix == ".py" or file.exists())
    except OSError as error:
        raise TaskError(f"Wanted a task, a file or an id; found {name_or_path[:40]!r}...: {error.strerror}.") from error
    return task_from_file(file) if is_file else builtin_task(name_or_path)


def task_from_file(path: Path) -> Task:
    """A task from a Python file in KernelBench's format, with modules of its folder that it imports. Nothing is executed.

    Raises:
        TaskError: it cannot be read, is no task, or imports a module from its folder that cannot be read.
    """
    source = read_source(path, "a task")
    check_task_source(source, str(path))
    return Task(id=path.stem, source=bundled(source, path.parent), origin=str(path))


def load_suite(name: str, *, path: Path | None = None, levels: Sequence[int] = (1, 2, 3), hub: bool = False) -> Suite:
    """Load a suite by name.

    Args:
        name: One of `SUITE_NAMES`.
        path: For `kernelbench` and `robust-kbench` a checkout, for `cuda-l1` one of the release's JSON lines files.
        levels: The levels to keep.
        hub: Read `kernelbench` from the Hugging Face hub instead of a checkout.

    Raises:
        TaskError: no such suite, its files are missing or are not what they should be, or no task is left.
        InfrastructureError: the hub was asked for and cannot be used.
    """
    _check_request(name, path, levels, hub)
    left_out: dict[str, str] = {}
    if name == "builtin":
        entries = builtin_entries(levels)
    elif name in CASTS:
        entries, left_out = entries_from_libraries(levels, name)
    elif name == "robust-kbench":
        entries, left_out = entries_from_tasks(_required(path, name), levels)
    elif name == "cuda-l1":
        entries = entries_from_release(_required(path, name), levels)
    elif hub:
        entries = entries_from_hub(levels)
    else:
        entries = entries_from_checkout(_required(path, name), levels)
    if not entries:
        raise TaskError(f"Wanted tasks of level {_listed(levels)} in the suite {name}; found none. Check --levels.")
    return Suite(name, tuple(entries), left_out)


def _check_request(name: str, path: Path | None, levels: Sequence[int], hub: bool) -> None:
    """Raise TaskError where there is no such suite, or what was asked for does not go with it."""
    if name not in SUITE_NAMES:
        hint = near_names(name, SUITE_NAMES)
        raise TaskError(f"Wanted a suite, one of {', '.join(SUITE_NAMES)}; found {name!r}.{hint}")
    if not levels:
        raise TaskError(f"Wanted at least one level of the suite {name}; found none.")
    if hub and name != "kernelbench":
        raise TaskError(f"Wanted the suite {name} from the hub; only kernelbench is read from there. Leave --hub out.")
    if name not in _PLACES and path is not None:
        raise TaskError(f"Wanted the suite {name}; found the path {path}. It comes with the package. Leave --path out.")
    if hub and path is not None:
        raise TaskError(f"Wanted kernelbench both from the hub and from {path}; choose one.")


def _required(path: Path | None, name: str) -> Path:
    if path is None:
        hub = ", or read the suite with --hub" if name == "kernelbench" else ""
        raise TaskError(f"Wanted {_PLACES[name]} for the suite {name}; found no path. Name one with --path{hub}.")
    return path


def _listed(levels: Sequence[int]) -> str:
    return ", ".join(map(str, levels))
