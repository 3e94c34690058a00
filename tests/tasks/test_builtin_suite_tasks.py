"""Every built-in task is fit to be judged: it runs, is no constant, depends on all it is given, reloads."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from kernelwright.tasks.suites import CLASS_LEVELS, builtin_names, builtin_task, task_class
from tests.quick import exhaustive_but

RANDOM_FORWARD = "linear_dropout"
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Sample:
    """A task brought to life once, with two draws of inputs and their outputs."""

    namespace: dict[str, Any]
    model: torch.nn.Module
    inputs: list[torch.Tensor]
    output: torch.Tensor
    other_inputs: list[torch.Tensor]
    other_output: torch.Tensor


def call(model: torch.nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(3)
    with torch.no_grad():
        return model(*inputs)


@cache
def sample(name: str) -> Sample:
    namespace: dict[str, Any] = {}
    exec(compile(builtin_task(name).source, f"<{name}>", "exec"), namespace)
    torch.manual_seed(1)
    model = namespace["Model"](*namespace["get_init_inputs"]())
    torch.manual_seed(2)
    inputs = namespace["get_inputs"]()
    other = namespace["get_inputs"]()
    return Sample(namespace, model, inputs, call(model, inputs), other, call(model, other))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    sample.cache_clear()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


each_task = pytest.mark.parametrize("name", builtin_names())
sixth_tasks = pytest.mark.parametrize("name", exhaustive_but(builtin_names(), *builtin_names()[::6]))
some_tasks = pytest.mark.parametrize("name", exhaustive_but(builtin_names(), *builtin_names()[::10]))


@each_task
def test_first_line_says_the_class_and_what_bounds_it(name: str) -> None:
    task = builtin_task(name)
    first = (ast.get_docstring(ast.parse(task.source)) or "").splitlines()[0]
    assert task_class(task) in CLASS_LEVELS
    assert "bound by" in first


@sixth_tasks
def test_output_is_one_finite_float_tensor_in_fresh_memory(name: str) -> None:
    s = sample(name)
    assert type(s.output) is torch.Tensor
    assert s.output.dtype is torch.float32
    assert s.output.numel() > 1
    assert torch.isfinite(s.output).all()
    assert all(s.output.data_ptr() != item.data_ptr() for item in s.inputs)


@sixth_tasks
def test_inputs_and_weights_are_small_and_floats_are_signed(name: str) -> None:
    s = sample(name)
    tensors = [*s.inputs, *s.model.parameters(), s.output]
    assert sum(item.numel() * item.element_size() for item in tensors) < 64 * 2**20
    assert all((item < 0).any() for item in s.inputs if item.is_floating_point())


TRIVIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "mean": lambda output: torch.full_like(output, output.mean().item()),
    "first row": lambda output: output[:1].expand_as(output),
    "swapped rows": lambda output: output.flip(0),
}


@some_tasks
def test_trivial_outputs_are_told_from_the_right_one(name: str) -> None:
    output = sample(name).output
    assert [kind for kind, make in TRIVIAL.items() if close(output, make(output))] == []


@some_tasks
def test_a_copy_of_an_input_is_told_from_the_right_output(name: str) -> None:
    s = sample(name)
    for item in s.inputs:
        if item.shape == s.output.shape:
            assert not close(s.output, item.to(s.output.dtype))


@some_tasks
def test_output_depends_on_every_input(name: str) -> None:
    s = sample(name)
    assert not close(s.output, s.other_output)
    for position, other in enumerate(s.other_inputs):
        mixed = [*s.inputs]
        mixed[position] = other
        assert not close(s.output, call(s.model, mixed)), f"input {position} does not matter"


WITH_WEIGHTS = re.compile(r"nn\.(Parameter|Linear|Conv|LayerNorm|BatchNorm|GroupNorm|GRU|LSTM)")


WITH_WEIGHTS_NAMES = [n for n in builtin_names() if WITH_WEIGHTS.search(builtin_task(n).source)]


@pytest.mark.parametrize("name", exhaustive_but(WITH_WEIGHTS_NAMES, *WITH_WEIGHTS_NAMES[::5]))
def test_output_depends_on_the_weights(name: str) -> None:
    s = sample(name)
    weights = list(s.model.parameters())
    before = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                weight.add_(torch.randn_like(weight) * (weight.std(correction=0) + 0.1))
        assert not close(s.output, call(s.model, s.inputs))
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)


@some_tasks
def test_state_dict_carries_everything_over_to_a_new_model(name: str) -> None:
    s = sample(name)
    torch.manual_seed(11)
    other = s.namespace["Model"](*s.namespace["get_init_inputs"]())
    assert other.training
    other.load_state_dict(s.model.state_dict())
    assert close(s.output, call(other, s.inputs))


@some_tasks
def test_same_inputs_give_the_same_output_again(name: str) -> None:
    s = sample(name)
    copies = [item.clone() for item in s.inputs]
    torch.manual_seed(4)
    with torch.no_grad():
        again = s.model(*s.inputs)
    assert close(s.output, again) == (name != RANDOM_FORWARD)
    assert all(torch.equal(item, copy) for item, copy in zip(s.inputs, copies, strict=True)), "inputs changed"


@some_tasks
def test_float64_and_other_memory_layouts_give_the_same_output(name: str) -> None:
    s = sample(name)
    model = s.namespace["Model"](*s.namespace["get_init_inputs"]())
    model.load_state_dict(s.model.state_dict())
    wide = [item.double() if item.is_floating_point() else item for item in s.inputs]
    wide = [item.mT.contiguous().mT if item.dim() > 1 else item for item in wide]
    output = call(model.double(), wide)
    assert output.dtype is torch.float64
    if name != RANDOM_FORWARD:
        torch.testing.assert_close(output.float(), s.output, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive
def test_only_the_named_task_draws_random_numbers() -> None:
    def drops(module: torch.nn.Module) -> bool:
        return isinstance(module, torch.nn.Dropout) and module.p > 0

    drawing = [name for name in builtin_names() if any(map(drops, sample(name).model.modules()))]
    assert drawing == [RANDOM_FORWARD]
