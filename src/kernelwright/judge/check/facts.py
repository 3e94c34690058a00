"""Measures a task on its reference, in the judge's own process and before any worker exists.

Seeds, weights and inputs are drawn here. No worker can know them in advance.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import secrets
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch

from kernelwright.errors import TaskError, listed
from kernelwright.judge.check.compare import Distance, apart
from kernelwright.judge.check.oracle import Inputs, Oracle, OutOfDomainError, Outputs, State, state_of, tensors_of
from kernelwright.judge.isolation.side import TaskShapes
from kernelwright.judge.worker.inspection import signature_of
from kernelwright.judge.worker.structure import Named, StructureError, flatten
from kernelwright.tasks import InputSet, LiveTask, is_inexact, unfit
from kernelwright.tasks.carried import carried
from kernelwright.tasks.input_sets import computable
from kernelwright.tasks.invariants import TensorForm

_CHANGED = Distance(1e-3, math.inf, 1e-3)
"""Distance of outputs beyond which they are different ones. Our choice."""


def secret_seed() -> int:
    """A seed that cannot be guessed."""
    return secrets.randbits(62)


def some_of(like: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """A mask of a random share of the elements; it may be empty."""
    return torch.rand(like.shape, generator=generator, device=like.device) < share


def one_of(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A mask of one random element. There must be one."""
    mask = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    mask.view(-1)[int(torch.randint(like.numel(), (), generator=generator, device=like.device))] = True
    return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """A task under one set of secret seeds: its reference, its shapes, its weights and how it draws random numbers."""

    live: LiveTask
    device: torch.device
    oracle: Oracle
    build_seed: int
    arguments: Any
    """Skeleton of the constructor's arguments."""
    shapes: TaskShapes
    output_dtypes: tuple[torch.dtype, ...]
    """Dtypes of the outputs; for complex outputs, those of their parts."""
    signature: tuple[tuple[str, int], ...]
    """Names and kinds of the arguments that the reference's `forward` takes."""
    options: dict[str, list[Any]]
    """Arguments that the task leaves out and that change the reference's outputs: the values of all after its own."""
    weights: State
    """Random state that both modules load."""
    stochastic: bool
    """True if the reference answers the same inputs differently, call by call."""
    stateful: bool
    """True if it does so after the same seed too, as with a hidden state. Both sides must then be called equally often."""
    carried: tuple[str, ...]
    """Names of the attributes and buffers that hold such a state, as far as they are the module's."""
    redraws: bool
    """True if inputs are drawn again, and not kept: they are large, and the same from the same seed."""
    generator: torch.Generator
    forms: tuple[TensorForm, ...]
    """Properties that all draws of each input share."""

    def draws_in(self, training: bool, state: State) -> bool:
        """True if the reference answers the same inputs differently in a mode, call by call."""
        return _differs(self.live, self.oracle, self.draw(), state, seeds=(1, 2), training=training)

    def draw(self, inputs: InputSet | None = None, base: Inputs | None = None, seed: int | None = None) -> list[Any]:
        """Inputs from the task's own distribution, or those of `base`, varied by an input set; fresh ones without a seed."""
        seed = secret_seed() if seed is None else seed
        drawn = self.live.inputs(seed, self.device) if base is None else base()
        generator = torch.Generator(self.device).manual_seed(seed + 1)
        return drawn if inputs is None else inputs.apply(drawn, generator, self.forms)

    def drawing(self, inputs: InputSet | None = None, base: Inputs | None = None) -> tuple[list[Any], Inputs]:
        """Inputs as of `draw`, and what returns the same later."""
        again = functools.partial(self.draw, inputs, base, secret_seed())
        drawn = again()
        return drawn, again if self.redraws else lambda: drawn

    def call_seed(self) -> int | None:
        """A seed for both sides' random generators before a call; None when the reference draws nothing."""
        return secret_seed() if self.stochastic else None

    def new_weights(self) -> State:
        """Another random state."""
        return self.oracle.random_state(self.generator)

    def varied_weights(self, weights: InputSet) -> State:
        """Another random state, whose floating parameters are varied."""
        names, state = self.oracle.parameter_names, self.new_weights()
        varied = {key: weights.apply([value], self.generator)[0] for key, value in state.items() if key in names}
        return self.oracle.tied(state | varied)

    def with_elements_changed(self, state: State) -> State:
        """The state with a hundredth of each parameter drawn anew: a cache that samples three elements misses it."""
        return self._with_new(state, self.oracle.parameter_names, lambda value: some_of(value, 0.01, self.generator))

    def with_part_of_a_row_changed(self, state: State) -> State:
        """The state with a little of one row of each matrix drawn anew: a cache that samples every row misses it.

        Vectors change only where there are no matrices: they are short enough to be compared whole.
        """
        names = self.oracle.parameter_names
        matrices = {key for key in names if state[key].dim() > 1}
        return self._with_new(state, matrices or names, self._part_of_a_row)

    def _part_of_a_row(self, value: torch.Tensor) -> torch.Tensor:
        """Mask of a few elements of one row, or of the only element."""
        if not value.dim():
            return one_of(value, self.generator)
        mask = torch.zeros(value.shape, dtype=torch.bool, device=value.device)
        if value.numel():
            row = mask[int(torch.randint(len(value), (), generator=self.generator, device=value.device))]
            row |= some_of(row, 0.03, self.generator) | one_of(row, self.generator)
        return mask

    def _with_new(self, state: State, names: Set[str], chosen: Callable[[torch.Tensor], torch.Tensor]) -> State:
        """The same state with the chosen elements of these parameters drawn anew."""
        other = self.new_weights()
        return self.oracle.tied(
            {key: torch.where(chosen(value), other[key], value) if key in names else value for key, value in state.items()}
        )

    def two_parts(self) -> list[set[str]]:
        """The names of the parameters in two random parts, or in one where there is one parameter only."""
        owners = self.oracle.owners()
        order = torch.randperm(len(owners), generator=self.generator, device=self.generator.device).tolist()
        names = [owners[index] for index in order]
        middle = len(names) // 2
        return [set().union(*part) for part in (names[:middle], names[middle:]) if part]

    @property
    def has_buffers(self) -> bool:
        """True if the state holds anything beside parameters."""
        return not self.oracle.parameter_names.issuperset(self.oracle.initial_state)


def measure_task(live: LiveTask, device: torch.device) -> TaskFacts:
    """Run the reference in this process and note what it tells about its task.

    Raises:
        TaskError: the reference does not work, or takes or returns what no worker can be sent.
    """
    build_seed, seed = secret_seed(), secret_seed()
    oracle = Oracle(live, device, build_seed)
    example = live.inputs(seed, device)
    try:
        example_tensors = tensors_of(example)
        arguments, argument_tensors = flatten(list(live.init_inputs))
    except StructureError as error:
        raise TaskError(
            f"Wanted tensors, numbers, strings, lists, tuples and dicts as inputs of {live.task.id}; found {error}."
        ) from error
    for index, tensor in enumerate(example_tensors):
        if (strange := unfit(tensor)) is not None:
            raise TaskError(f"Wanted plain tensors from get_inputs of {live.task.id}; found as tensor {index} {strange}.")
    outputs = oracle.own_outputs(example)
    if late := oracle.model.state_dict().keys() ^ (oracle.initial_state.keys() | oracle.sparse.keys()):
        raise TaskError(
            f"Wanted a reference for {live.task.id} whose state_dict has the same names before and after a call; "
            f"forward adds or removes {listed(sorted(late))}. Register them in the constructor."
        )
    if argument_tensors:
        raise TaskError(f"Wanted numbers, strings and lists from get_init_inputs of {live.task.id}; found tensors.")
    generator = torch.Generator(device=device).manual_seed(secret_seed())
    weights = oracle.random_state(generator)
    stochastic = _differs(live, oracle, example, weights, seeds=(1, 2), training=oracle.training)

    def answer(same: bool) -> Outputs:
        inputs = example if same else live.inputs(secret_seed(), device)
        return oracle.own_precision(inputs, state_of(oracle.model), training=oracle.training, seed=1)

    held: tuple[str, ...] = ()
    with contextlib.suppress(OutOfDomainError):
        held = tuple(carried(oracle.model, answer))
    stateful = bool(held) or (
        stochastic and _differs(live, oracle, example, weights, seeds=(1, 1), training=oracle.training)
    )
    options = {} if stateful else _options(oracle, example, outputs)
    others = max(map(tensors_of, options.values()), key=len, default=[])
    shapes = TaskShapes.measure([*example_tensors, *others], outputs, oracle.initial_state)
    redraws = shapes.is_large and _alike(example, live.inputs(seed, device))
    return TaskFacts(
        live=live,
        device=device,
        oracle=oracle,
        build_seed=build_seed,
        arguments=arguments,
        shapes=shapes,
        output_dtypes=tuple(output.dtype.to_real() if output.is_complex() else output.dtype for output in outputs),
        signature=tuple(signature_of(oracle.model) or ()),
        options=options,
        weights=weights,
        stochastic=stochastic or stateful,
        stateful=stateful,
        carried=held,
        redraws=redraws,
        generator=generator,
        forms=tuple(map(TensorForm.of, example_tensors, tensors_of(live.inputs(secret_seed(), device)))),
    )


_OPTIONS_MAX = 4
"""Arguments of `forward` that are given beside the task's own, one at a time. Our choice."""


def _options(oracle: Oracle, example: list[Any], outputs: Outputs) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    defaults: list[Any] = []
    every = inspect.signature(oracle.model.forward).parameters.values()
    placed = [one for one in every if one.kind <= one.POSITIONAL_OR_KEYWORD][len(example) :]
    constants = getattr(getattr(oracle.model.forward, "__code__", None), "co_consts", ())
    words = [word for one in constants for word in (one if isinstance(one, tuple) else [one]) if isinstance(word, str)]
    for one in [*placed, *(one for one in every if one.kind is one.KEYWORD_ONLY)]:
        if one.default is one.empty or len(found) == _OPTIONS_MAX:
            break
        for value in _other_values(one.default, tensors_of(example), words):
            given = [Named({one.name: value})] if one.kind is one.KEYWORD_ONLY else [*defaults, value]
            with contextlib.suppress(TaskError, StructureError):  # some other kind of value is wanted
                flatten(given)
                other = oracle.own_outputs([*example, *given])
                same_form = [(x.shape, x.dtype) for x in other] == [(x.shape, x.dtype) for x in outputs]
                if same_form and not apart(other, outputs).within(_CHANGED):
                    found[one.name] = given
                    break
        defaults.append(one.default)
    return found


def _other_values(default: Any, tensors: list[torch.Tensor], words: list[str]) -> list[Any]:
    """Values to try instead of a default: of words those that `forward` names; for None a tensor, masks, and a number."""
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int | float):
        return [default + (1 if isinstance(default, int) else 0.5)]
    if default is not None:
        return [word for word in words if word != default] if isinstance(default, str) else []
    found = [one for one in tensors[:1] if is_inexact(one)]
    for one in tensors[:1]:
        if one.dim() > 1 and one.numel() and not one.is_complex():
            mask = computable(one) > computable(one).double().mean()
            found += [mask, mask[..., 0], mask.new_ones(one.shape[-2], one.shape[-2]).tril()]
    return [*found, 0.5]


def _alike(first: list[Any], second: list[Any]) -> bool:
    (skeleton, tensors), (other, others) = flatten(list(first)), flatten(list(second))
    return bool(skeleton == other and all(map(torch.equal, tensors, others)))


def _differs(live: LiveTask, oracle: Oracle, same: list[Any], state: State, seeds: tuple[int, int], training: bool) -> bool:
    try:
        first = oracle.own_precision(same, state, training=training, seed=seeds[0])
        # A state that a module keeps may have come to rest on these inputs: others move it.
        oracle.own_precision(live.inputs(secret_seed(), oracle.device), state, training=training, seed=seeds[0])
        second = oracle.own_precision(same, state, training=training, seed=seeds[1])
    except OutOfDomainError:
        return False
    return not apart(first, second).within(_CHANGED)
