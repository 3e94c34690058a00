"""Puts confirmed code into a model: calls of the confirmed form run it, all others run the model's own `forward`.

The result has the model's own attributes, not copies of them: weights, buffers, submodules, mode and hooks are the same
objects under two faces. So `state_dict`, `load_state_dict`, `to` and `train` of either hold for both.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import pickle
import platform
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kernelwright.errors import ModelError, UsageError
from kernelwright.files import replace_file
from kernelwright.tasks import map_tensors
from kernelwright.tasks.in_memory import (
    Inputs,
    ModelCall,
    alike,
    call_untouched,
    candidate_of,
    check_model,
    form_of,
    name_of,
    tried,
    untouched,
)

_INDEX = "confirmed.json"
_FACTS = ("training", "device", "hardware", "speedup_low")
"""Fields of `ConfirmedCode` that the index holds; the others have files."""
_APART = 0.02
"""Relative distance between outputs of the optimized code and of the model above which they are not of one computation. The
judge has compared them strictly; half precision leaves 0.005. Our choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedCode:
    """Confirmed code for calls of one form."""

    source: str
    """Text of a module that defines `ModelNew`."""
    inputs: Inputs
    """An example of the calls for which it was confirmed."""
    training: bool
    """Mode of the model in which it was confirmed."""
    device: str
    """Kind of device on which it was confirmed: `cpu` or `cuda`."""
    hardware: str
    """Name of that processor or GPU."""
    speedup_low: float
    """Lower end of the confirmed speedup's 95 % interval."""


_mode_of = operator.attrgetter("training")


class _Code:
    """Optimized code around one model, ready to be called."""

    def __init__(self, model: nn.Module, placement: ConfirmedCode, call: ModelCall) -> None:
        self._training = placement.training
        self._rebuild, self._whole = call.rebuild, call.whole
        with _in_mode(model, placement.training):
            self._built = candidate_of(placement.source, model)
            self._run = self._built.forward
            self._check(model, call)
        owners = list(model.modules())
        self._modes = owners
        self._parts = [(owner._modules, list(owner._modules.values())) for owner in owners if owner._modules]
        hooks = [table for owner in owners[1:] for table in (owner._forward_hooks, owner._forward_pre_hooks)]
        self._hooked, self._unhooked = list(filter(None, hooks)), [table for table in hooks if not table]
        tables = [table for owner in owners for table in (owner._parameters, owner._buffers)]
        self._state = next(
            (
                (table, name, value.dtype, value.device)
                for table in tables
                for name, value in table.items()
                if value is not None and value.is_floating_point()
            ),
            None,
        )
        """Table, name, dtype and device of one weight. A call of `to` changes those of all, so one tells."""
        self._device_type = call.examples[0].tensors[0].device.type

    def _check(self, model: nn.Module, call: ModelCall) -> None:
        """See that code and model compute the same on the example; raises ModelError."""
        wanted = call_untouched(model, call.examples[0])
        with untouched(model):
            try:
                found = self(call.examples[0].copied().tensors)
            except Exception as error:
                raise ModelError(
                    f"Wanted the {name_of(model)} that was optimized, and the compilers that its code needs; on the inputs "
                    f"{call.description} the optimized code raised {type(error).__name__}: {error}. Optimize it anew, into "
                    "another directory."
                ) from error
        if not alike(wanted, found, _APART):
            raise ModelError(
                f"Wanted the {name_of(model)} that was optimized; on the inputs {call.description} this one computes "
                "something else than the optimized code. Optimize it anew, into another directory."
            )

    @property
    def last_path(self) -> str:
        """The path of the latest call: `optimized`, or `reference` where the code itself gave the call back."""
        return str(self._built.__dict__.get("last_path", "optimized"))

    def misfit(self, model: nn.Module) -> str:
        """Differences from the parts, mode and precision for which the code was confirmed; empty if there are none."""
        if torch.is_autocast_enabled(self._device_type):
            return "autocast is on"
        if torch.compiler.is_compiling() or _operators_are_watched():
            return "a compiler or a transform follows the call operator by operator"
        # Comparisons in C: of some hundred parts each call looks at all.
        if (not self._training) in map(_mode_of, self._modes) or model.training is not self._training:
            return f"the model or a part of it is not in {'train' if self._training else 'eval'} mode"
        if any(self._unhooked) or not all(self._hooked):
            return "a hook of a part was added or removed"
        for table, parts in self._parts:
            if list(table.values()) != parts:
                return "a part of the model was replaced"
        value = self._state[0].get(self._state[1]) if self._state else None
        if self._state and (value is None or (value.dtype, value.device) != self._state[2:]):
            return f"the weights are not {self._state[2]} on {self._state[3]}"
        return ""

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """The model's result for the tensors of a call."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                outputs = self._run(*tensors)
        else:
            outputs = self._run(*tensors)
        return outputs if self._whole else self._rebuild(iter(outputs))


def place(model: nn.Module, placements: Sequence[ConfirmedCode]) -> nn.Module:
    """The model with confirmed code in place; the model itself where there is none. `last_path` tells which path ran last.

    Raises:
        ModelError: the code belongs to another model, or the model is on another device than it was then.
    """
    if not placements:
        return model
    check_model(model)
    signature = inspect.signature(model.forward)

    def whole_form(args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """The form of a call with all defaults: a value that is named may be that of one that is left out."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return form_of((bound.args, bound.kwargs), tensors)

    codes = {}
    for placement in placements:
        with _in_mode(model, placement.training):
            (call,) = tried(model, [placement.inputs])
        codes[call.form] = codes[whole_form(call.examples[0].args, call.examples[0].kwargs, [])] = _Code(
            model, placement, call
        )
    kind = type(model)
    noted: set[str] = set()

    def note(self: nn.Module, difference: str, inputs: Inputs) -> None:
        """Tell in `last_path` that the model's own forward runs; warn once of each difference from what was confirmed."""
        self.__dict__["last_path"] = "reference"
        if difference and difference not in noted and not torch.compiler.is_compiling():
            noted.add(difference)
            message = f"kernelwright: the model's own forward runs, no faster, since {difference}; the call was {inputs}."
            warnings.warn(message, stacklevel=5)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        found = codes.get(form_of((args, kwargs), tensors))
        if found is None:
            tensors.clear()
            with contextlib.suppress(TypeError):  # the model's own forward says what is wrong
                found = codes.get(whole_form(args, kwargs, tensors))
        difference = found.misfit(self) if found else "nothing was confirmed for inputs of this form"
        if found is None or difference or _needs_gradients(self, tensors):
            note(self, difference, Inputs(*args, **kwargs))
            return kind.forward(self, *args, **kwargs)
        outputs = found(tensors)
        self.__dict__["last_path"] = found.last_path
        return outputs

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return place, (model, tuple(placements))

    body = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__, "__doc__": kind.__doc__}
    placed: nn.Module = object.__new__(type(f"Optimized{kind.__name__}", (kind,), body))
    object.__setattr__(placed, "__dict__", model.__dict__)
    return placed


def _operators_are_watched() -> bool:
    """True where somebody follows a call operator by operator, which a kernel of its own escapes.

    Those are torch.func's transforms, forward-mode derivatives, and dispatch modes such as make_fx and fake tensors.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
    )


def _needs_gradients(model: nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    """True where gradients are to flow through this call. None were checked, and most kernels carry none."""
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in (*tensors, *model.parameters())):
        return False
    if not model.training:
        warnings.warn(
            "kernelwright: gradients are recorded, so the model's own forward runs. For the optimized code call the model "
            "under torch.inference_mode() or torch.no_grad().",
            stacklevel=5,
        )
    return True


@contextlib.contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """A model in train or eval mode; afterwards all its parts are in theirs."""
    before = [(part, part.training) for part in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


def hardware_name(device: torch.device) -> str:
    """The name of a processor or GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


# --- in a folder ----------------------------------------------------------------------------------------------------


def save(placements: Sequence[ConfirmedCode], folder: Path) -> None:
    """Write confirmed code and what it was confirmed for into a folder, for `load`; no weights."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        index = []
        for number, one in enumerate(placements, start=1):
            names = {"source": f"optimized-{number}.py", "inputs": f"inputs-{number}.pt"}
            index.append({**{fact: getattr(one, fact) for fact in _FACTS}, **names})
            replace_file(folder / names["source"], one.source.encode())
            args, kwargs = map_tensors((one.inputs.args, one.inputs.kwargs), torch.Tensor.cpu)
            torch.save({"args": args, "kwargs": kwargs}, folder / names["inputs"])
        replace_file(folder / _INDEX, json.dumps({"placements": index}, indent=2).encode())
    except OSError as error:
        raise UsageError(f"Wanted a folder to save to at {folder}; {error.strerror}. Choose another one.") from error


def load(model: nn.Module, folder: Path) -> nn.Module:
    """Put into a model what `save` has written; nothing is searched or timed.

    Raises:
        ModelError: the model is another one, or on another kind of device.
        UsageError: the folder holds nothing that was saved.
    """
    check_model(model)
    where = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    placements = []
    try:
        for entry in json.loads((folder / _INDEX).read_text(encoding="utf-8"))["placements"]:
            stored = torch.load(folder / entry["inputs"], weights_only=True)
            device = where or torch.device(entry["device"])
            args, kwargs = map_tensors((stored["args"], stored["kwargs"]), operator.methodcaller("to", device))
            source = (folder / entry["source"]).read_text(encoding="utf-8")
            placements.append(ConfirmedCode(**{**entry, "source": source, "inputs": Inputs(*args, **kwargs)}))
    except (OSError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        found = "nothing there" if isinstance(error, FileNotFoundError) and not folder.exists() else f"{error}"
        raise UsageError(
            f"Wanted a folder that `save` of a result of kernelwright.optimize has written, at {folder}; found {found}. "
            "Check the path, or call `save` with it."
        ) from error
    for one in placements:
        if where is not None and one.device != where.type:
            raise ModelError(
                f"Wanted the model on {one.device}, where its optimized code was confirmed; found it on {where}. Call "
                f"model.to({one.device!r}) first, or use the model as it is."
            )
        if (here := hardware_name(where or torch.device(one.device))) != one.hardware:
            warnings.warn(f"kernelwright: the speedup was confirmed on {one.hardware}; this is {here}.", stacklevel=3)
    try:
        return place(model, placements)
    except ModelError as error:
        raise ModelError(
            f"Wanted the model that {folder} was saved for; found {name_of(model)}, on which saved inputs or code fail. "
            f"Give that one, or optimize this one into another directory. In detail: {error}"
        ) from error
