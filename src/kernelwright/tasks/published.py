"""Loads published suites: KernelBench, CUDA-L1's release and robust-kbench. Nothing is executed here.

KernelBench (Ouyang et al., arXiv 2502.10517) comes from a checkout or from the Hugging Face hub.

CUDA-L1's release (arXiv 2507.14111) has 250 tasks of an older KernelBench with the kernels found. Each file
`optimized_cuda_code/<gpu>.json` holds one JSON object a line. `ref_code` is the task as they ran it, whose shapes are not
today's, and `custom_code` is the kernel. Every `score_*` is a speedup they claim.

robust-kbench (Lange et al., arXiv 2509.14279) comes from a checkout, each forward task in each setting. A task's folder
holds `func_forward.py`, which defines `Model` and `get_inputs` with keyword arguments, and `config_forward.json`, which
lists what to call them with. A task of ours is that text with one setting below it.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import InfrastructureError, InternalError, TaskError, listed
from kernelwright.files import BINARY_LIMIT_BYTES, TEXT_LIMIT_BYTES, go_offline_without_hub, read_regular
from kernelwright.records import Candidate, Task
from kernelwright.tasks.entries import NO_CODE, SuiteEntry
from kernelwright.tasks.source import check_task_source, parsed, read_source

# --- KernelBench ------------------------------------------------------------------------------------------------------


HUB_DATASET = "ScalingIntelligence/KernelBench"
HUB_COLUMNS = ("problem_id", "code")

_NUMBERED = re.compile(r"(\d+)_.*\.py")


def entries_from_checkout(checkout: Path, levels: Sequence[int]) -> list[SuiteEntry]:
    """The tasks of a checkout, by level and then by number.

    Args:
        checkout: The repository's root, or the folder in it that holds `level1`, `level2`, ...
        levels: Levels to read; each must be there.

    Raises:
        TaskError: there is no such folder or level, or a file in it is not a task.
    """
    if not checkout.is_dir():
        state = "it is a file" if checkout.exists() else "there is nothing"
        raise TaskError(f"Wanted a checkout of KernelBench, a folder, at {checkout}; {state}. Check --path.")
    root = checkout / "KernelBench" if (checkout / "KernelBench").is_dir() else checkout
    missing = [level for level in levels if not (root / f"level{level}").is_dir()]
    if missing:
        raise TaskError(_without_level(checkout, root, missing[0]))
    return [entry for level in levels for entry in _level_entries(root / f"level{level}", level)]


def _without_level(checkout: Path, root: Path, level: int) -> str:
    """Message for a folder that lacks a level: what was looked for, what is there, and what to do."""
    wanted = f"Wanted level {level} of KernelBench, a folder level{level} or KernelBench/level{level}, in {checkout}"
    levels = sorted(match[1] for path in root.iterdir() if (match := re.fullmatch(r"level(\d+)", path.name)))
    if levels:
        there = ",".join(levels)
        return f"{wanted}; found level {', '.join(levels)} only. Choose among these, for bench with --levels {there}."
    if re.fullmatch(r"level\d+", checkout.name):
        return f"{wanted}; that is one level itself. Name the folder above with --path, and the level with --levels."
    names = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
    return (
        f"{wanted}; found {listed(names, 4) if names else 'an empty folder'}. "
        "Point --path at a clone of github.com/ScalingIntelligence/KernelBench, or at a folder with level1/1_Title.py."
    )


def _level_entries(folder: Path, level: int) -> list[SuiteEntry]:
    paths: dict[int, Path] = {}
    for path in sorted(folder.glob("*.py")):
        match = _NUMBERED.fullmatch(path.name)
        if match is None:
            raise TaskError(f"Wanted tasks named NUMBER_TITLE.py in {folder}; found {path.name}.")
        number = int(match[1])
        if number in paths:
            both = f"{paths[number].name} and {path.name}"
            raise TaskError(f"Wanted one task {number} in {folder}; found {both}.")
        paths[number] = path
    entries = []
    for number, path in sorted(paths.items()):
        source = read_source(path, "a task of KernelBench")
        entries.append(_entry(level, number, source, str(path)))
    return entries


def entries_from_hub(levels: Sequence[int]) -> list[SuiteEntry]:
    """The tasks of the published data set, by level and then by number.

    Raises:
        InfrastructureError: the package `datasets` is missing, or the hub cannot be reached.
        TaskError: the data set has other columns, or a row is not a task.
    """
    go_offline_without_hub()
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InfrastructureError(
            "Wanted KernelBench from the Hugging Face hub; the package datasets is not installed. "
            "Run pip install 'kernelwright[hub]', or name a checkout with --path."
        ) from error
    entries = []
    for level in levels:
        split = f"level_{level}"
        try:
            rows = load_dataset(HUB_DATASET, split=split)
        # The package raises its own, requests', httpx's and plain OSErrors for one cause: no data set came.
        except Exception as error:
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InfrastructureError(
                f"Wanted {split} of {HUB_DATASET} from the Hugging Face hub; it did not come: {cause}. "
                "Check the network, or name a checkout with --path."
            ) from error
        entries += _hub_entries(rows, level)
    return entries


def _hub_entries(rows: Iterable[dict[str, Any]], level: int) -> list[SuiteEntry]:
    sources: dict[int, str] = {}
    for row in rows:
        missing = [column for column in HUB_COLUMNS if column not in row]
        if missing:
            raise TaskError(
                f"Wanted the columns {', '.join(HUB_COLUMNS)} in {HUB_DATASET}; "
                f"it has no {', '.join(missing)}. It has {', '.join(row) or 'none'}."
            )
        sources[int(row["problem_id"])] = str(row["code"])
    origin = f"hf:{HUB_DATASET}/level_{level}"
    return [_entry(level, number, source, f"{origin}/{number}") for number, source in sorted(sources.items())]


def _entry(level: int, number: int, source: str, origin: str) -> SuiteEntry:
    check_task_source(source, origin)
    task = Task(id=f"kernelbench/level{level}/{number}", source=source, origin=origin)
    return SuiteEntry(task, level=level)


# --- CUDA-L1's release ------------------------------------------------------------------------------------------------


COLUMNS = ("level_id", "task_id", "ref_code", "custom_code")
SCORE_PREFIX = "score_"


def entries_from_release(path: Path, levels: Sequence[int]) -> list[SuiteEntry]:
    """The tasks of one release file, by level and then by number, each with its kernel where it has one.

    Raises:
        TaskError: the file is missing or is not JSON lines with the columns of the release.
    """
    text = _release_text(path)
    entries: dict[tuple[int, int], SuiteEntry] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        row = _release_row(line, where)
        level, task = _integer(row, "level_id", where), _integer(row, "task_id", where)
        if level not in levels:
            continue
        if (level, task) in entries:
            raise TaskError(f"Wanted one row for task {task} of level {level}; {where} is a second one.")
        entries[level, task] = _release_entry(row, level, task, where)
    return [entry for _, entry in sorted(entries.items())]


def _release_text(path: Path) -> str:
    wanted = f"Wanted a file of CUDA-L1's release, such as optimized_cuda_code/h100.json, at {path}"
    try:
        return read_regular(path, BINARY_LIMIT_BYTES).decode("utf-8")
    except FileNotFoundError as error:
        raise TaskError(f"{wanted}; there is no such file. Check --path.") from error
    except IsADirectoryError as error:
        raise TaskError(f"{wanted}; it is a directory. Name a file in it.") from error
    except OSError as error:
        raise TaskError(f"{wanted}; {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{wanted}; found bytes that are not UTF-8 text.") from error


def _release_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"Wanted one JSON object a line; {where} is not JSON ({error}). "
            "Use a file straight in optimized_cuda_code, not one in its folder codes."
        ) from error
    if not isinstance(row, dict):
        raise TaskError(f"Wanted one JSON object a line; {where} holds a {type(row).__name__}.")
    missing = [column for column in COLUMNS if column not in row]
    if missing:
        raise TaskError(
            f"Wanted the columns {', '.join(COLUMNS)}; {where} has no {', '.join(missing)}. "
            f"It has {listed(row)}. Use a file straight in optimized_cuda_code."
        )
    return row


def _integer(row: dict[str, Any], column: str, where: str) -> int:
    value = row[column]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TaskError(f"Wanted a whole number as {column} in {where}; found {value!r}.")
    return value


def _code(row: dict[str, Any], column: str, where: str) -> str | None:
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise TaskError(f"Wanted text or null as {column} in {where}; found a {type(value).__name__}.")
    return None if value is None or value.strip() in NO_CODE else value


def _release_entry(row: dict[str, Any], level: int, number: int, where: str) -> SuiteEntry:
    reference = _code(row, "ref_code", where)
    if reference is None:
        raise TaskError(f"Wanted the code of a task as ref_code in {where}; found none.")
    check_task_source(reference, where)
    custom = _code(row, "custom_code", where)
    candidate = None
    if custom is not None:
        candidate = Candidate(source=custom, policy="cuda-l1", note=f"published in {where}")
    task = Task(id=f"cuda-l1/level{level}/{number}", source=reference, origin=where)
    return SuiteEntry(task, candidate, level, _published(row, where))


def _published(row: dict[str, Any], where: str) -> dict[str, float]:
    published: dict[str, float] = {}
    for column, value in row.items():
        if not column.startswith(SCORE_PREFIX) or value is None:
            continue
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TaskError(f"Wanted a number or null as {column} in {where}; found {value!r}.")
        published[column] = float(value)
    return published


# --- robust-kbench ----------------------------------------------------------------------------------------------------


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
        levels: Levels to read.

    Raises:
        TaskError: there is no such folder, or a file in it cannot be read.
    """
    root = checkout / "tasks" if (checkout / "tasks").is_dir() else checkout
    folders = list(_folders(root))
    if not folders:
        state = "there is nothing" if not checkout.exists() else "it is a file" if checkout.is_file() else None
        state = state or f"found {listed(sorted(path.name for path in root.iterdir())) or 'an empty folder'}"
        raise TaskError(
            f"Wanted a checkout of robust-kbench, a folder with tasks/NAME/{_FORWARD}, at {checkout}; {state}. "
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
