"""What a module can change in the process that uses it, beside itself."""

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
_WATCHED_CLASSES = (
    torch.Tensor,
    torch.nn.Module,
    torch.nn.Linear,
    torch.nn.Conv2d,
    torch.nn.Parameter,
    torch.cuda.Event,
    torch.cuda.Stream,
    torch.Generator,
)

WRAPPED_BY_COMPILE = frozenset({"torch.Module.__init__", "torch.Module.__setstate__", "torch.manual_seed"})
"""What torch.compile itself replaces when it is first used."""


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
        "flush_denormal": bool((torch.tensor([1e-40]) * 1.0).item() == 0.0),
    }


def library_functions() -> dict[str, int]:
    """Identity of every function of the libraries that a drop-in module shares with its user."""
    places: list[tuple[str, Any]] = [(name, sys.modules[name]) for name in _WATCHED_MODULES if name in sys.modules]
    places += [(f"torch.{cls.__name__}", cls) for cls in _WATCHED_CLASSES]
    return {
        f"{place}.{name}": id(value)
        for place, owner in places
        for name, value in vars(owner).items()
        if callable(value) and not isinstance(value, type)
    }


def _file_mode_mask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
