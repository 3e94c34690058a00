"""Products of 16-bit matrices with what follows, as Triton kernels: what they compute, and when they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.records import Task
from kernelwright.rewrites.passes import FusionPass, RulesPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from tests.rewrites.samples import interpreted, task_text
from tests.rewrites.test_fusion import needs_triton
from tests.rewrites.test_sixteen_bits import PRECISE, drawing

LAYERS = "self.p = nn.Linear(48, 128, bias=BIAS).to(torch.float16)"
CASES = {
    "activation and residual": ("return F.gelu(self.p(a)) + b", "drawn(2, 20, 48), drawn(2, 20, 128)", "True"),
    "one row": ("return F.silu(self.p(a)) * b", "drawn(1, 1, 48), drawn(1, 1, 128)", "True"),
    "few rows": ("return self.p(a) + b", "drawn(5, 48), drawn(5, 128)", "False"),
    "batch": ("return F.silu(torch.bmm(a, b))", "drawn(3, 20, 48), drawn(3, 48, 64)", "True"),
}


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_a_product_rounds_once(case: str, tmp_path: Path, small: None) -> None:
    forward, inputs, bias = CASES[case]
    text = drawing(task_text(forward, inputs, LAYERS.replace("BIAS", bias)), "float16")
    recipe = Recipe((RulesPass.always(), FusionPass(single=True, products=True)))
    built = TaskContext.open(Task(id="sample", source=text), "cuda").build(recipe)
    assert built is not None
    assert "product-16" in built.techniques
    assert ("few-rows" in built.techniques) == (case in ("one row", "few rows"))
    interpreted(PRECISE, text, built.source, tmp_path, "0.52")
