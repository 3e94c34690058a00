"""A model in memory becomes a task that computes the same, or an error says what to change."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from kernelwright.errors import ModelError
from kernelwright.judge.isolation import fork_server
from kernelwright.tasks import bring_to_life
from kernelwright.tasks.in_memory import (
    Inputs,
    candidate_of,
    check_model,
    device_of,
    folder_on_path,
    leaves_of,
    sets_of,
    task_of,
    tried,
)


@dataclasses.dataclass
class Answer:
    scores: torch.Tensor
    parts: dict[str, list[torch.Tensor]]
    words: int = 3
    nothing: None = None


class Scorer(nn.Module):
    """Keyword-only arguments, nested inputs and a dataclass; a function by value within."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.activation = lambda x: torch.relu(x)
        self.register_buffer("offset", torch.arange(5.0))

    def forward(self, x, more=None, *, scale=1.0, ids):
        h = self.activation(self.layers(x)) * scale + self.offset + ids[:, None]
        return Answer(h, {"halves": [h / 2, more["y"] + 1]})


@pytest.fixture
def scorer():
    torch.manual_seed(1)
    return Scorer().eval()


def inputs(rows=4):
    return Inputs(torch.randn(rows, 6), {"y": torch.randn(3)}, ids=torch.randint(100, (rows,)), scale=0.5)


def test_the_task_of_a_model_computes_what_the_model_does(scorer, tmp_path):
    given = inputs()
    (call,) = tried(scorer, [given])
    task = task_of(scorer, call, tmp_path)
    assert "def forward(self, x, more_y, ids):" in task.source
    assert "self.model.forward(x, {'y': more_y}, scale=0.5, ids=ids)" in task.source
    with folder_on_path(tmp_path):
        live = bring_to_life(task)
        model = live.model(0, torch.device("cpu"))
        drawn = live.inputs(1, torch.device("cpu"))
    assert not model.training
    assert {
        key.removeprefix("model."): value for key, value in model.state_dict().items()
    }.keys() == scorer.state_dict().keys()
    with torch.no_grad():
        wanted = leaves_of(scorer(*given.args, **given.kwargs))
        found = model(given.args[0], given.args[1]["y"], given.kwargs["ids"])
        for first, second in zip(wanted, found, strict=True):
            assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
        again = call.rebuild(iter(found))
        model(*drawn)
    assert isinstance(again, Answer)
    assert torch.equal(again.parts["halves"][0], wanted[1])
    assert [x.shape for x in drawn] == [(4, 6), (3,), (4,)]


def test_the_same_model_is_the_same_task_whatever_its_weights_are(scorer, tmp_path):
    def text(model, rows=4):
        return task_of(model, tried(model, [inputs(rows)])[0], tmp_path).source

    first = text(scorer)
    assert text(Scorer().eval()) == first
    assert text(scorer, rows=5) != first
    assert text(Scorer().train()) != first
    scorer.factor = 3
    assert text(scorer) != first


def test_inputs_of_one_form_are_one_call_and_others_another(scorer):
    calls = tried(scorer, [inputs(), inputs(7), inputs()])
    assert [len(call.examples) for call in calls] == [2, 1]
    by_name = Inputs(ids=torch.randint(9, (4,)), scale=0.5, more={"y": torch.randn(3)}, x=torch.randn(4, 6))
    assert tried(scorer, [by_name])[0].form == calls[0].form


def test_trying_a_model_leaves_it_and_the_random_state_as_they_were():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    before, random = model[0].running_mean.clone(), torch.random.get_rng_state()
    tried(model, [Inputs(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))])
    assert torch.equal(model[0].running_mean, before)
    assert torch.equal(torch.random.get_rng_state(), random)


def test_code_around_the_present_model_has_its_weights(scorer, tmp_path):
    task = task_of(scorer, tried(scorer, [inputs()])[0], tmp_path)
    built = candidate_of(task.source + "\nclass ModelNew(Model):\n    pass\n", scorer)
    assert built.model is scorer
    with pytest.raises(ModelError, match="a model of its own"):
        candidate_of("import torch\nclass ModelNew(torch.nn.Module):\n    pass\n", scorer)


class Replaced(nn.Module):
    def __init__(self):
        super().__init__()
        self.forward = lambda x: x


class Numbers(nn.Module):
    def forward(self, x):
        return {"a": [lambda: x]} if x.dim() == 1 else [x.size(), 2]


class Cache:
    """A result that is no container: it holds tensors beside what is no tensor."""

    def __init__(self, keys):
        self.layers, self.kind, self.dtype, self.seen = [keys], Answer, keys.dtype, len(keys)


class Caching(nn.Module):
    def forward(self, x):
        return x * 2, Cache(x + 1)


class Endless(nn.Module):
    def forward(self, x):
        cache = Cache(x)
        cache.layers.append(cache)
        return cache


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"epoch": 3}


def mixed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear, "found the class .*Linear. Construct it first"),
        (lambda x: x, "found a function. Put a function into a module's forward"),
        (torch.jit.trace(nn.ReLU(), torch.ones(1)), "compiled already. Give the module it was made from"),
        (Replaced(), "the instance replaces it"),
        (mixed(), r"Call model.eval\(\) or model.train\(\)"),
        (WithExtraState(2, 2), "found in `_extra_state`, of a WithExtraState, a dict, which is no tensor. Leave it out"),
    ],
)
def test_what_cannot_be_optimized_is_refused_with_what_to_do(model, message):
    with pytest.raises(ModelError, match=message):
        check_model(model)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.Module()
        self.steps.taken = 0

    def forward(self, x, memory=None):
        if memory is not None:
            memory.add_(x)
            return memory * 2
        self.steps.taken += 1
        return x * self.steps.taken


def test_calls_that_depend_on_others_or_write_into_their_arguments_are_refused_by_name():
    model, x = Decoder(), torch.randn(3)
    with pytest.raises(ModelError, match=r"Decoder keeps a state between calls in `steps.taken`. Have forward take"):
        tried(model, [Inputs(x)], alone=True)
    assert model.steps.taken == 0
    with pytest.raises(ModelError, match=r"forward of .*Decoder writes into `memory`. Have forward take"):
        tried(model, [Inputs(x, torch.ones(3))], alone=True)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    tried(model, [Inputs(torch.full((4, 3), float("nan"))), Inputs(torch.randn(5, 3))], alone=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Inputs(torch.ones(2), torch.ones(2)),
            r"found \(float32\[2\], float32\[2\]\): too many positional arguments. A tuple",
        ),
        (Inputs(torch.ones(3, 3)), "its forward raised RuntimeError: mat1 and mat2"),
        (Inputs(torch.ones(2, 2).to_sparse()), "in `input` a sparse_coo Tensor of float32. Keep its"),
        (Inputs(object()), "found a object in `input`"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ModelError, match=message):
        tried(nn.Linear(2, 2), [given])


def test_outputs_that_cannot_be_compared_are_refused():
    with pytest.raises(ModelError, match=r"found a function in `out\['a'\]\[0\]`"):
        tried(Numbers(), [Inputs(torch.randn(3))])
    with pytest.raises(ModelError, match="found a list without one"):
        tried(Numbers(), [Inputs(torch.randn(3, 3))])
    with pytest.raises(ModelError, match=r"found a list in `out(\.layers\[1\])+.layers`"):
        tried(Endless(), [Inputs(torch.randn(3))])


def test_an_object_with_tensors_in_it_is_returned_anew_by_each_call(tmp_path):
    x = torch.randn(3)
    (call,) = tried(Caching(), [Inputs(x)])
    assert "return [out[0], out[1].layers[0], out[1].seen]" in task_of(Caching(), call, tmp_path).source
    first, second = (call.rebuild(iter([x, y, 3])) for y in (x + 1, x + 2))
    assert type(first[1]) is Cache
    assert (first[1].kind, first[1].dtype, first[1].seen) == (Answer, torch.float32, 3)
    assert torch.equal(first[1].layers[0], x + 1)
    assert torch.equal(second[1].layers[0], x + 2)


@pytest.mark.parametrize("given", [None, (), [], [()], 3, {}, {"x": 1}, {1: torch.ones(1)}])
def test_no_inputs_at_all_are_refused(given):
    with pytest.raises(ModelError, match=r"example_inputs"):
        sets_of(given)


def test_a_model_elsewhere_than_its_inputs_is_refused():
    with pytest.raises(ModelError, match=r"model.bias on meta and the input `input` on cpu.*Move them"):
        tried(nn.Linear(2, 2, device="meta"), [Inputs(torch.ones(1, 2))])
    (call,) = tried(nn.ReLU(), [Inputs(torch.ones(1, 2))])
    assert device_of(nn.ReLU(), call.examples) == torch.device("cpu")
    with pytest.raises(ModelError, match="on cpu or cuda; found it on meta"):
        tried(nn.Linear(2, 2, device="meta"), [Inputs(torch.ones(1, 2, device="meta"))])


def test_workers_find_the_modules_of_the_program_that_defines_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with folder_on_path(tmp_path / "model"):
        assert fork_server.installed_path()[-2:] == [str(tmp_path), str(tmp_path / "model")]
    assert sys.path[0] == ""
    assert str(tmp_path) not in fork_server.installed_path()


def test_modules_with_parametrizations_are_stored_and_keep_what_they_compute(tmp_path):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU())
    (call,) = tried(model, [Inputs(torch.randn(2, 4))])
    with folder_on_path(tmp_path):
        stored = bring_to_life(task_of(model, call, tmp_path)).model(0, torch.device("cpu")).model
    assert stored.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        stored[0].parametrizations.weight.original0.mul_(3.0)
        model[0].parametrizations.weight.original0.mul_(3.0)
    x = torch.randn(2, 4)
    assert torch.equal(stored(x), model(x))
    with pytest.raises(RuntimeError, match="parametrized"):
        torch.save(model, tmp_path / "by-torch")


def test_what_cannot_be_pickled_is_named(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[1].lock = threading.Lock()
    with pytest.raises(ModelError, match=r"`model.1.lock` is a lock"):
        task_of(model, tried(model, [Inputs(torch.randn(3, 2))])[0], tmp_path)


def test_code_stored_by_value_is_from_a_module_that_can_be_imported(tmp_path):
    program = {"__name__": "__main__", "nn": nn, "FACTOR": 3.0}
    exec("class Net(nn.Module):\n    def forward(self, x):\n        return x * FACTOR", program)
    task = task_of(program["Net"](), tried(program["Net"](), [Inputs(torch.randn(3))])[0], tmp_path)
    with folder_on_path(tmp_path):
        forward = type(bring_to_life(task).model(0, torch.device("cpu")).model).forward
    assert forward.__globals__["__name__"] == "kernelwright_main"
    assert vars(sys.modules["kernelwright_main"])["FACTOR"] == 3.0


_ELSEWHERE = """
import sys
from kernelwright.tasks import bring_to_life
from kernelwright.tasks.in_memory import folder_on_path
from kernelwright.records import Task
import torch
with folder_on_path(__import__("pathlib").Path(sys.argv[1])):
    live = bring_to_life(Task(id="x", source=open(sys.argv[2]).read()))
    model = live.model(0, torch.device("cpu"))
    print(float(model(torch.full((2, 2), 3.0)).sum()))
"""


@pytest.mark.exhaustive
def test_a_local_class_of_a_module_that_nobody_else_can_import_runs_in_another_process(tmp_path):
    class Local(nn.Module):
        def forward(self, x):
            return (lambda y: y * 2)(x)

    task = task_of(Local(), tried(Local(), [Inputs(torch.randn(2, 2))])[0], tmp_path)
    (tmp_path / "task.py").write_text(task.source)
    command = [sys.executable, "-c", _ELSEWHERE, str(tmp_path), str(tmp_path / "task.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=os.sep, check=True)
    assert float(done.stdout) == 24.0
