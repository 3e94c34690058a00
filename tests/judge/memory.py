"""Counts the memory of tensors, from the operators that make them: it is the same on every run and machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made within it have held after any operator of this thread. Kernels' own workspace, which
    they give back themselves, is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._made_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for storage in _storages(found):
            if storage._cdata in self._made:
                continue
            if not any(storage._cdata == given._cdata for given in _storages((args, kwargs))):  # a view, of an arena perhaps
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._made_bytes += storage.nbytes()
        # Those that have ended are only looked for where it matters: operators come by the ten thousand.
        if self._made_bytes > self.peak:
            self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
            self._made_bytes = sum(size for _, size in self._made.values())
            self.peak = max(self.peak, self._made_bytes)
        return found


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(values, torch.Tensor):
        if values.layout is torch.strided and not values.is_meta:
            yield values.untyped_storage()
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _storages(value)
