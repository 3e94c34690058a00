"""Puts another cubin into a kernel that Triton has compiled, by Triton's public classes.

Tested with Triton 3.6.0 and 3.7.1; every name used here is checked by a test. A `CompiledKernel` is built anew from the
same metadata and the other cubin, and takes the old one's place in the function's kernel cache. Nothing is
written to Triton's cache on disk, where the compiler's own cubin stays.

The text of this module is also pasted into candidates that carry a tuned kernel.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_CUBIN = ".cubin"


def with_cubin(kernel: Any, cubin: bytes) -> Any:
    """Return a `CompiledKernel` like `kernel` with another cubin, not loaded yet.

    Raises:
        OSError: the files of Triton's cache that describe the kernel are gone.
    """
    from triton.compiler import CompiledKernel

    with tempfile.TemporaryDirectory(prefix="kernelwright-tuned-") as folder:
        files = dict(kernel.metadata_group)
        for name in [name for name in files if name.endswith(_CUBIN)]:
            path = Path(folder) / name
            path.write_bytes(cubin)
            files[name] = str(path)
        made = CompiledKernel(kernel.src, files, kernel.hash)
    made.metadata_group = kernel.metadata_group
    return made


def load(kernel: Any) -> None:
    """Load a `CompiledKernel` onto the current device, as its first launch would."""
    getattr(kernel, "run")  # noqa: B009 - a property that loads.


def jit_function(function: Any) -> Any:
    """Return the `JITFunction` under autotuners, heuristics and other wrappers.

    Raises:
        TypeError: there is none.
    """
    inner = function
    while not hasattr(inner, "device_caches"):
        inner = getattr(inner, "fn", None)
        if inner is None:
            raise TypeError(f"wanted a function decorated with @triton.jit, found {function!r}; decorate it first")
    return inner


def put_in_place(function: Any, old: Any, new: Any) -> bool:
    """Let launches that used the `CompiledKernel` `old` use `new`; return whether `old` was in use."""
    for kernels, *_ in jit_function(function).device_caches.values():
        for key, value in kernels.items():
            if value is old:
                kernels[key] = new
                return True
    return False


class WrappedFunction:
    """A Triton function that is launched like itself; subclasses may replace a kernel after its first launch.

    Raises:
        TypeError: there is no `@triton.jit` function in it.
    """

    def __init__(self, function: Any) -> None:
        self.fn = function
        self._jit = jit_function(function)
        self._decided: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name == "fn":
            # Asked for before it is there, by what copies objects.
            raise AttributeError(name)
        return getattr(self.fn, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch as Triton would; the first launch of each kernel is followed by a decision about it."""
        kernel = self.fn.run(*args, grid=grid, warmup=warmup, **kwargs)
        # The identity of an object that is kept alive here, so no other kernel can have it.
        if warmup or kernel is None or id(kernel) in self._decided or _is_recorded():
            return kernel
        with self._lock:
            if id(kernel) not in self._decided:
                self._decided[id(kernel)] = kernel
                self._decide(kernel, args, grid, kwargs)
        return kernel

    def _decide(self, kernel: Any, args: Sequence[Any], grid: Any, kwargs: dict[str, Any]) -> None:
        """Replace `kernel` for later launches, or leave it as it is."""
        raise NotImplementedError


def _is_recorded() -> bool:
    """True where launches are being recorded into a CUDA graph, where nothing may be loaded or run."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
