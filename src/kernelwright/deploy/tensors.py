"""Copies a launch's tensors with the memory around them, and compares two sets of copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class CopiedArguments:
    """Positional and keyword arguments in which every tensor is a copy.

    A kernel is told strides and may reach beyond a view, so the whole storage is copied and the view made again in it;
    tensors that share memory share it in the copy.

    Raises:
        ValueError: an argument holds device memory in a way that is not understood.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
        self.args = tuple(self._copy(value) for value in args)
        self.kwargs = {name: self._copy(value) for name, value in kwargs.items()}

    def difference(self, other: CopiedArguments, tolerance: tuple[float, float] | None) -> str | None:
        """Say how the memory differs from another copy of the same arguments, or return None.

        Args:
            tolerance: relative and absolute tolerance; None for equal bits.
        """
        pairs = zip(self._storages.values(), other._storages.values(), strict=True)
        for number, ((one, dtype), (two, _)) in enumerate(pairs):
            left, right = (_as(storage, torch.uint8) for storage in (one, two))
            if torch.equal(left, right):
                continue
            if tolerance is None or not dtype.is_floating_point:
                count = int((left != right).sum())
                return f"{count} of {left.numel()} bytes of tensor {number} differ from the original's"
            values, others = (_as(storage, dtype).to(torch.float64) for storage in (one, two))
            if not torch.allclose(values, others, rtol=tolerance[0], atol=tolerance[1], equal_nan=True):
                return f"values of tensor {number} are out of tolerance"
        return None

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage.data_ptr()
            if key not in self._storages:
                self._storages[key] = (_as(storage, torch.uint8).clone().untyped_storage(), value.dtype)
            made = torch.empty(0, dtype=value.dtype, device=value.device)
            return made.set_(self._storages[key][0], value.storage_offset(), value.size(), value.stride())
        if hasattr(value, "data_ptr") or hasattr(value, "base"):
            raise ValueError(f"wanted tensors and numbers to compare launches on, found a {type(value).__name__}")
        return value


def _as(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    count = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (count,), (1,))
