"""The suite of library modules: each task is what the library has installed, and a missing library is named."""

from __future__ import annotations

import importlib.machinery
import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.tasks import load_task
from kernelwright.tasks.loading import bring_to_life
from kernelwright.tasks.source import check_task_source
from kernelwright.tasks.suites import MODULES, load_suite


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The libraries that seem to be installed."""
    names = {"torchvision", "transformers"}
    spec = importlib.machinery.ModuleSpec("library", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name in names else None)
    return names


def test_twenty_modules_at_two_sizes_are_tasks(installed: set[str]) -> None:
    suite = load_suite("modules")
    assert len(MODULES) == 20
    assert len({entry.task.sha256 for entry in suite.entries}) == 40
    assert {entry.task.id.rpartition("-")[2] for entry in suite.entries} == {"small", "large"}
    for entry in suite.entries:
        check_task_source(entry.task.source, entry.task.id)
    for name in ("modules/level3/bert-attention-small", "modules/bert-attention-small"):
        assert load_task(name).id == "modules/level3/bert-attention-small"


def test_the_same_modules_are_tasks_in_bfloat16(installed: set[str]) -> None:
    single, half = (load_suite(name).entries for name in ("modules", "modules-bf16"))
    assert [one.task.id.replace("modules/", "modules-bf16/") for one in single] == [one.task.id for one in half]
    for one, other in zip(single, half, strict=True):
        assert other.task.source.replace(".bfloat16()", "") == one.task.source
        assert other.task.source.count(".bfloat16()") == 2


def test_a_missing_library_leaves_its_tasks_out_and_says_what_to_install(installed: set[str]) -> None:
    installed.remove("torchvision")
    suite = load_suite("modules")
    assert len(suite.entries) == len(suite.left_out) == 20
    with pytest.raises(TaskError, match=r"vit-block-small; it is left out.*pip install 'kernelwright\[modules\]'"):
        load_task("modules/level3/vit-block-small")
    installed.remove("transformers")
    with pytest.raises(TaskError, match=r"neither is installed\. Run pip install"):
        load_suite("modules")


@pytest.mark.parametrize("library", ["torchvision", pytest.param("transformers", marks=pytest.mark.exhaustive)])
def test_the_modules_run_in_eval_mode(library: str) -> None:
    pytest.importorskip(library, exc_type=Exception)
    for entry in load_suite("modules").entries:
        if library in entry.task.source and not entry.task.id.endswith("-large"):
            run(entry.task)


def test_one_module_of_each_kind_of_call_runs() -> None:
    pytest.importorskip("transformers")
    for name in ("llama-norm", "clip-attention", "mistral-attention"):
        run(load_task(f"modules/level3/{name}-small"))


def test_modules_of_bfloat16_run() -> None:
    pytest.importorskip("transformers")
    for name in ("llama-norm", "clip-attention"):
        run(load_task(f"modules-bf16/level3/{name}-small"))


def run(task: Task) -> None:
    module = bring_to_life(task).module
    # Windows are counted in a tensor while they are constructed, and a fake parameter cannot become one of another type.
    takes_memory = "Swin" in task.source or ".bfloat16()" in task.source
    with torch.no_grad() if takes_memory else FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = module.Model(*module.get_init_inputs())
        (x,) = module.get_inputs()
        y = model(x)
        assert (y.shape[0], y.dtype) == (x.shape[0], x.dtype)
    assert not any(part.training for part in model.modules())
