"""Holds one side of a comparison: a worker with its arenas, fed inputs and read from memory.

A worker's answers are parsed field by field: in a candidate's process the harness itself can be made to lie.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from kernelwright.errors import DeviceError, TaskError
from kernelwright.judge.check.oracle import Outputs, State
from kernelwright.judge.isolation.gate import DeviceGate
from kernelwright.judge.isolation.process import CallClocks, WorkerError, WorkerSpec
from kernelwright.judge.isolation.workers import Workers
from kernelwright.judge.settings import Settings
from kernelwright.judge.worker.arena import ALIGNMENT_BYTES, TensorSpec, plan
from kernelwright.judge.worker.structure import flatten
from kernelwright.records import Reason
from kernelwright.tasks import INPUT_SETS, give_back_spare_memory, is_inexact
from kernelwright.tasks.input_sets import computable, once
from kernelwright.tasks.invariants import outline


class _WorkerReply(BaseModel):
    model_config = ConfigDict(frozen=True, strict=False, extra="ignore")


class Output(_WorkerReply):
    """One tensor, as the worker describes it."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    aliases: tuple[str, ...]
    traits: tuple[str, ...] = ()


class Described(_WorkerReply):
    """All that one call returned."""

    skeleton: Any
    strange: tuple[str, ...]
    outputs: tuple[Output, ...]
    inputs_kept: bool = True
    """True if the caller's tensors have the same shapes, memory and properties as before."""


class Series(_WorkerReply):
    """Several calls."""

    answers: tuple[Described, ...]


class BuiltModule(_WorkerReply):
    """Mode and state of a module that was built, or the name of the class that was missing."""

    missing: str | None = None
    training: bool = True
    signature: tuple[tuple[str, int], ...] | None = None
    """Names and kinds of the arguments that `forward` takes; None where Python cannot tell."""
    state: tuple[tuple[str, str, tuple[int, ...]], ...] = ()


class Mode(_WorkerReply):
    """The mode a module says it is in."""

    training: bool


class Inspection(Mode):
    """Process-wide settings before the build and now, and library functions that were replaced."""

    before: dict[str, Any]
    after: dict[str, Any]
    patched: tuple[str, ...]


class Held(_WorkerReply):
    """Counts of what a process holds, by kind, and whether calls moved random generators."""

    held: dict[str, int]
    moved: bool


class Use(_WorkerReply):
    """Answers to a program that trains a module and runs it under autocast, as `inspection.used` describes them."""

    gradients: dict[str, tuple[float, float] | None] | None
    autocast: tuple[str, ...] | None


class Operators(_WorkerReply):
    """Names of PyTorch operators that a call ran."""

    operators: tuple[str, ...]


R = TypeVar("R", bound=_WorkerReply)


def parse(kind: type[R], answer: dict[str, Any]) -> R | None:
    """The answer as what it should be, or None when it is not."""
    try:
        return kind.model_validate(answer)
    except (ValidationError, RecursionError):
        return None


SLOTS = 2
"""Places for a set of inputs at least. Same place and other values, other place and same values: both are tried."""

SERIES_CALLS_MAX = 48
SERIES_BYTES_MAX = 1 << 30
"""Calls under one request, which share its cost, as far as their inputs and outputs fit into this much memory."""

LARGE_BYTES = 1 << 30
"""Inputs and outputs of a call beyond which the memory of one is not held for another. Our choice."""
_SHIFT_BYTES = 96 << 10
"""Distance of the slots of a large task, which overlap. Our choice; a multiple of `ALIGNMENT_BYTES` and of `_SPOILT`."""
_SPOILT = torch.tensor([0x7BFF, -0x401, -1], dtype=torch.int16).repeat_interleave(8)
"""Filling of the slots where the present inputs do not lie: in every floating type NaN and numbers of both signs too large
for any output to be right that was computed from them."""

ALONE_LIMIT_S, _ALONE_RATIO = 5.0, 10.0
"""Limit of a candidate's call while others are stopped: so long, and this many times the longest before it. Our choice."""


_Placed = tuple[torch.Tensor, torch.Tensor]
"""A view of the arena, and what belongs there."""


@dataclass(frozen=True, slots=True)
class TaskShapes:
    """Memory that a task's tensors take, measured once on the reference."""

    slot_bytes: int
    outputs: tuple[TensorSpec, ...]
    """Contiguous, in the reference's dtypes."""
    output_bytes: int
    state: tuple[tuple[str, TensorSpec], ...]
    state_bytes: int

    @property
    def is_large(self) -> bool:
        """True if the inputs of one call are all that a worker's memory and the judge's hold."""
        return self.slot_bytes + self.output_bytes > LARGE_BYTES

    @property
    def step_bytes(self) -> int:
        """Distance of one slot from the next."""
        return _SHIFT_BYTES if self.is_large else self.slot_bytes

    @property
    def series_calls(self) -> int:
        """Most calls of one request; one where outputs are large, since five processes hold a copy of each."""
        return max(1, min(SERIES_CALLS_MAX, SERIES_BYTES_MAX // (self.slot_bytes + self.output_bytes)))

    @property
    def arena_bytes(self) -> dict[str, int]:
        """Size of each of a worker's arenas."""
        return {
            "inputs": (max(SLOTS, self.series_calls) - 1) * self.step_bytes + self.slot_bytes,
            "outputs": self.series_calls * self.output_bytes,
            "state": self.state_bytes,
        }

    @property
    def regions(self) -> list[list[TensorSpec]]:
        """Layout of the outputs of each call of a series."""
        return [
            [replace(spec, offset_bytes=spec.offset_bytes + index * self.output_bytes) for spec in self.outputs]
            for index in range(self.series_calls)
        ]

    @classmethod
    def measure(cls, inputs: list[torch.Tensor], outputs: list[torch.Tensor], state: State) -> TaskShapes:
        """Shapes of one set of inputs, its outputs and the module's state."""
        outlines = [outline(tensor) for tensor in inputs]
        others = (one.apply(outlines, torch.Generator()) for one in INPUT_SETS if one.layout)
        slot = max(plan(tensors)[1] for tensors in (outlines, *others))
        output_specs, output_bytes = plan([tensor.contiguous() for tensor in outputs])
        state_specs, state_bytes = plan([tensor.contiguous() for tensor in state.values()])
        slot += len(inputs) * ALIGNMENT_BYTES  # for those that begin off a multiple of it
        return cls(slot, output_specs, output_bytes, tuple(zip(state, state_specs, strict=True)), state_bytes)


@dataclass(frozen=True, slots=True)
class CallOutput:
    """Outputs and clocks of one call."""

    outputs: Outputs
    """Copies of the output arena's tensors, in the reference's dtypes; what was not written is NaN."""
    described: Described
    """The worker's description of its outputs: types, shapes, strides. Checked for being a good drop-in."""
    clocks: CallClocks
    inputs_intact: bool
    written: Sequence[torch.Tensor] = ()
    """Inputs as the call left them, where it changed some."""


class Side:
    """The reference, the candidate, or the second reference of an A/A comparison."""

    def __init__(self, workers: Workers, settings: Settings, shapes: TaskShapes, spec: WorkerSpec) -> None:
        self.role = spec.role
        self._settings = settings
        self._shapes, self._regions = shapes, shapes.regions
        self._device = torch.device(spec.device)
        self._workers = workers
        self._spec = spec
        self.worker = workers.start(spec, settings)
        self._layouts: dict[str, int] = {}
        self._called = False
        self.calls_us: list[float] = []
        """Times of the calls after the first by the judge's clock, microseconds."""
        self._latest: tuple[int, int | None] | None = None
        """Layout and seed of the latest call."""
        self.latency_us = math.inf
        """Latency of the latest timed call by the worker's clock, microseconds; to be believed of a reference only."""
        self._idle_us = 0.0
        """Processor time between the latest call and the next request, microseconds."""
        self._slot = 0
        self.placed: dict[int, list[_Placed]] = {}
        """Views of the arena and the tensors that were written there, by slot."""
        self.is_read, self.is_read_in_place = True, False
        """True if the outputs of its calls are read; and if only until the next call, so that they need no copy."""
        self._holds_views = False
        """True if the next outputs that are held are held by views."""

    def build(self, arguments: Any, seed: int) -> BuiltModule:
        """Import and construct the module; returns its interface. Raises WorkerError, for the reference TaskError."""
        answer = self._asked(BuiltModule, "build", self._settings.build_limit_s, arguments=arguments, seed=seed)
        if answer.missing is None:
            regions = [[spec.to_json() for spec in region] for region in self._regions]
            self._ask("outputs", self._settings.run_limit_s, regions=regions)
        return answer

    def renew(self) -> None:
        """Begin anew in a fresh process, in which nothing is built."""
        self.close()
        self.worker = self._workers.start(self._spec, self._settings)
        self._layouts.clear()
        self.placed.clear()
        self._called, self._latest, self._idle_us = False, None, 0.0

    def load_state(self, state: State) -> None:
        """Put weights into the module through `load_state_dict`."""
        self._place_state(state)
        self._ask("load_state", self._settings.build_limit_s, state=self._state_json())

    def step(self, state: State, parameters: set[str], how: str = "in place") -> None:
        """Change parameters as an optimiser does, or in another way that `Harness.op_step` names."""
        self._place_state(state)
        chosen = [entry for entry in self._state_json() if entry[0] in parameters]
        self._ask("step", self._settings.run_limit_s, state=chosen, how=how)
        self._called = self._called and how == "in place"  # what was replaced may make a compiler work again

    def _place_state(self, state: State) -> None:
        for key, spec in self._shapes.state:
            spec.view(self.worker.arenas["state"].memory).copy_(state[key])

    def read_state(self) -> State:
        """The module's state as it is now."""
        memory = self.worker.arenas["state"].memory
        self.worker.arenas["state"].poison()
        self._ask("save_state", self._settings.run_limit_s, state=self._state_json())
        return {key: spec.view(memory).clone() for key, spec in self._shapes.state}

    def set_mode(self, *, training: bool) -> bool:
        """Switch mode; returns the mode the module says it is in."""
        return self._asked(Mode, "mode", self._settings.run_limit_s, training=training).training

    def inspect(self) -> Inspection:
        """Process-wide settings before and after, and the module's interface."""
        return self._asked(Inspection, "inspect", self._settings.run_limit_s)

    def copy(self) -> None:
        """Put a deep copy into the module's place, or the module back; raises WorkerError where it cannot be copied."""
        self._ask("copy", self._settings.run_limit_s)

    def run_eagerly(self, eager: bool) -> None:
        """Let what torch.compile has compiled run as it is written, so that nothing is compiled for one call."""
        self._ask("eager", self._settings.run_limit_s, eager=eager)

    def use(self, inputs: list[Any], seed: int) -> Use:
        """Answers to a training step and to a call under autocast."""
        return self._asked(Use, "use", self._settings.build_limit_s, layout=self.place(inputs, slot=0), seed=seed)

    def held(self) -> Held:
        """Counts of what the process holds now; random generators begin elsewhere after it."""
        return self._asked(Held, "held", self._settings.run_limit_s, seed=secrets.randbits(32))

    def operators(self) -> list[str]:
        """PyTorch operators that the latest call runs when it is made again, by the worker's own account."""
        layout = self._latest[0] if self._latest else 0
        return list(self._asked(Operators, "trace", self._settings.run_limit_s, layout=layout).operators)

    def place(self, inputs: list[Any], slot: int) -> int:
        """Write inputs into a slot and poison the outputs; returns the layout's number for `call`."""
        layout = self._put(inputs, slot)
        self._poison_outputs()
        return layout

    def _poison_outputs(self) -> None:
        """Those of one call: there is room for a series, and to write all of it each time takes milliseconds."""
        self.worker.arenas["outputs"].poison(self._shapes.output_bytes)

    def _put(self, inputs: list[Any], slot: int) -> int:
        layout, pairs = self._prepare(inputs, slot)
        self._write(slot, pairs)
        return layout

    def _prepare(self, inputs: list[Any], slot: int) -> tuple[int, list[_Placed]]:
        """Place inputs, but for the writing, which no worker may see too early: the layout's number, and what goes where."""
        skeleton, tensors = flatten(inputs)
        specs, size = plan(tensors, as_aligned=True)
        if size > self._shapes.slot_bytes:  # unless another draw alone lies in so much memory
            specs, size = plan([tensor.contiguous() for tensor in tensors])
        if size > self._shapes.slot_bytes:
            raise TaskError("Wanted get_inputs to draw the same shapes every time; found larger ones on a later draw.")
        placed = [replace(spec, offset_bytes=spec.offset_bytes + slot * self._shapes.step_bytes) for spec in specs]
        key = repr((skeleton, placed))
        if key not in self._layouts:
            self._ask("layout", self._settings.run_limit_s, skeleton=skeleton, specs=[spec.to_json() for spec in placed])
            self._layouts[key] = len(self._layouts)
        memory = self.worker.arenas["inputs"].memory
        return self._layouts[key], [
            (once(view := spec.view(memory), view), once(tensor, view)) for spec, tensor in zip(placed, tensors, strict=True)
        ]

    def _write(self, slot: int, pairs: list[_Placed]) -> None:
        if self._shapes.is_large:
            self.placed.clear()
            memory = self.worker.arenas["inputs"].memory
            rest = (memory[:_SHIFT_BYTES] if slot else memory[-_SHIFT_BYTES:]).view(torch.int16).view(-1, len(_SPOILT))
            pairs = [(rest, _SPOILT.to(rest.device).expand_as(rest)), *pairs]
        for view, tensor in pairs:
            span = TensorSpec.of(view).span_bytes // view.element_size()
            if span > view.numel():  # between its elements lies what no output may come from; 0 is an index everywhere
                view.as_strided((span,), (1,)).fill_(math.nan if is_inexact(view) else 0)
            view.copy_(tensor)
        self.placed[slot], self._slot = pairs, slot

    def timed_call(
        self, inputs: list[Any], slot: int, flush: Callable[[], float], *, seed: int | None, hold: bool = False, repeats: int
    ) -> CallOutput:
        """One call on fresh inputs with cold caches of the device, and a host as warm as repeating the latest call makes it.

        A process that has slept takes two to four times as long to launch the same kernels as one that calls again and
        again. So only the inputs are written between the repetitions and the call: no repetition may have seen them.
        """
        layout, pairs = self._prepare(inputs, slot)
        if repeats:
            self.repeat(repeats)
        self._write(slot, pairs)
        self._poison_outputs()
        flush()
        answer = self.call(layout, seed=seed, hold=hold)
        self.latency_us = answer.clocks.inner_us
        return answer

    def call(
        self, layout: int, *, seed: int | None = None, hold: bool = False, other_us: float = 0.0, again: bool = False
    ) -> CallOutput:
        """One call on inputs placed last; everything the parent prepared is on the device before the clock starts.

        With `hold` the worker keeps the outputs for `recopy`. `other_us` is what the reference took for these inputs. With
        `again` the inputs are the latest call's, into whose outputs the worker has written.
        """
        limit_s = self.limit_s(other_us=other_us)
        answer, clocks = self._exchange("call", limit_s, layout=layout, seed=seed, again=again)
        if self._called:
            self.calls_us.append(clocks.outer_us)
        clocks = replace(clocks, idle_us=clocks.idle_us + self._idle_us)
        self._called, self._latest, self._idle_us = True, (layout, seed), 0.0
        described = self._parsed(Described, answer)
        intact = self._intact()
        written = [] if intact or self._shapes.is_large else [view.clone() for view, _ in self.placed[self._slot]]
        found = CallOutput(self._read_outputs(self._shapes.outputs), described, clocks, intact, written)
        if hold:
            self._hold()
        if self._shapes.is_large:
            self.placed.clear()
        return found

    def limit_s(self, calls: int = 1, other_us: float = 0.0) -> float:
        """Time for calls. While others wait for the device, a candidate has little more than was needed before."""
        if not self._called:
            return self._settings.build_limit_s
        limit_s = self._settings.run_limit_s * calls
        if self.role == "candidate" and self._spec.gate.alone:
            return min(limit_s, ALONE_LIMIT_S + _ALONE_RATIO * max([other_us, *self.calls_us]) / 1e6 * calls)
        return limit_s

    def _hold(self) -> None:
        """Have the worker keep what the latest call returned.

        It learns so only after the call, while the inputs and the harness's copy are taken away: a module that hands out
        empty memory cannot compute the outputs now. We alternate between keeping tensors and keeping views, because a module
        can detect references to its tensors.
        """
        placed = [pair for pairs in self.placed.values() for pair in pairs]
        self._take_away([view for view, _ in placed])
        self._ask("hold", self._settings.run_limit_s, views=self._holds_views)
        self._holds_views = not self._holds_views
        for view, tensor in placed:
            view.copy_(tensor)

    def _take_away(self, inputs: list[torch.Tensor]) -> None:
        for view in inputs:
            view.zero_()
        self._poison_outputs()

    def repeat(self, calls: int) -> None:
        """The latest call again, on inputs that lie there still.

        The results are not looked at. A module that works ahead here is slower in a series, where no call is repeated.
        """
        if self._latest is None:
            return
        layout, seed = self._latest
        _, clocks = self._exchange("repeat", self.limit_s(calls), layout=layout, seed=seed, calls=calls)
        self._idle_us += clocks.idle_us

    def series(self, draws: list[list[Any]], seeds: list[int | None]) -> tuple[list[CallOutput], CallClocks]:
        """Calls on at most `TaskShapes.series_calls` inputs under one request; each answer carries the clocks of all."""
        layouts = [self._put(inputs, slot) for slot, inputs in enumerate(draws)]
        self.worker.arenas["outputs"].poison()
        self._latest = None  # its inputs may be overwritten now
        answer, clocks = self._exchange("series", self.limit_s(len(draws)), layouts=layouts, seeds=seeds)
        intact = self._intact()
        if self._shapes.is_large:
            self.placed.clear()
        described = self._parsed(Series, answer).answers
        if len(described) != len(draws):
            raise WorkerError(Reason.PROTOCOL_VIOLATION, "a series was not answered call by call")
        return [
            CallOutput(self._read_outputs(region), one, clocks, intact)
            for one, region in zip(described, self._regions, strict=False)
        ], clocks

    def _intact(self) -> bool:
        """True if inputs in every slot are still what was placed there."""
        pairs = [pair for placed in self.placed.values() for pair in placed]
        # One question for all, as in compare.py; where something differs it may be NaN.
        differing = [(view != tensor).any() for view, tensor in pairs]
        return not differing or not torch.stack(differing).any() or all(_same_bits(view, tensor) for view, tensor in pairs)

    def recopy(self, index: int) -> Outputs:
        """The output of an earlier held call, as it is in the worker's memory now."""
        self._poison_outputs()
        self._ask("recopy", self._settings.run_limit_s, index=index)
        return self._read_outputs(self._shapes.outputs)

    def release(self) -> None:
        """Let the worker drop held outputs."""
        self._ask("release", self._settings.run_limit_s)

    def release_idle(self) -> None:
        """Let the worker give back the memory of what ran so far, and forget what lies in the slots."""
        self._ask("release_idle", self._settings.run_limit_s)
        self.placed.clear()

    def serve(self, gate: DeviceGate) -> None:
        """Belong to the evaluation of another gate from now on."""
        self._spec = replace(self._spec, gate=gate)
        self.worker.serve(gate)

    def close(self) -> None:
        """Give the worker back."""
        self._workers.stop(self.worker)

    def _read_outputs(self, specs: Sequence[TensorSpec]) -> Outputs:
        found = [computable(spec.view(self.worker.arenas["outputs"].memory)) for spec in specs if self.is_read]
        return found if self.is_read_in_place else [one.clone() for one in found]

    def _state_json(self) -> list[Any]:
        return [[key, spec.to_json()] for key, spec in self._shapes.state]

    def _ask(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        return self._exchange(op, timeout_s, **fields)[0]

    def _asked(self, kind: type[R], op: str, timeout_s: float, **fields: Any) -> R:
        return self._parsed(kind, self._ask(op, timeout_s, **fields))

    def _parsed(self, kind: type[R], answer: dict[str, Any]) -> R:
        if (reply := parse(kind, answer)) is None:
            raise WorkerError(Reason.PROTOCOL_VIOLATION, f"an answer is not a {kind.__name__.lower()}: {str(answer)[:200]}")
        return reply

    def _exchange(self, op: str, timeout_s: float, **fields: Any) -> tuple[dict[str, Any], CallClocks]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the worker must see all that was written before it was asked
            if self._shapes.is_large:
                give_back_spare_memory(self._device)  # the worker may need it
        try:
            return self.worker.exchange(op, timeout_s, **fields)
        except WorkerError as failure:
            if self.role != "reference":
                raise
            if self._device.type == "cuda" and failure.reason is Reason.OUT_OF_MEMORY:
                raise DeviceError(
                    f"Wanted memory on {self._device} for the reference; {failure.detail} "
                    "Who else uses it? Let fewer judges share it, or raise device_memory_limit_bytes or memory_limit_bytes."
                ) from failure
            raise TaskError(f"Wanted the reference to run; in its own process it failed: {failure.detail}") from failure


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors are equal, where NaN equals NaN."""
    return bool(((first == second) | ((first != first) & (second != second))).all())
