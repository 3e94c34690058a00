"""What runs inside a worker process: build one module, then answer calls on it.

The same code serves the reference and the candidate, so that both pay the same harness. In a candidate's process all
of this is at the candidate's mercy; nothing it answers is a result (see `docs/threat-model.md`). Functions are bound
at import, before candidate code exists, which defeats patching by name and costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ExecutionTraceObserver

from kernelwright.judge.worker.arena import TensorSpec, close_arena, open_arena
from kernelwright.judge.worker.channel import Channel, ChannelClosedError
from kernelwright.judge.worker.process_state import WRAPPED_BY_COMPILE, global_state, library_functions
from kernelwright.judge.worker.structure import unflatten

_clock_ns = time.perf_counter_ns
_copy_into = torch.Tensor.copy_
_data_ptr = torch.Tensor.data_ptr
_stride = torch.Tensor.stride
_storage = torch.Tensor.untyped_storage
_detach = torch.Tensor.detach
_count_version = torch.autograd.graph.increment_version
_attributes = vars(torch.nn.Module)["__dict__"].__get__
"""Of a module, whatever its class shows in their place."""
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_manual_seed = torch.manual_seed
_seed_processor = torch.default_generator.manual_seed
_DisableTorchFunction = torch._C.DisableTorchFunction
_DisableTorchDispatch = torch._C._DisableTorchDispatch
_no_grad = torch.no_grad
_TracedModule = torch.jit._trace.TopLevelTracedModule
_SCRIPTED_TABLES = (torch.jit._script.OrderedDictWrapper, torch.jit._script.OrderedModuleDict)
_type = type

_AWAKE_S = 2e-3
"""After calls that warm the host up a worker waits for the next request without sleeping, for so long at most."""
_LEFT_BYTES_MAX = 256 << 20
"""Of the device's memory in a process that has forgotten its module: libraries' workspaces are tens of MiB. Our choice."""


class _HostClock:
    """Brackets a call with the monotonic clock."""

    def ready(self) -> None:
        """A processor always is."""

    def start(self) -> None:
        self._start_ns = _clock_ns()

    def stop(self) -> None:
        self._stop_ns = _clock_ns()

    def settle(self) -> None:
        """Nothing is asynchronous here."""

    def elapsed_us(self) -> float:
        return (self._stop_ns - self._start_ns) / 1e3


class _DeviceClock:
    """Brackets a call with CUDA events on the stream that was current before the call."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").split(".")[0]
        runtime = ctypes.CDLL(f"libcudart.so.{major}")
        self._record, self._elapsed, self._synchronize = (
            runtime.cudaEventRecord,
            runtime.cudaEventElapsedTime,
            runtime.cudaDeviceSynchronize,
        )
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        for event in self._events:
            if runtime.cudaEventCreate(ctypes.byref(event)) != 0:
                raise RuntimeError("cudaEventCreate failed")
        self._stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def ready(self) -> None:
        """Have the device switch to this process before the clock starts: while it does, the host can queue many launches,
        and what is paid for launching them would be seen in one call and not in the next."""
        self._record(self._events[0], self._stream)
        self._synchronize()

    def start(self) -> None:
        self._record(self._events[0], self._stream)

    def stop(self) -> None:
        self._record(self._events[1], self._stream)

    def settle(self) -> None:
        """Wait for the whole device, whatever stream the work is on."""
        status = self._synchronize()
        if status != 0:
            raise RuntimeError(f"the device reports CUDA error {status} after the call")

    def elapsed_us(self) -> float:
        milliseconds = ctypes.c_float()
        if self._elapsed(ctypes.byref(milliseconds), *self._events) != 0:
            raise RuntimeError("the call's events were not recorded")
        return milliseconds.value * 1e3


_FREE_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "zeros",
        "zeros_like",
        "zero_",
        "fill_",
        "view",
        "_unsafe_view",
        "reshape",
        "as_strided",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "contiguous",
        "copy_",
        "clone",
        "to",
        "_to_copy",
        "detach",
        "detach_",
        "alias",
        "narrow",
        "resize_",
        "item",
        "_local_scalar_dense",
        "lift_fresh",
        "_reshape_alias",
        "numpy_T",
        "flatten",
        "unflatten",
        "chunk",
        "split",
        "unbind",
        "is_nonzero",
        "result_type",
    )
)


class Harness:
    """State of one worker: the module, its arenas and layouts."""

    def __init__(self, config: dict[str, Any], files: list[int]) -> None:
        self.config = config
        self.device = torch.device(config["device"])
        torch.set_num_threads(config["threads"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.init()  # type: ignore[no-untyped-call]
            limit = config["device_memory_limit_bytes"] / torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit), self.device)
        if config["strict_fp32"]:
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cuda.matmul.allow_tf32 = False
        self.memory = {name: open_arena(description, files, self.device) for name, description in config["arenas"].items()}
        # Where no device is in use `torch.manual_seed` takes longer than many a call: see `tasks.seed_generators`.
        self.seed = _seed_processor if self.device.type == "cpu" else _manual_seed
        self.clock: _HostClock | _DeviceClock = _DeviceClock() if self.device.type == "cuda" else _HostClock()
        self.layouts: list[tuple[Any, list[torch.Tensor]]] = []
        self.regions: list[list[torch.Tensor]] = []
        self.held: list[list[torch.Tensor]] = []
        self.held_marks: list[_OutputMeta] = []
        """Of all held outputs, when they were new: torch.compile's CUDA graphs forbid to look at one that they overwrote."""
        self.latest: tuple[list[torch.Tensor], list[_OutputMeta]] = [], []
        """Outputs of the latest call, until the next one, and what is to be known of them."""
        self.lingering: list[list[torch.Tensor]] = []
        self.lingering_marks: list[_OutputMeta] = []
        self.linger_calls = 8 if self.device.type == "cpu" else 0
        """On a processor large outputs go back to the system when freed, which takes as long as a short call, within
        the parent's clock and beyond the worker's own: they are freed together, so that most calls pay nothing."""
        self.left_gradients_on = False
        self.before = global_state()
        self.functions = library_functions()
        self.model: torch.nn.Module | None = None
        self.renamed: dict[str, torch.Tensor] = {}
        """What the `state_dict` showed, when the module was new, under names that are registered nowhere."""

    def op_build(self, message: dict[str, Any]) -> dict[str, Any]:
        """Import the module and construct the class, from the same seed on both sides."""
        path = Path(self.config["private"]) / f"{self.config['role']}.py"
        path.write_text(self.config["source"], encoding="utf-8")
        spec = importlib.util.spec_from_file_location(self.config["role"], path)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"no loader for {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.config["role"]] = module
        self.seed(message["seed"])
        spec.loader.exec_module(module)
        cls = getattr(module, self.config["class"], None)
        if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
            return {"missing": self.config["class"]}
        arguments = unflatten(message["arguments"], [])
        self.seed(message["seed"])
        self.model = cls(*arguments).to(self.device)
        registered = _registered_within(self.model)
        self.renamed = {key: value for key, value in self.model.state_dict().items() if key not in registered}
        return self.interface()

    def registered(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers where they lie, by their names in the `state_dict`. An optimiser or an average of weights
        does not ask for one before it uses them, nor looks for them each time, so none of the module's own code runs that
        could be told by it."""
        assert self.model is not None
        found = _registered_within(self.model)
        if not self.renamed:
            return found
        memory = [_OutputMeta.of(value) for value in found.values() if _type(value) in (_Tensor, _Parameter)]
        return found | {
            key: value for key, value in self.renamed.items() if any(_OutputMeta.of(value).overlaps(mark) for mark in memory)
        }

    def interface(self) -> dict[str, Any]:
        """What the module shows of itself: its mode and its state's names, dtypes and shapes."""
        assert self.model is not None
        state = self.model.state_dict()
        return {
            "training": bool(self.model.training),
            "state": [[key, str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in state.items()],
        }

    def op_layout(self, message: dict[str, Any]) -> dict[str, Any]:
        """Register where inputs will lie; calls name them by position."""
        specs = [TensorSpec.from_json(spec) for spec in message["specs"]]
        self.layouts.append((message["skeleton"], [spec.view(self.memory["inputs"]) for spec in specs]))
        return {}

    def op_outputs(self, message: dict[str, Any]) -> dict[str, Any]:
        """Register where outputs are to be put: one region for each call of a series."""
        memory = self.memory["outputs"]
        self.regions = [[TensorSpec.from_json(spec).view(memory) for spec in region] for region in message["regions"]]
        return {}

    def op_mode(self, message: dict[str, Any]) -> dict[str, Any]:
        """Switch the module between train and eval mode."""
        assert self.model is not None
        self.model.train(message["training"])
        return {"training": bool(self.model.training)}

    def op_load_state(self, message: dict[str, Any]) -> dict[str, Any]:
        """Load weights that the parent has put into the state arena."""
        assert self.model is not None
        self.model.load_state_dict(self._placed_state(message), strict=True)
        return {}

    def op_step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Change parameters where they are, as an optimiser does."""
        assert self.model is not None
        own = self.registered()
        with _no_grad(), _unheard():  # a parameter's own `copy_` would be told of it, too
            for key, value in self._placed_state(message).items():
                if key in own:  # an optimiser finds no others
                    _copy_into(own[key], value)
        return {}

    def _placed_state(self, message: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {key: TensorSpec.from_json(spec).view(self.memory["state"]).clone() for key, spec in message["state"]}

    def op_save_state(self, message: dict[str, Any]) -> dict[str, Any]:
        """Put the module's present state into the state arena."""
        assert self.model is not None
        state = self.registered()
        if not all(key in state for key, _ in message["state"]):
            state = {**self.model.state_dict(), **state}
        with _no_grad(), _unheard():  # as they lie in memory: no class of tensors may first make them now
            for key, spec in message["state"]:
                _copy_into(TensorSpec.from_json(spec).view(self.memory["state"]), state[key])
        self.clock.settle()
        return {}

    def op_inspect(self, message: dict[str, Any]) -> dict[str, Any]:
        """Process-wide settings before the build and now, and library functions that are no longer what they were."""
        after = global_state()
        after["grad_enabled"] = after["grad_enabled"] if not self.left_gradients_on else "turned on inside no_grad"
        return {"before": self.before, "after": after, "patched": self.patched(library_functions())[:20], **self.interface()}

    def patched(self, now: dict[str, int]) -> list[str]:
        """Functions of libraries that are no longer what they were, beside those that torch.compile replaces."""
        compiles = "torch._dynamo" in sys.modules
        return sorted(
            name
            for name, identity in self.functions.items()
            if now.get(name) != identity and not (compiles and name in WRAPPED_BY_COMPILE)
        )

    def op_call(self, message: dict[str, Any]) -> dict[str, Any]:
        """One call on inputs that lie ready; outputs go into the arena, descriptions of them into the answer."""
        self.clock.ready()
        delivered, flat = self._call(message["layout"], message["seed"], self.regions[0])
        described = self._described(delivered)
        self.latest = flat, delivered.marks
        return {"inner_us": self.clock.elapsed_us(), **described}

    def op_hold(self, message: dict[str, Any]) -> dict[str, Any]:
        """Keep the outputs of the latest call, as they are or by views: those keep the memory as well, but not the tensor
        object, by which a module could tell that it is kept."""
        flat, marks = self.latest
        self.held.append([_detach(item) for item in flat] if message["views"] else flat)
        self.held_marks.extend(marks)
        return {}

    def op_repeat(self, message: dict[str, Any]) -> dict[str, Any]:
        """Calls that nobody times or looks at, so that the host is as warm for the next as in a program's loop."""
        for _ in range(message["calls"]):
            self._call(message["layout"], message["seed"], [])
        return {}

    def op_series(self, message: dict[str, Any]) -> dict[str, Any]:
        """Several calls on different inputs under one request, so that the outer clock's noise is shared among them."""
        total_us, delivered = 0.0, []
        self.clock.ready()
        for layout, seed, region in zip(message["layouts"], message["seeds"], self.regions, strict=False):
            # Not kept here: on a GPU a second output beside it would be allocated while the clock runs.
            delivered.append(self._call(layout, seed, region)[0])
            total_us += self.clock.elapsed_us()
        return {"inner_us": total_us, "answers": [self._described(one) for one in delivered]}

    def _call(self, layout: int, seed: int | None, region: list[torch.Tensor]) -> tuple[_Delivered, list[torch.Tensor]]:
        skeleton, tensors = self.layouts[layout]
        self.latest = [], []  # before the clock starts: memory that is free again need not be allocated
        inputs = unflatten(skeleton, list(tensors))
        _count_version(tensors)  # the parent has written to them, which PyTorch has not seen
        if seed is not None:
            self.seed(seed)
        model, clock = self.model, self.clock
        assert model is not None
        with _no_grad():
            clock.start()
            result = model(*inputs)
            clock.stop()
            self.left_gradients_on |= torch.is_grad_enabled()
            delivered = self._deliver(result, region)
        clock.settle()
        return delivered

    def forget(self) -> bool:
        """Let go of the module and of all memory; returns whether it left the process as it found it."""
        now = library_functions()
        unchanged = global_state() == self.before and now.keys() == self.functions.keys() and not self.patched(now)
        self.model = None
        self.renamed.clear()
        self.latest = [], []
        sys.modules.pop(self.config["role"], None)
        for views in (
            self.layouts,
            self.regions,
            self.held,
            self.held_marks,
            self.lingering,
            self.lingering_marks,
        ):
            views.clear()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what is compiled, and the memory of its graphs
        gc.collect()
        for memory in self.memory.values():
            close_arena(memory)
        self.memory.clear()
        if self.device.type != "cuda":
            return unchanged
        torch.cuda.empty_cache()
        return unchanged and torch.cuda.memory_reserved(self.device) <= _LEFT_BYTES_MAX

    def op_trace(self, message: dict[str, Any]) -> dict[str, Any]:
        """Names of PyTorch's operators that one call runs, views and allocations left out."""
        skeleton, tensors = self.layouts[message["layout"]]
        model = self.model
        assert model is not None
        with _no_grad():
            names = operators_of(lambda: model(*unflatten(skeleton, list(tensors))), Path(self.config["private"]))
        self.clock.settle()
        return {"operators": sorted(names - _FREE_OPERATORS)}

    def op_recopy(self, message: dict[str, Any]) -> dict[str, Any]:
        """Put the output of an earlier call, as it is now, into the arena again."""
        for source, target in zip(self.held[message["index"]], self.regions[0], strict=True):
            _copy_into(target, source)
        self.clock.settle()
        return {}

    def op_release(self, message: dict[str, Any]) -> dict[str, Any]:
        """Let go of held outputs."""
        self.held.clear()
        self.held_marks.clear()
        return {}

    def op_rest(self, message: dict[str, Any]) -> dict[str, Any]:
        """Give back the memory of what ran so far: others are measured now, and outputs can be large."""
        self.latest = [], []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def _deliver(self, result: Any, region: list[torch.Tensor]) -> tuple[_Delivered, list[torch.Tensor]]:
        flat: list[torch.Tensor] = []
        strange: list[str] = []
        skeleton = _walk(result, flat, strange)
        if len(self.lingering) >= self.linger_calls:
            self.lingering.clear()
            self.lingering_marks.clear()
        marks, earlier = [_OutputMeta.of(item) for item in flat], tuple(self.lingering_marks)
        if self.linger_calls:
            self.lingering.append(flat)
            self.lingering_marks += marks
        if not strange and len(flat) == len(region):
            with _DisableTorchFunction():
                for item, target in zip(flat, region, strict=True):
                    if item.shape == target.shape and item.device == target.device:
                        _copy_into(target, item)
        return _Delivered(skeleton, strange, marks, earlier), flat

    def _described(self, delivered: _Delivered) -> dict[str, Any]:
        """What the parent is told of a call's outputs."""
        assert self.model is not None
        outputs = []
        state = [_OutputMeta.of(value) for value in _registered_within(self.model).values()]
        earlier = (*self.held_marks, *delivered.earlier)
        for index, mark in enumerate(delivered.marks):
            others = delivered.marks[:index] + delivered.marks[index + 1 :]
            outputs.append({**mark.to_json(), "aliases": self._aliases(mark, state, others, earlier)})
        return {"skeleton": delivered.skeleton, "strange": delivered.strange, "outputs": outputs}

    def _aliases(
        self,
        mark: _OutputMeta,
        state: Collection[_OutputMeta],
        others: Collection[_OutputMeta],
        earlier: Collection[_OutputMeta],
    ) -> list[str]:
        """Which of the module's inputs, state and outputs share memory with an output."""
        found = ["input"] if mark.overlaps(_OutputMeta.of(self.memory["inputs"])) else []
        if mark.overlaps(_OutputMeta.of(self.memory["outputs"])):
            found.append("harness")  # which need not copy it then, and is faster by that than the reference's
        if any(mark.overlaps(one) for one in state):
            found.append("state")
        if any(mark.overlaps(other) for other in others):
            found.append("other output")
        if any(mark.overlaps(one) for one in earlier):
            found.append("earlier output")
        return found


def operators_of(call: Callable[[], object], folder: Path) -> set[str]:
    """Names of PyTorch's operators that a call runs.

    By an observer of operators, not by the profiler: where there is a GPU, to profile a processor's work once attaches
    CUPTI to the process for good, and each launch takes longer from then on (`docs/log.md`).

    Args:
        call: What to watch.
        folder: Where the observer may write a file.
    """
    path = folder / "operators.json"
    path.touch()
    path.chmod(0o600)  # whatever mask for new files a module has set
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


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Operators run past classes of tensors and modes that would like to know of them."""
    with _DisableTorchFunction(), _DisableTorchDispatch():
        yield


def _registered_within(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the names under which they are registered."""
    found: dict[str, torch.Tensor] = {}
    modules = [("", model)]
    while modules:
        prefix, module = modules.pop()
        own = _attributes(module)
        own = _attributes(own["_actual_script_module"]) if type(module) is _TracedModule else own
        for kind in ("_parameters", "_buffers"):
            found |= {prefix + name: value for name, value in _entries(own.get(kind)) if isinstance(value, _Tensor)}
        modules += [(f"{prefix}{name}.", part) for name, part in _entries(own.get("_modules")) if part is not None]
    return found


def _entries(table: Any) -> list[tuple[str, Any]]:
    """Of a module's table, past what a class of its own does when it is read; of a scripted module it is no dictionary."""
    if isinstance(table, dict):
        return list(dict.items(table))
    return list(table.items()) if type(table) in _SCRIPTED_TABLES else []


_TRAITS = ("asking for gradients", "made in inference mode", "negated when it is read", "conjugated when it is read")
"""What a plain tensor may be beside its values. With one of these its user cannot do all that can be done with another."""


class _OutputMeta(NamedTuple):
    """What is to be known of an output when its memory is another's; taken while the parent's clock runs, so little."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    start: int
    stop: int
    """Of its storage, as addresses; equal where it has none."""
    traits: tuple[bool, ...]
    """As in `_TRAITS`."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _OutputMeta:
        device = tensor.device
        storage = _storage(tensor) if device.type != "meta" and tensor.layout is torch.strided else None
        start = 0 if storage is None else storage.data_ptr()
        stop = start if storage is None else start + storage.nbytes()
        traits = (tensor.requires_grad, tensor.is_inference(), tensor.is_neg(), tensor.is_conj())
        return cls(tensor.dtype, tensor.shape, _stride(tensor), device, start, stop, traits)

    def overlaps(self, other: _OutputMeta) -> bool:
        return max(self.start, other.start) < min(self.stop, other.stop)

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "stride": list(self.stride),
            "device": str(self.device),
            "traits": [name for name, has in zip(_TRAITS, self.traits, strict=True) if has],
        }


class _Delivered(NamedTuple):
    """A call's outputs, which lie in their region now."""

    skeleton: Any
    strange: list[str]
    marks: list[_OutputMeta]
    earlier: tuple[_OutputMeta, ...]
    """Of outputs of other calls that were in use still."""


def _walk(item: Any, flat: list[torch.Tensor], strange: list[str]) -> Any:
    """The structure of a result, its tensors in `flat`; what has no business in one goes to `strange`.

    Not a closure: one that calls itself is a cycle, which would keep every output alive until the garbage collector
    comes by, and each call would allocate anew.
    """
    kind = _type(item)
    if kind is _Tensor:
        if item.__dict__:
            strange.append("a torch.Tensor with attributes of its own")
        if item.layout is not torch.strided:
            strange.append(f"a tensor of layout {item.layout}")
            return None
        flat.append(item)
        return {"tensor": len(flat) - 1}
    if kind is list or kind is tuple:
        return {kind.__name__: [_walk(part, flat, strange) for part in item]}
    if kind is dict:
        return {"dict": {str(key): _walk(part, flat, strange) for key, part in item.items()}}
    if item is None or kind in (bool, int, float, str):
        return {"value": item}
    strange.append(f"{kind.__module__}.{kind.__qualname__}")
    return None


def serve(connection: socket.socket, config: dict[str, Any], files: list[int]) -> None:
    """Answer the parent until it hangs up. Exceptions of the module become answers."""
    channel = Channel(connection)
    harness: Harness | None = None
    while True:
        try:
            message = channel.receive()
        except ChannelClosedError:
            return
        try:
            if message["op"] == "forget":
                answer: dict[str, Any] = {"clean": harness is None or harness.forget()}
                harness = None
            elif message["op"] == "adopt":
                config, files = config | message["config"], channel.receive_files(message["files"])
                answer = {}
            else:
                harness = harness or Harness(config, files)
                answer = getattr(harness, f"op_{message['op']}")(message)
        except SystemExit as error:
            answer = {"error": {"type": "SystemExit", "message": f"exit status {error.code}", "trace": ""}}
        except BaseException as error:  # noqa: BLE001 - whatever a candidate raises is its answer
            answer = {"error": _error(error, config)}
        answer["nonce"] = message["nonce"]
        try:
            channel.send(answer)
        except ChannelClosedError:
            return
        if message["op"] == "repeat":
            channel.watch(_AWAKE_S)


def _error(error: BaseException, config: dict[str, Any]) -> dict[str, str]:
    """What is told of an exception: its words, and where the module's own code was, its file by name only.

    Frames of this harness and of libraries say nothing about the candidate, and their paths are this machine's.
    """
    name = f"{config['role']}.py"
    path = str(Path(config["private"]) / name)
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a candidate's exception may fail to print
        text = "(no message)"
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    trace = "".join(traceback.StackSummary.extract(iter(own[-6:])).format())
    return {
        "type": type(error).__name__,
        "message": text.replace(path, name)[:2000],
        "trace": trace.replace(path, name)[-4000:],
    }


def prepare_directories(private: Path, build: Path) -> None:
    """Point every cache and temporary file of this process into its private directory."""
    for name in ("home", "tmp"):
        (private / name).mkdir(parents=True, exist_ok=True)
    for module in ("statistics", "numpy", "json"):
        importlib.import_module(module)
    os.environ |= {
        "HOME": str(private / "home"),
        "TMPDIR": str(private / "tmp"),
        "XDG_CACHE_HOME": str(private / "home/.cache"),
        "TORCH_EXTENSIONS_DIR": str(build / "torch_extensions"),
        "TRITON_CACHE_DIR": str(build / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(build / "inductor"),
        "CUDA_CACHE_PATH": str(build / "cuda"),
        "MPLCONFIGDIR": str(private / "home"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Those go below TMPDIR, which is fresh in every process: ten seconds each time for headers that are used once.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    tempfile.tempdir = None  # some module imported before the fork may have asked for it already
    os.chdir(private)
