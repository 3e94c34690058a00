"""The header of `optimized.py` says how to use what was found, and only what is known of it."""

from __future__ import annotations

import ast

import pytest

from kernelwright.deploy.drop_in import FALLBACK, drop_in
from kernelwright.records import Candidate, Evaluation, Label, RunDirectory, Task
from kernelwright.records.screened import screened_of
from kernelwright.rewrites import wrappers
from kernelwright.rewrites.emit import DESCRIPTION
from tests.samples import accepted

SOURCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
    def forward(self, x, mask):
        return x
def get_inputs():
    return [torch.randn(1 << 20, 1 << 20), [torch.ones(3, dtype=torch.bool), 2]]
def get_init_inputs():
    return [64]
"""
TASK = Task(id="sized", source=SOURCE)
NEW = "class ModelNew(Model):\n    def forward(self, x, mask):\n        return x\n"


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


def header(run: RunDirectory, best: Evaluation, task: Task = TASK) -> str:
    text = drop_in(task, best, run)
    assert text.endswith(best.source)
    ast.parse(text)
    return " ".join(line.removeprefix("#").strip() for line in text.split("\n\n")[0].splitlines())


def test_use_and_covered_shapes_come_from_the_task_and_no_memory_is_taken(run):
    text = header(run, accepted(source=SOURCE + NEW))
    assert "new = ModelNew(64); new.load_state_dict(old.state_dict()); new.train(old.training)" in text
    assert "Covers: float32[1048576, 1048576], [bool[3], 2]. Nothing is known about other shapes" in text
    assert "Gradients: they flow" in text
    assert "Needs: torch; nothing of kernelwright." in text
    assert "First call: its cost was not recorded." in text
    other = header(run, accepted(source=NEW, labels=(Label.STATE_DIFFERS,)), TASK)
    assert "its weights cannot be loaded from Model" in other
    draws = Task(id="t", source=SOURCE.replace("[torch.randn(1 << 20, 1 << 20)", "[torch.randn(3).item()"))
    assert "Covers: what get_inputs of the task draws." in header(run, accepted(source=NEW), draws)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("compile", "compiled or recorded again"),
        ("cuda-graph", "Call it under torch.no_grad() or torch.inference_mode() to be faster"),
    ],
)
def test_a_wrapper_is_called_one_and_says_what_it_does_elsewhere(run, name, words):
    text = header(run, accepted(source=wrappers.wrap(SOURCE, name, (name,)), labels=(Label.WRAPPER_ONLY,)))
    assert words in text
    assert "Label wrapper-only: the same operators behind torch.compile or a CUDA graph, no new kernel." in text
    assert ("a C++ compiler" in text) == (name == "compile")


def test_what_the_built_in_policy_writes_falls_back_and_its_kernels_have_no_gradient_of_their_own(run):
    assert FALLBACK in DESCRIPTION
    kernel = f'x = """{DESCRIPTION}"""\ny = load_inline\nif not (not torch.is_grad_enabled() and x.is_cpu): pass\n'
    text = header(run, accepted(source=kernel, labels=(Label.CUSTOM_KERNEL,)))
    assert "On other shapes, types and memory layouts the reference's own forward runs" in text
    assert "Gradients: where they are enabled the reference's own forward runs and they flow." in text
    assert "Needs: torch, a C++ compiler and ninja; nothing of kernelwright." in text
    assert "Gradients: not checked." in header(run, accepted(source=NEW, labels=(Label.CUSTOM_KERNEL,)))


def test_the_cost_of_the_first_call_is_what_was_measured(run):
    best = accepted(source=NEW + "torch.compile(f)", checks={"spent_s": {"candidate build": 2.0, "candidate call": 20.4}})
    assert "First call: import, construction and first call took 22 s" in header(run, best)
    spent_s = {"build": 0.1, "first call": 0.2}
    run.append(screened_of(TASK, Candidate(source=best.source), correct=True, device="cpu", spent_s=spent_s))
    assert "First call: import, construction and first call took 0.3 s when it was measured." in header(run, best)
