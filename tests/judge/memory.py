"""Counts the memory of tensors, from the operators that make them: it is the same on every run and machine."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made within it have held after any operator of this thread. Kernels' own workspace, which
    they give back themselves, is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(found):
            if storage._cdata not in given:  # others are views, of arenas among them
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return found


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
