"""A model in memory from end to end: searched, judged, confirmed, in place, saved, and loaded in another process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import kernelwright
from kernelwright.errors import InfrastructureError, ModelError, UsageError
from kernelwright.records import TimingBlock
from kernelwright.search.in_memory import ModelResult, optimize_model
from kernelwright.search.optimize import OptimizeResult
from tests.samples import accepted

CODE = """
class ModelNew(Model):
    def forward(self, input):
        return torch.nn.functional.linear(input, self.model.weight, self.model.bias)
"""


@pytest.fixture
def model():
    return nn.Linear(3, 3).eval()


class Search:
    """Confirms code for inputs of four rows."""

    def __init__(self):
        self.asked = []

    def __call__(self, task, *, device, out):
        self.asked.append((device, out))
        best = accepted(2.0, task.source + CODE, confirms=True) if "[4, 3]" in task.source else None
        return OptimizeResult(out, best, 1, 1)


def test_each_form_of_inputs_is_searched_and_the_result_says_what_was_confirmed(model, tmp_path):
    search, x = Search(), torch.randn(4, 3)
    result = optimize_model(model, [x, torch.randn(5, 3), (x + 1,)], device="auto", out=tmp_path, search=search)
    assert search.asked == [("cpu", tmp_path / "inputs-1"), ("cpu", tmp_path / "inputs-2")]
    assert result.improved
    lines = str(result).splitlines()
    assert lines[0].startswith("1 of 2 forms of inputs")
    assert lines[1] == "  (float32[4, 3]): scripted: 2.000x (1.900 to 2.100) over eager"
    assert lines[2] == "  (float32[5, 3]): nothing was confirmed to be faster"
    with torch.no_grad():
        torch.testing.assert_close(result.module(x), model(x))
    result.save(tmp_path / "saved")
    assert type(kernelwright.load(model, tmp_path / "saved")).__name__ == "OptimizedLinear"


def test_where_nothing_was_confirmed_the_module_is_the_model(model, tmp_path):
    with pytest.warns(UserWarning, match=r"train mode.*call model.eval\(\) first"):
        result = optimize_model(model.train(), torch.randn(5, 3), device="cpu", out=tmp_path, search=Search())
    assert result.module is model
    assert not result.improved
    assert "0 of 1 forms" in str(result)


def test_a_near_miss_says_what_would_settle_it(tmp_path):
    blocks = [
        TimingBlock(process=process, reference_us=(12.0, 12.0), candidate_us=(10.0 + process, 10.0), null_us=(12.0, 12.5))
        for process in range(3)
    ]
    missed = accepted(1.5, speedup_low=1.02, speedup_high=2.2, noise_floor=0.05, blocks=tuple(blocks))
    result = ModelResult(tmp_path, nn.Identity(), {"(x)": OptimizeResult(tmp_path, None, 1, 1, near_miss=missed)}, ())
    said = str(result).splitlines()[-1]
    assert said.startswith("    nearest: 1.500x (1.020 to 2.200) by")
    assert "the noise here is 0.050: measure on a quieter machine, or with settings=kernelwright.judge.Settings(" in said
    assert re.search(r"\(processes_min=(\d+), processes_max=\1\) and another `out`$", said)


def test_another_device_than_the_models_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr("kernelwright.search.in_memory.resolve_device", lambda name: torch.device("cuda", 0))
    with pytest.raises(ModelError, match=r"on cuda; found it on cpu. Call model.to\('cuda'\)"):
        optimize_model(model, torch.randn(5, 3), device="cuda", out=tmp_path, search=Search())


def test_a_directory_that_cannot_be_written_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Wanted a directory to write to at"):
        optimize_model(model, torch.randn(5, 3), device="auto", out=tmp_path / "file", search=Search())
    (tmp_path / "model").write_text("")
    with pytest.raises(InfrastructureError, match=r"Wanted to write torch.nn.Linear to .*model; File exists"):
        optimize_model(model, torch.randn(5, 3), device="auto", out=tmp_path, search=Search())


def test_the_function_tells_models_from_tasks(model, tmp_path):
    with pytest.raises(UsageError, match="found a task, which draws its own"):
        kernelwright.optimize("layer_norm", (torch.ones(2),), out=tmp_path)
    with pytest.raises(ModelError, match="Wanted example_inputs"):
        kernelwright.optimize(model, out=tmp_path)
    with pytest.raises(ModelError, match=r"found a int"):
        kernelwright.optimize(3, (torch.ones(2),), out=tmp_path)


SCRIPT = """
import sys
from dataclasses import dataclass
import torch, kernelwright
from kernelwright.judge import Settings

@dataclass
class Out:
    y: torch.Tensor

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        self.scale = lambda rows: torch.diag(torch.full((rows,), 2.0))
    def forward(self, x, *, shift):
        return Out(self.scale(x.shape[0]) @ self.linear(x) + shift)

torch.manual_seed(int(sys.argv[1]))
model, x = Net().eval(), torch.randn(4000, 32)
given = kernelwright.Inputs(x, shift=torch.randn(32))
if sys.argv[2] == "search":
    settings = Settings(threads=1)
    result = kernelwright.optimize(model, given, out="run", budget=2, judged=1, device="cpu", settings=settings)
    print(result)
    assert result.improved, result
    result.save("saved")
    faster = result.module
else:
    faster = kernelwright.load(model, "saved")
with torch.no_grad():
    torch.testing.assert_close(faster(*given.args, **given.kwargs).y, model(*given.args, **given.kwargs).y)
print(type(faster).__name__)
"""


@pytest.mark.exhaustive
def test_a_script_optimizes_its_own_class_and_another_process_loads_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for seed, what in (("0", "search"), ("1", "load"), ("2", "search")):
        before = (tmp_path / "run" / "screened.jsonl").read_bytes() if what == "search" and seed == "2" else None
        done = subprocess.run(
            [sys.executable, "script.py", seed, what], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "OptimizedNet"
        if before is not None:  # other weights of the same model: nothing is searched again
            assert (Path(tmp_path) / "run" / "screened.jsonl").read_bytes() == before


ROOT = Path(__file__).parents[2]


def first_example(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[0]


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_the_first_example_of_a_page_runs(tmp_path, monkeypatch, capsys, page):
    """With a stand-in for the search, which takes a minute."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "kernelwright.api.run_search", lambda task, out, device, **options: Search()(task, device=device, out=out)
    )
    names = {"__name__": "__main__"}
    exec(first_example(page), names)
    assert "0 of 1 forms" in capsys.readouterr().out
    assert names["y"].shape == (2048, 64)


@pytest.mark.exhaustive
def test_the_first_example_runs_as_it_is_pasted(tmp_path):
    (tmp_path / "net.py").write_text(first_example("README.md"))
    done = subprocess.run([sys.executable, "net.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"(?m)^[01] of 1 forms of inputs are confirmed to be faster; see net-run\n  \(float32\[2048, 64\]\): ", done.stdout
    )
