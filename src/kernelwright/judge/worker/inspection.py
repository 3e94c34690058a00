"""Inspects a worker's process: settings and library functions that a module can change, and operators that a call runs.

It also counts the arithmetic of a call's products.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import logging
import math
import os
import random
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import TorchDispatchMode

from kernelwright.judge.worker.structure import arguments, flatten, unflatten

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
        aten.addbmm: lambda summand, one, other, **_: 2 * one.numel() * other.shape[-1],
        aten._cudnn_rnn: lambda inputs, weights, *_, **__: _recurrent(inputs, weights),
        aten.mkldnn_rnn_layer: lambda inputs, *rest, **_: _recurrent(inputs, rest[:4]),
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


def signature_of(model: torch.nn.Module) -> list[tuple[str, int]] | None:
    """Names and kinds of the arguments that a module's `forward` takes; None where Python cannot tell."""
    try:
        return [(one.name, int(one.kind)) for one in inspect.signature(model.forward).parameters.values()]
    except (TypeError, ValueError):
        return None


def used(model: torch.nn.Module, skeleton: Any, tensors: Sequence[torch.Tensor], seed: int) -> dict[str, Any]:
    """Answers of a module to a program that trains it, and to one that runs it under autocast.

    `gradients` has the norm and a random projection of each gradient, or None where there is none; `autocast` the types of
    outputs. Each is None where the module raises.
    """
    found: dict[str, Any] = {}
    for name, use in (("gradients", _gradients), ("autocast", _autocast_dtypes)):
        try:
            found[name] = use(model, skeleton, [tensor.detach().clone() for tensor in tensors], seed)
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # nothing runs in this process any more
            found[name] = None
    return found


def _gradients(
    model: torch.nn.Module, skeleton: Any, tensors: list[torch.Tensor], seed: int
) -> dict[str, tuple[float, float] | None]:
    """By the names of parameters, and `input 1` and so on, of a random weighting of all outputs."""
    leaves = {
        f"input {index}": tensor.requires_grad_() for index, tensor in enumerate(tensors, 1) if tensor.is_floating_point()
    }
    leaves |= {name: value for name, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}
    generators = {device: torch.Generator(device).manual_seed(seed) for device in {one.device for one in leaves.values()}}

    def projected(tensor: torch.Tensor) -> torch.Tensor:
        tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        weights = torch.randn(tensor.shape, device=tensor.device, generator=generators.get(tensor.device))
        return (tensor.float() * weights).sum()

    inputs, named = arguments(unflatten(skeleton, tensors))
    with torch.enable_grad():
        outputs = [one for one in flatten(model(*inputs, **named))[1] if one.requires_grad]
        if not outputs:
            return dict.fromkeys(leaves)
        total = torch.stack([projected(one) for one in outputs]).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: None if one is None else (float(one.float().norm()), float(projected(one)))
        for name, one in zip(leaves, found, strict=True)
    }


def _autocast_dtypes(model: torch.nn.Module, skeleton: Any, tensors: list[torch.Tensor], seed: int) -> list[str]:
    device = tensors[0].device.type if tensors else "cpu"
    inputs, named = arguments(unflatten(skeleton, tensors))
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        return [str(one.dtype) for one in flatten(model(*inputs, **named))[1]]


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


def _recurrent(inputs: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Every matrix of weights meets each step of each row of the batch once; packed inputs hold these in one dimension."""
    return 2 * math.prod(inputs.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


_MODULE_HOOKS = [
    value for name, value in vars(torch.nn.modules.module).items() if name.startswith("_global_") and isinstance(value, dict)
]
"""Hooks on all modules of a process."""

_WRAPPED_BY_COMPILE = frozenset(f"torch.nn.modules.module.Module.{name}" for name in ("__init__", "__setstate__"))
"""Functions that torch.compile replaces when it is first used, beside those that its own wrap."""
_FLAGS = re.compile(
    r"_get_(\w+(enabled|allow_\w+|precision|benchmark|deterministic|accumulation|priority_order|preferred_backend))"
)
"""Names of PyTorch's functions that read a setting of speed or precision."""
PRECISIONS = [(backend, part) for backend in ("cuda", "mkldnn") for part in ("matmul", "conv", "rnn")]
"""Backends and kinds of operators whose float32 may be computed in less."""
_OF_COMPILERS = re.compile(r"_?(TORCH|PYTORCH|TRITON|CUDA)")
"""Beginnings of environment variables that compilers read, and set."""
_BLANKET = (Warning, UserWarning, RuntimeWarning)
"""Categories of warnings that are many packages'."""
_CONSTANTS = (math.pi, math.e, math.tau)
_RECURSION_LIMIT = sys.getrecursionlimit()
_LIBRARY = (str(Path(os.__file__).parent), str(Path(torch.__file__).parents[1]), "<frozen ")
"""Beginnings of the paths of installed code."""


_TINY = float("1e-30")
"""Less than half a unit of 1; in a variable, since Python's compiler adds constants itself."""


def global_state() -> dict[str, Any]:
    """Process-wide settings of PyTorch and Python that a module can change."""
    return {
        "flags": _flags(),
        "environment": {name: value for name, value in os.environ.items() if not _OF_COMPILERS.match(name)}
        | {"sys.path": str(sys.path), "logging": str((logging.root.level, logging.root.manager.disable))}
        | {"numpy errors": str(numpy.geterr()), "printing": str((torch._tensor_str.PRINT_OPTS, numpy.get_printoptions()))},
        "warnings": [str(one[:3]) for one in warnings.filters if one[1] is one[3] is None and one[2] in _BLANKET],
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "grad_enabled": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "working_directory": os.getcwd(),
        "file_mode_mask": _file_mode_mask(),
        "tracing": sys.gettrace() is not None or sys.getprofile() is not None,
        "hooks": [id(sys.excepthook), id(sys.displayhook), id(sys.stdout), id(sys.stderr), id(sys.stdin)],
        "import_finders": [type(one).__qualname__ for one in (*sys.meta_path, *sys.path_hooks) if not _is_of_library(one)],
        "signals": _signal_handlers(),
        "recursion_limit": min(sys.getrecursionlimit(), _RECURSION_LIMIT),  # compilers raise it
        "switch_interval": sys.getswitchinterval(),
        "collector": [gc.isenabled(), *gc.get_threshold(), *map(id, gc.callbacks)],
        "modes": [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
        "saved_tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        # Of what computes alone: PyTorch itself registers some that only transform, when `vmap` is first used.
        "kernels": sum(name.startswith("aten/") and name.endswith(("/CPU", "/CUDA")) for name in torch.library._impls),
        "module_hooks": sum(len(hooks) for hooks in _MODULE_HOOKS),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "inference_mode": torch.is_inference_mode_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "rounding": [1.0 + _TINY, 1.0 - _TINY],  # to nearest both are 1
        "flush_denormal": bool((torch.tensor([1e-40]) * 1.0).item() == 0.0),
    }


def _flags() -> dict[str, str]:
    """Settings that change how fast or how exact the modules of a process are, by their names in PyTorch."""
    readers = {found[1]: getattr(torch._C, found[0]) for found in map(_FLAGS.fullmatch, dir(torch._C)) if found}
    readers |= {
        f"{backend}_{part}_fp32_precision": functools.partial(torch._C._get_fp32_precision_getter, backend, part)
        for backend, part in PRECISIONS
    }
    return {"threads": str(torch.get_num_threads()), **{name: str(read()) for name, read in readers.items()}}


def _signal_handlers() -> dict[str, int]:
    handlers = {str(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {name: id(one) if callable(one) else int(one or 0) for name, one in handlers.items() if one != signal.SIG_DFL}


def _is_of_library(value: Any) -> bool:
    """True if an installed package defines the class of a value, or the value where it is a class or function itself."""
    if type(value) is FunctionType:
        return value.__code__.co_filename.startswith(_LIBRARY)
    kind = value if _is_class(value) else type(value)
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None) or _LIBRARY[0]  # those that are frozen or built in have none
    return path.startswith(_LIBRARY) and getattr(module, kind.__name__, None) is kind


def generators() -> tuple[Any, set[int]]:
    """State of the generators of Python and NumPy, and the seeds of PyTorch's."""
    numbers = numpy.random.get_state(legacy=False)["state"]
    seeds = {torch.initial_seed()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        seeds.add(torch.cuda.initial_seed())
    return (random.getstate(), numbers["key"].tobytes(), numbers["pos"]), seeds


def held(device: torch.device, folder: Path) -> dict[str, int]:
    """Counts of what calls may leave behind in this process: bytes of memory, descriptors, threads, children, files."""
    threads, children = list(Path("/proc/self/task").iterdir()), list[str]()
    for thread in threads:
        with contextlib.suppress(OSError):  # of a thread that has ended, or a kernel that does not say
            children += (thread / "children").read_text().split()
    return {
        "bytes of memory": memory_bytes(device),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(threads),
        "children": len(children),
        "files": sum(len(files) for _, _, files in os.walk(folder)),
    }


def memory_bytes(device: torch.device) -> int:
    """Memory that this process holds for itself: of a GPU what PyTorch allocated, else what is resident and not shared."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        resident, shared = (int(word) for word in file.read().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class Library:
    """Functions and classes of every public module that is loaded now: a drop-in module shares them with its user."""

    def __init__(self) -> None:
        public = [name for name in list(sys.modules) if "._" not in f".{name}" and not name.startswith("kernelwright")]
        modules = [(name, sys.modules[name]) for name in public if issubclass(type(sys.modules[name]), ModuleType)]
        self._owners: list[tuple[str, Any, dict[str, Any]]] = [(name, module, {**vars(module)}) for name, module in modules]
        for name, _, values in self._owners[:]:
            classes = [one for one in values.values() if _is_class(one) and vars(one).get("__module__") == name]
            self._owners += [(f"{name}.{one.__qualname__}", one, {**vars(one)}) for one in classes]
        everything = [one for _, _, values in self._owners for one in values.values()]
        everything += [one.__func__ for one in everything if type(one) in (staticmethod, classmethod)]
        self._bodies = {one: _body(one) for one in everything if type(one) is FunctionType}

    def replaced(self, *, or_added: bool = False) -> list[str]:
        """Those that are no longer what they were, beside what torch.compile wraps; or functions that are new in modules."""
        found = {f"{one.__module__}.{one.__qualname__}" for one, body in self._bodies.items() if _body(one) != body}
        for place, owner, before in self._owners:
            is_installed = (getattr(owner, "__file__", None) or _LIBRARY[0]).startswith(_LIBRARY)
            if type(owner) is ModuleType and is_installed and sys.modules.get(place) is not owner:
                found.add(f"sys.modules[{place!r}]")
            now = vars(owner)
            changed = [name for name, value in before.items() if now.get(name) is not value and _runs(value)]
            if not _is_class(owner):
                added = now.items() if or_added else ()
                changed += [name for name, value in added if type(value) is FunctionType and not _runs(before.get(name))]
            elif len(now) != len(before):
                bases = [vars(base) for base in owner.__mro__[1:]]
                changed += [name for name in now.keys() - before.keys() if any(_runs(base.get(name)) for base in bases)]
            found |= {f"{place}.{name}" for name in changed if not self._wraps(now.get(name), name)}
        return sorted(found - _WRAPPED_BY_COMPILE)

    def _wraps(self, value: Any, name: str) -> bool:
        """True if an installed package's new function wraps the one that was there, as torch.compile's do in optimisers."""
        wrapped = value
        while type(wrapped) is FunctionType and wrapped not in self._bodies and _is_of_library(wrapped):
            wrapped = getattr(wrapped, "__wrapped__", None)
        known = type(wrapped) is FunctionType and wrapped in self._bodies
        return known and wrapped is not value and wrapped.__name__ == name


@functools.cache
def library() -> Library:
    """The library as it was when this was first called: by the process that forks workers, for all of them."""
    return Library()


def _runs(value: Any) -> bool:
    """True if a value is code, or a constant that code computes with. Other numbers may be a library's own state."""
    is_constant = type(value) is torch.dtype or (type(value) is float and value in _CONSTANTS)
    return is_constant or callable(value) or issubclass(type(value), property | staticmethod | classmethod | ModuleType)


def _is_class(value: Any) -> bool:
    return issubclass(type(value), type)  # `isinstance` would ask the value, and some warn


def _body(function: Any) -> tuple[int, ...]:
    return id(function.__code__), id(function.__defaults__), id(function.__kwdefaults__)


def _file_mode_mask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
