"""Loads robust-kbench (Lange et al., arXiv 2509.14279) as a suite, from a checkout: each forward task in each setting.

A task's folder holds `func_forward.py`, which defines `Model` and `get_inputs` with keyword arguments, and
`config_forward.json`, which lists what to call them with. A task of ours is that text with one setting below it. Nothing is
executed here.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import InternalError, TaskError, listed
from kernelwright.files import TEXT_LIMIT_BYTES, read_regular
from kernelwright.records import Task
from kernelwright.tasks.entries import SuiteEntry
from kernelwright.tasks.source import check_task_source, parsed, read_source

OWN_LEVEL = 3
"""Level of robust-kbench's own tasks. Its copies of KernelBench are of levels 1 and 2."""

_NAME = "robust-kbench"
_CONFIG, _FORWARD, _BACKWARD = "config_forward.json", "func_forward.py", "func_backward.py"
_SETTING = """

# One setting of {config}, in the form that a task of KernelBench has.
def get_inputs(drawn=get_inputs):
    return drawn({inputs})


def get_init_inputs():
    return [{init}]
"""


def entries_from_tasks(checkout: Path, levels: Sequence[int]) -> tuple[list[SuiteEntry], dict[str, str]]:
    """The tasks of a checkout, its copies of KernelBench first, and by id why others are left out.

    The first setting of a task is the one that robust-kbench times by default, and its id is the task's name. Others
    that differ have a number after it: `layernorm`, `layernorm-2`.

    Args:
        checkout: The repository's root, or its folder `tasks`.
        levels: Which levels to read.

    Raises:
        TaskError: there is no such folder, or a file in it cannot be read.
    """
    root = checkout / "tasks" if (checkout / "tasks").is_dir() else checkout
    folders = list(_folders(root))
    if not folders:
        found = "there is nothing" if not checkout.exists() else "it is a file" if checkout.is_file() else None
        found = found or f"found {listed(sorted(path.name for path in root.iterdir())) or 'an empty folder'}"
        raise TaskError(
            f"Wanted a checkout of robust-kbench, a folder with tasks/NAME/{_FORWARD}, at {checkout}; {found}. "
            "Point --path at a clone of github.com/SakanaAI/robust-kbench."
        )
    entries: list[SuiteEntry] = []
    left_out: dict[str, str] = {}
    for level, name, folder in folders:
        if level in levels:
            _add(f"{_NAME}/level{level}/{name}", level, folder, entries, left_out)
    return entries, left_out


def _folders(root: Path) -> Iterator[tuple[int, str, Path]]:
    """Level, name and folder of each task."""
    copies = [
        (int(path.parent.name.removeprefix("level_")), int(path.name.removeprefix("task_")), path)
        for path in root.glob("kernelbench/level_[0-9]*/task_[0-9]*")
    ]
    yield from ((level, str(number), path) for level, number, path in sorted(copies))
    own = sorted(path for path in root.glob("*") if any((path / name).is_file() for name in (_FORWARD, _BACKWARD)))
    yield from ((OWN_LEVEL, path.name, path) for path in own)


def _add(task_id: str, level: int, folder: Path, entries: list[SuiteEntry], left_out: dict[str, str]) -> None:
    """Add a task of each setting of a folder, or say why there is none."""
    if (folder / _BACKWARD).is_file():
        left_out[f"{task_id}:backward"] = "only forward passes are tasks"
    if not (folder / _FORWARD).is_file() or not (folder / _CONFIG).is_file():
        left_out[task_id] = f"its folder lacks {_FORWARD} or {_CONFIG}"
        return
    source = read_source(folder / _FORWARD, "a task of robust-kbench")
    known: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for given in _settings(folder / _CONFIG):
        unfit = ""
        try:
            given = _called_with(source, *given, folder / _FORWARD)
        except UnfitSettingError as error:
            unfit = str(error)
        if given in known:
            continue
        known.append(given)
        one = task_id if len(known) == 1 else f"{task_id}-{len(known)}"
        if unfit:
            left_out[one] = unfit
            continue
        init, inputs = given
        text = _SETTING.format(
            config=_CONFIG,
            inputs=", ".join(f"{key}={value!r}" for key, value in inputs.items()),
            init=", ".join(map(repr, init.values())),
        )
        task = Task(id=one, source=source.rstrip() + "\n" + text, origin=f"{folder / _FORWARD} (setting {len(known)})")
        check_task_source(task.source, task.origin)
        entries.append(SuiteEntry(task, level=level))


def _settings(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Keyword arguments of Model and of get_inputs, in the order in which robust-kbench makes them.

    Raises:
        TaskError: it is not the JSON that robust-kbench reads.
    """
    try:
        config = json.loads(read_regular(path, TEXT_LIMIT_BYTES))
        for kind in ("single", "multi"):
            lists = [config[f"{kind}_{part}_configs"] for part in ("init", "input", "shared")]
            for init, inputs, shared in itertools.product(*lists):
                yield {**init, **shared}, {**inputs, **shared}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TaskError(
            f"Wanted settings of robust-kbench, lists such as single_init_configs, in {path}; "
            f"found {type(error).__name__}: {error}. Check the checkout."
        ) from error


def _called_with(
    source: str, init: dict[str, Any], inputs: dict[str, Any], where: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of Model and of get_inputs in a setting, with the defaults of those that it does not name.

    Raises:
        UnfitSettingError: the functions do not take them.
    """
    tree = parsed(source, f"a task in {where}")
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    methods = {
        method.name: method
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Model"
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }
    return _bound(methods.get("__init__"), init, "Model"), _bound(functions.get("get_inputs"), inputs, "get_inputs")


def _bound(function: ast.FunctionDef | None, given: dict[str, Any], name: str) -> dict[str, Any]:
    """Values of a function's arguments in its order.

    Raises:
        UnfitSettingError: it takes others.
    """
    arguments = [item.arg for item in function.args.args if item.arg != "self"] if function else []
    defaults = function.args.defaults if function else []
    if unknown := [key for key in given if key not in arguments]:
        raise UnfitSettingError(f"its setting has {listed(unknown)}, which {name} does not take")
    values: dict[str, Any] = {}
    try:
        if defaults:
            values = {key: ast.literal_eval(node) for key, node in zip(arguments[-len(defaults) :], defaults, strict=True)}
    except ValueError:
        raise UnfitSettingError(f"a default of {name} is computed") from None
    values |= given
    if missing := [key for key in arguments if key not in values]:
        raise UnfitSettingError(f"its setting lacks {listed(missing)}, which {name} takes")
    return {key: values[key] for key in arguments}


class UnfitSettingError(InternalError):
    """A setting does not fit its functions."""
