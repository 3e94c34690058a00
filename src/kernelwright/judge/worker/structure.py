"""Takes nested inputs and outputs apart, and puts them together again: structure, tensors, and whose memory they lie in.

A skeleton is the JSON of a value whose tensors are numbers of a flat list.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from kernelwright.errors import InternalError


class StructureError(InternalError):
    """A value holds something that is neither a tensor, a plain scalar nor a list, tuple or dict of those."""


class Named(dict[str, Any]):
    """Arguments that a call gives by their names: the last of its inputs, where there are any."""


def arguments(inputs: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call that are given by place, and those by name."""
    return (inputs[:-1], inputs[-1]) if inputs and type(inputs[-1]) is Named else (inputs, {})


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
        kind = "named" if isinstance(item, Named) else "dict"
        return {kind: {key: _skeleton(part, tensors) for key, part in item.items()}}
    raise StructureError(f"a {type(item).__name__}")


def unflatten(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Put a value together again."""
    ((kind, body),) = skeleton.items()
    if kind == "tensor":
        return tensors[body]
    if kind == "value":
        return body
    if kind in ("dict", "named"):
        return (Named if kind == "named" else dict)((key, unflatten(part, tensors)) for key, part in body.items())
    parts = [unflatten(part, tensors) for part in body]
    return parts if kind == "list" else tuple(parts)


_stride = torch.Tensor.stride
_storage = torch.Tensor.untyped_storage
_Tensor = torch.Tensor
_type = type

_TRAITS = (
    "asking for gradients",
    "made in inference mode",
    "negated when it is read",
    "conjugated when it is read",
    "with attributes of its own, or names",
)
"""Properties with which a tensor cannot be used like any other."""


class OutputMetadata(NamedTuple):
    """Metadata of an output, captured before its memory is reused; small, since the parent's clock runs meanwhile."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    start: int
    stop: int
    """Addresses of its storage; equal where it has none."""
    traits: tuple[bool, ...]
    """One truth value for each of `_TRAITS`."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OutputMetadata:
        """The metadata of a tensor as it is now."""
        device = tensor.device
        strided = tensor.layout is torch.strided
        storage = _storage(tensor) if device.type != "meta" and strided else None
        start = 0 if storage is None else storage.data_ptr()
        stop = start if storage is None else start + storage.nbytes()
        # PyTorch 2.13 has no names of dimensions any more. Compilers mark tensors, too.
        marked = any(not name.startswith("_dynamo") for name in tensor.__dict__) or any(getattr(tensor, "names", ()))
        traits = (tensor.requires_grad, tensor.is_inference(), tensor.is_neg(), tensor.is_conj(), marked)
        return cls(tensor.dtype, tensor.shape, _stride(tensor) if strided else (), device, start, stop, traits)

    def overlaps(self, other: OutputMetadata) -> bool:
        """True if both storages share memory."""
        return max(self.start, other.start) < min(self.stop, other.stop)

    def to_json(self) -> dict[str, Any]:
        """The description that the parent parses as `replies.Output`."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "stride": list(self.stride),
            "device": str(self.device),
            "traits": [name for name, has in zip(_TRAITS, self.traits, strict=True) if has],
        }


class Delivered(NamedTuple):
    """A call's outputs, which lie in their region now."""

    skeleton: Any
    strange: list[str]
    marks: list[OutputMetadata]
    earlier: tuple[OutputMetadata, ...]
    """Metadata of other calls' outputs that were still in use."""


def walk(item: Any, flat: list[torch.Tensor], strange: list[str]) -> Any:
    """The structure of a result; its tensors go to `flat`, the names of types that do not belong there to `strange`.

    Not a closure: one that calls itself is a cycle, which would keep every output alive until the garbage collector
    comes by, and each call would allocate anew.
    """
    kind = _type(item)
    if kind is _Tensor:
        if item.__dict__:
            strange.append("a torch.Tensor with attributes of its own")
        if item.layout is not torch.strided:
            strange.append(f"a tensor of layout {item.layout}")
            return None
        flat.append(item)
        return {"tensor": len(flat) - 1}
    if kind is list or kind is tuple:
        return {kind.__name__: [walk(part, flat, strange) for part in item]}
    if kind is dict:
        return {"dict": {str(key): walk(part, flat, strange) for key, part in item.items()}}
    if item is None or kind in (bool, int, float, str):
        return {"value": item}
    strange.append(f"{kind.__module__}.{kind.__qualname__}")
    return None


def aliases_of(
    output: OutputMetadata,
    owners: Mapping[str, Collection[OutputMetadata]],
    others: Collection[OutputMetadata],
    earlier: Collection[OutputMetadata],
) -> list[str]:
    """Which of the memory's owners, of the call's other outputs and of earlier ones share memory with an output."""
    shared = {**owners, "other output": others, "earlier output": earlier}
    return [name for name, marks in shared.items() if any(output.overlaps(mark) for mark in marks)]
