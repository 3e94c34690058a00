"""Takes nested inputs and outputs apart into a JSON skeleton and a flat list of tensors, and puts them together again."""

from __future__ import annotations

from typing import Any

import torch

from kernelwright.errors import InternalError


class StructureError(InternalError):
    """A value holds something that is neither a tensor, a plain scalar nor a list, tuple or dict of those."""


def flatten(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a value into a JSON skeleton and its tensors, in reading order; raises StructureError."""
    tensors: list[torch.Tensor] = []
    return _skeleton(value, tensors), tensors


def _skeleton(item: Any, tensors: list[torch.Tensor]) -> Any:
    """Describe a value and collect its tensors. No closure within `flatten`: one that calls itself is a cycle, which would
    keep every call's tensors until the garbage collector happens to look, and on a GPU those fill the memory first."""
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return {"tensor": len(tensors) - 1}
    if item is None or isinstance(item, bool | int | float | str):
        return {"value": item}
    if isinstance(item, list | tuple):
        kind = "list" if isinstance(item, list) else "tuple"
        return {kind: [_skeleton(part, tensors) for part in item]}
    if isinstance(item, dict) and all(isinstance(key, str) for key in item):
        return {"dict": {key: _skeleton(part, tensors) for key, part in item.items()}}
    raise StructureError(f"a {type(item).__name__}")


def unflatten(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Put a value together again."""
    ((kind, body),) = skeleton.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "value":
        return body
    if kind == "dict":
        return {key: unflatten(part, tensors) for key, part in body.items()}
    parts = [unflatten(part, tensors) for part in body]
    return parts if kind == "list" else tuple(parts)
