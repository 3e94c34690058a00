"""Confirmed code in a model: it runs for calls of the confirmed form, and the model's own forward for all others."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from kernelwright.deploy.placement import ConfirmedCode, hardware_name, load, place, save
from kernelwright.errors import ModelError, UsageError
from kernelwright.tasks import bring_to_life
from kernelwright.tasks.in_memory import Inputs, folder_on_path, task_of, tried


@dataclasses.dataclass
class Outcome:
    y: torch.Tensor
    rows: int


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)
        self.calls = []

    def forward(self, x, factor=2.0):
        self.calls.append("own")
        return Outcome(
            self.dropout(torch.diag(torch.full((x.shape[0],), factor, dtype=x.dtype)) @ self.linear(x)), x.shape[0]
        )


CODE = """
class ModelNew(Model):
    def forward(self, x):
        self.model.calls.append("optimized")
        return [self.model.linear(x) * 2.0, x.shape[0]]
"""


def placement_of(model, tmp_path, code=CODE, given=None):
    given = given or Inputs(torch.randn(4, 3))
    (call,) = tried(model, [given])
    source = task_of(model, call, tmp_path / "model").source + code
    facts = {"device": "cpu", "hardware": hardware_name(torch.device("cpu")), "speedup_low": 1.5}
    return ConfirmedCode(source=source, inputs=given, training=model.training, **facts)


@pytest.fixture
def model():
    torch.manual_seed(2)
    return Scaled().eval()


@pytest.fixture
def placed(model, tmp_path):
    placed = place(model, [placement_of(model, tmp_path)])
    model.calls.clear()
    return placed


@pytest.fixture
def x():
    return torch.randn(4, 3)


def who_ran(model, *args, **kwargs):
    model.calls.clear()
    model(*args, **kwargs)
    return model.calls[0]


@torch.no_grad()
def test_calls_of_the_confirmed_form_run_the_code_and_return_what_the_model_does(model, placed, x):
    found, wanted = placed(x), model(x)
    assert model.calls == ["optimized", "own"]
    assert isinstance(placed, Scaled)
    assert isinstance(found, Outcome)
    torch.testing.assert_close(found.y, wanted.y)
    assert found.rows == 4
    for args, kwargs in (((), {"x": x}), ((x, 2.0), {}), ((), {"factor": 2.0, "x": x})):  # equal to what was confirmed
        assert who_ran(placed, *args, **kwargs) == "optimized"


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m(x[:2]),
        lambda m, x: m(x, factor=3.0),
        lambda m, x: m.train()(x),
        lambda m, x: (m.dropout.train(), m(x)),
        lambda m, x: (setattr(m, "dropout", nn.Identity()), m(x)),
        lambda m, x: m.double()(x.double()),
        pytest.param(lambda m, x: torch.compile(m, backend="eager")(x), marks=pytest.mark.exhaustive),
    ],
    ids=["shape", "value", "mode", "part's mode", "part", "dtype", "compiled"],
)
@torch.no_grad()
def test_all_other_calls_run_the_models_own_forward(model, placed, x, call):
    wanted = copy.deepcopy(model)
    torch.manual_seed(0)
    found = call(placed, x)
    assert set(model.calls) <= {"own"}
    torch.manual_seed(0)
    expected = call(wanted, x)
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected)), strict=True):
        if isinstance(one, Outcome):
            torch.testing.assert_close(one.y, other.y)


@pytest.mark.parametrize(
    ("call", "difference"),
    [
        (lambda m, x: m(x[:2]), r"nothing was confirmed for inputs of this form; the call was \(float32\[2, 3\]\)"),
        (lambda m, x: m(x, factor=3.0), r"inputs of this form; the call was \(float32\[4, 3\], factor=3.0\)"),
        (lambda m, x: m.train()(x), "not in eval mode"),
        (lambda m, x: (setattr(m, "dropout", nn.Identity()), m(x)), "a part of the model was replaced"),
        (lambda m, x: torch.autocast("cpu", torch.bfloat16)(m)(x), "autocast is on"),
    ],
    ids=["shape", "value", "mode", "part", "autocast"],
)
@torch.no_grad()
def test_the_models_own_forward_says_once_that_it_runs(placed, x, call, difference):
    placed(x)
    assert placed.last_path == "optimized"
    with pytest.warns(UserWarning, match=difference) as warned:
        call(placed, x)
    assert placed.last_path == "reference"
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(placed, x)


@torch.no_grad()
def test_code_that_gives_a_call_to_the_reference_is_not_taken_for_optimized(model, tmp_path, x):
    code = CODE.replace("self.model.calls", 'self.__dict__["last_path"] = "reference"\n        self.model.calls')
    result = place(model, [placement_of(model, tmp_path, code)])
    result(x)
    assert result.last_path == "reference"


@torch.no_grad()
def test_autocast_and_a_wrong_call_are_the_models_own_affair(model, placed, x):
    with torch.autocast("cpu", torch.bfloat16):
        assert who_ran(placed, x) == "own"
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        placed()
    with pytest.raises(TypeError, match="unexpected keyword"):
        placed(x, other=3)
    model.double()
    with pytest.raises(RuntimeError, match="dtype"):
        placed(x)


def forward_derivative(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x)).y).tangent


@pytest.mark.parametrize(
    "follow",
    [
        lambda m, x: torch.func.vmap(lambda one: m(one).y)(torch.stack([x, x])),
        lambda m, x: torch.func.jvp(lambda one: m(one).y, (x,), (x,)),
        lambda m, x: make_fx(lambda one: m(one).y)(x)(x + 1),
        forward_derivative,
    ],
    ids=["vmap", "jvp", "make_fx", "forward derivative"],
)
@torch.no_grad()
def test_whoever_follows_a_call_operator_by_operator_sees_the_models_own(model, placed, x, follow):
    found = follow(placed, x)
    assert set(model.calls) == {"own"}
    torch.testing.assert_close(found, follow(copy.deepcopy(model), x))


def test_gradients_come_from_the_models_own_forward_and_eval_mode_says_so(model, placed, x):
    with pytest.warns(UserWarning, match="inference_mode") as warned:
        placed(x).y.sum().backward()
    assert warned[0].filename == __file__
    assert model.calls == ["own"]
    assert placed.linear.weight.grad is model.linear.weight.grad is not None
    placed.requires_grad_(False)
    assert who_ran(placed, x) == "optimized"
    with pytest.warns(UserWarning, match="inference_mode"):
        assert who_ran(placed, x.requires_grad_()) == "own"
    with torch.inference_mode():
        assert who_ran(placed, torch.randn(4, 3)) == "optimized"


@torch.no_grad()
def test_model_and_result_are_two_faces_of_one_model(model, placed, x):
    assert placed.state_dict().keys() == model.state_dict().keys()
    placed.load_state_dict({key: torch.randn_like(value) for key, value in model.state_dict().items()})
    torch.testing.assert_close(placed(x).y, model(x).y)
    model.load_state_dict({key: torch.randn_like(value) for key, value in model.state_dict().items()}, assign=True)
    torch.testing.assert_close(placed(x).y, model(x).y)
    placed.train()
    assert model.training
    assert model.dropout.training
    seen = []
    placed.eval().register_forward_hook(lambda *args: seen.append(1))
    assert who_ran(placed, x) == "optimized"
    assert seen == [1]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_come_to_parts_later_run(model, placed, x, kind):
    seen = []
    hook = getattr(model.linear, kind)(lambda *args: seen.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert who_ran(placed, x) == "own"
    assert seen == [1]
    hook.remove()
    assert who_ran(placed, x) == "optimized"


@torch.no_grad()
def test_a_hook_that_is_part_of_what_was_confirmed_may_stay_but_not_go(model, tmp_path, x):
    hook = model.linear.register_forward_hook(lambda module, args, out: out * 1.0)
    placed = place(model, [placement_of(model, tmp_path)])
    assert who_ran(placed, x) == "optimized"
    hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert who_ran(placed, x) == "own"


@torch.no_grad()
def test_it_can_be_copied_and_pickled(placed, x):
    twin = copy.deepcopy(placed)
    twin.linear.weight.zero_()
    assert not torch.equal(twin(x).y, placed(x).y)
    assert who_ran(twin, x) == "optimized"
    buffer = io.BytesIO()
    torch.save(placed, buffer)
    buffer.seek(0)
    assert who_ran(torch.load(buffer, weights_only=False), x) == "optimized"


@torch.no_grad()
def test_what_was_saved_is_put_into_another_instance_with_its_weights(model, tmp_path, x):
    save([placement_of(model, tmp_path)], tmp_path / "saved")
    other = Scaled()  # in train mode
    loaded = load(other, tmp_path / "saved")
    assert other.training
    assert other.dropout.training
    assert who_ran(loaded, x) == "own"
    loaded.eval()
    assert who_ran(loaded, x) == "optimized"
    torch.testing.assert_close(loaded(x).y, other(x).y)


@torch.no_grad()
def test_it_can_be_a_part_of_a_model_and_be_optimized_with_it(model, placed, tmp_path, x):
    whole = nn.Sequential(placed, nn.Identity()).eval()
    names = list(whole.state_dict())
    assert who_ran(placed, x) == "optimized"
    whole[1] = Last()
    (call,) = tried(whole, [Inputs(x)])
    task = task_of(whole, call, tmp_path / "model")
    with folder_on_path(tmp_path / "model"):
        judged = bring_to_life(task).model(0, torch.device("cpu"))
    assert [name.removeprefix("model.") for name in judged.state_dict()] == names
    torch.testing.assert_close(judged(x), whole(x))


class Last(nn.Module):
    def forward(self, outcome):
        return outcome.y


def test_without_confirmed_code_it_is_the_model(model, tmp_path):
    assert place(model, []) is model
    save([], tmp_path / "saved")
    assert load(model, tmp_path / "saved") is model


def test_code_that_computes_something_else_is_refused(model, tmp_path):
    save([placement_of(model, tmp_path)], tmp_path / "saved")

    class Other(Scaled):
        def forward(self, x):
            return Outcome(self.linear(x) * 2.1, x.shape[0])

    with pytest.raises(ModelError, match="computes something else"):
        load(Other(), tmp_path / "saved")
    with pytest.raises(ModelError, match=r"saved was saved for; found torch\.nn.Linear, on which .* raised AttributeError"):
        load(torch.nn.Linear(3, 3), tmp_path / "saved")


@pytest.mark.parametrize("index", [None, "{", "{}", '{"placements": [{}]}'])
def test_a_folder_that_nothing_was_saved_to_is_refused(model, tmp_path, index):
    if index is not None:
        (tmp_path / "confirmed.json").write_text(index)
    with pytest.raises(UsageError, match="Wanted a folder that `save`"):
        load(model, tmp_path)
    with pytest.raises(UsageError, match=r"nothing; found nothing there\. Check the path"):
        load(model, tmp_path / "nothing")


def test_another_kind_of_device_is_refused_and_other_hardware_warned_about(model, tmp_path):
    save([placement_of(model, tmp_path)], tmp_path)
    index = json.loads((tmp_path / "confirmed.json").read_text())
    for changes, expected in (
        ({"hardware": "NVIDIA X"}, pytest.warns(UserWarning, match="confirmed on NVIDIA X; this is")),
        ({"device": "cuda"}, pytest.raises(ModelError, match=r"Call model.to\('cuda'\) first")),
    ):
        index["placements"][0] |= changes
        (tmp_path / "confirmed.json").write_text(json.dumps(index))
        with expected:
            load(model, tmp_path)
