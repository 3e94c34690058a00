"""Brings a task's module to life: executes it, draws its inputs and constructs its reference.

A task's own code is trusted: it defines what is right. It runs in the judge's process (as the float64 truth) and in
the reference's; candidates never do.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.tasks.source import check_task_source, line_in_file

_CONSTRUCTOR = "Have get_init_inputs() return a list of the arguments that Model's constructor takes."


@dataclass(frozen=True, slots=True)
class LiveTask:
    """A task whose module has been executed in this process."""

    task: Task
    module: types.ModuleType
    init_inputs: list[Any]
    """The constructor's arguments, from `get_init_inputs`."""

    def inputs(self, seed: int, device: torch.device) -> list[Any]:
        """Draw a fresh set of inputs on `device`; the same seed gives the same inputs.

        Raises:
            TaskError: `get_inputs` raised or did not return a list.
        """
        with _seeded(seed, device), _as_task_error(self.task, "get_inputs"):
            with torch.device(device):
                drawn = self.module.get_inputs()
            if isinstance(drawn, list | tuple):
                return [_to_device(item, device) for item in drawn]
        raise TaskError(
            f"Wanted a list of inputs from get_inputs of {self.task.id}; found {type(drawn).__name__}. Have it return "
            "the arguments of Model.forward, as in [x]."
        )

    def model(self, seed: int, device: torch.device) -> torch.nn.Module:
        """Construct the reference from a seed.

        Raises:
            TaskError: the constructor raised, or `Model` is no module.
        """
        given = ", ".join(repr(item)[:40] for item in self.init_inputs)
        with _seeded(seed, device), _as_task_error(self.task, f"Model({given})", _CONSTRUCTOR):
            built = self.module.Model(*self.init_inputs)
            if isinstance(built, torch.nn.Module):
                built = built.to(device)
        if not isinstance(built, torch.nn.Module):
            raise TaskError(f"Wanted a torch.nn.Module from Model of {self.task.id}; found {type(built).__name__}.")
        if (found := unfit_state(built)) is not None:
            raise TaskError(f"Wanted plain tensors in the state_dict of Model of {self.task.id}; found {found}")
        return built


def bring_to_life(task: Task) -> LiveTask:
    """Execute a task's module.

    Raises:
        TaskError: it raised, or one of its three names is not what it should be.
    """
    check_task_source(task.source, task.origin or task.id)
    name = f"kernelwright_task_{task.sha256[:12]}"
    filename = _filename(task)
    # inspect.getsource, which Triton and torch.jit need, reads from here.
    linecache.cache[filename] = (len(task.source), None, task.source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    module.__file__ = filename
    with _seeded(0, torch.device("cpu")), _as_task_error(task, "the module"):
        exec(compile(task.source, filename, "exec"), module.__dict__)
    with _seeded(0, torch.device("cpu")), _as_task_error(task, "get_init_inputs"):
        init_inputs = module.get_init_inputs()
    if not isinstance(init_inputs, list | tuple):
        raise TaskError(f"Wanted a list from get_init_inputs of {task.id}; found {type(init_inputs).__name__}.")
    return LiveTask(task, module, list(init_inputs))


_DTYPES = """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64
    complex64 complex128
"""
"""Types of which values can be drawn, varied and compared."""


def unfit(value: Any, *, sparse: bool = False) -> str | None:
    """Kind of a tensor that cannot be varied, sent to other processes and compared, and what to do; None for a plain tensor.

    Args:
        sparse: True takes a sparse tensor, of which nothing is varied.
    """
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, which is no tensor. Leave it out of get_extra_state"
    if torch.nn.parameter.is_lazy(value):
        return f"a {type(value).__name__} without values. Call the model once before, or name its sizes in the constructor"
    name, layout = str(value.dtype).removeprefix("torch."), str(value.layout).removeprefix("torch.")
    is_plain = layout == "strided" or (sparse and "sparse" in layout)
    if is_plain and name in _DTYPES.split() and not value.is_nested and not is_traceable_wrapper_subclass(value):
        return None
    to_do = "Keep its content in strided tensors of a usual type, and make it in forward"
    to_do = "Give the model as it was before it was quantised" if value.is_quantized else to_do
    return f"a {layout} {type(value).__name__} of {name}. {to_do}"


def unfit_state(model: torch.nn.Module) -> str | None:
    """The first entry of a module's state that can be no weight or buffer, with its part and what to do; None if all can."""
    parameters, parts = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_modules())
    for key, value in model.state_dict().items():
        part = parts.get(key.rpartition(".")[0], model)
        found = unfit(value, sparse=key not in parameters)
        if found and "quantized" in type(part).__module__:
            found = "packed weights of a quantised layer. Give the model as it was before it was quantised"
        elif (
            not found
            and value.layout is torch.strided
            and any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))
        ):
            found = "an expanded tensor, into which nothing can be loaded. Call .contiguous() on it"
        if found:
            return f"in `{key}`, of a {type(part).__name__}, {found}."
    return None


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        seed_generators(seed)
        yield


def seed_generators(seed: int) -> None:
    """Seed torch's generators of the processor and of all GPUs.

    `torch.manual_seed` writes down the call stack for each kind of device that is not in use: 0.2 ms or more.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def device_is_full(error: BaseException) -> bool:
    """True where an exception says that a GPU's memory ran out."""
    if isinstance(error, torch.AcceleratorError):
        return "out of memory" in str(error)
    # A library that finds no memory for its handle says so in an error of no particular type.
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "_ALLOC_FAILED" in str(error))


_SPARE_BYTES = 8 << 30
"""GPU memory that PyTorch may keep free; other processes need the rest. To return it makes all streams wait. Our choice."""


def give_back_spare_memory(device: torch.device) -> None:
    """Return what PyTorch keeps free in this process to a GPU, if it is much."""
    if device.type == "cuda" and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > _SPARE_BYTES:
        torch.cuda.empty_cache()


def printing_aside() -> contextlib.AbstractContextManager[object]:
    """Send what a task prints to standard error: standard output holds the result alone, for programs to read."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def _as_task_error(task: Task, what: str, to_do: str = "") -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        if device_is_full(error):
            raise  # others may have filled it: not the task's fault
        raise TaskError(
            f"Wanted {what} of {task.origin or task.id} to run; it raised {described(error, task, to_do)}"
        ) from error


def described(error: BaseException, task: Task, to_do: str = "") -> str:
    """An exception of a task's own code in one line: its kind, its message, where it was raised, and what to do."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.replace(".", "/")
        neighbour = Path(task.origin).parent / missing
        to_do = f"Put {missing}.py or the package {missing} into the folder of the task's file, or install it."
        if neighbour.with_suffix(".py").is_file() or neighbour.is_dir():
            to_do = f"Write `import {error.name}`: beside the task's file only what `import` statements name is found."
    elif isinstance(error, ImportError) and "relative import" in first:
        to_do = "Leave out the dot before the module's name: a task's file is no part of a package."
    return f"{type(error).__name__}: {first.rstrip('.')}{_place(error, task)}. {to_do}".rstrip()


def _place(error: BaseException, task: Task) -> str:
    """The innermost line of the task's own files that an exception came through; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == _filename(task):
            return f", in line {line_in_file(task.source, frame.lineno or 1)} of {Path(task.origin or task.id).name}"
        if frame.filename.startswith("<") and frame.filename.endswith(".py>"):
            return f", in line {frame.lineno} of {frame.filename[1:-1]}"
    return ""


def _filename(task: Task) -> str:
    return f"<task {task.id}>"


def _to_device(item: Any, device: torch.device) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach().to(device)
    if isinstance(item, list | tuple):
        return type(item)(_to_device(part, device) for part in item)
    if isinstance(item, dict):
        return {key: _to_device(part, device) for key, part in item.items()}
    return item
