"""Builds one module inside a worker process and answers calls on it.

The same code serves the reference and the candidate, so that both pay the same harness. In a candidate's process all
of this is at the candidate's mercy; nothing it answers is a result (see `docs/threat-model.md`). Functions are bound
at import, before candidate code exists, which defeats patching by name and costs nothing.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import importlib.util
import operator
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from kernelwright.judge.worker.arena import TensorSpec, close_arena, open_arena
from kernelwright.judge.worker.clocks import DeviceClock, HostClock
from kernelwright.judge.worker.inspection import (
    FREE_OPERATORS,
    Library,
    generators,
    global_state,
    held,
    library,
    operators_of,
    signature_of,
    used,
)
from kernelwright.judge.worker.structure import Delivered, OutputMetadata, aliases_of, arguments, unflatten, walk

_copy_into = torch.Tensor.copy_
_detach = torch.Tensor.detach
_storage = torch.Tensor.untyped_storage
_count_version = torch.autograd.graph.increment_version
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_attributes = vars(torch.nn.Module)["__dict__"].__get__
"""A module's own attributes, whatever its class shows in their place."""
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

_LEFT_BYTES_MAX = 256 << 20
"""Device memory that a process without a module may hold: libraries' workspaces are tens of MiB. Our choice."""


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
        if config.get("tf32_products"):
            torch.backends.cuda.matmul.allow_tf32 = True
        self.memory = {name: open_arena(description, files, self.device) for name, description in config["arenas"].items()}
        # Where no device is in use `torch.manual_seed` takes longer than many a call: see `tasks.seed_generators`.
        self.seed = _seed_processor if self.device.type == "cpu" else _manual_seed
        self.clock: HostClock | DeviceClock = DeviceClock() if self.device.type == "cuda" else HostClock()
        self.layouts: list[tuple[Any, list[torch.Tensor]]] = []
        self.marks: list[list[OutputMetadata]] = []
        """Metadata of the tensors of each layout."""
        self.regions: list[list[torch.Tensor]] = []
        self.held: list[list[torch.Tensor]] = []
        self.held_metadata: list[OutputMetadata] = []
        """Metadata of held outputs, taken at once: torch.compile's CUDA graphs forbid reading one that they overwrote."""
        self.versions: list[int] = []
        """Counts of the changes of each input of the latest call before it."""
        self.latest: tuple[list[torch.Tensor], list[OutputMetadata]] = [], []
        """Outputs of the latest call, until the next one, and their metadata."""
        self.lingering: list[list[torch.Tensor]] = []
        self.lingering_metadata: list[OutputMetadata] = []
        self.linger_calls = 8 if self.device.type == "cpu" else 0
        """Calls whose outputs are freed together. On a processor, returning a large output to the system takes as long as a
        short call, and only the parent's clock would see it."""
        self.left_gradients_on = False
        self.before = global_state()
        self.library: Library = library()
        self.drawn, self.seeded = generators()
        """State of the random generators of Python and NumPy, and seeds of PyTorch's that are the harness's own."""
        self.left_seeds = False
        self.model: torch.nn.Module | None = None
        self.original: torch.nn.Module | None = None
        """The module while a copy has its place."""
        self.replaced: list[torch.Tensor] = []
        """Memory of parameters before they were replaced: a module that kept the address is to be stale and not to crash."""
        self.renamed: dict[str, torch.Tensor] = {}
        """Entries of the new module's `state_dict` whose names are registered nowhere."""

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
        self.left_seeds = self.moved_generators({message["seed"]})
        return self.interface()

    def registered(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers where they lie, by their names in the `state_dict`, without running the module's own code.

        An optimiser or an average of weights reads them without asking for a `state_dict` first.
        """
        assert self.model is not None
        found = _registered_within(self.model)
        if not self.renamed:
            return found
        memory = [OutputMetadata.of(value) for value in found.values() if _type(value) in (_Tensor, _Parameter)]
        return found | {
            key: value
            for key, value in self.renamed.items()
            if any(OutputMetadata.of(value).overlaps(mark) for mark in memory)
        }

    def interface(self) -> dict[str, Any]:
        """The module's mode and its state's names, dtypes and shapes."""
        assert self.model is not None
        state = self.model.state_dict()
        return {
            "training": bool(self.model.training),
            "signature": signature_of(self.model),
            "state": [[key, str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in state.items()],
        }

    def op_layout(self, message: dict[str, Any]) -> dict[str, Any]:
        """Register where inputs will lie; calls name them by position."""
        specs = [TensorSpec.from_json(spec) for spec in message["specs"]]
        self.layouts.append((message["skeleton"], [spec.view(self.memory["inputs"]) for spec in specs]))
        self.marks.append([OutputMetadata.of(tensor) for tensor in self.layouts[-1][1]])
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
        self.load(self._placed_state(message))
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Load weights and buffers; sparse buffers stay."""
        assert self.model is not None
        sparse = {key: value for key, value in self.model.state_dict().items() if value.layout is not torch.strided}
        self.model.load_state_dict(sparse | state, strict=True)

    def op_step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Change parameters in one of several ways: `in place`, as an optimiser does; `data in place`, which counts no
        version; `data replaced`, as `module.to` does; or `assigned` by `load_state_dict`."""
        assert self.model is not None
        placed, how = self._placed_state(message), message.get("how", "in place")
        own = self.registered()
        self.replaced += [value.detach() for value in own.values()]
        if how == "assigned":
            self.model.load_state_dict(placed, strict=False, assign=True)
            return {}
        with _no_grad(), _without_overrides():  # nor with a parameter's own `copy_`
            for key, value in placed.items():
                if key not in own:  # an optimiser finds no others
                    continue
                if how == "data replaced":
                    own[key].data = value
                else:
                    _copy_into(own[key].data if how == "data in place" else own[key], value)
        return {}

    def _placed_state(self, message: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {key: TensorSpec.from_json(spec).view(self.memory["state"]).clone() for key, spec in message["state"]}

    def op_save_state(self, message: dict[str, Any]) -> dict[str, Any]:
        """Put the module's present state into the state arena."""
        assert self.model is not None
        state = self.registered()
        if not all(key in state for key, _ in message["state"]):
            state = {**self.model.state_dict(), **state}
        with _no_grad(), _without_overrides():  # as they lie in memory: no class of tensors may first make them now
            for key, spec in message["state"]:
                _copy_into(TensorSpec.from_json(spec).view(self.memory["state"]), state[key])
        self.clock.settle()
        return {}

    def op_inspect(self, message: dict[str, Any]) -> dict[str, Any]:
        """Process-wide settings before the build and now, and library functions that are no longer what they were."""
        assert self.model is not None
        after = global_state()
        after["flags"] |= {"seeds": "set when it was built"} if self.left_seeds else {}
        after["grad_enabled"] = after["grad_enabled"] if not self.left_gradients_on else "turned on inside no_grad"
        patched = self.library.replaced()[:20]
        return {"before": self.before, "after": after, "patched": patched, "training": bool(self.model.training)}

    def op_held(self, message: dict[str, Any]) -> dict[str, Any]:
        """Counts of what the process holds, and whether calls have moved random generators since the last request. They
        begin elsewhere then: a module that sets the same seed in each call is seen too."""
        moved = self.moved_generators(self.seeded)
        random.seed(message["seed"])
        numpy.random.seed(message["seed"] % (1 << 32))
        self.seed(message["seed"])
        self.drawn, self.seeded = generators()
        return {"held": held(self.device, Path(self.config["private"])), "moved": moved}

    def moved_generators(self, seeds: set[int]) -> bool:
        """True if somebody has drawn from the generators of Python and NumPy, or given PyTorch's another seed than these."""
        drawn, found = generators()
        return drawn != self.drawn or not found <= seeds

    def op_call(self, message: dict[str, Any]) -> dict[str, Any]:
        """One call on inputs that lie ready; outputs go into the arena, descriptions of them into the answer.

        With `again` the caller has written into what the latest call returned, and into nothing else.
        """
        if again := message.get("again", False):
            for item in self.latest[0]:
                _storage(item).fill_(1)  # type: ignore[attr-defined]
        self.clock.ready()
        delivered, flat = self.call(message["layout"], message["seed"], self.regions[0], again=again)
        described = self._described(delivered, self._owners())
        _, tensors = self.layouts[message["layout"]]
        is_kept = all(map(operator.eq, map(OutputMetadata.of, tensors), self.marks[message["layout"]]))
        described["inputs_kept"] = is_kept and self.versions == [_version(tensor) for tensor in tensors]
        self.latest = flat, delivered.marks
        return {"inner_us": self.clock.elapsed_us(), **described}

    def op_hold(self, message: dict[str, Any]) -> dict[str, Any]:
        """Keep the outputs of the latest call, or views of them: a module can detect references to its tensors."""
        flat, marks = self.latest
        self.held.append([_detach(item) for item in flat] if message["views"] else flat)
        self.held_metadata.extend(marks)
        return {}

    def op_repeat(self, message: dict[str, Any]) -> dict[str, Any]:
        """Calls without timing or results, so that the host is as warm for the next as in a program's loop."""
        for _ in range(message["calls"]):
            self.call(message["layout"], message["seed"], [])
        return {}

    def op_series(self, message: dict[str, Any]) -> dict[str, Any]:
        """Several calls on different inputs under one request, so that the outer clock's noise is shared among them."""
        total_us, delivered = 0.0, []
        self.clock.ready()
        for layout, seed, region in zip(message["layouts"], message["seeds"], self.regions, strict=False):
            # Not kept here: on a GPU a second output beside it would be allocated while the clock runs.
            delivered.append(self.call(layout, seed, region)[0])
            total_us += self.clock.elapsed_us()
        owners = self._owners()  # once for all: the outer clock runs
        return {"inner_us": total_us, "answers": [self._described(one, owners) for one in delivered]}

    def call(
        self, layout: int, seed: int | None, region: list[torch.Tensor], *, again: bool = False
    ) -> tuple[Delivered, list[torch.Tensor]]:
        """Call the module on a layout of inputs; returns its outputs as delivered to a region, and their tensors."""
        skeleton, tensors = self.layouts[layout]
        self.latest = [], []  # before the clock starts: memory that is free again need not be allocated
        inputs, named = arguments(unflatten(skeleton, list(tensors)))
        if not again:
            _count_version(tensors)  # the parent has written to them, which PyTorch has not seen
        self.versions = [_version(tensor) for tensor in tensors]
        if seed is not None:
            self.seed(seed)
            self.seeded = {seed}
        model, clock = self.model, self.clock
        assert model is not None
        with _no_grad():
            clock.start()
            result = model(*inputs, **named)
            clock.stop()
            clock.arrive()
            self.left_gradients_on |= torch.is_grad_enabled()
            delivered = self.deliver(result, region)
        clock.settle()
        return delivered

    def forget(self) -> bool:
        """Let go of the module and of all memory; returns whether it left the process as it found it."""
        unchanged = self.drop_module()
        for memory in self.memory.values():
            close_arena(memory)
        self.memory.clear()
        if self.device.type != "cuda":
            return unchanged
        torch.cuda.empty_cache()
        return unchanged and torch.cuda.memory_reserved(self.device) <= _LEFT_BYTES_MAX

    def drop_module(self) -> bool:
        """Let go of the module and of what it returned; returns whether settings and libraries are as they were."""
        unchanged = global_state() == self.before and not self.library.replaced(or_added=True)
        self.model = None
        self.renamed.clear()
        self.replaced.clear()
        self.latest = [], []
        sys.modules.pop(self.config["role"], None)
        for views in (
            self.layouts,
            self.marks,
            self.regions,
            self.held,
            self.held_metadata,
            self.lingering,
            self.lingering_metadata,
        ):
            views.clear()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what is compiled, and the memory of its graphs
        gc.collect()
        return unchanged

    def op_copy(self, message: dict[str, Any]) -> dict[str, Any]:
        """Put a deep copy into the module's place, or the module back into that of its copy."""
        self.model, self.original = (self.original, None) if self.original else (copy.deepcopy(self.model), self.model)
        return {}

    def op_eager(self, message: dict[str, Any]) -> dict[str, Any]:
        """Let functions that torch.compile has compiled run as they are written, or compiled again."""
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("force_eager" if message["eager"] else "default")
        return {}

    def op_use(self, message: dict[str, Any]) -> dict[str, Any]:
        """Gradients of a training step, and types of outputs under autocast."""
        assert self.model is not None
        skeleton, tensors = self.layouts[message["layout"]]
        answers = used(self.model, skeleton, tensors, message["seed"])
        self.clock.settle()
        return answers

    def op_trace(self, message: dict[str, Any]) -> dict[str, Any]:
        """Names of PyTorch's operators that one call runs, views and allocations left out."""
        skeleton, tensors = self.layouts[message["layout"]]
        model = self.model
        assert model is not None
        inputs, named = arguments(unflatten(skeleton, list(tensors)))
        with _no_grad():
            names = operators_of(lambda: model(*inputs, **named), Path(self.config["private"]))
        self.clock.settle()
        return {"operators": sorted(names - FREE_OPERATORS)}

    def op_recopy(self, message: dict[str, Any]) -> dict[str, Any]:
        """Put the output of an earlier call, as it is now, into the arena again."""
        for source, target in zip(self.held[message["index"]], self.regions[0], strict=True):
            _copy_into(target, source)
        self.clock.settle()
        return {}

    def op_release(self, message: dict[str, Any]) -> dict[str, Any]:
        """Let go of held outputs."""
        self.held.clear()
        self.held_metadata.clear()
        return {}

    def op_release_idle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Give back the memory of what ran so far: others are measured now, and outputs can be large."""
        self.latest = [], []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def deliver(self, result: Any, region: list[torch.Tensor]) -> tuple[Delivered, list[torch.Tensor]]:
        """Copy the tensors of a result to a region, where they fit, and describe the rest."""
        flat: list[torch.Tensor] = []
        strange: list[str] = []
        skeleton = walk(result, flat, strange)
        if len(self.lingering) >= self.linger_calls:
            self.lingering.clear()
            self.lingering_metadata.clear()
        marks, earlier = [OutputMetadata.of(item) for item in flat], tuple(self.lingering_metadata)
        if self.linger_calls:
            self.lingering.append(flat)
            self.lingering_metadata += marks
        if not strange and len(flat) == len(region):
            with _DisableTorchFunction():
                for item, target in zip(flat, region, strict=True):
                    if item.shape == target.shape and item.device == target.device:
                        _copy_into(target, item)
        return Delivered(skeleton, strange, marks, earlier), flat

    def _owners(self) -> dict[str, list[OutputMetadata]]:
        """Metadata of the memory in which no output may lie, by whose it is."""
        assert self.model is not None
        return {
            "input": [OutputMetadata.of(self.memory["inputs"])],
            "harness": [OutputMetadata.of(self.memory["outputs"])],  # an output there need not be copied: that saves time
            "state": [OutputMetadata.of(value) for value in _registered_within(self.model).values()],
        }

    def _described(self, delivered: Delivered, owners: Mapping[str, list[OutputMetadata]]) -> dict[str, Any]:
        """Description of a call's outputs for the parent."""
        outputs = []
        earlier = (*self.held_metadata, *delivered.earlier)
        for index, mark in enumerate(delivered.marks):
            others = delivered.marks[:index] + delivered.marks[index + 1 :]
            outputs.append({**mark.to_json(), "aliases": aliases_of(mark, owners, others, earlier)})
        return {"skeleton": delivered.skeleton, "strange": delivered.strange, "outputs": outputs}


@contextlib.contextmanager
def _without_overrides() -> Iterator[None]:
    """Operators run without overrides by tensor subclasses and modes."""
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
    """Entries of a module's table, read past its own class; a scripted module's table is no dictionary."""
    if isinstance(table, dict):
        return list(dict.items(table))
    return list(table.items()) if type(table) in _SCRIPTED_TABLES else []
