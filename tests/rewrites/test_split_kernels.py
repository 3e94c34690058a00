"""The CUDA kernels around the split product, on a CPU: they split as the Triton kernels do, bit for bit, and repair."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernelwright.rewrites.templates import split_product
from kernelwright.rewrites.templates.split_product import Knobs
from kernelwright.rewrites.templates.text import kernel_text

HERE = Path(__file__).parent
EPILOGUE = (split_product.bias(), split_product.scale(-0.5), split_product.RELU, split_product.residual())
SCRIPT = """
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
        theirs = module.split(x, True)
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
def test_kernels_split_as_triton_does_and_repair_what_is_marked(kind, tmp_path):
    (tmp_path / "emitted.py").write_text(split_product.emit(Knobs()))
    head = split_product.cuda_head(Knobs(form="wgmma", **split_product.WGMMA_CHOICES[0]), EPILOGUE)
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
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "emitted.py"), str(tmp_path / "kernels.so"), kind],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
