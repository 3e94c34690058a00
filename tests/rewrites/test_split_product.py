"""Split products: numbers under Triton's interpreter, kernels in CUDA C++ on a CPU, what compiles, and refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kernelwright.errors import CompilerMissingError
from kernelwright.gpu.compilers import compile_triton, find_nvcc
from kernelwright.rewrites.templates import base, split_product
from kernelwright.rewrites.templates.base import kernel_text
from kernelwright.rewrites.templates.products import ProductSizes
from kernelwright.rewrites.templates.split_product import Knobs
from tests.rewrites.samples import interpreted_answer, module_at

HERE = Path(__file__).parent
EPILOGUE = (split_product.bias(), split_product.scale(-0.5), split_product.RELU, split_product.residual())
SMALL = Knobs(block_m=64, block_n=64, block_k=32, num_warps=4)
INTERPRET = """
import importlib.util, json, sys
import torch

def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()

def across(rows, length):
    # Values of a column lie side by side, as in `b.mT` of a plain product: fewer programs split those.
    return torch.randn(length, rows).T

spec = importlib.util.spec_from_file_location("emitted", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
knobs = json.loads(sys.argv[2])
torch.manual_seed(0)
a, b = torch.randn(2, 9, 75), across(70, 75)

def linear():
    return error(module.launch(a, b, knobs), a.double() @ b.double().mT)

row = {"linear": linear()}
# Nothing of the weight is kept.
b.mul_(-2)
row["changed"] = linear()
# On a CPU the kernel refuses, and PyTorch computes the same.
row["refuses"] = not module.takes(a, b) and torch.equal(module.product(a, b, knobs), a @ b.mT)
x, y = across(33, 2 * 40).view(33, 2, 40).transpose(0, 1), torch.randn(2, 40, 36)
row["batched"] = error(module.launch(x, y.mT, knobs), x.double() @ y.double())
rows = across(40, 48) * torch.logspace(-25, 15, 40)[:, None]
sizes = torch.logspace(15, -10, 48)
cols = across(48, 48) * sizes[:, None]
exact = rows.double() @ cols.double().T
# Columns weigh alike: otherwise a row's error would be that of its two or three largest values.
each = ((module.launch(rows, cols, knobs) - exact) / sizes).norm(dim=1) / (exact / sizes).norm(dim=1)
row["rows of all sizes"] = each.max().item()
# The large values of these rows meet zeros: what is left is too small for two float16.
wide = across(40, 48)
wide[:, 0] = 1e25
cols = across(48, 48)
cols[:, 0] = 0
row["too wide"] = error(module.launch(wide, cols, knobs), wide.double() @ cols.double().T)
wide[3, 5], wide[4, 6], cols[7, 9], cols[8, 2] = float("inf"), float("nan"), float("nan"), -float("inf")
cols[9, 5] = 1.0
ours, theirs = module.launch(wide, cols, knobs), wide @ cols.T
known = theirs.isfinite()
row["special"] = bool((ours.isnan() == theirs.isnan()).all() and (ours == theirs)[theirs.isinf()].all())
row["beside special"] = error(ours[known], theirs[known].double())
# As many rows as an H200 has multiprocessors: a program splits each.
x, y = torch.randn(132, 40), across(36, 40)
row["many rows"] = error(module.launch(x, y, knobs), x.double() @ y.double().T)
print(json.dumps(row))
"""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def text() -> str:
    return split_product.SPLIT_TRITON.module(SMALL)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("split_k", [1, 2])
def test_products_have_the_error_of_float32(split_k, text, tmp_path):
    (tmp_path / "case.py").write_text(text)
    knobs = json.dumps(asdict(replace(SMALL, split_k=split_k)))
    errors = dict(interpreted_answer(INTERPRET, str(tmp_path / "case.py"), knobs))
    assert {case: error for case, error in errors.items() if error is not True and not error < 6e-7} == {}
    assert errors["refuses"] is True
    assert errors["special"] is True, "Inf and NaN are those of float32"


@needs_triton
def test_the_kernel_compiles_for_hopper_with_wgmma(text, tmp_path, triton_cache):
    path = tmp_path / "kernels.py"
    path.write_text(text)
    function = module_at(path).product_kernel
    constants = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP": 8, "SPLIT_K": 1, "SHARED_B": True}
    signature = {name: "i32" for name in function.arg_names if name not in constants}
    signature |= {"c": "*fp32", "parts": "*fp32", "shifts_a": "*i32", "shifts_b": "*i32"}
    signature |= dict.fromkeys(("a", "a_low"), "tensordesc<fp16[64, 32]>")
    signature |= dict.fromkeys(("b", "b_low"), "tensordesc<fp16[128, 32]>")
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
    epilogue = EPILOGUE if cluster == 2 else ()
    (tmp_path / "kernel.cu").write_text(
        split_product.cuda_head(Knobs(cluster=cluster), epilogue) + kernel_text(*split_product.CUDA)
    )
    command = [str(nvcc), "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-cubin", "kernel.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert spills == ["0"] * 5


def test_emitted_modules_stand_alone(text):
    compile(text, "emitted", "exec")
    assert "kernelwright" not in text


@pytest.mark.parametrize("template", [split_product.SPLIT_CUDA, split_product.SPLIT_TRITON])
def test_every_alternative_fits_in_shared_memory(template):
    choices = template.alternatives(ProductSizes(m=4096, n=4096, k=4096))
    assert len(choices) > 2
    # Tiles in CUDA C++ begin at a multiple of 1,024 bytes; each stage has two barriers.
    assert all(knobs.shared_bytes + 1024 + 16 * knobs.num_stages <= base.SHARED_BYTES for knobs in choices)


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


ON_CPU = """
import ctypes, importlib.util, sys
import numpy as np
import torch

spec = importlib.util.spec_from_file_location("emitted", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
kernels = ctypes.CDLL(sys.argv[2])
kernels.workspace_bytes.restype = ctypes.c_int64
torch.manual_seed(0)

def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())

def values(kind, shape):
    x = torch.randn(shape)
    if kind == "ranges":
        rows = x.flatten(0, -2)
        rows *= torch.logspace(-45, 17, len(rows), dtype=torch.float64)[torch.randperm(len(rows))].float()[:, None]
        rows[0] = 0
    elif kind == "wide":
        x *= torch.exp(9 * torch.randn(shape))
    elif kind == "special":
        x[..., 3, 7], x[..., 4, -1], x[..., 9, 0] = float("inf"), float("nan"), -float("inf")
    return x

def across(x):
    return x.mT.contiguous().mT

def case(name, a, b, processors, slices, ways, repaired=True):
    left, right = a if a.dim() == b.dim() else a.flatten(0, -2), b
    n, k = b.shape[-2:]
    batch, m = (1, left.shape[0]) if b.dim() == 2 else left.shape[:2]
    strides = [0] * (3 - left.dim()) + list(left.stride()) + [0] * (3 - b.dim()) + list(b.stride())
    sizes = (ctypes.c_int64 * 13)(batch, m, n, k, b.dim() == 2, slices, *strides, 0)
    work = torch.full((kernels.workspace_bytes(sizes),), 170, dtype=torch.uint8)
    found = kernels.split_both(pointer(left), pointer(right), pointer(work), sizes, processors)
    assert found == ways, (name, found)
    places = (ctypes.c_int64 * 9)()
    kernels.layout_of(sizes, places)

    def part(index, shape, dtype):
        count = int(np.prod(shape))
        return work[places[index] :][: count * dtype.itemsize].view(dtype).view(shape)

    split = []
    for which, x in enumerate((left.reshape(-1, m, k), right.reshape(-1, n, k))):
        rows, padded = x.shape[0] * x.shape[1], -(-k // 64) * 64
        ours = [part(2 * which + half, (x.shape[0], x.shape[1], padded), torch.float16) for half in (0, 1)]
        ours += [part(6 + which, (rows,), torch.int32), part(4 + which, (rows,), torch.int32)]
        theirs = module.split(x, 64)
        for mine, other, what in zip(ours[:3], theirs[:3], ("high", "low", "shifts")):
            assert torch.equal(mine.view(torch.int16), other.reshape(mine.shape).view(torch.int16)), (name, which, what)
        assert torch.equal(ours[3] > 0, theirs[3] > 0), (name, which, "marks")
        split.append(ours)
    if not repaired:
        # The steps of so long a sum take a CPU too long.
        return
    # What the product is to store, in slices.
    parts = part(8, (slices, batch, m, n), torch.float32)
    (ah, al, sa, _), (bh, bl, sb, _) = split
    ah, al, bh, bl = (x.double() for x in (ah, al, bh, bl))
    whole = ah @ bh.mT + ah @ bl.mT + al @ bh.mT
    whole *= torch.exp2(-(sa.view(-1, m, 1) + sb.view(-1, 1, n)).double())
    for index in range(slices):
        parts[index] = (whole / slices).float()
    bias, residual, c = torch.randn(n), torch.randn(batch, m, n), torch.full((batch, m, n), 7.0)
    kernels.add_and_repair(
        pointer(left), pointer(right), pointer(c), pointer(work), sizes, processors, pointer(bias), pointer(residual)
    )
    plain = left.reshape(-1, m, k).double() @ right.reshape(-1, n, k).double().mT
    exact = torch.relu((plain + bias) * -0.5) + residual
    assert torch.equal(c.isnan(), exact.isnan()), name
    known = exact.isfinite()
    assert torch.equal(c[~known & ~exact.isnan()].double(), exact[~known & ~exact.isnan()]), name
    size = (left.reshape(-1, m, k).double().norm(dim=-1)[..., None] * right.reshape(-1, n, k).double().norm(dim=-1)[:, None])
    error = ((c.double() - exact).abs() / (size + bias.abs() + residual.abs()))[known].max().item()
    assert error < 1e-6, (name, error)
    marked = int((split[0][3] > 0).sum() + (split[1][3] > 0).sum())
    print(name, found, f"{error:.1e}, {marked} marked")

# Warps a row (0), blocks (1), several blocks (2), columns (3).
kind = sys.argv[3]
if kind == "long":
    case("blocks", values("special", (34, 9000)), values("ranges", (33, 9000)), 1, 2, 11, False)
    case("spans", values("wide", (34, 9001)), values("special", (33, 9001)), 132, 2, 22, False)
else:
    case(kind + " odd", values(kind, (70, 75)), across(values(kind, (66, 75))), 1, 3, 3)
if kind in ("normal", "ranges", "wide"):
    case(kind + " warps", values(kind, (2, 35, 96)), values(kind, (41, 96)), 1, 2, 0)
    case(kind + " columns", across(values(kind, (2, 68, 600))), values(kind, (2, 33, 600)), 1, 2, 30)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("kind", ["special", "normal", "ranges", "wide", "long"])
def test_kernels_split_as_triton_does_and_repair_what_is_marked(kind, text, tmp_path):
    (tmp_path / "emitted.py").write_text(text)
    head = split_product.cuda_head(Knobs(), EPILOGUE)
    # The device's instructions and headers are left out.
    plain = head.split("__device__ __forceinline__ void multiply")[0].splitlines()
    head = "".join(f"{line}\n" for line in plain if "#include" not in line)
    (tmp_path / "kernels.cpp").write_text(
        f'#include "{HERE}/cuda_on_cpu.h"\n'
        + head
        + kernel_text("split_operands.cu")
        + (HERE / "split_on_cpu.cpp").read_text()
    )
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-pthread", "-shared", "-fPIC"]
    command = ["g++", *options, "kernels.cpp", "-o", "kernels.so"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr[-3000:]
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_CPU, str(tmp_path / "emitted.py"), str(tmp_path / "kernels.so"), kind],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
