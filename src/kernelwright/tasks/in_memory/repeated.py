"""Finds equal submodules of a model, such as the layers of a transformer: a search of one of them serves all."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from kernelwright.errors import ModelError
from kernelwright.tasks.in_memory.inputs import (
    ExampleCall,
    Inputs,
    alike,
    call_untouched,
    form_of,
    name_of,
    untouched,
)
from kernelwright.tasks.input_sets import copied, map_tensors

_LEAST = 3
"""Calls of equal submodules from which one is searched for all. Our choice."""
_APART = 0.01
"""Relative distance between results above which two submodules compute something else: bfloat16 leaves 0.004. Our choice."""
_SHARE, _SHARE_OF_EACH = 0.6, 0.2
"""Shares of a model's calls of innermost submodules below which it is searched as a whole: of all equal ones, and of one
kind of them. Our choice: a ResNet's stages are short, and each would be a search of its own."""


@dataclass(frozen=True, slots=True)
class EqualModules:
    """Submodules with one code and one form of calls, each with weights of its own."""

    paths: tuple[str, ...]
    module: nn.Module
    """The first of them."""
    inputs: Inputs
    """Arguments of its first call."""
    calls: int
    """Calls of all of them in one call of the model."""

    @property
    def name(self) -> str:
        """All of them in words."""
        return f"{self.calls} equal {name_of(self.module)} ({self.paths[0]}, ...)"


@dataclass(slots=True)
class _Lookalikes:
    """Submodules that look alike."""

    paths: list[str] = field(default_factory=list)
    inputs: Inputs | None = None


class _Watch:
    """Hears of each call of some parts of a model, before it and after it."""

    def before(self, path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the arguments."""

    def after(self, path: str, part: nn.Module, args: Any, result: Any) -> None:
        """Called with the result."""


@contextmanager
def _watched(parts: Mapping[str, nn.Module], watch: _Watch) -> Iterator[None]:
    """Tell of each call of some parts."""
    with ExitStack() as hooks:
        for path, part in parts.items():
            hooks.enter_context(part.register_forward_pre_hook(partial(watch.before, path), with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(partial(watch.after, path)))
        yield


class _Forms(_Watch):
    """Notes the form of each call, and what is no plain data in it."""

    def __init__(self) -> None:
        self.of: dict[str, list[Any]] = defaultdict(list)
        self.strange: dict[Any, list[str]] = defaultdict(list)

    def before(self, path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note one call."""
        self.of[path].append(form_of((args, kwargs), []))
        for kind in map(type, (*args, *kwargs.values())):
            if kind not in (torch.Tensor, nn.Parameter, list, tuple, dict, bool, int, float, str, type(None)):
                self.strange[type(part), kind].append(path)

    def calls(self, group: _Lookalikes) -> int:
        """Calls of all members of a group."""
        return sum(len(self.of[path]) for path in group.paths)


def equal_modules(model: nn.Module, call: ExampleCall) -> list[EqualModules]:
    """The largest submodules of a model of which there are several equal ones; none where they are a small part of it.

    Equal are those that look alike, are called alike, and of which the first, with another's weights and buffers, computes
    what that one does, on that one's inputs.

    Raises:
        ModelError: the call failed, or the submodules take arguments that are no plain data, so that none stands alone.
    """
    named = dict(model.named_modules())
    forms = _Forms()
    with _watched(named, forms):
        call_untouched(model, call)
    groups = [group for group in _lookalikes(named, forms.of) if forms.calls(group) >= _LEAST]
    while chosen := list(_outermost(groups)):
        _compare(model, call, named, chosen)
        count = len(groups)
        groups = [group for group in groups if forms.calls(group) >= _LEAST]
        if len(groups) == count:
            break
    innermost = {path: len(forms.of[path]) for path, part in named.items() if not any(True for _ in part.children())}
    total, large = max(sum(innermost.values()), 1), {}
    for group in chosen:
        share = sum(count for path, count in innermost.items() if _is_inside(path, group.paths)) / total
        if share >= _SHARE_OF_EACH and group.inputs is not None:
            first = named[group.paths[0]]
            large[share, group.paths[0]] = EqualModules(tuple(group.paths), first, group.inputs, forms.calls(group))
    if sum(share for share, _ in large) >= _SHARE:
        return [*large.values()]
    several = [(kind, given) for (kind, given), paths in forms.strange.items() if len(paths) >= _LEAST]
    for kind, given in several[:1]:
        raise ModelError(
            f"Wanted layers that take tensors and plain data, so that one can be searched for all; found that each "
            f"{name_of(kind)} takes a {given.__name__}. Where the model can do without, as by use_cache=False, call it so."
        )
    return []


def _lookalikes(named: Mapping[str, nn.Module], forms: Mapping[str, list[Any]]) -> Iterator[_Lookalikes]:
    """Submodules with submodules of their own, by what they look like and the one form of their calls."""
    alike: dict[Any, _Lookalikes] = defaultdict(_Lookalikes)
    for path, part in named.items():
        if path and len(set(forms[path])) == 1 and any(True for _ in part.children()):
            alike[_looks(part), forms[path][0]].paths.append(path)
    yield from alike.values()


class _TimeByKind(_Watch):
    """Adds up the time of calls by the kind of their submodules."""

    def __init__(self, kind_of: Mapping[str, int], kinds: int, device: torch.device) -> None:
        self._kind_of, self._device = kind_of, device
        self.spent_s, self._began_s = [0.0] * kinds, 0.0

    def now_s(self) -> float:
        """The time once the device has nothing left to do, in seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def before(self, path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the start."""
        self._began_s = self.now_s()

    def after(self, path: str, part: nn.Module, args: Any, result: Any) -> None:
        """Add the time that the call took."""
        self.spent_s[self._kind_of[path]] += self.now_s() - self._began_s


def time_shares(model: nn.Module, call: ExampleCall, kinds: Sequence[EqualModules]) -> list[float]:
    """Shares of the time of one call of a model that all submodules of each kind take."""
    kind_of = {path: number for number, kind in enumerate(kinds) for path in kind.paths}
    clock = _TimeByKind(kind_of, len(kinds), call.tensors[0].device)
    given, parts = call.copied(), {path: model.get_submodule(path) for path in kind_of}
    with untouched(model):
        model.forward(*given.args, **given.kwargs)
        start_s = clock.now_s()
        with _watched(parts, clock):
            model.forward(*given.args, **given.kwargs)
        whole_s = clock.now_s() - start_s
    return [one_s / whole_s for one_s in clock.spent_s]


class _Comparison(_Watch):
    """Compares members with the first of their group, given each one's weights, and keeps the first's arguments."""

    def __init__(self, named: Mapping[str, nn.Module], groups: Sequence[_Lookalikes]) -> None:
        self.group_of = {path: group for group in groups for path in group.paths}
        self._named = named
        self._wanted: dict[str, Any] = {}
        self.others: list[str] = []

    def before(self, path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compute what the first would."""
        group = self.group_of[path]
        args, kwargs = map_tensors((args, kwargs), lambda tensor: copied(tensor.detach()))
        if group.inputs is None:
            group.inputs = Inputs(*args, **kwargs)
        elif path != group.paths[0]:
            weights = {**dict(part.named_parameters()), **dict(part.named_buffers())}
            with torch.no_grad():
                self._wanted[path] = torch.func.functional_call(self._named[group.paths[0]], weights, args, kwargs)

    def after(self, path: str, part: nn.Module, args: Any, result: Any) -> None:
        """Note a member that computes something else."""
        if path in self._wanted and not alike(self._wanted.pop(path), result, _APART):
            self.others.append(path)


def _compare(model: nn.Module, call: ExampleCall, named: dict[str, nn.Module], groups: Sequence[_Lookalikes]) -> None:
    """Leave members that differ from the first out of groups that do not overlap, and note the first's arguments."""
    comparison = _Comparison(named, groups)
    with _watched({path: named[path] for path in comparison.group_of}, comparison):
        call_untouched(model, call)
    for group in groups:
        group.paths = [path for path in group.paths if path not in comparison.others]


def _looks(part: nn.Module) -> tuple[Any, ...]:
    """Features of a submodule, its weights aside, that equal ones have in common."""
    state = (*part.named_parameters(), *part.named_buffers())
    return type(part), repr(part), tuple((name, value.shape, value.dtype, value.device) for name, value in state)


def _outermost(groups: Sequence[_Lookalikes]) -> Iterator[_Lookalikes]:
    """Groups none of whose members lies inside another group's."""
    for group in groups:
        others = [path for other in groups if other is not group for path in other.paths]
        if not any(_is_inside(path, others) for path in group.paths):
            yield group


def _is_inside(path: str, others: Sequence[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)
