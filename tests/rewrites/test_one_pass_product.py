"""The template that multiplies float32 matrices in one pass: what it computes, compiles to, and when it is proposed."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from kernelwright.gpu.compilers import compile_triton
from kernelwright.judge.check.guard import static_labels
from kernelwright.records import Label, Task
from kernelwright.records.policy import Context
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.rewrites.order import Order
from kernelwright.rewrites.passes import FusionPass, ProductPass, RulesPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from kernelwright.rewrites.templates import base
from kernelwright.rewrites.templates.products import ONE_PASS, OnePassKnobs, ProductSizes
from tests.quick import exhaustive_but
from tests.rewrites.samples import compare, interpreted_answer, module_at, task_text
from tests.rewrites.test_fusion import interpret
from tests.rewrites.test_products import replaced, written

INTERPRET = """
import importlib.util, json, sys
import torch

spec = importlib.util.spec_from_file_location("emitted", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
torch.manual_seed(0)
inf, nan = float("inf"), float("nan")

def made(sizes, knobs, special=False):
    batch, m, n, k = sizes
    a, b = torch.randn(*batch, m, k), torch.randn(*batch, k, n).mT
    if special:
        a[..., 3, 5], a[..., 4, 6], b[..., 1, 2], b[..., 0, 7] = inf, nan, -inf, nan
    found, exact = module.launch(a, b, knobs), a.double() @ b.double().mT
    found = found.sum(0) if knobs["split_k"] > 1 else found
    if special:
        finite = exact.isfinite()
        same = torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())
        return 0.0 if same and torch.allclose(found[finite].double(), exact[finite], atol=1e-4) else inf
    return ((found.double() - exact).norm() / exact.norm()).item()

print(json.dumps([made(*case) for case in json.loads(sys.argv[2])]))
"""
TILE = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 4, "num_stages": 2, "split_k": 1, "precision": "tf32x3"}
COLUMN = TILE | {"block_m": 2, "block_n": 1, "block_k": 64, "precision": "ieee"}
CASES = {
    "whole tiles": (((), 32, 32, 48), TILE),
    "odd sizes": (((), 21, 35, 70), TILE),
    "slices of K": (((), 21, 35, 70), TILE | {"split_k": 3}),
    "a slice beyond the end of K": (((), 21, 35, 33), TILE | {"split_k": 4}),
    "a batch": (((3,), 20, 20, 40), TILE | {"split_k": 2}),
    "without tensor cores": (((), 21, 35, 70), TILE | {"precision": "ieee"}),
    "a column": (((), 9, 1, 300), COLUMN),
    "a column in slices of K": (((), 9, 1, 300), COLUMN | {"split_k": 4}),
    "columns": (((2,), 5, 1, 100), COLUMN),
    "Inf and NaN": (((), 20, 20, 40), TILE, True),
}
TALL = task_text("return a @ b", "N(16384, 16), N(16, 16384)")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Errors of all cases, by one process: Triton interprets where it is told to at import."""
    path = tmp_path_factory.mktemp("emitted") / "product.py"
    path.write_text(ONE_PASS.module(OnePassKnobs()))
    found = interpreted_answer(INTERPRET, str(path), json.dumps(list(CASES.values())))
    return dict(zip(CASES, found, strict=True))


ALTERNATIVES = ONE_PASS.alternatives(ProductSizes(m=4096, n=4096, k=4096))
IN_TF32 = next(one for one in ALTERNATIVES if one.precision == "tf32x3")


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_products_have_the_error_of_float32(case, interpreted):
    assert interpreted[case] < 4e-7


@needs_triton
@pytest.mark.parametrize("knobs", exhaustive_but(ALTERNATIVES, IN_TF32), ids=lambda one: str(one.precision))
def test_kernels_compile_for_hopper_within_its_shared_memory(knobs, tmp_path, triton_cache):
    path = tmp_path / "kernels.py"
    path.write_text(ONE_PASS.module(knobs))
    module = module_at(path)
    constants = {"BLOCK_M": knobs.block_m, "BLOCK_N": knobs.block_n, "BLOCK_K": knobs.block_k, "GROUP": 8, "k_a": 1}
    constants |= {"PRECISION": knobs.precision, "EVEN": True, "col_b": 1}
    signature = {name: "i32" for name in module.multiply.arg_names if name not in constants}
    signature |= dict.fromkeys("abc", "*fp32")
    kernel = compile_triton(
        module.multiply, signature, constants, 90, knobs.num_warps, knobs.num_stages, frozenset(signature)
    )
    assert ("wgmma.mma_async" in kernel.ptx) == (knobs.precision != "ieee")
    assert kernel.shared_bytes <= base.SHARED_BYTES


@needs_triton
@pytest.mark.parametrize(
    "text",
    [
        task_text("return a @ b", "N(40, 64), N(64, 48)"),
        task_text("return torch.bmm(a, b)", "N(3, 40, 64), N(3, 64, 48)"),
        task_text("return a @ b", "N(2, 40, 64), N(64, 1)"),
        task_text("return self.f(a)", "N(2, 40, 64)", "self.f = nn.Linear(64, 48)"),
    ],
)
def test_a_product_is_replaced_by_one_that_is_equal(text, tmp_path, any_size):
    count, source = replaced(text, ONE_PASS.technique)
    assert count == 2, "one of each graph: training and evaluation"
    # Without a GPU the emitted function computes `a @ b.mT`, so this shows how it is called.
    compare(text, source, 1e-5, written(tmp_path))


@pytest.mark.exhaustive
@needs_triton
def test_the_kernel_that_follows_adds_the_slices_of_k(tmp_path):
    forward = "return torch.tanh(self.f(a) * 2.0)"
    text = task_text(forward, "N(128, 1024)", "self.f = nn.Linear(1024, 512)")
    recipe = Recipe((RulesPass.always(), ProductPass(ONE_PASS.technique), FusionPass(single=True)))
    built = TaskContext.open(Task(id="sample", source=text), "cuda").build(recipe)
    assert built is not None
    before, class_new, rest = built.source.partition("class ModelNew")
    assert len(re.findall(r"one_pass_product_0|fused_0|torch\.", rest.partition("super().forward")[2])) == 2
    assert "tl.sum(" in before + class_new
    interpret(text, built.source.replace("has_tensor_cores(a.device)", "True"), tmp_path, 1e-4)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((4096, 4096, 15), "length"),
        ((4096, 8, 4096), "columns"),
        ((256, 512, 511), "multiply-adds"),
        ((1000, 1, 4096), "values"),
        ((1024, 1, 4096), None),
        ((16384, 16384, 16), None),
    ],
)
def test_what_the_template_does_not_take_has_a_reason(sizes, reason):
    found = ONE_PASS.refusal(ProductSizes(**dict(zip("mnk", sizes, strict=True))))
    assert (found is None) if reason is None else (reason in str(found))


@pytest.mark.parametrize("columns", [1, 256])
def test_few_tiles_are_spread_over_all_multiprocessors_by_slices_of_k(columns):
    sizes = ProductSizes(m=256, n=columns, k=131072)
    first, *others = ONE_PASS.alternatives(sizes)
    programs = first.split_k * sizes.tiles(first.block_m, first.block_n)
    assert programs > base.MULTIPROCESSORS // 2
    assert sizes.k // first.split_k >= 4 * first.block_k
    assert {one.split_k for one in others} == {first.split_k}, "what follows adds as many parts, whatever the tile"


def test_products_of_16_bit_pieces_have_their_label():
    text = ONE_PASS.module(OnePassKnobs())
    assert {Label.SPLIT_PRECISION, Label.CUSTOM_KERNEL} <= static_labels(text, TALL)


def test_the_policy_proposes_it_where_splitting_in_memory_does_not_pay(nvcc):
    given = Context(task=Task(id="sample", source=TALL), device="cuda", history=(), seed=0)
    found = {name for one in BuiltinPolicy(Order({})).propose(given, 4) for name in one.techniques}
    assert ONE_PASS.technique in found
    assert not found & {"split-product-cuda", "split-product-triton"}
