"""Reads the example inputs of a model in memory, and draws fresh inputs that are like them."""

from __future__ import annotations

import inspect
import keyword
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelwright.errors import ModelError
from kernelwright.tasks.input_sets import map_tensors

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
        args, kwargs = map_tensors((self.args, self.kwargs), lambda tensor: tensor.detach().clone())
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
            if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise self._strange(name, f"a {type(value).__name__} of layout {value.layout}", "plain tensors")
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
            return like.clone()
        self.pool = self.pool.to(like.device)
        fresh = self.pool[torch.randint(self.pool.numel(), like.shape, device=like.device)]
        if like.is_floating_point() or like.is_complex():
            fresh = torch.where(like == 0, like, fresh)
        return torch.empty_like(like).copy_(fresh)


class InputDraws:
    """Draws inputs like the examples, for calls of one form.

    Values are drawn with replacement from the examples' own, so that each is one that the model may meet. Zeros among
    floating values stay where they are. Some tensors stay whole: those of truth values, of at most two different values,
    with infinities, and integers in ascending order, since they are masks, flags, positions and offsets.
    """

    def __init__(self, calls: Sequence[ExampleCall], model: str) -> None:
        self._tensors = []
        for examples in zip(*(call.tensors for call in calls), strict=True):
            kept = [tensor.detach().cpu() for tensor in examples]
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
            drawn.examples = [example.to(device) for example in drawn.examples]
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
        if not torch.isfinite(values).all():
            return None
        values = values[values != 0]
    elif all(example.dim() and bool((example.diff(dim=-1) >= 0).all()) for example in examples):
        return None
    if values.numel() > _POOL_SIZE:
        values = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0))[:_POOL_SIZE]]
    return values if torch.unique(values).numel() > 2 else None
