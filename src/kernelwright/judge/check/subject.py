"""What one evaluation is about, and its secrets: seeds, weights and inputs that no worker knows in advance."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kernelwright.errors import InternalError, TaskError
from kernelwright.judge.check.compare import Distance, apart
from kernelwright.judge.check.oracle import Oracle, OutOfDomainError, State, tensors_of
from kernelwright.judge.isolation.replies import Built
from kernelwright.judge.isolation.side import Shapes, Side
from kernelwright.judge.isolation.workers import Workers
from kernelwright.judge.settings import Settings
from kernelwright.judge.worker.structure import StructureError, flatten
from kernelwright.records import Candidate, Label, Reason
from kernelwright.records.canonical import sha256_of
from kernelwright.tasks import InputSet, LiveTask


class Gate(Protocol):
    """Lets one evaluation use the device."""

    held_s: float
    """For how long it has had the device alone."""

    def __call__(self, *, shared: bool = False) -> AbstractContextManager[None]:
        """Enter alone, or with all others that measure nothing either."""
        ...


class RejectionError(InternalError):
    """The candidate may not replace its reference."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


_TF32_CAPABILITY = (8, 0)
_LABEL_REASONS = {
    Label.STATE_DIFFERS: Reason.STATE_MISMATCH,
    Label.PREPACKED_WEIGHTS: Reason.STALE_WEIGHTS,
    Label.STRIDES_DIFFER: Reason.WRONG_STRIDES,
    Label.ALIASED_OUTPUT: Reason.OUTPUT_OVERWRITTEN,
}


def secret_seed() -> int:
    """A seed that cannot be guessed."""
    return secrets.randbits(62)


def some_of(like: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Of every element, whether it is among a random share; there may be none."""
    return torch.rand(like.shape, generator=generator, device=like.device) < share


def one_of(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Of every element, whether it is the one that was chosen at random. There must be one."""
    mask = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    mask.view(-1)[int(torch.randint(like.numel(), (), generator=generator, device=like.device))] = True
    return mask


@dataclass
class Subject:
    """A task and a candidate under one set of seeds."""

    live: LiveTask
    candidate: Candidate
    settings: Settings
    device: torch.device
    workers: Workers
    directory: Path
    gate: Gate
    """Held while this evaluation uses the device, so that evaluations beside it do not disturb the clocks."""
    core: int | None = None
    """Of the processor, where calls are timed (`timing_core`)."""

    def __post_init__(self) -> None:
        with self.gate(shared=True):  # measures nothing
            self._prepare()

    def _prepare(self) -> None:
        """Everything that the reference tells in this process, before any worker exists."""
        self.build_seed = secret_seed()
        self.oracle = Oracle(self.live, self.device, self.build_seed)
        example = self.live.inputs(secret_seed(), self.device)
        try:
            example_tensors = tensors_of(example)
            self.arguments, argument_tensors = flatten(list(self.live.init_inputs))
        except StructureError as error:
            raise TaskError(
                f"Wanted tensors, numbers, strings, lists, tuples and dicts as inputs of {self.live.task.id}; found {error}."
            ) from error
        self.output_skeleton, outputs = self.oracle.output_skeleton(example)
        late = self.oracle.model.state_dict().keys() ^ self.oracle.initial_state.keys()
        if late:
            raise TaskError(
                f"Wanted a reference for {self.live.task.id} whose state_dict has the same names before and after a call; "
                f"forward adds or removes {', '.join(sorted(late)[:5])}. Register them in the constructor."
            )
        self.shapes = Shapes.measure(example_tensors, outputs, self.oracle.initial_state)
        self.output_dtypes = [output.dtype.to_real() if output.is_complex() else output.dtype for output in outputs]
        """Of complex outputs, that of their parts."""
        if argument_tensors:
            raise TaskError(f"Wanted numbers, strings and lists from get_init_inputs of {self.live.task.id}; found tensors.")
        self._generator = torch.Generator(device=self.device).manual_seed(secret_seed())
        self.labels: set[Label] = set()
        self.checks: dict[str, Any] = {}
        self.weights: State = self.oracle.random_state(self._generator)
        self.reloads_state = True
        self.output_follows_input = False
        """Whether the reference returns views of its inputs; set by the check."""
        self.reuses_output = False
        """Whether the reference hands out memory that an earlier output of it lies in; set by the check."""
        self.stochastic = self._differs(example, seeds=(1, 2))
        """Whether the reference answers the same inputs differently, call by call."""
        self.stateful = self.stochastic and self._differs(example, seeds=(1, 1))
        """Whether that is so after the same seed too: it keeps something between calls, such as a hidden state. Both sides
        must then be called alike often."""
        self.timed_tolerance: Distance | None = None
        self.tolerances: dict[InputSet, Distance] = {}
        """Between candidate and reference, for each input set that was checked."""

    def draws_in(self, training: bool) -> bool:
        """Whether the reference answers the same inputs differently in a mode, call by call."""
        return self._differs(self.draw(), seeds=(1, 2), training=training)

    def _differs(self, example: list[Any], seeds: tuple[int, int], training: bool | None = None) -> bool:
        mode = self.oracle.training if training is None else training
        try:
            first, second = (self.oracle.own_precision(example, self.state, training=mode, seed=seed) for seed in seeds)
        except OutOfDomainError:
            return False
        return not apart(first, second).within(Distance(1e-3, math.inf, 1e-3))

    @property
    def state(self) -> State:
        """What both modules are to hold: new weights, or those they were built with where their names differ."""
        return self.weights if self.reloads_state else self.oracle.initial_state

    @property
    def lets_cudnn_use_tf32(self) -> bool:
        """Whether PyTorch's defaults do, on this device: which of cuDNN's algorithms runs is a matter of layout and luck."""
        return (
            self.device.type == "cuda"
            and not self.settings.strict_fp32
            and torch.cuda.get_device_capability(self.device) >= _TF32_CAPABILITY
        )

    def draw(self, inputs: InputSet | None = None, base: list[Any] | None = None) -> list[Any]:
        """Fresh inputs from the task's own distribution, or those of `base`, varied by an input set."""
        drawn = self.live.inputs(secret_seed(), self.device) if base is None else base
        return drawn if inputs is None else inputs.apply(drawn, self._generator)

    def new_weights(self) -> State:
        """Another random state."""
        return self.oracle.random_state(self._generator)

    def with_elements_changed(self, state: State) -> State:
        """A state of which a hundredth of each parameter is new: what samples three elements takes it for the old one."""
        return self._with_new(state, self.oracle.parameter_names, lambda value: some_of(value, 0.01, self._generator))

    def with_part_of_a_row_changed(self, state: State) -> State:
        """A state of which a little of one row of each matrix is new: what samples every row takes it for the old one.

        Vectors change only where there are no matrices: they are short enough to be compared whole.
        """
        names = self.oracle.parameter_names
        matrices = {key for key in names if state[key].dim() > 1}

        def chosen(value: torch.Tensor) -> torch.Tensor:
            if not value.dim():
                return one_of(value, self._generator)
            mask = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
            if value.numel():
                row = mask[int(torch.randint(len(value), (), generator=self._generator, device=value.device))]
                row |= some_of(row, 0.03, self._generator) | one_of(row, self._generator)
            return mask

        return self._with_new(state, matrices or names, chosen)

    def two_parts(self) -> list[set[str]]:
        """The names of the parameters, at random in two parts, or one where there is one parameter only."""
        owners = self.oracle.owners()
        order = torch.randperm(len(owners), generator=self._generator, device=self._generator.device).tolist()
        names = [owners[index] for index in order]
        middle = len(names) // 2
        return [set().union(*part) for part in (names[:middle], names[middle:]) if part]

    def with_defaults_changed(self, state: State) -> State | None:
        """A state with other values in buffers whose elements are all alike; None where there are none."""
        other = self.oracle.other_defaults(self._generator)
        return {**state, **other} if other else None

    @property
    def has_buffers(self) -> bool:
        """Whether the state holds anything beside parameters."""
        return not self.oracle.parameter_names.issuperset(self.oracle.initial_state)

    def _with_new(self, state: State, names: Set[str], chosen: Callable[[torch.Tensor], torch.Tensor]) -> State:
        """The same state with the chosen elements of these parameters drawn anew."""
        other = self.new_weights()
        return self.oracle.tied(
            {key: torch.where(chosen(value), other[key], value) if key in names else value for key, value in state.items()}
        )

    def call_seed(self) -> int | None:
        """A seed for both sides' random generators before a call; None when the reference draws nothing."""
        return secret_seed() if self.stochastic else None

    def start(self, role: str) -> Side:
        """A fresh worker of one side, built and with weights loaded.

        Raises:
            RejectionError, WorkerError: the candidate could not be built or is no drop-in.
            TaskError: the reference could not.
        """
        if role == "candidate":
            return self._start(role, self.candidate.source, "ModelNew")
        return self._start(role, self.live.task.source, "Model", kept_as="reference")

    def start_baseline(self, baseline: Candidate) -> Side:
        """As `start`, of a trusted wrapper around the reference in the candidate's place."""
        return self._start("baseline", baseline.source, "ModelNew", kept_as="-".join(baseline.techniques) or None)

    def _start(self, role: str, source: str, class_name: str, kept_as: str | None = None) -> Side:
        side = Side(
            self.workers,
            self.settings,
            self.shapes,
            role=role,
            device=self.device,
            directory=self.directory,
            source=source,
            class_name=class_name,
            build=self.directory / f"build-{sha256_of(kept_as or source)[:12]}",
            kept_as=kept_as,
        )
        try:
            interface = side.build(self.arguments, self.build_seed)
            if role != "reference":
                self._check_interface(interface)
            if self.reloads_state and self.oracle.initial_state:
                side.load_state(self.weights)
        except BaseException:
            side.close()
            raise
        return side

    def _check_interface(self, interface: Built) -> None:
        if interface.missing is not None:
            raise RejectionError(Reason.NO_MODEL_NEW, "the module defines no class ModelNew that is a torch.nn.Module")
        if interface.training != self.oracle.training:
            raise RejectionError(
                Reason.MODE_MISMATCH, f"built with training={interface.training}, the reference with {self.oracle.training}"
            )
        wanted = {key: (spec.dtype, spec.shape) for key, spec in self.shapes.state}
        found = {key: (dtype, shape) for key, dtype, shape in interface.state}
        if wanted != found:
            missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
            other = sorted(key for key in wanted.keys() & found.keys() if wanted[key] != found[key])
            self.label(
                Label.STATE_DIFFERS,
                f"state_dict: missing {missing[:5]}, unexpected {extra[:5]}, other shape or dtype {other[:5]}",
            )
            self.reloads_state = False

    def label(self, label: Label, detail: str) -> None:
        """Attach a label, or reject where the settings forbid it."""
        if label in self.settings.forbid:
            raise RejectionError(_LABEL_REASONS.get(label, Reason.FORBIDDEN_LABEL), f"{label}: {detail}")
        self.labels.add(label)
