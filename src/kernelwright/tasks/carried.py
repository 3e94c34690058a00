"""Finds what a module keeps from one call to the next: counters, caches and other attributes, and buffers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module that hold its parts."""
_LATER_CALLS = 8
"""Calls of a module whose attributes move, among which one may depend on those before it. Our choice."""


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
        if not all(map(near, first, answer(True))):
            return names
    return []


def _marks(model: nn.Module) -> dict[str, Any]:
    """Marks by name that change with the buffers and attributes of a module's parts."""
    marks: dict[str, Any] = {name: _mark(buffer) for name, buffer in model.named_buffers()}
    for path, part in model.named_modules():
        marks |= {
            f"{path}.{name}".lstrip("."): _mark(value) for name, value in vars(part).items() if name not in MODULES_OWN
        }
    return marks


def _mark(value: Any) -> torch.Tensor | bytes | int:
    try:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            return value.detach().clone()
        return id(value) if isinstance(value, nn.Module) else pickle.dumps(value)
    except Exception:  # noqa: BLE001 - any class may refuse in its own way
        return id(value)


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


def near(first: torch.Tensor, second: torch.Tensor, apart: float = 1e-3) -> bool:
    """True where tensors of one shape differ by at most this share of the first one's norm."""
    kind = torch.complex128 if first.is_complex() else torch.float64
    one, other = (x.to(kind).nan_to_num(0.0, 1.0, -1.0) for x in (first, second))
    return one.shape == other.shape and bool((one - other).norm() <= apart * one.norm())
