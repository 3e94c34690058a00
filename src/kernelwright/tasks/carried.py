"""Finds what a module keeps from one call to the next: counters, caches and other attributes, and buffers."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module that hold its parts."""
_OPAQUE = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
_DEPTH, _LATER_CALLS = 4, 8
"""Containers and objects within one another that are looked into, and calls of a module whose attributes move, among which
one may depend on those before it. Our choice."""


def carried(model: nn.Module, answer: Callable[[bool], list[torch.Tensor]]) -> list[str]:
    """Names of the attributes and buffers by which a call depends on earlier ones; none where it does not, by its answers.

    Args:
        answer: Calls the module, on the same inputs each time (True) or on others, with the same random numbers.
    """
    first, before = answer(True), _marks(model)
    answer(False)  # a state may have come to rest on the same inputs
    after = _marks(model)
    names = sorted(name for name in before | after if not _alike(before.get(name), after.get(name)))
    only_buffers = dict(model.named_buffers()).keys() >= set(names)
    for _ in range((1 if only_buffers else _LATER_CALLS) if names else 0):
        if not all(map(_near, first, answer(True))):
            return names
    return []


def _marks(model: nn.Module) -> dict[str, Any]:
    """Copies of the buffers and attributes of a module's parts, by name."""
    marks = {name: _mark(buffer, 0) for name, buffer in model.named_buffers()}
    for path, part in model.named_modules():
        own = ((name, value) for name, value in vars(part).items() if name not in MODULES_OWN)
        marks |= {f"{path}.{name}".lstrip("."): _mark(value, _DEPTH) for name, value in own}
    return marks


def _mark(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.layout is torch.strided else None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not depth or isinstance(value, _OPAQUE):
        return id(value)
    if isinstance(value, list | tuple | deque):
        return [_mark(part, depth - 1) for part in value]
    table = value if isinstance(value, dict) else getattr(value, "__dict__", {"": id(value)})
    return {key: _mark(part, depth - 1) for key, part in table.items()}


def _alike(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_alike(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_alike, first, second))
    return bool(first == second)


def _near(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    kind = torch.complex128 if first.is_complex() else torch.float64
    first, second = (x.to(kind).nan_to_num(0.0, 1.0, -1.0) for x in (first, second))
    return bool((first - second).norm() <= 1e-3 * first.norm())
