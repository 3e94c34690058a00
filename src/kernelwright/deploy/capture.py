"""Captures the kernels that a computation launches, as targets that can be tuned.

    with capture_launches() as captured:
        model(*inputs)
    for launch in captured.launches: ...

Launches of `@triton.jit` functions are seen, autotuned or not, and those of torch.compile's kernels when it compiles with
`tunable_torch_compile`. Run the computation once before, so that nothing is compiled or autotuned while it is watched,
and on other inputs, so that what a kernel writes differs from what it finds.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kernelwright.errors import CompilerMissingError, UsageError
from kernelwright.gpu.launch_spec import (
    ELEMENT_BYTES,
    Argument,
    KernelLaunch,
    ScalarArgument,
    Target,
    TensorArgument,
    plain_type,
    triton_launch,
)


@dataclass(slots=True)
class Captured:
    """Launches of each kernel and grid once, in order of first launch."""

    launches: list[KernelLaunch] = field(default_factory=list)
    _seen: dict[tuple[int, tuple[int, ...]], tuple[Any, KernelLaunch]] = field(default_factory=dict)

    def record(self, kernel: Any, grid: tuple[int, ...], values: Mapping[str, Any], launch: Callable[[], Any]) -> Any:
        """Launch, and remember the launch and what it changed."""
        if hasattr(kernel, "result"):
            kernel = kernel.result()
        known = self._seen.get((id(kernel), grid))
        if known is not None:
            known[1].count += 1
            return launch()
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        before = {name: _memory(tensor).clone() for name, tensor in tensors.items()}
        ranges = {name: _contents(tensor) for name, tensor in tensors.items()}
        result = launch()
        changed = {name for name, tensor in tensors.items() if not torch.equal(before[name], _memory(tensor))}
        function = kernel.src.fn.__name__
        try:
            target, reason = _target(kernel, grid, values, ranges, changed), ""
        except (UsageError, ValueError) as error:
            target, reason = None, str(error)
        found = KernelLaunch(function, target, reason)
        # The kernel is kept alive, so that no other can have its identity.
        self._seen[id(kernel), grid] = kernel, found
        self.launches.append(found)
        return result


@contextmanager
def capture_launches() -> Iterator[Captured]:
    """Watch the launches of Triton functions, and of torch.compile's kernels, in this process.

    Raises:
        CompilerMissingError: Triton is not installed.
    """
    try:
        from triton.compiler import CompiledKernel
        from triton.runtime import JITFunction
    except ImportError as error:
        raise CompilerMissingError(f"wanted Triton, found none ({error}); pip install 'kernelwright[triton]'") from error
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    captured = Captured()
    run, run_compiled, launcher = JITFunction.run, CachingAutotuner.run, CompiledKernel.__getitem__

    def watched(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return run(self, *args, grid=grid, warmup=True, **kwargs)
        # Compiles if it has to, and says which kernel the launch will use.
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        known = {name: value for name, value in kwargs.items() if name in self.signature.parameters}
        bound = self.signature.bind(*args, **known)
        bound.apply_defaults()
        sizes = grid(bound.arguments) if callable(grid) else grid
        launch = functools.partial(run, self, *args, grid=grid, warmup=False, **kwargs)
        return captured.record(kernel, tuple(sizes), bound.arguments, launch)

    def watched_compiled(self: Any, *args: Any, stream: Any, **kwargs: Any) -> Any:
        launch = functools.partial(run_compiled, self, *args, stream=stream, **kwargs)
        described = _compiled_launch(self, args, stream, kwargs)
        return launch() if described is None else captured.record(*described, launch)

    def watched_launcher(self: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, stream: Any = None) -> Any:
            values = dict(zip(self.src.fn.arg_names, args, strict=True))
            return captured.record(self, tuple(grid), values, functools.partial(original, *args, stream=stream))

        original = launcher(self, grid)
        return launch

    JITFunction.run, CachingAutotuner.run = watched, watched_compiled  # type: ignore[method-assign]
    CompiledKernel.__getitem__ = watched_launcher
    try:
        yield captured
    finally:
        JITFunction.run, CachingAutotuner.run = run, run_compiled  # type: ignore[method-assign]
        CompiledKernel.__getitem__ = launcher


def _compiled_launch(
    autotuner: Any, args: Sequence[Any], stream: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[int, ...], dict[str, Any]] | None:
    """Return (kernel, grid, values) of a launch of torch.compile's, or None if it cannot be found."""
    if len(autotuner.launchers) != 1:
        return None
    launcher = autotuner.launchers[0]
    kernel = launcher.__globals__.get("bin")
    if kernel is None:
        return None
    calls: list[tuple[Any, ...]] = []
    # The launcher's own code, with a runner that only writes down what it is called with.
    probe = types.FunctionType(launcher.__code__, {**launcher.__globals__, "runner": lambda *values: calls.append(values)})
    probe(*args, **kwargs, stream=stream)
    names = kernel.src.fn.arg_names
    grid, values = calls[0][:3], calls[0][-len(names) :]
    return kernel, tuple(grid), dict(zip(names, values, strict=True))


def _target(
    kernel: Any,
    grid: tuple[int, ...],
    values: Mapping[str, Any],
    ranges: Mapping[str, dict[str, Any]],
    changed: set[str],
) -> Target:
    metadata = kernel.metadata
    scratch = sum(getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size"))
    if scratch or getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "launch_cooperative_grid", False):
        raise UsageError("Wanted an ordinary launch, found scratch memory, clusters or a cooperative grid.")
    arguments: list[Argument] = []
    for name, kind in kernel.src.signature.items():
        if kind != "constexpr":
            arguments.append(_argument(name, kind, values[name], ranges.get(name, {}), name in changed))
    spec = triton_launch(metadata.name, metadata.name, grid, metadata.num_warps, metadata.shared, arguments)
    return Target(spec, kernel.asm["cubin"], metadata.target.arch)


def _argument(name: str, kind: Any, value: Any, contents: Mapping[str, Any], is_changed: bool) -> Argument:
    if not isinstance(kind, str):
        raise UsageError(f"Wanted a pointer or a number as {name}, found {kind}.")
    if not kind.startswith("*"):
        return ScalarArgument.model_validate({"name": name, "type": plain_type(kind), "value": value})
    dtype = plain_type(kind)[1:]
    if dtype not in ELEMENT_BYTES or not isinstance(value, torch.Tensor):
        raise UsageError(f"Wanted a tensor of a known type as {name}, found {kind} given a {type(value).__name__}.")
    # What the kernel can reach from the pointer it is given, whatever the view's own shape is.
    count = _memory(value).numel() // ELEMENT_BYTES[dtype]
    role = "inout" if is_changed else "input"
    return TensorArgument.model_validate({"name": name, "dtype": dtype, "shape": (count,), "role": role, **contents})


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from a tensor's first element to the end of its storage."""
    storage = tensor.untyped_storage()
    begin = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, begin, (storage.nbytes() - begin,), (1,))


def _contents(tensor: torch.Tensor) -> dict[str, Any]:
    """Say how to draw numbers like a tensor's: from its range where that may matter, else by its spread.

    Integers may be indices, which must stay within bounds; numbers that are never negative may be arguments of a square
    root.
    """
    if tensor.numel() == 0 or tensor.dtype.is_complex:
        return {}
    values = tensor.to(torch.float64)
    values = values[torch.isfinite(values)]
    if values.numel() == 0:
        return {}
    low, high = float(values.min()), float(values.max())
    if not tensor.dtype.is_floating_point:
        return {"init": "integers", "low": low, "high": high + 1}
    if low == high and low in (0.0, 1.0):
        return {"init": "ones" if low else "zeros"}
    if low >= 0.0:
        return {"init": "uniform", "low": low, "high": high if high > low else low + 1.0}
    return {"init": "normal", "scale": float(values.square().mean().sqrt())}
