"""Reads the settings and library functions of a process that a module can change."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

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
