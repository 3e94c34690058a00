"""What a new user does in the first hour, from end to end: KernelBench's user, and the owner of a model in a package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelwright import cli

pytestmark = pytest.mark.exhaustive

SCALE = """import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, a, b):
        return torch.diag(a) @ b

def get_inputs():
    return [torch.randn(64), torch.randn(64, 32)]

def get_init_inputs():
    return []
"""
NEW = SCALE.replace("class Model", "class ModelNew").replace("torch.diag(a) @ b", "a[:, None] * b")


def test_a_user_of_kernelbench_judges_own_candidates(tmp_path: Path, capsys) -> None:
    checkout, mine = tmp_path / "checkout", tmp_path / "mine"
    for level, title, source in ((1, "Scale", SCALE), (2, "Scale_relu", SCALE.replace("@ b", "@ b.relu()"))):
        folder = checkout / "KernelBench" / f"level{level}"
        folder.mkdir(parents=True)
        (folder / f"1_{title}.py").write_text(source)
    mine.mkdir()
    (mine / "level_1_problem_1_sample_0_kernel.py").write_text(NEW)
    (mine / "1_Scale_relu.py").write_text(NEW.replace("* b", "* b.abs()"))
    given = ["--path", str(checkout), "--device", "cpu", "--check-only"]
    bench = ["bench", "kernelbench", *given, "--levels", "1,2", "--baselines", "eager", "--candidates", str(mine)]
    assert cli.main([*bench, "--out", str(tmp_path / "run"), "--json"]) == 0
    captured = capsys.readouterr()
    table = json.loads(captured.out)
    assert (table["tally"]["tasks"], table["tally"]["accepted"]) == (2, 1)
    assert "kernelbench/level2/1  candidate: rejected     wrong-output" in captured.err
    candidate = str(mine / "level_1_problem_1_sample_0_kernel.py")
    evaluate = ["evaluate", "kernelbench/level1/1", candidate, *given, "--json"]
    assert cli.main([*evaluate, "--out", str(tmp_path / "one")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["task"]) == ("accepted", "kernelbench/level1/1")


def test_a_model_in_a_package_is_judged_and_no_candidate_imports_from_its_folder(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    package = tmp_path / "mine" / "parts"
    package.mkdir(parents=True)
    (package / "layers.py").write_text(SCALE.partition("def get_inputs")[0])
    task = tmp_path / "mine" / "task.py"
    task.write_text("import torch\nfrom parts.layers import Model\n" + SCALE[SCALE.index("def get_inputs") :])
    alone, beside = tmp_path / "mine" / "alone.py", tmp_path / "mine" / "beside.py"
    alone.write_text(NEW)
    beside.write_text(NEW.replace("import torch\n", "import torch\nfrom parts.layers import Model\n", 1))
    monkeypatch.chdir(task.parent)
    monkeypatch.syspath_prepend("")
    given = ["--device", "cpu", "--check-only", "--json", "--out", str(tmp_path / "run")]
    assert cli.main(["evaluate", "task.py", str(alone), *given]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "accepted"
    assert cli.main(["evaluate", "task.py", str(beside), *given]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["reason"] == "build-failed"
    assert "No module named 'parts'" in found["detail"]
    assert "imports installed packages only, nothing beside it" in found["detail"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "torch.diag(a) @ b" in config["task_source"], "the record holds the modules beside the task"
