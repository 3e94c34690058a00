"""Indices of maxima and minima in fused Triton kernels, which equal eager's also where values tie or are NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx

from kernelwright.gpu.compilers import compile_triton
from kernelwright.rewrites.fusion import triton as triton_printer
from kernelwright.rewrites.fusion.program import LoopProgram
from tests.quick import exhaustive_but
from tests.rewrites.samples import apply_rules, interpreted, kernels_of, task_text
from tests.rewrites.test_fusion import LENGTHS, needs_triton
from tests.rewrites.test_sixteen_bits import BOTH

SPECIAL = "torch.tensor([-math.inf, -0.0, 0.0, 1e-45, -1e-45, 1.5, -1.5, 2e38, -2e38, math.inf, math.nan, -math.nan])"
"""Numbers of which a row has the first few or all, so that its largest, or smallest, are several."""


def inputs(sizes: str, per_row: str) -> str:
    """A tensor of special numbers, of which each point of `per_row` has the first few or the first few negated."""
    few = f"torch.randint(0, 12, ({sizes})) % torch.randint(1, 13, ({per_row},))"
    return f"{SPECIAL}[{few}] * (torch.randint(0, 2, ({per_row},)) * 2 - 1)"


CASES = {
    "short rows": ("torch.argmax(a, -1), torch.argmin(a, 2, keepdim=True)", "5, 3, 37", "5, 3, 1"),
    "rows": ("torch.argmax(a, 1), torch.argmin(a, 1)", "3, 1500", "3, 1"),
    "long rows": ("torch.argmax(a, 1), torch.argmin(a, 1)", "5, 16500", "5, 1"),
    "split rows": ("torch.argmax(a, 1), torch.argmin(a, 1, keepdim=True)", "3, 16500", "3, 1"),
    "several dimensions": ("torch.argmax(a), torch.argmin(a.t())", "130, 143", "1"),
    "columns": ("torch.argmax(a, 1, keepdim=True), torch.argmin(a, -2)", "2, 13, 33", "2, 1, 33"),
    "outer dimension": ("torch.argmax(a, -3), torch.argmin(a, 0)", "40, 5, 9", "1, 5, 9"),
    "long columns": ("torch.argmax(a, 1), torch.argmin(a, 1, keepdim=True), a.amax(1)", "2, 1100, 70", "2, 1, 70"),
    "transposed": ("torch.argmax(a.transpose(1, 2), 2), torch.argmin(a.transpose(1, 2), 1)", "3, 40, 33", "3, 1, 33"),
    "fused": ("torch.argmin(-a, 1), torch.argmax(torch.relu(a) * 2, 1), a.amax(1), a.amax(1) + 1", "30, 70", "30, 1"),
    "rounded": ("torch.argmax(a.half(), 1), torch.argmin(a.bfloat16(), 1)", "40, 70", "40, 1"),
    "second pass": ("torch.argmin(a - a.amax(1, keepdim=True), 1)", "3, 16500", "3, 1"),
}

EXACT = f"""{BOTH}
for seed in range(2):
    torch.manual_seed(seed)
    given = old.get_inputs()
    with torch.no_grad():
        pairs = list(zip(tensors(model(*given)), tensors(rewritten(*given)), strict=True))
    for want, have in pairs:
        assert (have.dtype, have.shape, have.stride()) == (want.dtype, want.shape, want.stride())
        torch.testing.assert_close(have, want, rtol=2e-6, atol=1e-37, equal_nan=True)
"""


@needs_triton
@pytest.mark.parametrize("name", exhaustive_but(CASES, "columns", "rounded"))
def test_indices_are_those_of_eager(name: str, tmp_path: Path, small: None, few_programs: None) -> None:
    forward, sizes, per_row = CASES[name]
    done = apply_rules(task_text(f"return {forward}", inputs(sizes, per_row)), fuse="cuda", single=True)
    splits = name in ("split rows", "several dimensions", "second pass")
    assert ("split-rows" in done.fired) == splits
    assert "torch.argm" not in done.source.split("class ModelNew")[1]
    assert ("for step in range" in done.source) == (name in ("long rows", "long columns") or splits)
    interpreted(EXACT, done.reference, done.source, tmp_path)


@pytest.mark.parametrize(
    ("forward", "sizes", "fires"),
    exhaustive_but(
        [
            ("torch.argmax(a, 1)", "16, 256, 256", True),
            ("torch.argmin(a, 1)", "128, 4096, 4095", True),
            ("torch.argmax(a, -1, keepdim=True)", "64, 40", True),
            ("torch.argmax(a, 1) + 1", "64, 40", True),
            ("torch.argmax(a, 1)", "4096, 1", False),
            ("torch.argmax(a, 1)", "0, 4096", False),
            ("torch.argmax(a, 0)", "4096, 64", False),
            ("torch.argmax(a.double(), 1)", "64, 40", False),
            ("torch.argmax(a.long(), 1)", "64, 40", False),
            ("torch.max(a, 1)[1]", "64, 40", False),
        ],
        ("torch.argmin(a, 1)", "128, 4096, 4095", True),
        ("torch.argmax(a, 1) + 1", "64, 40", True),
        ("torch.argmax(a, 0)", "4096, 64", False),
        ("torch.argmax(a.double(), 1)", "64, 40", False),
    ),
)
def test_indices_of_float32_are_fused_on_a_gpu(forward: str, sizes: str, fires: bool) -> None:
    text = task_text(f"return {forward}", f"torch.empty({sizes})")
    assert apply_rules(text, fuse="cuda", single=True).fired == (("fuse-all-triton",) if fires else ())
    assert not apply_rules(text, fuse="cpu", single=True).fired


def test_an_index_is_no_part_of_a_convolution_nor_longer_than_half_a_key() -> None:
    text = task_text("return torch.argmax(self.c(a), 1)", "torch.empty(4, 8, 64, 64)", "self.c = nn.Conv2d(8, 64, 3)")
    source = apply_rules(text, fuse="cuda", single=True, tiled=True, channels=True).source
    assert source.count("def fused") == 2
    for size in (1 << 31, (1 << 31) - 1):
        program = LoopProgram((2, size), reduced=(1,))
        program.add("argmax", program.load(fx.Graph().placeholder("a"), (size, 1)))
        assert triton_printer.accepts(program) == (size < 1 << 31)


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(
    "call",
    [
        "torch.argmax(a, dim=1), 128, 4096, 4095",
        "torch.argmin(a, dim=1), 16, 256, 256",
        "torch.argmax(a, 2), 16, 256, 256",
        "torch.argmin(a, 1), 3, 20000",
        "torch.argmax(a, 1), 600, 20000",
    ],
)
def test_indices_compile_for_hopper(call: str, triton_cache: Path) -> None:
    """Down to machine code, which needs no GPU."""
    forward, _, sizes = call.partition("), ")
    done = apply_rules(task_text(f"return {forward})", f"torch.empty({sizes})"), fuse="cuda", single=True)
    _, kernels = kernels_of(done.source, triton_cache)
    assert len(kernels) == 1 + (sizes == "3, 20000")
    for kernel in kernels.values():
        constants = {name: LENGTHS[name] for name in kernel.arg_names if name in LENGTHS}
        others = (name for name in kernel.arg_names if name not in constants)
        types = {name: "*fp32" if name.startswith("in") else "*i64" for name in others}
        assert compile_triton(kernel, types, constants, 90).cubin
