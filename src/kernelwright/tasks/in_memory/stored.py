"""Turns a model in memory and its example inputs into a task, which the judge runs in processes of its own.

The task's text calls the model's `forward` with tensors by name and takes apart what it returns. The model and the inputs
lie in two files, which the text names by a hash of what the model is made of. Their folder is on Python's path of the
judge's processes, which may read it and not write to it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.machinery
import inspect
import linecache
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
from torch import fx, nn
from torch.fx.graph_module import _format_import_block
from torch.nn.utils.parametrize import is_parametrized
from torch.package.importer import sys_importer

from kernelwright.errors import InfrastructureError, ModelError
from kernelwright.files import replace_file
from kernelwright.records import Task, sha256_of
from kernelwright.tasks.carried import MODULES_OWN
from kernelwright.tasks.in_memory.inputs import InputDraws, ModelCall, is_plain, name_of

_present: contextvars.ContextVar[nn.Module | None] = contextvars.ContextVar("present", default=None)
"""A model that `stored_model` gives in the place of the stored one."""


_TEXT = """{description}

import torch
from kernelwright.tasks.in_memory import stored_inputs, stored_model


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = stored_model({key!r})
        self.training = self.model.training

    def forward(self, {arguments}):
        {body}


def get_inputs():
    return stored_inputs({inputs_key!r})


def get_init_inputs():
    return []
"""


_NO_PART = ("training", "last_path")
"""Plain attributes that are no part of what a model computes: its mode, told apart, and the path of its latest call."""
_SHARED_BYTES = 1 << 30
"""Size of a model's file from which the processes that load it share its pages: a judge and screening are a dozen. Our
choice."""
_SHOWN = 24_000
"""Most characters of a model's description in a task's text, where language models read it. Our choice."""


def task_of(model: nn.Module, call: ModelCall, folder: Path) -> Task:
    """The task of a model on inputs of one form; writes the model and the inputs into `folder`.

    Raises:
        ModelError: the model cannot be stored.
    """
    description = _description(model)
    first = call.examples[0]
    invocation = f"self.model.forward({', '.join(first.values)})"
    body = f"return {invocation}"
    if not call.whole:
        body = f"out = {invocation}\n        return [{', '.join(call.outputs)}]"
    key, inputs_key = (sha256_of(text)[:16] for text in (description, f"{description}{call.description}{call.form}"))
    shown = description if len(description) <= _SHOWN else description[:_SHOWN] + "\n..."
    source = _TEXT.format(
        description=_docstring(f"The model {name_of(model)} on inputs {call.description}.\n\n{shown}"),
        key=key,
        inputs_key=inputs_key,
        arguments=", ".join(first.names),
        body=body,
    )
    draws = InputDraws(call.examples, name_of(model))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((_model_file(key), model), (_inputs_file(inputs_key), draws)):
            if not (folder / name).exists():  # that of an earlier run, which is to be resumed
                replace_file(folder / name, _stored(content, model))
    except OSError as error:
        raise InfrastructureError(
            f"Wanted to write {name_of(model)} to {folder}; {error.strerror}. Make room, or choose another `out`."
        ) from error
    return Task(id=type(model).__name__, source=source, origin="a model in memory")


def _docstring(text: str) -> str:
    return '"""' + text.replace("\\", "\\\\").replace('"""', "'''").rstrip('"') + '\n"""'


def _description(model: nn.Module) -> str:
    """Structure of a model without the values of its weights: two models with one description compute the same."""
    kinds = {type(child): None for child in model.modules() if not type(child).__module__.startswith("torch.")}
    lines = [f"In {'train' if model.training else 'eval'} mode:", repr(model), ""]
    for name, child in model.named_modules():
        plain = {
            key: value
            for key, value in sorted(vars(child).items())
            if type(child) in kinds and key not in _NO_PART and not key.startswith("_") and _is_plain_data(value)
        }
        lines += [f"{name or 'model'}: {plain}"] if plain else []
        lines += [child.code] if isinstance(child, torch.fx.GraphModule) else []
    lines += [f"{key}: {tuple(value.shape)} {value.dtype}" for key, value in model.state_dict().items()]
    for kind in kinds:
        with contextlib.suppress(OSError, TypeError):
            lines += ["", inspect.getsource(kind)]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))


def _is_plain_data(value: Any) -> bool:
    return all(map(_is_plain_data, value)) if type(value) in (list, tuple) else is_plain(value)


def _model_file(key: str) -> str:
    return f"model-{key}.pt"


def _inputs_file(key: str) -> str:
    return f"inputs-{key}.pt"


def _stored(content: object, model: nn.Module) -> memoryview:
    buffer = BytesIO()
    with _by_value(model):
        try:
            torch.save(content, buffer, pickle_module=types.SimpleNamespace(__name__="pickler", Pickler=_Pickler))
        except Exception as error:
            raise ModelError(
                f"Wanted a model that can be pickled, since it is judged in other processes; {_unpicklable(model)}: "
                f"{str(error).splitlines()[0]}. Make it in forward, or leave it out of __getstate__."
            ) from error
    return buffer.getbuffer()


class _GraphCode(nn.Module):
    """A graph module as the text of its code. FX traces such code anew to load one, which changes or refuses some."""

    text: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the code."""
        return _function(self.text)(self, *args, **kwargs)


@functools.cache
def _function(text: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "<graph>", "exec"), names)
    return cast(Callable[..., Any], names["forward"])


def _graph_code(text: str, attributes: dict[str, Any]) -> nn.Module:
    """The module of such a text, with the attributes that a graph module had."""
    made = _GraphCode()
    vars(made).update(attributes, text=text)
    return made


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Stores what has a context variable by the name under which a module has it, as the hooks of a library share one, and
    graph modules as their code."""

    def reducer_override(self, item: Any) -> Any:
        """The parts of a pickled object."""
        if isinstance(item, fx.GraphModule):
            code = item.graph.python_code("self")
            text = f"{_format_import_block(code.globals, sys_importer)}\n{code.src}"
            kept = {name: one for name, one in vars(item).items() if name in MODULES_OWN or not name.startswith("_")}
            return _graph_code, (text, kept)
        held = getattr(item, "__dict__", {}).values()
        if any(type(one) is contextvars.ContextVar for one in (item, *held)):
            for module in list(sys.modules.values()):
                for name, found in list(getattr(module, "__dict__", {}).items()):
                    if found is item:
                        return getattr, (module, name)
        return super().reducer_override(item)


@contextlib.contextmanager
def _by_value(model: nn.Module) -> Iterator[None]:
    """Code that another process could not import is stored with the model: modules, and the classes that PyTorch makes for
    modules with parametrizations, whose `__getstate__` raises."""
    names = {type(child).__module__.partition(".")[0] for child in model.modules()} - {"__main__"}
    hidden = [sys.modules[name] for name in names if name in sys.modules and not _can_be_imported(name)]
    for module in hidden:
        cloudpickle.register_pickle_by_value(module)
    kinds = {type(child) for child in model.modules() if is_parametrized(child) and "__getstate__" in vars(type(child))}
    raising = [(kind, kind.__dict__["__getstate__"]) for kind in kinds]
    for kind in kinds:
        del kind.__getstate__
    try:
        yield
    finally:
        for kind, method in raising:
            type.__setattr__(kind, "__getstate__", method)
        for module in hidden:
            cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    if name in sys.builtin_module_names:
        return True
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    specs = (finder.find_spec(name, None) for finder in finders)
    return any(spec is not None and _is_there(spec) for spec in specs)


def _is_there(spec: importlib.machinery.ModuleSpec) -> bool:
    return spec.origin is not None or bool(spec.submodule_search_locations)


def _unpicklable(model: nn.Module) -> str:
    """Name the attribute that cannot be pickled, and its part."""
    for path, child in model.named_modules():
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                try:
                    cloudpickle.dumps(value)
                except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError):
                    return f"`{'.'.join(filter(None, ('model', path, name)))}` is a {type(value).__name__}"
    return f"something in this {name_of(model)} cannot"


# --- in the judge's processes ---------------------------------------------------------------------------------------


def stored_model(key: str) -> nn.Module:
    """The model of a task, loaded anew; in `with_present_model` the present one."""
    present = _present.get()
    if present is not None:
        return present
    model: nn.Module = _loaded(_model_file(key))
    _name_modules(model)
    return model


def _name_modules(model: nn.Module) -> None:
    """Give code that was stored by value a module of its own to be from, where torch.compile looks its globals up: another
    process has another `__main__`."""
    kinds = {kind for child in model.modules() for kind in type(child).__mro__}
    for function in (member for kind in kinds for member in vars(kind).values() if isinstance(member, types.FunctionType)):
        names = function.__globals__
        if names.get("__name__") == "__main__" or names.get("__name__") not in sys.modules:
            own = types.ModuleType(f"kernelwright_{str(names.get('__name__')).strip('_')}")
            names["__name__"] = own.__name__
            vars(own).update(names)
            sys.modules[own.__name__] = own


def stored_inputs(key: str) -> list[torch.Tensor]:
    """Fresh inputs of a task."""
    draws: InputDraws = _loaded(_inputs_file(key))
    return draws.draw()


def _loaded(name: str) -> Any:
    for folder in sys.path:
        if (file := Path(folder) / name).is_file():
            shared = file.stat().st_size > _SHARED_BYTES
            return torch.load(file, map_location="cpu", weights_only=False, mmap=shared)
    raise FileNotFoundError(f"no {name} on Python's path; put the folder `model` of its run on PYTHONPATH")


@contextlib.contextmanager
def folder_on_path(folder: Path) -> Iterator[None]:
    """Processes that are started in here find the files in a folder, and what this process imports from the folder of its
    program, which defines the model."""
    before = list(sys.path)
    whole = [entry or os.getcwd() for entry in before]
    # Workers leave out the first entry, the program's folder: here it is wanted, and comes once more.
    sys.path[:] = [*whole, whole[0], str(folder.resolve())]
    try:
        yield
    finally:
        sys.path[:] = before


def candidate_of(source: str, model: nn.Module) -> nn.Module:
    """The module `ModelNew` of a candidate's text, around a model that is present.

    Raises:
        ModelError: it holds another model.
    """
    module = types.ModuleType(f"kernelwright_optimized_{sha256_of(source)[:12]}")
    filename = f"<{module.__name__}>"
    # Triton reads a kernel's text from here, and its module from there.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    sys.modules[module.__name__] = module
    token = _present.set(model)
    try:
        exec(compile(source, filename, "exec"), module.__dict__)
        built: nn.Module = module.ModelNew()
    finally:
        _present.reset(token)
    if getattr(built, "model", None) is not model:
        raise ModelError(
            f"Wanted optimized code that takes the weights of {name_of(model)}; it makes a model of its own. Its text is in "
            "optimized.py of the run."
        )
    return built
