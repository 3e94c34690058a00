"""Float32 products that the split-product template computes: which ones, when they are proposed, and what is emitted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType

import pytest

from kernelwright.errors import CompilerMissingError
from kernelwright.judge.check.guard import static_labels
from kernelwright.records import Label, Task
from kernelwright.records.policy import Context
from kernelwright.rewrites import emit, templates
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.order import Order
from kernelwright.rewrites.passes import ProductPass, RulesPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from kernelwright.rewrites.templates import base
from kernelwright.rewrites.tracing import trace
from tests.quick import exhaustive_but
from tests.rewrites.samples import compare, task_text

LARGE = task_text("return torch.relu(self.f(a))", "N(1024, 512)", "self.f = nn.Linear(512, 512)")
PRODUCTS = {
    "mm": task_text("return torch.mm(a, b)", "N(40, 64), N(64, 48)"),
    "left transposed": task_text("return a.T @ b", "N(64, 40), N(64, 48)"),
    "right transposed": task_text("return a @ b.T", "N(40, 64), N(48, 64)"),
    "bmm": task_text("return torch.bmm(a, b)", "N(3, 40, 64), N(3, 64, 48)"),
    "four dimensions": task_text("return a @ b", "N(2, 3, 40, 64), N(2, 3, 64, 48)"),
    "shared right": task_text("return a @ b", "N(2, 3, 40, 64), N(64, 48)"),
    "linear": task_text("return self.f(a)", "N(2, 40, 64)", "self.f = nn.Linear(64, 48)"),
    "no bias": task_text("return self.f(a)", "N(40, 64)", "self.f = nn.Linear(64, 48, bias=False)"),
    "addmm": task_text("return torch.addmm(a, b, c, beta=0.5, alpha=3)", "N(48), N(40, 64), N(64, 48)"),
    "baddbmm": task_text("return torch.baddbmm(a, b, c, alpha=-2)", "N(3, 40, 48), N(3, 40, 64), N(3, 64, 48)"),
}
OTHERS = {
    "float64": task_text("return a @ b", "N(40, 64).double(), N(64, 48).double()"),
    "bfloat16": task_text("return a @ b", "N(40, 64).bfloat16(), N(64, 48).bfloat16()"),
    "a vector": task_text("return a @ b", "N(40, 64), N(64)"),
    "few rows": task_text("return a @ b", "N(31, 64), N(64, 48)"),
    "short sums": task_text("return a @ b", "N(40, 16), N(16, 48)"),
    "broadcast": task_text("return a @ b", "N(40, 64), N(3, 64, 48)"),
}
FOLLOWED = {
    # What the task computes, and what is left of it after the product's kernel.
    "bias and activation": ("F.leaky_relu(self.f(a) * 2.0, 0.1)", ""),
    "swish and bias": ("(lambda x: torch.sigmoid(x) * x + self.g)(self.f(a))", ""),
    "others": ("torch.sigmoid(F.gelu(torch.relu(self.f(a))) + b)", ""),
    "two readers": ("(lambda x: torch.relu(x) + torch.tanh(x))(self.f(a))", "tanh"),
    "other width": ("torch.relu(self.f(a) + b[:, :1])", "relu"),
    "unlike activation": ("torch.tanh(torch.relu(self.f(a)))", "tanh"),
}
INTERPRET = """
import importlib.util, json, sys
import torch

spec = importlib.util.spec_from_file_location("emitted", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
torch.manual_seed(0)
model = module.ModelNew()
x = torch.randn(40, 64)
with torch.no_grad():
    exact = module.Model.forward(model.double(), x.double())
    # Neither the reference nor PyTorch's product is to answer.
    module.Model.forward = None
    module.takes = lambda *tensors: True
    found = model.float()(x)
print(json.dumps(((found.double() - exact).norm() / exact.norm()).item()))
"""
FORMS = ("split-product-cuda", "split-product-triton")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def replaced(text: str, technique: str = "split-product-triton") -> tuple[int, str]:
    """How many products the template took, and the candidate; its guard asks for a CPU, so that it runs in a test."""
    traced = trace(Task(id="sample", source=text))
    graphs = emit.copy_graph(traced.training), emit.copy_graph(traced.evaluation)
    count = templates.replace(templates.BY_TECHNIQUE[technique], *graphs)
    before, class_new, after = emit.module(text, traced, graphs, (technique,)).partition("class ModelNew")
    return count, before + class_new + after.replace(".is_cuda", ".is_cpu")


def written(folder: Path) -> Callable[[str, str], ModuleType]:
    """A loader by way of a file: Triton reads the source of its functions from one."""

    def load(source: str, name: str) -> ModuleType:
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@needs_triton
@pytest.mark.parametrize("name", exhaustive_but(PRODUCTS, *list(PRODUCTS)[::2]))
def test_a_product_is_replaced_by_one_that_is_equal(name, any_size, tmp_path):
    count, source = replaced(PRODUCTS[name])
    assert count == 2, "one of each graph: training and evaluation"
    # Without a GPU the emitted function computes `a @ b.mT`, so this shows how it is called.
    compare(PRODUCTS[name], source, 1e-5, written(tmp_path))


@pytest.mark.parametrize("name", exhaustive_but(FOLLOWED, *list(FOLLOWED)[::2]))
def test_a_kernel_in_cuda_computes_what_follows_the_product(name, any_size, tmp_path):
    expression, left = FOLLOWED[name]
    init = "self.f = nn.Linear(64, 48); self.g = nn.Parameter(torch.randn(48))"
    text = task_text(f"return {expression}", "N(2, 40, 64), N(2, 40, 48)", init)
    recipe = Recipe((RulesPass.always(), ProductPass("split-product-cuda")))
    built = TaskContext.open(Task(id="sample", source=text), "cuda").build(recipe)
    assert built is not None
    before, class_new, forward = built.source.partition("class ModelNew")
    source = before + class_new + forward.replace(".is_cuda", ".is_cpu")
    assert forward.count("split_product_") == 1
    assert (left in forward) if left else ("aten" not in forward and "F." not in forward)
    # Without a GPU the fall-back computes the same.
    compare(text, source, 1e-5, written(tmp_path))


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_left_alone(name, any_size):
    assert replaced(OTHERS[name])[0] == 0


def proposed(text: str, device: str = "cuda", names: Collection[str] = FORMS) -> list[str]:
    """Which of these techniques the policy's first eight candidates for a task have."""
    found = BuiltinPolicy(Order({})).propose(
        Context(task=Task(id="sample", source=text), device=device, history=(), seed=0), 8
    )
    return [name for one in found for name in one.techniques if name in names]


def test_the_policy_proposes_split_products_for_large_products_on_a_gpu_alone(nvcc):
    assert proposed(LARGE) == [name for name in FORMS for _ in ("plain", "in a CUDA graph")]
    assert proposed(LARGE, names=("one-pass-product",)) == ["one-pass-product"] * 2
    assert proposed(LARGE, "cpu") == []
    assert proposed(LARGE.replace("1024", "1023")) == [], "one row short of enough work"
    assert proposed(LARGE.replace("512)", "512, dtype=torch.float64)")) == []


def test_without_nvcc_only_the_triton_form_is_proposed(monkeypatch):
    def missing() -> Path:
        raise CompilerMissingError("nvcc is not installed")

    monkeypatch.setattr(base, "find_torch_nvcc", missing)
    buildable = [template.technique for template in templates.PRODUCTS if template.builds_for("cuda")]
    assert buildable == ["split-product-triton", "one-pass-product"]
    assert not any(template.builds_for("cpu") for template in templates.BY_TECHNIQUE.values())


@pytest.mark.parametrize(("name", "left"), [("NARROW", ["split-product-cuda"]), ("Product", ["split-product-triton"])])
def test_a_task_has_no_template_whose_names_are_its_own(name, left, nvcc):
    assert set(proposed(LARGE + f"\n{name} = 3\n")) == set(left)


def test_a_candidate_is_python_and_says_what_it_is(nvcc):
    context = Context(task=Task(id="sample", source=LARGE), device="cuda", history=(), seed=0)
    for one in BuiltinPolicy(Order({})).propose(context, 4):
        compile(one.source, "candidate", "exec")
        assert "kernelwright" not in one.source
        assert {Label.SPLIT_PRECISION, Label.CUSTOM_KERNEL} <= static_labels(one.source, LARGE)
    assert Label.SPLIT_PRECISION not in static_labels(LARGE, LARGE)


@pytest.mark.exhaustive
@needs_triton
def test_an_interpreted_candidate_equals_the_reference(any_size, tmp_path):
    text = task_text("return torch.relu(self.f(a))", "N(40, 64)", "self.f = nn.Linear(64, 48)")
    count, source = replaced(text)
    assert count == 2
    path = tmp_path / "candidate.py"
    path.write_text(source)
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRET, str(path)],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert json.loads(answer.stdout) < 6e-7
