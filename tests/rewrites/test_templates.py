from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from kernelwright.errors import CompilerMissingError
from kernelwright.gpu.compilers import compile_triton, find_nvcc
from kernelwright.rewrites.templates import base, split_product
from kernelwright.rewrites.templates.products import ProductSizes
from kernelwright.rewrites.templates.split_product import Knobs
from kernelwright.rewrites.templates.text import kernel_text
from tests.quick import exhaustive_but
from tests.rewrites.samples import module_at

SMALL = Knobs(block_m=64, block_n=64, block_k=32, num_warps=4, chunk=32)
CASES = {
    "inline": (replace(SMALL, form="inline"), ()),
    "mixed": (replace(SMALL, form="mixed", chunk=64), ()),
    "split": (replace(SMALL, form="split", chunk=64, flat=True), ()),
    "tma": (replace(SMALL, form="tma", chunk=64), ()),
    "two accumulators": (replace(SMALL, form="split", chunk=64, joint=False), ()),
    "slices of K": (replace(SMALL, form="split", split_k=2), (split_product.bias(), split_product.RELU)),
    "epilogue": (
        SMALL,
        (
            split_product.bias(),
            split_product.GELU,
            split_product.scale(2.0),
            split_product.leaky_relu(0.1),
            split_product.residual(),
            split_product.SIGMOID,
            split_product.SWISH,
        ),
    ),
}
INTERPRET = """
import importlib.util, json, sys
import torch
from tests.quick import exhaustive_but

def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()

def across(rows, length):
    # Values of a column lie side by side, as in `b.mT` of a plain product: fewer programs split those.
    return torch.randn(length, rows).T

path, *names = sys.argv[1:]
spec = importlib.util.spec_from_file_location("emitted", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
torch.manual_seed(0)
a, b = torch.randn(2, 9, 75), across(70, 75)
rest = [torch.randn(70) if name == "bias" else torch.randn(2, 9, 70) for name in names]

def linear():
    return error(module.launch(a, b, *rest), module.eager(a.double(), b.double(), *[x.double() for x in rest]))

row = {"linear": linear()}
# Nothing of the weight is kept.
b.mul_(-2)
row["changed"] = linear()
# On a CPU the kernel refuses, and PyTorch computes the same.
row["refuses"] = not module.takes(a, b, *rest) and torch.equal(module.product(a, b, *rest), module.eager(a, b, *rest))
if not rest:
    x, y = across(33, 2 * 40).view(33, 2, 40).transpose(0, 1), torch.randn(2, 40, 36)
    row["batched"] = error(module.launch(x, y.mT), x.double() @ y.double())
    rows = across(40, 48) * torch.logspace(-25, 15, 40)[:, None]
    sizes = torch.logspace(15, -10, 48)
    cols = across(48, 48) * sizes[:, None]
    exact = rows.double() @ cols.double().T
    # Columns weigh alike: otherwise a row's error would be that of its two or three largest values.
    each = ((module.launch(rows, cols) - exact) / sizes).norm(dim=1) / (exact / sizes).norm(dim=1)
    row["rows of all sizes"] = each.max().item()
    # The large values of these rows meet zeros: what is left is too small for two float16.
    wide = across(40, 48)
    wide[:, 0] = 1e25
    cols = across(48, 48)
    cols[:, 0] = 0
    row["too wide"] = error(module.launch(wide, cols), wide.double() @ cols.double().T)
    wide[3, 5], wide[4, 6], cols[7, 9], cols[8, 2] = float("inf"), float("nan"), float("nan"), -float("inf")
    cols[9, 5] = 1.0
    ours, theirs = module.launch(wide, cols), wide @ cols.T
    known = theirs.isfinite()
    row["special"] = bool((ours.isnan() == theirs.isnan()).all() and (ours == theirs)[theirs.isinf()].all())
    row["beside special"] = error(ours[known], theirs[known].double())
    if module.KNOBS["form"] == "split":
        # As many rows as an H200 has multiprocessors: a program splits each.
        x, y = torch.randn(132, 40), across(36, 40)
        row["many rows"] = error(module.launch(x, y), x.double() @ y.double().T)
print(json.dumps(row))
"""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES])
def interpreted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Errors of a case, by a process of its own, for seconds: Triton interprets where it is told to at import."""
    knobs, epilogue = CASES[request.param]
    path = tmp_path_factory.mktemp("emitted") / "case.py"
    path.write_text(split_product.emit(knobs, epilogue))
    names = [fragment.tensor for fragment in epilogue if fragment.tensor]
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRET, str(path), *names],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    row: dict[str, float] = json.loads(answer.stdout)
    assert ("special" in row) == (not names)
    return row


@needs_triton
def test_products_have_the_error_of_float32(interpreted):
    assert {case: error for case, error in interpreted.items() if error is not True and not error < 6e-7} == {}
    assert interpreted["refuses"] is True


@needs_triton
def test_inf_and_nan_are_those_of_float32(interpreted):
    assert interpreted.get("special", True) is True


def emitted(knobs: Knobs, path: Path) -> ModuleType:
    path.write_text(split_product.emit(knobs))
    return module_at(path)


@needs_triton
@pytest.mark.parametrize("form", exhaustive_but(["inline", "mixed", "split", "tma"], "tma"))
def test_kernels_compile_for_hopper_with_wgmma(form, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    knobs = Knobs(form=form, block_m=64, block_k=32, num_warps=4)
    function = emitted(knobs, tmp_path / "kernels.py").product_kernel
    a_halves, b_halves = form in ("split", "tma"), form != "inline"
    constants = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP": 8, "STEPS": 8, "SPLIT_K": 1, "k_a": 1, "k_b": 1}
    constants |= {"JOINT": True, "FLAT": False, "A_HALVES": a_halves, "B_HALVES": b_halves, "TMA": form == "tma"}
    constants |= {"EVEN": True, "SHARED_B": True, "PERSISTENT": False, "SPECIALISED": False}
    signature = {name: "i32" for name in function.arg_names if name not in constants}
    signature |= {"c": "*fp32", "parts": "*fp32", "shifts_a": "*i32", "shifts_b": "*i32"}
    for names, rows, halves in ((("a", "a_low"), 64, a_halves), (("b", "b_low"), 128, b_halves)):
        pointer = f"tensordesc<fp16[{rows}, 32]>" if form == "tma" else "*fp16" if halves else "*fp32"
        signature |= dict.fromkeys(names, pointer)
    aligned = frozenset(name for name, kind in signature.items() if not kind.startswith("tensordesc"))
    kernel = compile_triton(function, signature, constants, 90, 4, 3, aligned)
    assert kernel.ptx.count("wgmma.mma_async") >= 6
    assert kernel.shared_bytes <= base.SHARED_BYTES


@pytest.mark.exhaustive
@pytest.mark.toolchain
@pytest.mark.parametrize("cluster", [1, 2])
def test_the_kernels_in_cuda_compile_without_spilling(cluster, tmp_path):
    try:
        nvcc = find_nvcc()
    except CompilerMissingError as missing:
        pytest.skip(str(missing))
    choice = next(choice for choice in split_product.WGMMA_CHOICES if choice["cluster"] == cluster)
    epilogue = CASES["epilogue"][1] if cluster == 2 else ()
    (tmp_path / "kernel.cu").write_text(
        split_product.cuda_head(Knobs(form="wgmma", **choice), epilogue) + kernel_text(*split_product.CUDA)
    )
    command = [str(nvcc), "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-cubin", "kernel.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert spills == ["0"] * 5


@pytest.mark.parametrize("knobs", split_product.SPLIT_TRITON.alternatives(ProductSizes(m=4096, n=4096, k=4096))[::7])
def test_emitted_modules_stand_alone(knobs):
    text = split_product.emit(knobs)
    compile(text, "emitted", "exec")
    assert "kernelwright" not in text


def test_every_choice_for_wgmma_fits():
    assert [split_product.unfit(Knobs(form="wgmma", **choice)) for choice in split_product.WGMMA_CHOICES if choice] == [
        None for _ in split_product.WGMMA_CHOICES
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"form": "bf16"}, "wanted a form"),
        ({"chunk": 96}, "multiple of block_k"),
        ({"chunk": 512}, "truncation"),
        ({"chunk": 2048, "joint": False}, "truncation"),
        ({"num_stages": 4, "block_k": 128}, "shared memory"),
        ({"block_m": 256, "block_k": 32, "num_stages": 2}, "registers"),
        ({"block_m": 64, "block_n": 64, "num_warps": 16}, "too little"),
        ({"persistent": True}, "tensor memory accelerator"),
        ({"form": "tma", "specialised": True}, "four warps"),
        ({"form": "tma", "persistent": True, "split_k": 2}, "all of K"),
        ({"flat": True, "chunk": 64}, "the same"),
        ({"cluster": 2}, "clusters"),
        ({"form": "wgmma"}, "wgmma"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(change, reason):
    knobs = Knobs(**asdict(Knobs()) | change)
    assert reason in (split_product.unfit(knobs) or "")
    with pytest.raises(ValueError, match=reason):
        split_product.emit(knobs)


def test_two_fragments_cannot_read_one_name():
    with pytest.raises(ValueError, match="another name"):
        split_product.emit(Knobs(), (split_product.bias(), split_product.bias()))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, None),
        ({"batch": 64, "m": 512, "n": 512, "k": 512}, None),
        ({"batch": 64, "m": 512, "n": 64, "k": 512}, "memory"),
        ({"m": 128, "n": 256, "k": 1 << 19}, "memory"),
        ({"m": 256, "n": 256, "k": 1 << 17}, None),
        ({"m": 256, "n": 256, "k": 1 << 12}, None),
        ({"m": 128}, "multiply-adds"),
        ({"m": 16, "n": 1 << 20}, "rows"),
        ({"k": 8, "m": 1 << 16}, "length"),
    ],
)
def test_products_that_are_not_worth_it_are_refused(arguments, reason):
    found = split_product.SPLIT_TRITON.refusal(ProductSizes(**{"m": 1024, "n": 1024, "k": 1024} | arguments))
    assert found is None if reason is None else reason in (found or "")
