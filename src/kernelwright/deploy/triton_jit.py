"""Decorates Triton functions so that they run tuned machine code where there is some.

    @kernelwright.jit
    @triton.autotune(configs=..., key=...)     # or without
    @triton.jit
    def kernel(...): ...

The first launch of each specialisation runs what Triton compiled. Then the cache is asked for a tuned schedule of that
very code, for this GPU and signature. One that is found is proven legal again where a fitting disassembler is
installed, and compared with the original on copies of the launch's own arguments, once for each GPU and driver;
later launches run it. Whatever does not fit is logged once, and the original stays.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelwright.deploy.cache import CacheEntry, TunedCache
from kernelwright.deploy.deploy import find_tuned
from kernelwright.errors import KernelwrightError, ToolchainError, UsageError
from kernelwright.gpu import disassemble
from kernelwright.gpu.driver import GpuIdentity, gpu_identity
from kernelwright.gpu.launch_spec import signature_of
from kernelwright.gpu.triton_kernels import WrappedFunction, load, put_in_place, with_cubin
from kernelwright.sass import check

_log = logging.getLogger(__name__)


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


class TunedFunction(WrappedFunction):
    """A Triton function whose launches use tuned machine code of a cache; it is launched like the function itself.

    Raises:
        TypeError: there is no `@triton.jit` function in it.
    """

    def __init__(self, function: Any, cache: TunedCache) -> None:
        super().__init__(function)
        self.cache = cache
        self._said: set[str] = set()

    def _decide(self, kernel: Any, args: Sequence[Any], grid: Any, kwargs: dict[str, Any]) -> None:
        """Replace `kernel` by its tuned schedule if there is one and it holds; else say why not."""
        if hasattr(kernel, "result"):
            kernel = kernel.result()
            self._decided[id(kernel)] = kernel
        name = kernel.metadata.name
        try:
            gpu = gpu_identity(_device())
            original = kernel.asm["cubin"]
            found = find_tuned(self.cache, original, gpu.architecture, gpu.name, signature_of(kernel))
            if found is None:
                self._say_missing(name, gpu)
                return
            tuned = with_cubin(kernel, found.cubin)
            self._decided[id(tuned)] = tuned
            wrong = None
            if not self.cache.is_verified(found.entry, gpu):
                wrong = self._not_proven(original, found.cubin)
                wrong = wrong or self._compared(kernel, tuned, found.entry, args, grid, kwargs)
            if wrong is not None:
                self._say(f"the tuned kernel for {name} is not used: {wrong}")
                return
            self.cache.mark_verified(found.entry, gpu)
            # Now and not at the next launch, which may be recorded into a graph.
            load(tuned)
            if not put_in_place(self._jit, kernel, tuned):
                self._say(f"the tuned kernel for {name} is not used: Triton no longer holds the original")
        # A lookup must never take a launch down that has worked without it.
        except (KernelwrightError, OSError, ValueError, RuntimeError) as error:
            self._say(f"the tuned kernel for {name} is not used: {type(error).__name__}: {error}")

    def _not_proven(self, original: bytes, tuned: bytes) -> str | None:
        try:
            violations = check(original, tuned, disassemble)
        except ToolchainError as error:
            _log.info("the proof made when the kernel was deployed stands: %s", error)
            return None
        return f"it is not a legal schedule of the original: {violations[0]}" if violations else None

    def _compared(
        self, original: Any, tuned: Any, entry: CacheEntry, args: Sequence[Any], grid: Any, kwargs: dict[str, Any]
    ) -> str | None:
        """Run both on copies of the same arguments and say how they differ, or return None."""
        copies = []
        current = original
        try:
            for kernel in (original, tuned):
                copied = CopiedArguments(args, kwargs)
                if kernel is not current and not put_in_place(self._jit, current, kernel):
                    return "Triton no longer holds the original"
                current = kernel
                if self.fn.run(*copied.args, grid=grid, warmup=False, **copied.kwargs) is not kernel:
                    return "copies of the arguments are launched with another kernel"
                copies.append(copied)
        finally:
            if current is not original:
                put_in_place(self._jit, current, original)
        return copies[0].difference(copies[1], None if entry.deterministic else (entry.rtol, entry.atol))

    def _say_missing(self, name: str, gpu: GpuIdentity) -> None:
        others = [found.entry for found in self.cache.entries() if found.entry.entry == name]
        if others:
            self._say(
                f"no tuned kernel fits {name}: {len(others)} are kept for other code, signatures or GPUs than {gpu.name}'s; "
                "the compiler, the source or the configuration has changed since"
            )
        else:
            _log.info("no tuned kernel for %s in %s", name, self.cache.root)

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning("%s", message)


def jit(function: Any = None, *, cache: Path | str | TunedCache | None = None) -> Any:
    """Decorate a Triton function so that its launches use tuned machine code if there is some in the cache.

    Under Triton's interpreter there is no machine code, and the function stays as it is.

    Raises:
        TypeError: `function` is not decorated with `@triton.jit`.
        UsageError: `cache` is no directory's path and no TunedCache.
    """
    from triton import knobs

    if not isinstance(cache, Path | str | TunedCache | None):
        raise UsageError(
            f"Wanted `cache` to be a directory's path, a TunedCache, or None for the default; found {cache!r}. Name the "
            "directory that `kernelwright sass deploy` wrote to."
        )
    store = cache if isinstance(cache, TunedCache) else TunedCache(Path(cache) if cache is not None else None)
    if function is None:
        return lambda decorated: jit(decorated, cache=store)
    return function if knobs.runtime.interpret else TunedFunction(function, store)


def _device() -> int:
    from triton.runtime import driver

    device: int = driver.active.get_current_device()
    return device
