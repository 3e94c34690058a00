"""Fused Triton kernels of float16 and bfloat16: they compute in float32, and round as stores and conversions do."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from kernelwright.gpu.compilers import compile_triton
from tests.quick import exhaustive_but
from tests.rewrites.samples import Rewritten, apply_rules, interpreted, kernels_of, task_text
from tests.rewrites.test_fusion import needs_triton

TYPES = ("float16", "bfloat16")

RMS_NORM = """
h = a.float()
h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
return self.w * h.to(a.dtype)
"""

CASES = {
    "RMS norm": (RMS_NORM, "drawn(4, 6, 96)", "self.w = nn.Parameter(drawn(96))"),
    "RMS norm of long rows": (RMS_NORM, "drawn(9, 16500)", "self.w = nn.Parameter(drawn(16500))"),
    "softmax with a mask": (
        "return F.softmax((a * 0.125).masked_fill(b > 0.5, -1e4), -1)",
        "drawn(2, 40, 33), torch.rand(2, 40, 33)",
        "pass",
    ),
    "layer norm, split": (
        "return F.layer_norm(a, [20000], self.w, self.b, 1e-5) + b",
        "drawn(3, 20000), drawn(3, 20000)",
        "self.w, self.b = nn.Parameter(drawn(20000)), nn.Parameter(drawn(20000))",
    ),
    "softmax in float32": ("return F.softmax(a, -1, dtype=torch.float32).to(a.dtype)", "drawn(2, 40, 33)", "pass"),
    "columns": ("return a - a.mean(1, keepdim=True), (a * 2).amax(1)", "drawn(3, 24, 70)", "pass"),
    "with float32": ("return F.gelu(a) * b + a", "drawn(60, 50), torch.randn(60, 50)", "pass"),
    "gate": ("return F.silu(a) * b, torch.relu(a + b)", "drawn(60, 50), drawn(60, 50)", "pass"),
    "windows": (
        "return F.max_pool2d(a, 3, 2, 1) * 2, F.avg_pool2d(a, 2) + 1, self.d(a).relu() * 0.5",
        "drawn(2, 6, 13, 18)",
        "self.d = nn.Conv2d(6, 6, 3, padding=1, groups=6).to(torch.TYPE)",
    ),
    "mean of all": ("return F.mse_loss(a.float(), b.float())", "drawn(70, 60), drawn(70, 60)", "pass"),
}
"""Body, inputs and constructor; `drawn` gives numbers of 16 bits."""
QUICK = [
    ("RMS norm", "bfloat16"),
    ("RMS norm of long rows", "float16"),
    ("softmax with a mask", "float16"),
    ("layer norm, split", "bfloat16"),
    ("with float32", "bfloat16"),
    ("windows", "bfloat16"),
]

BOTH = """
import copy, sys
import torch
from pathlib import Path
from tests.rewrites.samples import load, module_at, tensors

folder = Path(sys.argv[1])
new = module_at(folder / "candidate.py")
old = load((folder / "reference.txt").read_text(), "reference")
torch.manual_seed(3)
model = old.Model().eval()
torch.manual_seed(3)
rewritten = new.ModelNew().eval()
new.Model.forward = None  # the candidate may not run the reference
given = old.get_inputs()
"""
"""Reference and candidate of equal weights, and inputs."""

PRECISE = f"""{BOTH}
torch.Tensor.float = torch.Tensor.double  # the precise one, below, stays in float64
precise = copy.deepcopy(model).double()
with torch.no_grad():
    have = tensors(rewritten(*given))
    exact = tensors(precise(*(one.double() for one in given)))
del torch.Tensor.float
with torch.no_grad():
    eager = tensors(model(*given))
for mine, theirs, right in zip(have, eager, exact, strict=True):
    assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    unit = torch.finfo(mine.dtype).eps
    allowed = float(sys.argv[2]) * unit * right.abs() + 3e-6 * right.abs().max()
    assert ((mine - right).abs() <= allowed).all(), float(((mine - right).abs() / allowed).max())
"""
"""No further than the given roundings from what float64 gives, where eager rounds each operator's result."""

EXACT = f"""{BOTH}
with torch.no_grad():
    for want, have in zip(tensors(model(*given)), tensors(rewritten(*given)), strict=True):
        assert have.dtype == want.dtype and want.abs().max() > 0
        torch.testing.assert_close(have, want, rtol=0, atol=1e-7)
"""
"""What eager gives, but for float32's rounding of a difference."""


def drawing(given: str, dtype: str) -> str:
    """A task's text in which `drawn` gives numbers of a type."""
    return given.replace(
        "class Model(", f"def drawn(*sizes):\n    return torch.randn(*sizes).to(torch.{dtype})\n\nclass Model("
    )


def text(case: str, dtype: str) -> str:
    body, inputs, init = CASES[case]
    return drawing(task_text(body, inputs, init.replace("TYPE", dtype)), dtype)


@needs_triton
@pytest.mark.parametrize(("case", "dtype"), exhaustive_but(itertools.product(CASES, TYPES), *QUICK))
def test_a_kernel_rounds_once(case: str, dtype: str, tmp_path: Path, small: None, few_programs: None) -> None:
    done = apply_rules(text(case, dtype), fuse="cuda", single=True)
    assert ("split-rows" in done.fired) == (case == "layer norm, split")
    body = done.source.split("class ModelNew")[1]
    assert "torch." not in body.split("super().forward")[1], "one kernel computes all of it"
    # A GPU rounds to the nearest number of bfloat16, Triton's interpreter to the next one towards zero.
    units = (2 if "RMS" in case else 1) * (1.02 if dtype == "bfloat16" else 0.51)
    interpreted(PRECISE, done.reference, done.source, tmp_path, str(units))


CONVOLUTIONS = """
self.c = nn.Conv2d(6, 20, 3, padding=1, stride=(1, 2)).to(torch.TYPE)
self.w = nn.Conv2d(32, 24, 3, bias=False).to(torch.TYPE)
self.t = nn.ConvTranspose1d(16, 10, 4, stride=2, groups=2).to(torch.TYPE)
"""


def convolved(dtype: str, *, fp16: bool = True) -> Rewritten:
    forward = "return torch.tanh(self.c(a)) * 2, torch.softmax(self.w(b), 1), self.t(c) + 1"
    inputs = "drawn(2, 6, 13, 14), drawn(1, 32, 9, 8), drawn(3, 16, 31)"
    given = drawing(task_text(forward, inputs, CONVOLUTIONS.replace("TYPE", dtype)), dtype)
    return apply_rules(given, fuse="cuda", single=True, tiled=True, channels=True, fp16=fp16)


@needs_triton
def test_a_convolution_multiplies_the_tasks_own_numbers(tmp_path: Path, small: None) -> None:
    done = convolved("float16")
    assert {"tiled-convolution", "fp16-convolution", "channels-in-tile"} <= set(done.fired)
    body = done.source.split("class ModelNew")[1]
    assert "torch." not in body.split("super().forward")[1], "kernels compute all of it"
    assert "allow_tf32" not in done.source, "TF32 is for numbers of 32 bits"
    assert "conv_transpose1d" in convolved("float16", fp16=False).source.split("class ModelNew")[1]
    interpreted(PRECISE, done.reference, done.source, tmp_path, "0.51")


@needs_triton
def test_tensor_cores_multiply_bfloat16(small: None, triton_cache: Path) -> None:
    """Triton's interpreter takes bfloat16 for whole numbers in a product: only the compiler shows what is multiplied."""
    short, long = convolved("float16").source, convolved("bfloat16").source
    first, second = (one[one.index("KNOBS_FUSED_0") :] for one in (short, long))
    assert second == first.replace("float16", "bfloat16")
    module, kernels = kernels_of(long, triton_cache)
    kernel = kernels["fused_1_kernel"]
    names = [name for name in kernel.arg_names if name.islower()]
    signature = {name: "*i32" if name.endswith("_largest") else "*bf16" for name in names}
    constants = dict(zip(("POINTS", "CHANNELS", "LENGTH"), module.KNOBS_FUSED_1["tile"][0], strict=True))
    ptx = compile_triton(kernel, signature, {**constants, "TF32": True}, 90, 4, 3, frozenset(signature)).ptx
    assert re.search(r"mma\S*\.bf16\.bf16", ptx)


ROUNDED = "h = a * 1.001\nreturn h.to(torch.{dtype}).float() - h, h.to(torch.{dtype})"


@needs_triton
@pytest.mark.parametrize("dtype", TYPES)
def test_a_conversion_rounds_what_the_kernel_goes_on_with(dtype: str, tmp_path: Path, small: None) -> None:
    done = apply_rules(task_text(ROUNDED.format(dtype=dtype), "N(60, 50)"), fuse="cuda")
    assert done.source.count(f".to(tl.{dtype}).to(tl.float32)") == 1
    if dtype == "float16":
        interpreted(EXACT, done.reference, done.source, tmp_path)


@needs_triton
@pytest.mark.parametrize("dtype", TYPES)
def test_a_gpu_rounds_to_the_nearest(dtype: str, small: None, triton_cache: Path) -> None:
    kernel = kernels_of(apply_rules(text("gate", dtype), fuse="cuda").source, triton_cache)[1]["fused_0_kernel"]
    short, pointer = {"float16": ("f16", "*fp16"), "bfloat16": ("bf16", "*bf16")}[dtype]
    signature = dict.fromkeys(kernel.arg_names, pointer)
    ptx = compile_triton(kernel, signature, {}, 90, 4, 3, frozenset(signature)).ptx
    assert f"cvt.rn.{short}" in ptx
    assert ".rz" not in ptx


@pytest.mark.parametrize(
    ("stays", "forward", "inputs"),
    [
        ("cumsum", "return torch.cumsum(a * 2, -1)", "torch.randn(600, 600).half()"),
        ("conv2d", "return F.conv2d(a, b)", "torch.randn(4, 16, 32, 32).half(), torch.randn(16, 16, 3, 3).half()"),
        ("torch.softmax", "return torch.softmax(a * 2, -1, dtype=torch.float16)", "torch.randn(60, 50).bfloat16()"),
        ("torch.int32", "return (a * 2).to(torch.int32)", "torch.randn(60, 50)"),
        ("F.rms_norm", "return F.rms_norm(a, [50])", "torch.randn(60, 50).half()"),
        ("torch.float64", "return torch.relu(a * 2).double()", "torch.randn(60, 50)"),
    ],
)
def test_what_no_kernel_of_16_bits_computes_stays(stays: str, forward: str, inputs: str, small: None) -> None:
    done = apply_rules(task_text(forward, inputs), fuse="cuda", single=True, tiled=True)
    assert stays in done.source.split("class ModelNew")[1]


def test_a_processor_has_no_such_kernels(small: None) -> None:
    for dtype in TYPES:
        assert not apply_rules(text("gate", dtype), fuse="cpu", single=True).fired
    assert apply_rules(text("gate", "float32"), fuse="cpu", single=True).fired


NOTHING = {
    "to its type": "a.to(torch.float32)",
    "float": "a.float()",
    "type_as": "a.type_as(b)",
    "to another": "a.to(b)",
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_conversion_that_does_nothing_is_gone(what: str) -> None:
    done = apply_rules(task_text(f"return {NOTHING[what]} + b", "N(4, 5), N(4, 5)"))
    assert "a + b" in done.source.split("class ModelNew")[1]


def test_type_as_names_its_type() -> None:
    done = apply_rules(task_text("return (a * 2).type_as(b)", "N(4, 5), N(4, 5).half()"))
    body = done.source.split("class ModelNew")[1]
    assert ".to(torch.float16)" in body
    assert "type_as" not in body
