"""Inspects a worker's process: settings and library functions that a module can change, and operators that a call runs.

It also counts the arithmetic of a call's products.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import TorchDispatchMode

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


def operations_of(call: Callable[[], object]) -> int:
    """Floating-point operations of a call's products of matrices, convolutions, recurrent layers and attention.

    A multiplication and an addition are two. Pointwise work, reductions and kernels that are no PyTorch operators count
    nothing, nor do products inside of other operators, such as `cdist` and `bilinear`. A causal mask saves nothing here.

    Raises:
        Exception: whatever the call raises, or an operator that cannot run while it is counted.
    """
    # It takes a tenth of a second, and only a screening process on a GPU counts.
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    formulas = flop_registry | {
        aten.addbmm: _summed_products,
        aten._cudnn_rnn: _cudnn_recurrent,
        aten.mkldnn_rnn_layer: _mkldnn_recurrent,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    }
    # On its fast path a transformer's layer is one operator, whose parts nobody sees.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    counter = _Counter(formulas)
    try:
        with counter:
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.operations


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what PyTorch's formulas say of each operator.

    PyTorch's `FlopCounterMode` does the same by modules. Its first operator imports torch.compile, which takes a second.
    """

    def __init__(self, formulas: Mapping[Any, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self._formulas = formulas

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # this is what imports torch.compile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = self._formulas.get(func.overloadpacket)
        if formula is None:
            with self:  # the parts of a composite operator count
                result = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        result = func(*args, **kwargs)
        self.operations += formula(*args, **kwargs, out_val=result)
        return result


def _summed_products(summand: torch.Tensor, one: torch.Tensor, other: torch.Tensor, **_: Any) -> int:
    return 2 * one.numel() * other.shape[-1]


def _cudnn_recurrent(inputs: torch.Tensor, weights: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    return _recurrent(inputs, weights)


def _mkldnn_recurrent(inputs: torch.Tensor, *rest: Any, **_: Any) -> int:
    return _recurrent(inputs, rest[:4])


def _recurrent(inputs: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Every matrix of weights meets each step of each row of the batch once; packed inputs hold these in one dimension."""
    return 2 * math.prod(inputs.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


_WATCHED_MODULES = (
    "time",
    "statistics",
    "builtins",
    "math",
    "random",
    "json",
    "socket",
    "numpy",
    "torch",
    "torch.nn.functional",
    "torch.cuda",
    "torch.linalg",
    "torch.testing",
    "torch.autograd",
    "torch.backends.cudnn",
    "torch.random",
)
_WATCHED_CLASSES: tuple[type, ...] = (
    torch.Tensor,
    torch.cuda.Event,
    torch.cuda.Stream,
    torch.Generator,
    *(value for value in vars(torch.nn).values() if isinstance(value, type)),
)
_MODULE_HOOKS = [
    value for name, value in vars(torch.nn.modules.module).items() if name.startswith("_global_") and isinstance(value, dict)
]
"""Hooks on all modules of a process."""

WRAPPED_BY_COMPILE = frozenset({"torch.Module.__init__", "torch.Module.__setstate__", "torch.manual_seed"})
"""Functions that torch.compile replaces when it is first used."""


_TINY = float("1e-30")
"""Less than half a unit of 1; in a variable, since Python's compiler adds constants itself."""


def global_state() -> dict[str, Any]:
    """Process-wide settings of PyTorch that a module can change."""
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "grad_enabled": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "threads": torch.get_num_threads(),
        "working_directory": os.getcwd(),
        "file_mode_mask": _file_mode_mask(),
        "tracing": sys.gettrace() is not None or sys.getprofile() is not None,
        "hooks": [id(sys.excepthook), id(sys.displayhook), id(sys.stdout), id(sys.stderr), id(sys.stdin)],
        "modes": [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
        # Of what computes alone: PyTorch itself registers some that only transform, when `vmap` is first used.
        "kernels": sum(name.startswith("aten/") and name.endswith(("/CPU", "/CUDA")) for name in torch.library._impls),
        "module_hooks": sum(len(hooks) for hooks in _MODULE_HOOKS),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "inference_mode": torch.is_inference_mode_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "rounding": [1.0 + _TINY, 1.0 - _TINY],  # to nearest both are 1
        "flush_denormal": bool((torch.tensor([1e-40]) * 1.0).item() == 0.0),
    }


def memory_bytes(device: torch.device) -> int:
    """Memory that this process holds for itself: of a GPU what PyTorch allocated, else what is resident and not shared."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        resident, shared = (int(word) for word in file.read().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def library_functions() -> dict[str, int]:
    """Identity of every function of the libraries that a drop-in module shares with its user, and of what it does."""
    places: list[tuple[str, Any]] = [(name, sys.modules[name]) for name in _WATCHED_MODULES if name in sys.modules]
    places += [(f"torch.{cls.__name__}", cls) for cls in _WATCHED_CLASSES]
    return {
        f"{place}.{name}": hash((id(value), id(getattr(value, "__code__", None)), id(getattr(value, "__defaults__", None))))
        for place, owner in places
        for name, value in vars(owner).items()
        if callable(value) and not isinstance(value, type)
    }


def _file_mode_mask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
