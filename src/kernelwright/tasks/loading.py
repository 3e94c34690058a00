"""Read a task from a file or a suite id, and bring its module to life.

A task's own code is trusted: it defines what is right. It runs in the judge's process (as the float64 truth) and in
the reference's; candidates never do.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelwright.errors import TaskError, UsageError
from kernelwright.files import TEXT_LIMIT_BYTES, has_text_name, read_regular
from kernelwright.records import Task

REQUIRED_NAMES = ("Model", "get_inputs", "get_init_inputs")


def load_task(name_or_path: str) -> Task:
    """A task from a Python file, or by its id in the built-in suite.

    Raises:
        TaskError: there is no such file or id, or the file is not a task.
    """
    path = Path(name_or_path)
    try:
        is_file = bool(name_or_path) and (path.suffix == ".py" or path.exists())
    except OSError as error:
        raise TaskError(f"Wanted a task, a file or an id; found {name_or_path[:40]!r}...: {error.strerror}.") from error
    if is_file:
        return task_from_file(path)
    from kernelwright.tasks.suites import builtin_task

    return builtin_task(name_or_path)


def task_from_file(path: Path) -> Task:
    """A task from a Python file in KernelBench's format; only its syntax and names are checked here."""
    source = read_source(path, "a task")
    check_task_source(source, str(path))
    return Task(id=path.stem, source=source, origin=str(path))


def read_source(path: Path, what: str, wrong: type[UsageError] = TaskError) -> str:
    """The text of a Python file.

    Args:
        path: The file.
        what: What it should hold, in words.
        wrong: What to raise.

    Raises:
        UsageError: it is missing, is no regular file, is empty, too large or is not UTF-8 text, or its name is not.
    """
    wanted = f"Wanted {what}, a Python file, at {path}"
    if not has_text_name(path):
        raise wrong(f"{wanted}; its name is not UTF-8 text, and no record could hold it. Rename the file.")
    try:
        data = read_regular(path, TEXT_LIMIT_BYTES)
    except FileNotFoundError as error:
        raise wrong(f"{wanted}; there is no such file. Check the path.") from error
    except IsADirectoryError as error:
        raise wrong(f"{wanted}; it is a directory. Name a file in it.") from error
    except OSError as error:
        raise wrong(f"{wanted}; {error.strerror}. Name a file that can be read.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(f"{wanted}; found {len(data)} bytes that are not UTF-8 text.") from error
    if "\0" in text:
        raise wrong(f"{wanted}; found binary data with null bytes.")
    if not text.strip():
        raise wrong(f"{wanted}; the file is empty.")
    return text


def check_task_source(source: str, where: str) -> None:
    """See that a text is Python and defines what a task must.

    Raises:
        TaskError: it is not, or does not.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise TaskError(
            f"Wanted a task in {where}; it is not valid Python{line}: {getattr(error, 'msg', error)}."
        ) from error
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            defined |= {alias.asname or alias.name for alias in node.names}
    missing = [name for name in REQUIRED_NAMES if name not in defined]
    if missing:
        raise TaskError(
            f"Wanted a task in {where} that defines {', '.join(REQUIRED_NAMES)}; found no {', '.join(missing)}. "
            "See KernelBench's format in docs/start.md."
        )


@dataclass(frozen=True, slots=True)
class LiveTask:
    """A task whose module has been executed in this process."""

    task: Task
    module: types.ModuleType
    init_inputs: list[Any]
    """What `get_init_inputs` returned: the constructor's arguments."""

    def inputs(self, seed: int, device: torch.device) -> list[Any]:
        """Draw a fresh set of inputs on `device`; the same seed gives the same inputs.

        Raises:
            TaskError: `get_inputs` raised or did not return a list.
        """
        with _seeded(seed, device), _as_task_error(self.task, "get_inputs"):
            with torch.device(device):
                drawn = self.module.get_inputs()
        if not isinstance(drawn, list | tuple):
            raise TaskError(f"Wanted a list of inputs from get_inputs of {self.task.id}; found {type(drawn).__name__}.")
        return [_to_device(item, device) for item in drawn]

    def model(self, seed: int, device: torch.device) -> torch.nn.Module:
        """Construct the reference from a seed.

        Raises:
            TaskError: the constructor raised, or `Model` is no module.
        """
        with _seeded(seed, device), _as_task_error(self.task, "Model"):
            built = self.module.Model(*self.init_inputs)
        if not isinstance(built, torch.nn.Module):
            raise TaskError(f"Wanted a torch.nn.Module from Model of {self.task.id}; found {type(built).__name__}.")
        return built.to(device)


def bring_to_life(task: Task) -> LiveTask:
    """Execute a task's module.

    Raises:
        TaskError: it raised, or one of its three names is not what it should be.
    """
    check_task_source(task.source, task.origin or task.id)
    name = f"kernelwright_task_{task.sha256[:12]}"
    filename = f"<task {task.id}>"
    # inspect.getsource, which Triton and torch.jit need, reads from here.
    linecache.cache[filename] = (len(task.source), None, task.source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    module.__file__ = filename
    with _seeded(0, torch.device("cpu")), _as_task_error(task, "its module"):
        exec(compile(task.source, filename, "exec"), module.__dict__)
    with _seeded(0, torch.device("cpu")), _as_task_error(task, "get_init_inputs"):
        init_inputs = module.get_init_inputs()
    if not isinstance(init_inputs, list | tuple):
        raise TaskError(f"Wanted a list from get_init_inputs of {task.id}; found {type(init_inputs).__name__}.")
    return LiveTask(task, module, list(init_inputs))


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        seed_generators(seed)
        yield


def seed_generators(seed: int) -> None:
    """As `torch.manual_seed`, which writes down the whole call stack for each kind of device that is not in use yet, to say
    later who asked: a millisecond or more where the stack is deep. Where there is no GPU, nobody will."""
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def device_is_full(error: BaseException) -> bool:
    """Whether an exception says that a GPU's memory ran out."""
    if isinstance(error, torch.AcceleratorError):
        return "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError)


def printing_aside() -> contextlib.AbstractContextManager[object]:
    """What a task prints goes to standard error: on standard output there is the result alone, for programs to read."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def _as_task_error(task: Task, what: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        if device_is_full(error):
            raise  # others may have filled it: not the task's fault
        text = str(error).strip().splitlines()
        raise TaskError(
            f"Wanted {what} of task {task.id} to run; it raised {type(error).__name__}: {text[0] if text else ''}"
        ) from error


def _to_device(item: Any, device: torch.device) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach().to(device)
    if isinstance(item, list | tuple):
        return type(item)(_to_device(part, device) for part in item)
    if isinstance(item, dict):
        return {key: _to_device(part, device) for key, part in item.items()}
    return item
