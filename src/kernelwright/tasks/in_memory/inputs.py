"""Checks that a model in memory and its example inputs can be judged, draws fresh inputs like them, and takes apart what the
model returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import keyword
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelwright.errors import ModelError
from kernelwright.tasks.carried import MODULES_OWN, carried, near
from kernelwright.tasks.input_sets import computable, copied, laid_as, map_tensors
from kernelwright.tasks.loading import unfit, unfit_state

_POOL_SIZE = 1 << 20
"""Most values of one input from which fresh ones are drawn. Our choice."""


class Inputs:
    """One set of example inputs: `Inputs(ids, mask=m)` stands for the call `model(ids, mask=m)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        shown = [*map(_shown, self.args), *(f"{name}={_shown(value)}" for name, value in self.kwargs.items())]
        return f"({', '.join(shown)})"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(part)}" for key, part in value.items()) + "}"
    return repr(value) if is_plain(value) else type(value).__name__


def is_plain(value: Any) -> bool:
    """True for None, a truth value, a number and a text."""
    return value is None or type(value) in (bool, int, float, str)


def sets_of(example_inputs: Any) -> list[Inputs]:
    """The sets of example inputs that a user gave: one, or a list of them.

    Raises:
        ModelError: there are none.
    """
    if isinstance(example_inputs, list):
        sets = [inputs for item in example_inputs for inputs in sets_of(item)]
    elif isinstance(example_inputs, Inputs):
        sets = [example_inputs]
    elif isinstance(example_inputs, dict) and all(isinstance(name, str) for name in example_inputs):
        sets = [Inputs(**example_inputs)]
    elif isinstance(example_inputs, tuple):
        sets = [Inputs(*example_inputs)]
    elif isinstance(example_inputs, torch.Tensor):
        sets = [Inputs(example_inputs)]
    else:
        raise ModelError(
            "Wanted example_inputs: a tuple of arguments, a dict of keyword arguments, kernelwright.Inputs(x, mask=m), or a "
            f"list of such sets; found {_found(example_inputs)}. For forward(x) write example_inputs=(x,)."
        )
    empty = [inputs for inputs in sets if not any(True for _ in tensors_in((inputs.args, inputs.kwargs)))]
    if not sets or empty:
        raise ModelError(
            f"Wanted a tensor in every set of example inputs; found {empty[0] if empty else 'no set'}. Give what forward "
            "takes, as example_inputs=(x,)."
        )
    return sets


def _found(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in reading order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """One call of a model as `inspect.Signature.bind` writes it, so that one call has one form."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    """A name for each tensor, in reading order."""
    values: tuple[str, ...]
    """Text of each argument in a call, in order: tensors by their names."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the call, in reading order."""
        return list(tensors_in((self.args, self.kwargs)))

    def copied(self) -> ExampleCall:
        """The same with copies of its tensors, which need no gradients."""
        args, kwargs = map_tensors((self.args, self.kwargs), lambda tensor: copied(tensor.detach()))
        return ExampleCall(args, kwargs, self.names, self.values)


def call_of(signature: inspect.Signature, inputs: Inputs, model: str) -> ExampleCall:
    """A set of inputs as a call of `forward` with this signature.

    Raises:
        ModelError: they do not fit, or hold what no worker can be sent.
    """
    try:
        bound = signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        raise ModelError(
            f"Wanted example inputs for forward{signature} of {model}; found {inputs}: {error}. A tuple holds the arguments "
            "of one call, a dict its keyword arguments, a list several sets."
        ) from error
    spelling = _Spelling(model)
    values = []
    plain = [parameter.name for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_POSITIONAL]
    for index, value in enumerate(bound.args):
        values.append(spelling.text(value, plain[index] if index < len(plain) else f"argument_{index}"))
    values += [f"{name}={spelling.text(value, name)}" for name, value in bound.kwargs.items()]
    return ExampleCall(bound.args, bound.kwargs, tuple(spelling.names), tuple(values))


class _Spelling:
    """Writes arguments as Python text and gives their tensors names."""

    def __init__(self, model: str) -> None:
        self.names: list[str] = []
        self._model = model

    def text(self, value: Any, name: str) -> str:
        """The text of a value at an argument of this name."""
        if isinstance(value, torch.Tensor):
            if (strange := unfit(value)) is not None:
                raise ModelError(f"Wanted plain tensors as example inputs of {self._model}; found in `{name}` {strange}.")
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise self._strange(name, f"a {type(value).__name__}", "plain tensors")
            self.names.append(self._free(name))
            return self.names[-1]
        if is_plain(value):
            return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)
        if type(value) in (list, tuple):
            parts = [self.text(part, f"{name}_{index}") for index, part in enumerate(value)]
            return f"[{', '.join(parts)}]" if type(value) is list else f"({''.join(f'{part}, ' for part in parts)})"
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return "{" + ", ".join(f"{key!r}: {self.text(part, f'{name}_{key}')}" for key, part in value.items()) + "}"
        raise self._strange(
            name, f"a {type(value).__name__}", "tensors, numbers, texts, and lists, tuples and dicts of them"
        )

    def _free(self, name: str) -> str:
        name = name if name.isidentifier() and not keyword.iskeyword(name) else f"tensor_{len(self.names)}"
        while name in ("self", "torch", "out", "F", *self.names):
            name += "_"
        return name

    def _strange(self, name: str, found: str, wanted: str) -> ModelError:
        return ModelError(
            f"Wanted {wanted} as example inputs of {self._model}; found {found} in `{name}`. Wrap the model in a module "
            "whose forward takes plain inputs and makes the others."
        )


def form_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A hashable description of a call's arguments, by which it is recognised; their tensors go to `tensors`.

    Arguments that are no plain tensors and no plain data are described by an object that equals no other.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        tensors.append(value)
        return value.shape, value.dtype, value.device
    if kind is tuple or kind is list:
        return kind, tuple([form_of(part, tensors) for part in value])
    if kind is dict:
        return kind, tuple([(key, form_of(part, tensors)) for key, part in value.items()]) if value else ()
    return (kind, value) if is_plain(value) else object()


# --- fresh inputs ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Drawn:
    """Draws one tensor: its values from a pool, or whole as one of the examples has it."""

    examples: list[torch.Tensor]
    pool: torch.Tensor | None

    def draw(self, chosen: int) -> torch.Tensor:
        """A fresh tensor like the chosen example."""
        like = self.examples[chosen]
        if self.pool is None:
            return copied(like)
        self.pool = self.pool.to(like.device)
        fresh = self.pool[torch.randint(self.pool.numel(), like.shape, device=like.device)]
        if like.is_floating_point() or like.is_complex():
            fresh = torch.where(like == 0, like, fresh)
        return laid_as(fresh, like)


class InputDraws:
    """Draws inputs like the examples, for calls of one form.

    Values are drawn with replacement from the examples' own, so that each is one that the model may meet. Zeros among
    floating values stay where they are. Some tensors stay whole: those of truth values, of at most two different values,
    with infinities, and integers in ascending order, since they are masks, flags, positions and offsets.
    """

    def __init__(self, calls: Sequence[ExampleCall], model: str) -> None:
        self._tensors = []
        for examples in zip(*(call.tensors for call in calls), strict=True):
            kept = [copied(tensor.detach(), torch.device("cpu")) for tensor in examples]
            self._tensors.append(_Drawn(kept, _pool(kept)))
        if all(drawn.pool is None for drawn in self._tensors):
            raise ModelError(
                f"Wanted example inputs of {model} with many different values, from which fresh ones can be drawn; every "
                "tensor holds two at most, is sorted, or is a mask. Give real data, or torch.randn."
            )

    def draw(self) -> list[torch.Tensor]:
        """Fresh inputs, on PyTorch's default device."""
        chosen = int(torch.randint(len(self._tensors[0].examples), (), device="cpu")) if self._several else 0
        device = torch.get_default_device()
        for drawn in self._tensors:
            drawn.examples = [one if one.device.type == device.type else copied(one, device) for one in drawn.examples]
        return [drawn.draw(chosen) for drawn in self._tensors]

    @property
    def _several(self) -> bool:
        return len(self._tensors[0].examples) > 1


def _pool(examples: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Values from which fresh ones are drawn; None for tensors that stay as they are."""
    values = torch.cat([example.flatten() for example in examples])
    if values.dtype == torch.bool or not values.numel():
        return None
    if values.is_floating_point() or values.is_complex():
        if not torch.isfinite(computable(values)).all():
            return None
        values = values[values != 0]
    elif all(example.dim() and bool((example.diff(dim=-1) >= 0).all()) for example in examples):
        return None
    if values.numel() > _POOL_SIZE:
        values = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0))[:_POOL_SIZE]]
    return values if torch.unique(computable(values)).numel() > 2 else None


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
    name = kind.__qualname__.partition(".__new__")[0]  # of a graph module, whose class is made with it
    return name if module in ("__main__", "builtins") else f"{module}.{name}"


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
    if (strange := unfit_state(model)) is not None:
        raise ModelError(f"Wanted plain tensors in the state_dict of this {name}; found {strange}")
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


def tried(model: nn.Module, sets: Sequence[Inputs], *, alone: bool = False) -> list[ModelCall]:
    """The calls that sets of example inputs stand for, those of one form together, tried on the model.

    Args:
        alone: Whether calls must leave their arguments alone and not depend on earlier ones.

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
        if alone:
            _check_alone(model, examples[0])
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


def _check_alone(model: nn.Module, example: ExampleCall) -> None:
    """See that a call leaves its arguments alone and does not depend on earlier ones; raises ModelError."""
    written: set[str] = set()

    def answer(same: bool) -> list[torch.Tensor]:
        call, found = example.copied(), list[torch.Tensor]()
        args, kwargs = (call.args, call.kwargs) if same else map_tensors((call.args, call.kwargs), _turned)
        torch.manual_seed(0)
        with contextlib.suppress(Exception):  # others may lie outside its domain
            found = [one.clone() for one in leaves_of(model.forward(*args, **kwargs)) if isinstance(one, torch.Tensor)]
        pairs = zip(call.names, call.tensors, example.tensors, strict=True)
        written.update(name for name, now, was in pairs if not ((now == was) | (now != now) & (was != was)).all())
        return found

    with untouched(model):
        held = carried(model, answer)
    wrong = (
        f"leaves its arguments alone; forward of {name_of(model)} writes into"
        if written
        else (f"gives the same answer whatever calls came before; {name_of(model)} keeps a state between calls in")
    )
    if names := sorted(written) or held:
        raise ModelError(
            f"Wanted a model that {wrong} `{'`, `'.join(names)}`. Have forward take the state as an argument and return the "
            "new one."
        )


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if tensor.dim() else tensor


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Calls in here leave a model's buffers and attributes and the random state as they were, and the same random numbers
    are drawn.

    Raises:
        ModelError: they write into its parameters.
    """
    versions = [(name, weight, weight._version) for name, weight in model.named_parameters() if not weight.is_inference()]
    written: list[str] = []
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    attributes = [(part, {k: v for k, v in vars(part).items() if k not in MODULES_OWN}) for part in model.modules()]
    devices = sorted({buffer.device.index or 0 for buffer in (*model.parameters(), *model.buffers()) if buffer.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        try:
            yield
        finally:
            for buffer, value in saved:
                buffer.copy_(value)
            written += [name for name, weight, version in versions if weight._version != version]
            for part, before in attributes if not written else ():  # one may say that they are written
                vars(part).update(before)
    if written:
        raise ModelError(
            f"Wanted a model that leaves its weights alone; forward of {name_of(model)} writes into `{written[0]}`. "
            "If it does so in the first call only, call it once before; if not, return the new weights."
        )


_CONSTANTS = (torch.dtype, torch.device, torch.Size, type)
"""Types of what a result may hold beside tensors and plain values; each call returns the example's."""
_NO_PLAIN_OBJECTS = (*_CONSTANTS, torch.Tensor, nn.Module, types.FunctionType, types.ModuleType)
_DEEPEST = 12
"""Most containers around each other, for objects that hold each other. Our choice."""


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
    if hasattr(value, "__dict__") and not isinstance(value, _NO_PLAIN_OBJECTS):  # a cache of keys and values, say
        names = list(vars(value))
        return [(f".{name}", part) for name, part in vars(value).items()], lambda parts: _object_of(kind, names, parts)
    return None


def _object_of(kind: type, names: list[str], parts: list[Any]) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update(zip(names, parts, strict=True))
    return made


def leaves_of(value: Any) -> list[Any]:
    """Everything in a result that is no container, in reading order."""
    container = _parts(value)
    return [value] if container is None else [leaf for _, part in container[0] for leaf in leaves_of(part)]


def alike(wanted: Any, found: Any, apart: float) -> bool:
    """True where results have one structure, and each tensor differs by at most this share of its norm."""
    first, second = leaves_of(wanted), leaves_of(found)
    pairs = zip(first, second, strict=False)
    return type(wanted) is type(found) and len(first) == len(second) and all(_agree(*pair, apart) for pair in pairs)


def _agree(one: Any, other: Any, apart: float) -> bool:
    """True where two leaves of results agree; numbers of floating point always do."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and near(one, other, apart)
    return type(one) is type(other) and (one == other or isinstance(one, float))


def _taken_apart(value: Any, text: str, texts: list[str], model: str) -> Rebuild:
    """Return what puts a result together again; the texts that read its leaves go to `texts`."""
    if isinstance(value, torch.Tensor) or is_plain(value):
        # A view of a tensor with attributes, such as a cache's, has none: such a one is no plain result.
        texts.append(f"{text}[...]" if isinstance(value, torch.Tensor) and vars(value) else text)
        return next
    if isinstance(value, _CONSTANTS):
        return lambda leaves: value
    container = _parts(value) if text.count(".") + text.count("[") <= _DEEPEST else None
    if container is None or (isinstance(value, dict) and not all(is_plain(key) for key in value)):
        raise ModelError(
            f"Wanted tensors, numbers, texts, and lists, tuples, dicts and dataclasses of them from forward of {model}; "
            f"found a {type(value).__name__} in `{text}`. Wrap the model in a module whose forward returns tensors only."
        )
    parts, make = container
    rebuilds = [_taken_apart(part, text + access, texts, model) for access, part in parts]
    return lambda leaves: make([rebuild(leaves) for rebuild in rebuilds])
