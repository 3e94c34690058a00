"""robust-kbench loads from a checkout in each of its settings, and says what is no task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernelwright import cli
from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.records.policy import Context
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.tasks import load_task
from kernelwright.tasks.loading import bring_to_life
from kernelwright.tasks.suites import load_suite

FORWARD = """
import torch


def forward_fn(x, weight, eps=0.0):
    return torch.softmax(torch.nn.functional.linear(x * 1.0, weight) + eps, -1)


class Model(torch.nn.Module):
    def __init__(self, width: int = 3, kind: str = "ones"):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, width))

    def forward(self, x, fn=forward_fn):
        return fn(x, self.weight)


def get_inputs(rows: int, width: int = 3):
    return [torch.randn(rows, width, requires_grad=True)]


input_names = ["x"]
"""
SETTINGS = {
    "single_init_configs": [{}],
    "single_input_configs": [{"rows": 2}],
    "single_shared_configs": [{"width": 4}],
    "multi_init_configs": [{}, {"kind": "other"}],
    "multi_input_configs": [{"rows": 2}],
    "multi_shared_configs": [{"width": 4}],
}


def write_task(folder: Path, text: str = FORWARD, backward: bool = False, **settings: object) -> None:
    folder.mkdir(parents=True)
    (folder / "func_forward.py").write_text(text)
    (folder / "config_forward.json").write_text(json.dumps(SETTINGS | settings))
    if backward:
        (folder / "func_backward.py").write_text(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "robust"
    write_task(root / "tasks" / "rows", backward=True)
    write_task(root / "tasks" / "wrong", single_input_configs=[{"depth": 2}], multi_input_configs=[{}])
    write_task(root / "tasks" / "kernelbench" / "level_1" / "task_10")
    write_task(root / "tasks" / "kernelbench" / "level_1" / "task_2")
    return root


def test_every_setting_that_differs_is_a_task(checkout: Path) -> None:
    suite = load_suite("robust-kbench", path=checkout)
    ids = [entry.task.id.removeprefix("robust-kbench/") for entry in suite.entries]
    assert ids == ["level1/2", "level1/2-2", "level1/10", "level1/10-2", "level3/rows", "level3/rows-2"]
    assert [entry.level for entry in suite.entries] == [1, 1, 1, 1, 3, 3]
    assert suite == load_suite("robust-kbench", path=checkout / "tasks")
    only_own = load_suite("robust-kbench", path=checkout, levels=(3,))
    assert {entry.level for entry in only_own.entries} == {3}


def test_what_is_no_task_is_named_with_its_reason(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "tasks" / "half").mkdir()
    (checkout / "tasks" / "half" / "func_forward.py").write_text(FORWARD)
    write_task(checkout / "tasks" / "computed", FORWARD.replace("width: int = 3)", "width: int = 2 + 1)"))
    left_out = load_suite("robust-kbench", path=checkout).left_out
    assert {name.removeprefix("robust-kbench/level3/"): why for name, why in left_out.items()} == {
        "computed": "a default of get_inputs is computed",
        "computed-2": "a default of get_inputs is computed",
        "half": "its folder lacks func_forward.py or config_forward.json",
        "rows:backward": "only forward passes are tasks",
        "wrong": "its setting has depth, which get_inputs does not take",
        "wrong-2": "its setting lacks rows, which get_inputs takes",
        "wrong-3": "its setting lacks rows, which get_inputs takes",
    }
    assert cli.main(["bench", "robust-kbench", "--path", str(checkout), "--only", "wrong"]) == 2
    assert "left out, as its setting has depth" in capsys.readouterr().err


def test_an_id_gives_the_task_with_the_arguments_of_its_setting(checkout: Path) -> None:
    live = bring_to_life(load_task("robust-kbench/level3/rows-2", checkout))
    assert live.init_inputs == [4, "other"]
    (x,) = live.inputs(0, torch.device("cpu"))
    assert x.shape == (2, 4)
    assert torch.allclose(live.model(0, torch.device("cpu"))(x).sum(-1), torch.ones(2))


def test_the_builtin_policy_rewrites_a_model_that_takes_its_function_as_an_argument(checkout: Path) -> None:
    """The candidate runs its own text for the function that the model has by default, and any other as it is given."""
    task = load_task("robust-kbench/level3/rows", checkout)
    proposed = BuiltinPolicy().propose(Context(task=task, device="cpu", history=(), seed=0), 8)
    rewritten = next(one for one in proposed if "remove-noops" in one.techniques)
    assert "fn is forward_fn" in rewritten.source
    # Read with the input makers of the task, which a candidate has not.
    reference = bring_to_life(task)
    module = bring_to_life(Task(id="candidate", source=f"{rewritten.source}\nget_inputs = get_init_inputs = list\n")).module
    x = torch.randn(2, 4)
    new = module.ModelNew(*reference.init_inputs)
    assert torch.allclose(new(x), reference.model(0, torch.device("cpu"))(x))
    assert torch.equal(new(x, lambda x, weight: x + 1), x + 1)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere", "there is nothing.*SakanaAI/robust-kbench"),
        ("file", "it is a file"),
        ("folder", "found a, b"),
        ("settings", "found KeyError: 'single_init_configs'.* Check the checkout"),
    ],
)
def test_a_wrong_path_is_answered_with_what_is_there(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("a", "b"):
        (tmp_path / "folder" / name).mkdir(parents=True)
    write_task(tmp_path / "settings" / "tasks" / "one")
    (tmp_path / "settings" / "tasks" / "one" / "config_forward.json").write_text("{}")
    with pytest.raises(TaskError, match=message) as caught:
        load_suite("robust-kbench", path=tmp_path / place)
    assert "\n" not in str(caught.value)
