"""torch.compile(model, backend="kernelwright"): parts between graph breaks, searched once, saved."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from kernelwright import dynamo
from kernelwright.errors import PolicyError, UsageError
from kernelwright.search.in_memory import optimize_model
from kernelwright.search.optimize import OptimizeResult
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


def test_replaced_weights_and_gradients_run_the_part_itself(searched, tmp_path):
    model, x = nn.Linear(8, 4).eval(), torch.randn(5, 8)
    fast = compiled(model, tmp_path)
    with torch.no_grad():
        fast(x)
    with pytest.warns(UserWarning, match="gradients are recorded"):
        fast(x).sum().backward()
    assert model.weight.grad is not None
    model.weight = nn.Parameter(torch.ones(4, 8))
    with torch.no_grad(), pytest.warns(UserWarning, match="weights were replaced"):
        torch.testing.assert_close(fast(x), model(x))


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
