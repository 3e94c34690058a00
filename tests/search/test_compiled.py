"""Which is right, eager or compiled? Modes of torch.compile are judged and told line by line."""

from __future__ import annotations

import json

import pytest
import torch

import kernelwright
from kernelwright import cli
from kernelwright.errors import UsageError
from kernelwright.judge import Settings
from kernelwright.rewrites.wrappers import COMPILE_MODES
from kernelwright.search import compiled

TASK = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(8, 1) + 1)
        self.eval()

    def forward(self, x):
        y = torch.softmax(x * self.scale, dim=1)
        return torch.nn.functional.dropout(y, 0.1, self.training)


def get_inputs():
    return [torch.randn(8, 64)]


def get_init_inputs():
    return []
"""
ANSWERS = {
    "default": "return super().forward(x)",
    "max-autotune-no-cudagraphs": "return super().forward(x).t().contiguous().t() * 1.01",
}
SETTINGS = Settings.quick(threads=1, timed=False)


@pytest.fixture
def compiles(monkeypatch):
    """Stands for torch.compile, which takes a minute: one mode is right, another one has other strides and is wrong."""

    def source(task, mode):
        return f"{task.source}\nclass ModelNew(Model):\n    def forward(self, x):\n        {ANSWERS[mode]}\n"

    monkeypatch.setattr(compiled, "compiled_source", source)


def told(mode: compiled.ModeVerdict) -> dict[str, str]:
    return dict(mode.findings())


@pytest.mark.usefixtures("one_fork_server")
def test_each_mode_is_told_with_both_errors_and_every_deviation(compiles, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    arguments = ["evaluate", "task.py", "--against-compile", "--device", "cpu", "--check-only"]
    assert cli.main([*arguments, "--out", "run"]) == 1
    lines = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    right = {kind: text for mode, kind, text in lines[:-1] if mode == "default"}
    assert right["verdict"] == "accepted"
    assert "against float64, eager's" in right["error"]
    assert "allowed" in right["nearest"]
    assert ["max-autotune-no-cudagraphs", "verdict", "rejected"] in lines
    deviations = {text.split(":")[0] for _, kind, text in lines[:-1] if kind == "deviation"}
    assert deviations == {"wrong-strides", "wrong-output"}
    assert cli.main([*arguments, "--out", "run", "--json"]) == 1
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert [one["mode"] for one in modes] == ["default", "max-autotune-no-cudagraphs"]
    assert modes[0]["reason"] is None
    assert modes[0]["errors"]["own"].keys() == {"eager", "compiled", "allowed"}
    assert modes[1]["errors"]["own"]["compiled"] > modes[1]["errors"]["own"]["allowed"] > modes[1]["errors"]["own"]["eager"]


def test_a_model_in_memory_is_judged_too(compiles, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILE_MODES", COMPILE_MODES[:1])
    monkeypatch.setitem(ANSWERS, "default", "return super().forward(input)")
    source = compiled.compiled_source
    monkeypatch.setattr(compiled, "compiled_source", lambda task, mode: source(task, mode).replace("self, x", "self, input"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)).eval()
    (mode,) = kernelwright.evaluate_compiled(model, example_inputs=torch.randn(4, 8), settings=SETTINGS)
    assert mode.evaluation.accepted, mode.evaluation.detail
    with pytest.raises(UsageError, match="one form"):
        kernelwright.evaluate_compiled(model, example_inputs=[torch.randn(4, 8), torch.randn(5, 8)])


@pytest.mark.usefixtures("one_fork_server")
def test_where_there_is_no_float64_truth_no_error_is_claimed(compiles, tmp_path):
    (tmp_path / "task.py").write_text(TASK.replace("self.eval()", "pass"))
    modes = kernelwright.evaluate_compiled(tmp_path / "task.py", device="cpu", settings=SETTINGS)
    assert "there is no such truth" in told(modes[0])["error"]
    assert not modes[0].errors


@pytest.mark.exhaustive
def test_torch_compile_itself_is_right_and_draws_other_numbers(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    modes = kernelwright.evaluate_compiled(tmp_path / "task.py", device="cpu", settings=SETTINGS)
    assert [one.mode for one in modes if one.evaluation.accepted] == ["default", "max-autotune-no-cudagraphs"]
    assert "other-draws" in modes[0].evaluation.labels
