"""torch.compile(model, backend="kernelwright"): parts between graph breaks, searched once, saved."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from kernelwright import dynamo
from kernelwright.errors import PolicyError, UsageError
from kernelwright.rewrites.passes import RulesPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from kernelwright.search.in_memory import optimize_model
from kernelwright.search.optimize import OptimizeResult
from tests.rewrites.test_models_as_they_come import model_and_inputs
from tests.samples import accepted

CODE = """
class ModelNew(Model):
    def forward(self, *tensors):
        CALLS.append(1)
        return super().forward(*tensors)
CALLS = []
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x, *, mask):
        y = self.norm(self.first(x)) + self.shift
        torch._dynamo.graph_break()
        return {"y": self.last(y).relu() * mask, "twice": y * 2}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.linear(x).relu()


@pytest.fixture
def searched(monkeypatch):
    """The parts that were searched, each with confirmed code that calls the part itself."""
    found = []

    def search(task, *, device, out):
        return OptimizeResult(out, accepted(2.0, task.source + CODE, confirms=True), 1, 1)

    def optimize(model, inputs, *, out, **options):
        found.append((model, options))
        return optimize_model(model, inputs, device="cpu", out=Path(out), search=search)

    monkeypatch.setattr("kernelwright.dynamo.api.optimize", optimize)
    torch._dynamo.reset()
    return found


def compiled(model, folder, **options):
    return torch.compile(model, backend=dynamo.backend, options={"out": folder, **options})


def test_each_part_is_searched_once_with_its_weights_and_saved(searched, tmp_path):
    model, mask = Net().eval(), torch.rand(4)
    fast = compiled(model, tmp_path, budget=3)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(5, 8)
            found, wanted = fast(x, mask=mask), model(x, mask=mask)
            assert list(found) == list(wanted)
            torch.testing.assert_close(found, wanted)
    (first, given), (last, _) = searched
    assert given == {"budget": 3}
    assert {tuple(value.shape) for value in first.state_dict().values()} == {(8, 8), (8,)}
    assert {value.data_ptr() for value in last.parameters()} == {model.last.weight.data_ptr(), model.last.bias.data_ptr()}

    torch._dynamo.reset()
    again = compiled(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(x, mask=mask), wanted)
    assert len(searched) == 2  # what was saved is loaded


def test_equal_layers_and_replaced_weights_share_one_search_and_gradients_run_the_part_itself(searched, tmp_path):
    layers, x = nn.Sequential(Layer(), Layer()).eval(), torch.randn(5, 8)
    fast = compiled(layers, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layers(x))
        layers[0].linear.weight = nn.Parameter(torch.ones(8, 8))
        torch.testing.assert_close(fast(x), layers(x))
    assert len(searched) == 1
    with pytest.warns(UserWarning, match="gradients are recorded"):
        fast(x).sum().backward()
    assert layers[1].linear.weight.grad is not None


def test_a_part_is_kept_for_so_many_sets_of_weights(searched, tmp_path, monkeypatch):
    monkeypatch.setattr("kernelwright.dynamo.MOST_WEIGHTS", 1)
    layers, x = nn.Sequential(Layer(), Layer()).eval(), torch.randn(5, 8)
    with torch.no_grad(), pytest.warns(UserWarning, match="weights change often"):
        torch.testing.assert_close(compiled(layers, tmp_path)(x), layers(x))


def test_a_part_that_cannot_be_searched_runs_as_it_is_and_says_so(tmp_path, monkeypatch):
    def optimize(*_, **__):
        raise PolicyError("Wanted a policy; found none.")

    monkeypatch.setattr("kernelwright.dynamo.api.optimize", optimize)
    torch._dynamo.reset()
    fast, x = compiled(nn.Linear(8, 4), tmp_path), torch.randn(5, 8)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"runs as it is \(part-\w+\). Wanted a policy"):
        fast(x)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(nn.Linear(8, 4), tmp_path, budget=0)(x)  # asks for no search, and nothing is saved


def test_wrong_options_are_refused():
    graph = torch.fx.symbolic_trace(nn.Linear(8, 4))
    with pytest.raises(UsageError, match="found bugdet"):
        dynamo.backend(graph, (), options={"out": "x", "bugdet": 3})
    with pytest.raises(UsageError, match="found no `out`"):
        dynamo.backend(graph, ())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["BertModel", "GPT2LMHeadModel", "LlamaForCausalLM", "LongformerModel", "ViTForImageClassification"]
)
def test_models_of_libraries_with_graph_breaks_run_generated_parts(name, tmp_path, monkeypatch):
    """Parts of which one holds masks alone, or constants, and layers that share a part."""
    model, inputs = model_and_inputs(name)
    blocks = next(part for part in model.eval().modules() if isinstance(part, nn.ModuleList) and len(part) > 1)
    blocks[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    techniques = []

    def search(task, *, device, out):
        built = TaskContext.open(task, device).build(Recipe((RulesPass.always(),)))
        techniques.append(built and built.techniques)
        return OptimizeResult(out, built and accepted(2.0, built.source, confirms=True), 1, 1)

    def optimize(model, inputs, *, out, **options):
        return optimize_model(model, inputs, device="cpu", out=Path(out), search=search)

    monkeypatch.setattr("kernelwright.dynamo.api.optimize", optimize)
    torch._dynamo.reset()
    fast = compiled(model, tmp_path)
    with torch.no_grad():
        wanted = model(**inputs)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                torch.testing.assert_close(fast(**inputs).to_tuple()[0], wanted.to_tuple()[0])
    own = [str(one.message) for one in warned if "runs as it is" in str(one.message)]
    assert all("with many different values" in message for message in own)  # a part that makes masks
    assert len(own) <= 1
    assert any(techniques)
    assert len(techniques) > 1


SCRIPT = """
import sys, torch
model, x = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()).eval(), torch.randn(64, 32)
fast = torch.compile(model, backend="kernelwright", options={"out": "compiled", "budget": 1, "judged": 1, "device": "cpu"})
with torch.no_grad():
    torch.testing.assert_close(fast(x), model(x))
assert "kernelwright.dynamo" in sys.modules
"""


@pytest.mark.exhaustive
def test_pytorch_finds_the_backend_by_its_entry_point_and_a_search_runs(tmp_path):
    points = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
    package = tmp_path / "backend-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: backend\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{name} = {where}\n" for group, one in points.items() for name, where in one.items())
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "compiled").glob("part-*/saved/confirmed.json"))
