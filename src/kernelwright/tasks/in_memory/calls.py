"""Checks that a model in memory and its example inputs can be judged, and takes apart what the model returns."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelwright.errors import ModelError
from kernelwright.tasks.in_memory.inputs import ExampleCall, Inputs, call_of, form_of, is_plain

Rebuild = Callable[[Iterator[Any]], Any]
"""Puts a result together again from its tensors and plain values, in reading order."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of one form, as it was tried on the model."""

    form: Any
    """`form_of` its arguments."""
    examples: tuple[ExampleCall, ...]
    outputs: tuple[str, ...]
    """Text for each tensor and plain value in the result `out`."""
    rebuild: Rebuild
    whole: bool
    """True where the result is one tensor."""

    @property
    def description(self) -> str:
        """The inputs in words."""
        return repr(Inputs(*self.examples[0].args, **self.examples[0].kwargs))


# --- what can be used -----------------------------------------------------------------------------------------------


def name_of(model: object) -> str:
    """A model's class in words."""
    kind = model if isinstance(model, type) else type(model)
    module = "torch.nn" if kind.__module__.startswith("torch.nn.") else kind.__module__
    return kind.__qualname__ if module in ("__main__", "builtins") else f"{module}.{kind.__qualname__}"


def check_model(model: object) -> nn.Module:
    """A model that can be optimized.

    Raises:
        ModelError: it is no module, or one that cannot be.
    """
    name = name_of(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ModelError(f"Wanted a model, an instance of torch.nn.Module; found the class {name}. Construct it first.")
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Wanted a model, an instance of torch.nn.Module, or a task; found a {name}. Put a function into a module's "
            "forward."
        )
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        raise ModelError(
            f"Wanted a model as it was written; found a {name}, compiled already. Give the module it was made from."
        )
    if "forward" in vars(model):
        raise ModelError(
            f"Wanted a model whose class defines forward; in this {name} the instance replaces it. Define it in a subclass."
        )
    modes = {child.training for child in model.modules()}
    if len(modes) > 1:
        raise ModelError(
            f"Wanted a model in one mode; parts of this {name} are in train mode and others in eval mode. Call "
            "model.eval() or model.train() first."
        )
    strange = [key for key, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise ModelError(
            f"Wanted tensors in the model's state_dict; `{strange[0]}` of this {name} is none. Leave it out of "
            "get_extra_state."
        )
    return model


def device_of(model: nn.Module, calls: Sequence[ExampleCall]) -> torch.device:
    """The one device of a model and its example inputs.

    Raises:
        ModelError: there are several, or it is one that computes nothing.
    """
    where = {tensor.device: f"model.{name}" for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    where |= {
        tensor.device: f"the input `{name}`" for call in calls for name, tensor in zip(call.names, call.tensors, strict=True)
    }
    if len(where) > 1:
        found = " and ".join(f"{what} on {device}" for device, what in where.items())
        raise ModelError(
            f"Wanted the model and its example inputs on one device; found {found}. Move them, as by model.to('cuda') and "
            "x.to('cuda')."
        )
    (device,) = where
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"Wanted a model on cpu or cuda; found it on {device}. Move it and its inputs to one of these.")
    return device


def tried(model: nn.Module, sets: Sequence[Inputs]) -> list[ModelCall]:
    """The calls that sets of example inputs stand for, those of one form together, tried on the model.

    Raises:
        ModelError: the inputs do not fit, or the outputs are none that the judge can compare.
    """
    name, signature = name_of(model), inspect.signature(model.forward)
    by_form: dict[Any, list[ExampleCall]] = {}
    calls = [call_of(signature, inputs, name) for inputs in sets]
    device_of(model, calls)
    for call in calls:
        by_form.setdefault(form_of((call.args, call.kwargs), []), []).append(call.copied())
    tried_calls = []
    for form, examples in by_form.items():
        result = call_untouched(model, examples[0])
        outputs: list[str] = []
        rebuild = _taken_apart(result, "out", outputs, name)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(result)):
            raise ModelError(
                f"Wanted a tensor among what forward of {name} returns; found a {type(result).__name__} without one."
            )
        tried_calls.append(ModelCall(form, tuple(examples), tuple(outputs), rebuild, isinstance(result, torch.Tensor)))
    return tried_calls


def call_untouched(model: nn.Module, call: ExampleCall) -> Any:
    """The result of one call that leaves the model's buffers, the inputs and the random state as they were.

    Raises:
        ModelError: the call raised.
    """
    call = call.copied()
    with untouched(model):
        try:
            return model.forward(*call.args, **call.kwargs)
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            raise ModelError(
                f"Wanted example inputs on which {name_of(model)} runs; on {Inputs(*call.args, **call.kwargs)} its forward "
                f"raised {type(error).__name__}: {text}. A tuple holds the arguments of one call, a list several sets."
            ) from error


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Calls in here leave a model's buffers and the random state as they were, and the same random numbers are drawn."""
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({buffer.device.index or 0 for buffer in (*model.parameters(), *model.buffers()) if buffer.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        try:
            yield
        finally:
            for buffer, value in saved:
                buffer.copy_(value)


def _parts(value: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]] | None:
    """The parts of a container, each with the text that reads it, and how to build one anew; None for anything else."""
    kind = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return [(f".{name}", getattr(value, name)) for name in names], lambda parts: kind(
            **dict(zip(names, parts, strict=True))
        )
    if isinstance(value, dict):
        keys = list(value)
        return [(f"[{key!r}]", value[key]) for key in keys], lambda parts: kind(zip(keys, parts, strict=True))
    if isinstance(value, list | tuple):
        make = (lambda parts: kind(*parts)) if hasattr(kind, "_fields") else kind
        return [(f"[{index}]", part) for index, part in enumerate(value)], make
    return None


def leaves_of(value: Any) -> list[Any]:
    """Everything in a result that is no container, in reading order."""
    container = _parts(value)
    return [value] if container is None else [leaf for _, part in container[0] for leaf in leaves_of(part)]


def _taken_apart(value: Any, text: str, texts: list[str], model: str) -> Rebuild:
    """Return what puts a result together again; the texts that read its leaves go to `texts`."""
    if isinstance(value, torch.Tensor) or is_plain(value):
        texts.append(text)
        return next
    container = _parts(value)
    if container is None or (isinstance(value, dict) and not all(is_plain(key) for key in value)):
        raise ModelError(
            f"Wanted tensors, numbers, texts, and lists, tuples, dicts and dataclasses of them from forward of {model}; "
            f"found a {type(value).__name__} in `{text}`. Wrap the model in a module whose forward returns tensors only."
        )
    parts, make = container
    rebuilds = [_taken_apart(part, text + access, texts, model) for access, part in parts]
    return lambda leaves: make([rebuild(leaves) for rebuild in rebuilds])
