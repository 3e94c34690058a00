"""Finds which of PyTorch's operators a call runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ExecutionTraceObserver

_FREE = """
    empty empty_like empty_strided new_empty zeros zeros_like zero_ fill_ view _unsafe_view reshape as_strided t
    transpose permute expand slice select unsqueeze squeeze contiguous copy_ clone to _to_copy detach detach_
    alias narrow resize_ item _local_scalar_dense lift_fresh _reshape_alias numpy_T flatten unflatten chunk split
    unbind is_nonzero result_type
"""
FREE_OPERATORS = frozenset(f"aten::{name}" for name in _FREE.split())
"""Views, allocations and copies, which compute nothing."""


def operators_of(call: Callable[[], object], folder: Path) -> set[str]:
    """Names of PyTorch's operators that a call runs, by an observer that writes a file into a folder.

    The profiler would attach CUPTI to the process for good where there is a GPU, and each launch would take longer from
    then on (`docs/log.md`).
    """
    path = folder / "operators.json"
    mask = os.umask(0o077)  # whatever mask for new files a module has set
    path.touch()
    os.umask(mask)
    observer = ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    try:
        call()
    finally:
        observer.stop()
        observer.unregister_callback()
    names = {node["name"] for node in json.loads(path.read_bytes())["nodes"]}
    path.unlink()
    return {name for name in names if name.startswith("aten::")}
