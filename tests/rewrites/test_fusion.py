"""Fused kernels against eager: C++ is built and run, Triton is interpreted, and compiled for a GPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import fx

from kernelwright.gpu.compilers import compile_triton
from kernelwright.records.knobs import fixed, knobs_of
from kernelwright.rewrites.fusion import triton as triton_printer
from kernelwright.rewrites.fusion.groups import MOST_MEMBERS
from kernelwright.rewrites.fusion.program import LoopProgram, Signature
from tests.quick import exhaustive_but
from tests.rewrites.samples import apply_rules, compare, interpreted, kernels_of, task_text

POINTWISE = """
z = torch.relu(a) * self.p + F.gelu(a, approximate='tanh') - F.mish(a) / 3 + F.silu(b)
u = F.softplus(a * 3) + F.elu(b) + F.selu(a) + F.leaky_relu(b, 0.1) + F.logsigmoid(a) + F.hardswish(b)
v = torch.where(a > b, torch.tanh(a), torch.erf(b)) + torch.clamp(a, -0.5, 0.5) ** 2
v = v + 1 / (2 + torch.sin(b))
w = torch.expm1(a * 1e-3) + torch.log1p(b.abs()) + F.hardsigmoid(a) + torch.maximum(a, b)
w = w + (a * b).abs().sqrt()
return z + u, v * w + u
"""
ROWS = """
x = torch.softmax(a * 2, -1) * self.q
y = F.layer_norm(a + x, [37], self.q, self.r) + torch.logsumexp(a, -1, keepdim=True)
z = (a - a.mean(-1, keepdim=True)) / torch.sqrt(a.var(-1, keepdim=True, unbiased=False) + 1e-5)
u = a.norm(dim=-1) + a.norm(p=1, dim=-1) + a.var(-1) * a.std(-1, correction=3)
return torch.tanh(y), torch.log_softmax(z * 3, -1) + 1, (a * a).amax(-1) - (a + 1).amin(-1), u
"""
SHORT = """
x = F.layer_norm(a * 2 + 3, [37], self.q, self.r)
return torch.relu(x), torch.softmax(a, -1) * b, a.amax(-1) * 2 + 1, a.sum(-1, keepdim=True) + a
"""
COLUMNS = """
x = torch.softmax(a + self.s, 1) * 2
y = (a * a).mean(1, keepdim=True)
return x * a, a * torch.rsqrt(y + 1e-6), torch.relu(torch.logsumexp(a * 3, 1)) + 1
"""
LONG_COLUMNS = """
x = (a * self.w + b).sum(1) * self.w + 1
return x, (a * b).mean(1, keepdim=True) * b, torch.exp(a).amax(1) - torch.relu(a - b).amin(1)
"""
GROUPS = """
x = F.silu(self.g(a) * 2)
y = torch.relu(self.i(a)) + 1
z = torch.tanh(self.b(a) + 1)
return x, y, z, ((a - 0.5) ** 2).mean() * 3, (a + 1).abs().amax()
"""
LONG = """
x = torch.softmax(a * 3, -1) + self.r[:1]
y = (a - a.mean(-1, keepdim=True)) / torch.sqrt(a.var(-1, keepdim=True, unbiased=False) + 1e-5)
return x, torch.tanh(y), (a * 2).amax(-1) + 1, (a * a).sum() * 0.5, (a + 1).std(-1)
"""
WHOLE = """
x = F.layer_norm(a * 3 + 100, a.shape)
return x * 2, a / a.norm(), torch.softmax(a.flatten(), 0) + a.flatten().var(0)
"""
WINDOWS = """
x = F.max_pool2d(a, 3, 2, 1) + 1, F.avg_pool2d(a, 4, 1, 1), F.max_pool2d(a, 2, ceil_mode=True, dilation=2)
y = F.max_pool1d(b, 8, 1, 4), self.d1(b), self.d2(a).relu() * self.s
z = F.max_pool3d(c, 3, 2, 1, dilation=3), F.avg_pool3d(c, 2), self.d3(c)
return x, y, z
"""
SCANS = """
zeros = torch.zeros_like(a.select(1, 0).unsqueeze(1))
x = torch.cumsum(a * b, 1) + 1, torch.cumprod(a * 0.01 + 1, 1), torch.cumsum(a.flip(1), 1).flip(1)
y = torch.cat((zeros, torch.cumsum(a.narrow(1, 0, 599), 1)), 1), torch.cumsum(torch.cat((zeros, a), 1)[:-1], 1)
return x, y, a.masked_fill(b, 3.0) * 2
"""
LOSSES = """
x = F.smooth_l1_loss(a, b), F.smooth_l1_loss(a, b, beta=0.3, reduction='sum'), F.huber_loss(a, b, delta=0.7)
y = F.mse_loss(a, b), F.l1_loss(a * 2, b), F.kl_div(a, b.relu(), reduction='batchmean'), F.kl_div(a, b, log_target=True)
return x, y, F.cross_entropy(a, self.t), F.triplet_margin_loss(a, b, a - b), F.cosine_similarity(a, b)
"""
CONVOLUTIONS = """
x = self.c1(a).relu() * 2, self.c2(a), self.c3(b), self.c4(b), self.c5(d)
return x, self.t1(c), self.t5(c), self.t6(b), self.t2(a).tanh() + self.s[:1], self.t3(b), self.t4(d) + self.c6(d)
"""
FEWER_CONVOLUTIONS = """
x = self.c1(a).relu() * 2, self.c5(d), self.t1(c)
return x, self.t6(b), self.t4(d) + self.c6(d)
"""
CHANNELS = """
x = torch.softmax(self.c1(a), 1) * 2, torch.tanh(self.c2(a).amin(1, keepdim=True)), self.c3(b).mean(1)
y = (torch.logsumexp(self.t1(c).relu(), 1, keepdim=True) - self.u).amax(1), self.t6(b).sum(1, keepdim=True) * 3
z = self.t3(b) / self.t3(b).norm(dim=1, keepdim=True), F.layer_norm(self.c2(a), (13, 19))
return x, y, z
"""
POOLED = """
x = F.max_pool2d(self.c1(a).tanh() * 2, 2), F.avg_pool2d(self.c2(a).relu(), (3, 2)) + self.s[0], F.max_pool3d(self.c3(b), 2)
y = torch.softmax(F.max_pool1d(self.t1(c) - self.u, 3), 1), F.avg_pool1d(self.t1(c).softmax(1) * 3, 6)
z = F.max_pool2d(self.t4(d), 2, ceil_mode=True), F.max_pool3d(self.t6(b).sigmoid(), (2, 3, 4)).logsumexp(1)
w = F.max_pool2d(self.c5(d), 2) + self.v, F.avg_pool3d(self.c4(b).mean(1, keepdim=True), 2), self.c3(b).relu()
return x, y, z, w, F.max_pool2d(self.c2(a), 3, 2), F.max_pool2d(self.c6(d), 2, padding=1)
"""
STATE = """
self.v = nn.Parameter(torch.randn(40, 1, 1))
self.u = nn.Parameter(torch.randn(9, 1))
self.w = nn.Parameter(torch.randn(70))
self.p = nn.Parameter(torch.randn(5, 1, 1))
self.q = nn.Parameter(torch.rand(37) + 0.5)
self.r = nn.Parameter(torch.randn(37))
self.s = nn.Parameter(torch.randn(6, 1, 1))
self.t = nn.Parameter(torch.arange(70) % 37, requires_grad=False)
self.g = nn.GroupNorm(2, 6)
self.i = nn.InstanceNorm2d(6, affine=True)
self.b = nn.BatchNorm2d(6)
self.d1 = nn.Conv1d(6, 6, 7, padding=3, groups=6)
self.d2 = nn.Conv2d(6, 6, (3, 5), padding=1, dilation=(2, 1), groups=6)
self.d3 = nn.Conv3d(6, 6, 3, stride=(1, 2, 1), padding=(0, 1, 2), groups=6, bias=False)
self.c1 = nn.Conv2d(6, 20, 3, padding=1, stride=(1, 2))
self.c2 = nn.Conv2d(6, 9, (3, 2), dilation=2, bias=False)
self.c3 = nn.Conv3d(6, 8, (3, 2, 1))
self.c4 = nn.Conv3d(6, 18, 2, groups=2)
self.c5 = nn.Conv2d(32, 40, 3, padding=1, stride=(1, 2), groups=2)
self.c6 = nn.ConvTranspose2d(32, 17, 1, bias=False)
self.t5 = nn.ConvTranspose1d(6, 9, 2, stride=3)
self.t6 = nn.ConvTranspose3d(6, 8, 3, stride=(2, 1, 4), padding=1, dilation=(2, 1, 2))
self.t4 = nn.ConvTranspose2d(32, 17, 3, padding=1)
self.t1 = nn.ConvTranspose1d(6, 9, 5, stride=3, dilation=2, padding=2)
self.t2 = nn.ConvTranspose2d(6, 40, 3, padding=1, groups=2)
self.n1 = nn.Conv1d(6, 5, 2, stride=2)
self.n2 = nn.ConvTranspose1d(6, 3, 2, stride=2)
self.t3 = nn.ConvTranspose3d(6, 8, (3, 5, 2), stride=(2, 3, 1), padding=(1, 0, 0), dilation=(1, 2, 3))
"""
CASES = {
    "pointwise": (POINTWISE, "torch.randn(4, 5, 11, 13), torch.randn(4, 5, 11, 13)"),
    "rows": (ROWS, "torch.randn(70, 37)"),
    "columns": (COLUMNS, "torch.randn(3, 6, 13, 11)"),
    "long": (LONG, "torch.randn(3, 16500)"),
    "groups": (GROUPS, "torch.randn(3, 6, 13, 11)"),
}
GPU_CASES = {
    **CASES,
    "whole": (WHOLE, "torch.randn(130, 143)"),
    "long columns": (LONG_COLUMNS, "torch.randn(2, 1100, 70), torch.randn(2, 1, 70)"),
    "windows": (WINDOWS, "torch.randn(1, 6, 13, 18), torch.randn(1, 6, 97), torch.randn(1, 6, 9, 7, 8)"),
    "convolutions": (
        CONVOLUTIONS,
        "torch.randn(2, 6, 17, 21), torch.randn(2, 6, 5, 7, 6), torch.randn(3, 6, 77), torch.randn(2, 32, 9, 9)",
    ),
    "one convolution of each kind": (
        FEWER_CONVOLUTIONS,
        "torch.randn(2, 6, 17, 21), torch.randn(1, 6, 4, 6, 5), torch.randn(3, 6, 77), torch.randn(2, 32, 9, 9)",
    ),
    "four convolutions": (
        "return self.c5(a) * 2, self.t1(b), self.n1(b), self.n2(b)",
        "torch.randn(1, 32, 5, 5), torch.randn(2, 6, 61)",
    ),
    "two convolutions": ("return self.c5(a) * 2, self.n2(b)", "torch.randn(1, 32, 5, 5), torch.randn(2, 6, 61)"),
    "channels": (CHANNELS, "torch.randn(2, 6, 17, 21), torch.randn(2, 6, 5, 7, 6), torch.randn(3, 6, 77)"),
    "pooled": (
        POOLED,
        "torch.randn(2, 6, 17, 21), torch.randn(2, 6, 5, 7, 6), torch.randn(3, 6, 77), torch.randn(2, 32, 10, 10)",
    ),
    "scans": (SCANS, "torch.randn(5, 600), torch.randn(5, 600) > 0"),
    "losses": (LOSSES, "torch.randn(70, 37), torch.randn(70, 37)"),
    "short": (SHORT, "torch.randn(9, 7, 37), torch.randn(9, 7, 1)"),
}
CONVOLVED = ("convolutions", "one convolution of each kind", "four convolutions", "two convolutions")
ALONE = ("windows", "scans", *CONVOLVED, "losses")
"""Cases of operators that are kernels of their own."""
RULES = {"losses": ("write-out-row-losses",)}
"""Rules that come before a case's kernels."""
TILED = ("tiled-convolution",)
REDUCED = {"channels": (*TILED, "channels-in-tile"), "pooled": (*TILED, "channels-in-tile", "pool-in-tile")}
"""What a convolution's kernel also does in these cases."""


def sample(name: str) -> str:
    forward, inputs = GPU_CASES[name]
    return task_text(forward, inputs, STATE)


@pytest.fixture(autouse=True)
def own_build_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


@pytest.mark.toolchain
@pytest.mark.parametrize("name", exhaustive_but([*CASES, "losses"], "rows"))
def test_cpp_agrees_with_eager(name: str) -> None:
    done = apply_rules(sample(name), *RULES.get(name, ()), fuse="cpu", single=name in ALONE)
    assert done.fired == (*RULES.get(name, ()), "fuse-all-cpp" if name in ALONE else "fuse-chains-cpp")
    assert "torch.softmax" not in done.source.split("class ModelNew")[1]
    compare(done.reference, done.source, 2e-6)


@pytest.mark.exhaustive
@pytest.mark.toolchain
def test_cpp_lets_nan_through() -> None:
    text = task_text("return torch.relu(a) + torch.clamp(a, -1, 1), (a * 2).amax(-1) + 1", "N(64, 40)")
    done = apply_rules(text, fuse="cpu")
    namespace: dict[str, object] = {}
    exec(compile_source(done.source), namespace)
    x = torch.randn(64, 40)
    x[3, 5] = float("nan")
    with torch.no_grad():
        outputs = namespace["ModelNew"]()(x)  # type: ignore[operator]
    for have, want in zip(outputs, (torch.relu(x) + torch.clamp(x, -1, 1), (x * 2).amax(-1) + 1), strict=True):
        assert torch.equal(have.isnan(), want.isnan())


def compile_source(source: str) -> object:
    return compile(source, "candidate", "exec")


INTERPRET = """
import importlib.util, sys
from pathlib import Path
import torch
from tests.rewrites.samples import compare, load, tensors

folder = Path(sys.argv[1])

def from_file(source, name):
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

reference, candidate = ((folder / name).read_text() for name in ("reference.txt", "candidate.py"))
# Kernels do not know the mode: train mode with the first weights and eval mode with others show what all four would.
one_mode = "self.training" not in candidate.partition("class ModelNew")[2]
compare(reference, candidate, float(sys.argv[2]), from_file, (0, 3) if one_mode else range(4))
old, new = load(reference, "reference"), from_file(candidate, "candidate")
model, inputs = old.Model().eval(), old.get_inputs()
inputs[0].view(-1)[7] = float("nan")
rewritten = new.ModelNew().eval()
rewritten.load_state_dict(model.state_dict())
with torch.no_grad():
    pairs = zip(tensors(model(*inputs)), tensors(rewritten(*inputs)), strict=True)
    assert all(torch.equal(want.isnan(), have.isnan()) for want, have in pairs), "NaN does not get through, or more does"
"""

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize("name", GPU_CASES)
def test_triton_agrees_with_eager_in_the_interpreter(name: str, tmp_path: Path, small: None, few_programs: None) -> None:
    done = apply_rules(
        sample(name), *RULES.get(name, ()), fuse="cuda", single=name in ALONE, tiled=True, channels=name in REDUCED
    )
    assert ("row = row * " in done.source) == (name in ("rows", "short", "groups", "losses")), (
        "several rows are one program's"
    )
    fused = "fuse-all-triton" if name in ALONE else "fuse-chains-triton"
    assert done.fired == (
        *RULES.get(name, ()),
        fused,
        *(("split-rows",) if name in ("long", "whole") else (dict.fromkeys(CONVOLVED, TILED) | REDUCED).get(name, ())),
    )
    exact = done.source.replace(ALLOWS_TF32, "[False]")
    interpret(done.reference, exact, tmp_path)
    if name in (*CONVOLVED, *REDUCED):
        rounded = done.source.replace(ALLOWS_TF32, "[True]")
        interpret(done.reference, rounded, tmp_path, 3e-3)
        with pytest.raises(AssertionError, match="error "):
            interpret(done.reference, rounded, tmp_path)
    if name in ALONE[:2]:
        most = {name: max(choices) for name, choices in knobs_of(done.source).items()}
        interpret(done.reference, fixed(done.source, most), tmp_path)


@pytest.mark.parametrize(
    ("forward", "state", "fires"),
    exhaustive_but(
        [
            ("F.max_pool2d(a, 3, 2, 1)", "pass", True),
            ("F.avg_pool2d(a, 3, 2, 1, count_include_pad=False)", "pass", False),
            ("F.avg_pool2d(a, 3, 2, ceil_mode=True)", "pass", False),
            ("F.max_pool2d(a, 12, 2)", "pass", False),
            ("self.d(a)", "self.d = nn.Conv2d(8, 8, 3, groups=8)", True),
            ("self.d(a)", "self.d = nn.Conv2d(8, 16, 3, groups=8)", False),
            ("self.d(a)", "self.d = nn.Conv2d(8, 8, 3, groups=4)", False),
            ("F.max_pool2d(a.double(), 3)", "pass", False),
        ],
        ("F.max_pool2d(a, 3, 2, 1)", "pass", True),
        ("F.avg_pool2d(a, 3, 2, 1, count_include_pad=False)", "pass", False),
        ("self.d(a)", "self.d = nn.Conv2d(8, 8, 3, groups=8)", True),
        ("self.d(a)", "self.d = nn.Conv2d(8, 8, 3, groups=4)", False),
    ),
)
def test_windows_are_fused_where_all_are_alike(forward: str, state: str, fires: bool) -> None:
    text = task_text(f"return {forward}", "N(2, 8, 40, 40)", state)
    done = apply_rules(text, fuse="cuda", single=True)
    assert done.fired == (("fuse-all-triton",) if fires else ())
    assert not apply_rules(text, fuse="cpu", single=True).fired


@pytest.mark.parametrize(
    ("forward", "fires"),
    [
        ("torch.cumsum(a, 1)", True),
        ("torch.cumsum(a, 0)", False),
        ("torch.cumsum(a, 1).flip(1)", False),
        ("torch.cumsum(a.flip(1), 1).flip(0)", False),
        ("torch.cumsum(a.flip(1), 1).flip(1) + torch.cumsum(a.flip(1), 1)", True),
        ("torch.cumsum(a, 1, dtype=torch.float64)", False),
        ("torch.cumsum(a[:, :300], 1)", False),
        ("torch.cat((torch.ones_like(a[:, :1]), torch.cumsum(a, 1)), 1)", True),
        ("torch.cat((torch.zeros_like(a), a), 1) * 1", False),
    ],
)
def test_scans_of_long_rows_are_fused(forward: str, fires: bool) -> None:
    done = apply_rules(task_text(f"return {forward}", "N(70, 600)"), fuse="cuda", single=True)
    assert done.fired == (("fuse-all-triton",) if fires else ())


@pytest.mark.parametrize(
    ("layer", "sizes", "fires"),
    exhaustive_but(
        [
            ("nn.Conv2d(8, 64, 3)", "4, 8, 64, 64", True),
            ("nn.Conv2d(8, 64, 3)", "1, 8, 32, 32", True),
            ("nn.Conv2d(32, 64, 3)", "1, 32, 32, 32", False),
            ("nn.Conv2d(64, 8, 1, stride=4)", "700, 64, 256, 256", True),
            ("nn.Conv2d(8, 64, 3, padding='same')", "4, 8, 64, 64", False),
            ("nn.Conv2d(8, 64, 3, groups=2)", "4, 8, 64, 64", True),
            ("nn.Conv2d(8, 32, 3, groups=8)", "4, 8, 64, 64", False),
            ("nn.Conv2d(256, 16, 3)", "4, 256, 64, 64", False),
            ("nn.Conv2d(3, 64, 1)", "4, 3, 64, 64", True),
            ("nn.ConvTranspose2d(32, 64, 3, stride=2)", "4, 32, 32, 32", True),
            ("nn.ConvTranspose2d(32, 64, 3, stride=2, dilation=2)", "4, 32, 32, 32", True),
            ("nn.ConvTranspose2d(256, 16, 3)", "4, 256, 64, 64", False),
            ("nn.Conv3d(3, 64, (3, 5, 7))", "2, 3, 32, 32, 32", True),
            ("nn.Conv3d(3, 8, 3)", "2, 3, 64, 64, 64", False),
            ("nn.ConvTranspose3d(32, 32, (3, 5, 7), stride=2, groups=4)", "2, 32, 12, 24, 48", True),
        ],
        ("nn.Conv2d(8, 64, 3)", "1, 8, 32, 32", True),
        ("nn.Conv2d(32, 64, 3)", "1, 32, 32, 32", False),
        ("nn.Conv2d(64, 8, 1, stride=4)", "700, 64, 256, 256", True),
        ("nn.Conv2d(8, 64, 3, padding='same')", "4, 8, 64, 64", False),
        ("nn.ConvTranspose2d(32, 64, 3, stride=2)", "4, 32, 32, 32", True),
        ("nn.Conv3d(3, 8, 3)", "2, 3, 64, 64, 64", False),
    ),
)
def test_convolutions_become_tiles_where_they_may_be_faster_than_cudnn(layer: str, sizes: str, fires: bool) -> None:
    text = task_text("return self.c(a)", f"torch.empty({sizes})", f"self.c = {layer}")
    done = apply_rules(text, fuse="cuda", single=True, tiled=True)
    assert done.fired == (("fuse-all-triton", *TILED) if fires else ())
    assert ("tl.program_id(0).to(tl.int64)" in done.source) == sizes.startswith("700")
    # Each call looks whether TF32 is allowed, and takes the kernel of that precision.
    assert (f"{ALLOWS_TF32}(x0, " in done.source) == fires
    assert not apply_rules(text, fuse="cuda", single=True).fired


@pytest.mark.parametrize("channels", [8, 32])
def test_no_tile_divides_by_a_number_of_taps_that_may_be_zero(channels: int) -> None:
    """Even rows have no tap here. LLVM dropped that case where it found the number of taps as a divisor."""
    layer = f"nn.ConvTranspose2d({channels}, 64, (3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1))"
    text = task_text("return self.c(a)", f"torch.empty(4, {channels}, 64, 64)", f"self.c = {layer}")
    kernel = apply_rules(text, fuse="cuda", single=True, tiled=True).source
    assert "taps0 = tl.where(phase0 == 0, 0, 3)" in kernel
    assert "each0 = tl.where(phase0 == 0, 1, 3)" in kernel
    assert "each1 = tl.where(phase1 == 0, 1, 2)" in kernel or "each1 = tl.where(phase1 == 0, 1, tl.where(" in kernel
    assert not re.search(r"(%|//) taps", kernel)


@pytest.mark.parametrize(
    ("forward", "sizes", "fires"),
    [
        ("torch.softmax(a, 1)", "4096, 16385", True),
        ("torch.softmax(a, 1)", "1024, 16385", False),
        ("torch.softmax(a, 1)", "8192, 16384", False),
        ("torch.softmax(a, 1)", "64, 524289", False),
        ("torch.logsumexp(a, 1)", "4096, 16385", False),
    ],
)
def test_long_rows_are_read_once_where_the_cache_cannot_hold_them(forward: str, sizes: str, fires: bool) -> None:
    text = task_text(f"return {forward}", f"torch.empty({sizes})")
    done = apply_rules(text, fuse="cuda", single=True, single_pass=True)
    assert ("one-read-rows" in done.fired) == fires
    assert done.source.count("tl.load(in0") == 1 or not fires
    assert "one-read-rows" not in apply_rules(text, fuse="cuda", single=True).fired


@pytest.mark.exhaustive
@needs_triton
def test_rows_read_once_agree_with_eager(tmp_path: Path, small: None) -> None:
    """The interpreter runs one program after another: none may wait, and each run makes what the next one reads."""
    forward = """
    y = a / a.norm(dim=1, keepdim=True), torch.exp(a - a.amin(-1, keepdim=True)).sum(-1, keepdim=True) * a
    z = torch.argmin(a - a.amax(1, keepdim=True), 1), a - a.amax(1, keepdim=True)
    return torch.softmax(a * 3, 1) + 1, F.layer_norm(a + 10, [16500]), y, z
    """
    done = apply_rules(task_text(forward, "N(2, 16500)"), fuse="cuda", single=True, single_pass=True)
    assert "one-read-rows" in done.fired
    source = re.sub(r" *while arrived[^\n]*\n[^\n]*\n", "", done.source)
    source = source.replace("ticket = tl.atomic_add(state, 1)", "ticket = tl.program_id(0)")
    source = source.replace(triton_printer.OneReadKernel.requires[0], "True")
    source = re.sub(r"\n    (_fused_\d+_launch\(x.*)", r"\n    for _ in range(4):\n        \1", source)
    interpret(done.reference, source, tmp_path, 3e-6)


@pytest.mark.exhaustive
@needs_triton
def test_partial_results_are_numbers_where_the_first_input_is_a_mask(tmp_path: Path) -> None:
    inputs = "torch.randn(3, 16500), torch.randn(3, 16500) > 0"
    done = apply_rules(task_text("return torch.where(b, a, 0.5).sum(-1)", inputs), fuse="cuda")
    assert done.fired == ("fuse-chains-triton", "split-rows")
    interpret(done.reference, done.source, tmp_path)


def test_a_pool_reads_what_another_kernel_computes() -> None:
    text = task_text("return F.max_pool2d(torch.exp(a) + 1, 3, 1, 1) * 2", "N(2, 8, 40, 40)")
    source = apply_rules(text, fuse="cuda").source
    assert "fused_1(y)" in source.replace("y2", "y")
    assert source.count("def _fused") == 2


@pytest.mark.exhaustive
@needs_triton
def test_one_program_for_each_long_row_agrees_with_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_printer, "FEW_PROGRAMS", 0)
    done = apply_rules(sample("long"), fuse="cuda")
    assert done.fired == ("fuse-chains-triton",)
    interpret(done.reference, done.source, tmp_path)


@pytest.mark.exhaustive
@needs_triton
def test_other_numbers_of_chunks_and_longer_tiles_compute_the_same(tmp_path: Path) -> None:
    """The largest ones leave chunks that hold nothing."""
    done = apply_rules(task_text("return F.layer_norm(a + 100, [33000])", "N(2, 33000)"), fuse="cuda", single=True)
    choices = knobs_of(done.source)
    assert choices["KNOBS_FUSED_0.chunks"] == (8, 4)
    for chunks in choices["KNOBS_FUSED_0.chunks"]:
        # A hundred times the spread is added to each value, so that digits cancel in eager too.
        values = {"KNOBS_FUSED_0.chunks": chunks, "KNOBS_FUSED_0.tile": max(choices["KNOBS_FUSED_0.tile"])}
        interpret(done.reference, fixed(done.source, values), tmp_path, 1e-5)


@pytest.mark.parametrize(
    ("shape", "splits"), [("3, 16385", True), ("3, 16384", False), ("528, 16385", False), ("8192, 64", False)]
)
def test_only_few_long_rows_are_split_over_programs(shape: str, splits: bool) -> None:
    done = apply_rules(task_text("return torch.softmax(a, -1)", f"N({shape})"), fuse="cuda", single=True)
    assert done.fired == ("fuse-all-triton", *(("split-rows",) if splits else ()))
    # The maximum and the sum of exponentials are found in one pass.
    assert ("_fused_0_pass_0" in done.source, "_fused_0_pass_1" in done.source) == (splits, False)


@pytest.mark.parametrize(
    ("forward", "shape", "fires"),
    [
        ("a.sum(1)", "128, 4096, 4095", True),
        ("a.amin(0)", "1025, 132 * 64 - 63", True),
        ("a.amin(0)", "1025, 131 * 64", False),
        ("torch.softmax(a, 1)", "128, 4096, 4095", False),
        ("a.var(1)", "128, 4096, 4095", False),
        ("torch.softmax(a, 1)", "128, 1024, 4095", True),
    ],
)
def test_long_columns_are_walked_down_once_by_many_programs(forward: str, shape: str, fires: bool) -> None:
    done = apply_rules(task_text(f"return {forward}", f"torch.empty({shape})"), fuse="cuda", single=True)
    assert done.fired == (("fuse-all-triton",) if fires else ())
    assert ("for step in range" in done.source) == (fires and "softmax" not in forward)


@pytest.mark.parametrize(
    ("forward", "passes"),
    [
        ("F.layer_norm(a, [20000])", 1),
        ("((a - a.sum(-1, keepdim=True) / 7) ** 2).sum(-1)", 2),
        ("torch.exp(a - a.amin(-1, keepdim=True)).sum(-1)", 2),
        ("F.rms_norm(a, [20000])", 1),
    ],
)
def test_one_pass_finds_the_variance_and_only_that(forward: str, passes: int) -> None:
    done = apply_rules(task_text(f"return torch.relu({forward})", "N(3, 20000)"), fuse="cuda")
    assert done.source.count("def _fused_0_pass_") == passes


@needs_triton
@pytest.mark.parametrize("allowed", exhaustive_but([True, False], True))
@pytest.mark.parametrize("name", exhaustive_but((*CONVOLVED, "pooled"), "two convolutions"))
def test_convolutions_of_float16_agree_with_eager(name: str, allowed: bool, tmp_path: Path, small: None) -> None:
    """In TF32's precision where it is allowed, and else in that of float32."""
    made = {
        half: apply_rules(sample(name), fuse="cuda", single=name in ALONE, tiled=True, channels=name in REDUCED, fp16=half)
        for half in (False, True)
    }
    assert set(made[True].fired) - set(made[False].fired) == {"fp16-convolution"}
    text = made[True].source.replace(ALLOWS_TF32, f"[{allowed}]")
    interpret(made[True].reference, text, tmp_path, 2e-3 if allowed else 2e-6)


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_few_channels_are_laid_out_with_zeros_after_them(channels: int, tmp_path: Path, small: None) -> None:
    """Those of a group, also; what a position has beside them is read by nobody."""
    layers = (
        f"self.c = nn.Conv2d({channels}, 16, 5, padding=1)",
        f"self.t = nn.ConvTranspose2d({channels}, 8, 5, stride=2)",
        f"self.g = nn.Conv2d({2 * channels}, 18, (4, 5), groups=2, dilation=(1, 2), padding=3)",
    )
    inputs = f"torch.randn(1, {channels}, 7, 9), torch.randn(1, {2 * channels}, 6, 8)"
    text = task_text("return self.c(a), self.t(a), self.g(b)", inputs, "\n".join(layers))
    done = apply_rules(text, fuse="cuda", single=True, tiled=True, fp16=True)
    assert "fp16-convolution" in done.fired
    each = {1: 2, 2: 2, 3: 4, 4: 4, 5: 8}[channels]
    assert re.findall(r"_Prepared\(tf32, 1, (\d+), (\d+), (\d+)", done.source) == [
        (str(channels), str(each), groups) for groups in "112"
    ]
    interpret(done.reference, done.source.replace(ALLOWS_TF32, "[True]"), tmp_path, 2e-3)


RANGES = """
import sys
from pathlib import Path
import torch
from tests.rewrites.samples import load, module_at

folder = Path(sys.argv[1])
old, new = load((folder / "reference.txt").read_text(), "reference"), module_at(folder / "candidate.py")
model, rewritten = old.Model().eval(), new.ModelNew().eval()
(x,) = old.get_inputs()
sizes = torch.tensor([1.0, 0.3, 7.9, 1e-18, 1e18, 60000.0])
x = x / x.abs().amax((1, 2, 3), keepdim=True) * sizes.view(-1, 1, 1, 1)
x[0, :, 5:] = 1e-7
with torch.no_grad():
    model.c.weight *= torch.logspace(-12, 4, 8).view(-1, 1, 1, 1)
    rewritten.load_state_dict(model.state_dict())
    want, have = model.double()(x.double()), rewritten(x)
    error = (have - want).square().mean((2, 3)).sqrt() / want.square().mean((2, 3)).sqrt()
    assert error.max() < 1e-3, f"error {error.max()}"
    dark = (have - want)[0, :, 7:].abs().amax() / want[0, :, 7:].abs().amax()
    assert dark < 1e-3, f"error {dark} where an image is dark"
    x[5, 0, 3, 3] = float("inf")
    have, want = rewritten(x), model.float()(x)
    assert torch.equal(have.isinf(), want.isinf()), "Inf does not get through, or more does"
    assert have[5].isfinite().any(), "what does not read it is finite"
"""


@needs_triton
def test_a_convolution_of_float16_keeps_the_range_of_float32(tmp_path: Path, small: None) -> None:
    """Images and output channels have magnitudes from 1e-18 to 1e18, and one image has dark parts."""
    layer = "self.c = nn.Conv2d(12, 8, 3, padding=1, bias=False)"
    text = task_text("return self.c(a)", "N(6, 12, 9, 10)", layer)
    done = apply_rules(text, fuse="cuda", single=True, tiled=True, fp16=True)
    assert "fp16-convolution" in done.fired
    candidate = done.source.replace(ALLOWS_TF32, "[True]")
    interpreted(RANGES, done.reference, candidate, tmp_path)
    always = candidate.replace("if shift != 12:", "if shift == 999:")
    assert always != candidate
    with pytest.raises(AssertionError, match="error "):
        interpreted(RANGES, done.reference, always, tmp_path)


def interpret(reference: str, candidate: str, folder: Path, tolerance: float = 2e-6) -> None:
    """Compare both, also on NaN."""
    interpreted(INTERPRET, reference, candidate, folder, str(tolerance))


ALLOWS_TF32 = "[torch.backends.cudnn.allow_tf32]"
LENGTHS = {"CHUNKS": 4, "TILE": 4096, "STEPS": 2, "ROWS": 2, "WIDTH": 64, "MANY": 4}
LENGTHS |= {"POINTS": 64, "CHANNELS": 32, "LENGTH": 16}
"""Constants of kernels whose programs compute chunks of rows, windows or convolutions."""


@needs_triton
@pytest.mark.parametrize("name", exhaustive_but(GPU_CASES, "rows"))
def test_triton_compiles_for_hopper(name: str, small: None, few_programs: None, triton_cache: Path) -> None:
    """Down to machine code, which needs no GPU."""
    channels = name in REDUCED
    rules = RULES.get(name, ())
    done = apply_rules(sample(name), *rules, fuse="cuda", single=name in ALONE, tiled=True, channels=channels)
    _, kernels = kernels_of(done.source, triton_cache)
    assert kernels
    kinds = {"in1": "*i1"} if name == "scans" else {}
    for kernel in kernels.values():
        for tf32 in (False, True) if "TF32" in kernel.arg_names else (False,):
            constants = {given: value for given, value in (LENGTHS | {"TF32": tf32}).items() if given in kernel.arg_names}
            signature = {given: kinds.get(given, "*fp32") for given in kernel.arg_names if given not in constants}
            assert compile_triton(kernel, signature, constants, 90).cubin


@needs_triton
@pytest.mark.parametrize(
    ("layer", "inputs", "copied_bytes"),
    exhaustive_but(
        [
            ("nn.Conv2d(64, 128, 3)", "64, 64, 32, 32", 16),
            ("nn.Conv2d(3, 64, 11, stride=2, padding=3)", "64, 3, 64, 64", 8),
            ("nn.Conv2d(1, 64, 13)", "64, 1, 64, 64", 4),
            ("nn.ConvTranspose2d(64, 64, 4, stride=2, padding=1)", "32, 64, 32, 32", 16),
            ("nn.Conv3d(32, 64, 3, groups=2)", "16, 32, 16, 16, 16", 16),
        ],
        ("nn.Conv2d(3, 64, 11, stride=2, padding=3)", "64, 3, 64, 64", 8),
    ),
)
def test_float16_goes_straight_from_memory_to_tensor_cores(
    layer: str, inputs: str, copied_bytes: int, small: None, triton_cache: Path
) -> None:
    """By asynchronous copies of a position's channels, 16 bytes at most; between two steps nothing else is loaded."""
    ptx = float16_on_hopper(layer, inputs, triton_cache)
    assert "wgmma.mma_async" in ptx
    assert "mma.sync" not in ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert {int(one, 0) for one in copies} == {copied_bytes}
    assert "ld.global" not in ptx[ptx.index("cp.async.c") : ptx.rindex("wgmma.wait_group")]


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(
    ("layer", "inputs", "load", "taps"),
    [
        ("nn.Conv2d(3, 64, 7, stride=2, padding=3)", "64, 3, 64, 64", "b32", 49),
        ("nn.Conv2d(1, 64, 7)", "64, 1, 64, 64", "b16", 49),
        ("nn.Conv3d(6, 16, 3)", "16, 6, 16, 16, 16", "v2.b32", 27),
    ],
)
def test_few_channels_are_loaded_at_constant_distances(
    layer: str, inputs: str, load: str, taps: int, small: None, triton_cache: Path
) -> None:
    """Two threads share a position, with a load each at each tap; divisions are for the position, not for its taps."""
    ptx = float16_on_hopper(layer, inputs, triton_cache)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.c" not in ptx
    assert len(re.findall(rf"ld\.global\.{load} ", ptx)) >= taps
    assert len(re.findall(r"\b(?:mul\.hi|div|rem)\.", ptx)) <= 16


def float16_on_hopper(layer: str, inputs: str, folder: Path) -> str:
    """PTX of a layer's kernel in float16, with its default knobs."""
    text = task_text("return self.c(a)", f"N({inputs})", f"self.c = {layer}")
    module, kernels = kernels_of(apply_rules(text, fuse="cuda", single=True, tiled=True, fp16=True).source, folder)
    kernel, knobs = kernels["fused_0_kernel"], module.KNOBS_FUSED_0
    constants = dict(zip(("POINTS", "CHANNELS", "LENGTH"), knobs["tile"][0], strict=True)) | {"TF32": True}
    kinds = {"pixels": "*fp16", "filters": "*fp16", "pixel_largest": "*i32", "filter_largest": "*i32"}
    signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names if name not in constants}
    return compile_triton(kernel, signature, constants, 90, knobs["warps"][0], knobs["stages"][0], frozenset(signature)).ptx


@needs_triton
def test_a_mean_is_rounded_before_it_is_subtracted(triton_cache: Path) -> None:
    """Triton's own division is a product, which ptxas would join with the difference."""
    done = apply_rules(task_text("return F.layer_norm(a, [768]) * 2", "N(64, 768)"), fuse="cuda")
    kernel = kernels_of(done.source, triton_cache)[1]["fused_0_kernel"]
    ptx = compile_triton(kernel, dict.fromkeys(kernel.arg_names, "*fp32"), {}, 90).ptx
    rounded, product = (set(re.findall(rf"div\.{one}\.f32\s+(%\w+)", ptx)) for one in ("rn", "full"))
    subtracted = set(re.findall(r"sub\.f32\s+%\w+, %\w+, (%\w+);", ptx))
    assert rounded
    assert subtracted == rounded
    assert not subtracted & product


CONSTANT_ROWS = """
import sys
from pathlib import Path
import torch
from tests.rewrites.samples import module_at

model = module_at(Path(sys.argv[1], "candidate.py")).ModelNew().train()
with torch.no_grad():
    rows = torch.linspace(-3, 3, 70).repeat(1000, 1)
    found = model(rows)
    assert found.abs().max() < 1e-7, "equal numbers are their own mean"
    rows[3, 5], rows[:, 6] = float("inf"), 3e38
    model(rows)
    assert model.n.running_mean.isinf().nonzero().flatten().tolist() == [5, 6]
"""


@needs_triton
def test_a_batch_norm_of_equal_rows_leaves_nothing(tmp_path: Path) -> None:
    """Their sum is rounded, and the root of `eps` makes 300 times as much of what that leaves. What overflows still does."""
    text = task_text("return self.n(a) * 2", "N(1000, 70)", "self.n = nn.BatchNorm1d(70)")
    done = apply_rules(text, fuse="cuda")
    assert "tl.div_rn" in done.source
    interpreted(CONSTANT_ROWS, done.reference, done.source, tmp_path)


@needs_triton
@pytest.mark.parametrize(
    ("layer", "sizes", "forward"),
    exhaustive_but(
        [
            ("nn.Conv2d(3, 16, 3, padding=1)", "64, 3, 31, 31", "self.c(a)"),
            ("nn.Conv2d(32, 64, 4)", "4, 32, 64, 64", "self.c(a)"),
            ("nn.ConvTranspose2d(32, 64, 3, stride=2)", "4, 32, 32, 32", "self.c(a)"),
            ("nn.Conv2d(8, 64, 3)", "4, 8, 64, 64", "self.c(a)"),
            ("nn.Conv2d(16, 64, 1)", "16, 16, 64, 64", "F.max_pool2d(self.c(a), 4)"),
            ("nn.Conv2d(16, 64, 1, stride=2)", "16, 16, 128, 128", "self.c(a)"),
        ],
        ("nn.Conv2d(3, 16, 3, padding=1)", "64, 3, 31, 31", "self.c(a)"),
    ),
    ids=["odd rows", "odd rows of taps", "transposed", "even rows", "places of a window", "strides"],
)
def test_neighbouring_threads_have_neighbouring_positions(layer, sizes, forward, triton_cache: Path) -> None:
    """Where they have channels each access takes parts of 32 lines of memory in place of four, and each value an address.

    Which they have where nothing is known depends on Triton's version. A thread reads one value at a time, since what is
    told of neighbours is not true at the end of a row, nor in a window.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    text = task_text(f"return torch.relu({forward})", f"torch.empty({sizes})", f"self.c = {layer}")
    done = apply_rules(text, fuse="cuda", single=True, tiled=True, channels=True)
    kernel = kernels_of(done.source, triton_cache)[1]["fused_0_kernel"]
    constants = {"POINTS": 64, "CHANNELS": 64, "LENGTH": 16, "TF32": True}
    signature = {argument: "constexpr" if argument in constants else "*fp32" for argument in kernel.arg_names}
    places = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind != "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=places)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2}).asm["ttgir"]
    layouts = dict(re.findall(r"(#\w+) = #ttg.blocked<\{sizePerThread = (.*?), warpsPerCTA", found))
    reads = re.findall(r"(?:async_copy_global_to_local|tt.load) %inputs.*?64x16x!tt.ptr<f32>, (#\w+)>", found)
    writes = re.findall(r"tt.store .*?64x64x!tt.ptr<f32>, (#\w+)>", found)
    assert {layouts[one] for one in reads} == {"[1, 1], threadsPerWarp = [32, 1]"}
    assert {layouts[one].rpartition(" = ")[2] for one in writes} <= {"[32, 1]", "[16, 2]"}, "a thread may write four at once"
    weights = re.findall(r"(?:async_copy_global_to_local|tt.load) %weights.*?16x64x!tt.ptr<f32>, (#\w+)>", found)
    if int(sizes.split(", ")[1]) % 16 == 0 and ", 1" not in layer:
        wanted = {"[1, 4], threadsPerWarp = [2, 16]"}
    else:  # a filter's taps are adjacent
        wanted = {"[1, 1], threadsPerWarp = [16, 2]", "[4, 1], threadsPerWarp = [4, 8]"}
    assert {layouts[one] for one in weights} <= wanted


@pytest.mark.exhaustive
@pytest.mark.toolchain
def test_values_that_are_the_same_along_a_row_are_written_out() -> None:
    forward = """
    x = b[:, :1].expand(64, 37) * 2 + 1
    y = a.sum(1, keepdim=True) * 3 + 1
    return x, torch.softmax(x, 1) + 1, torch.logsumexp(y, 1, keepdim=True) + a, a.amax(1, keepdim=True) * 2 + 1
    """
    done = apply_rules(task_text(forward, "N(4096, 1), N(64, 37)"), fuse="cpu")
    compare(done.reference, done.source, 2e-6)


NORMS = """
x = self.d(a) + 1
y = torch.relu(self.b(self.f(a)) + F.dropout(self.e(b), 0.5, self.training)) * F.dropout(x, 0.2, self.training)
return y + self.e2(F.dropout(x * 2, 0.1, self.training)), x.mean(1)
"""
NORMS_STATE = """
self.f = nn.Conv2d(6, 6, 1)
self.b = nn.BatchNorm2d(6)
self.d = nn.BatchNorm2d(6, affine=False)
self.e = nn.BatchNorm2d(6, momentum=0.3)
self.e2 = nn.BatchNorm2d(6, track_running_stats=False)
"""


@pytest.mark.exhaustive
@pytest.mark.toolchain
@pytest.mark.parametrize("rules", [(), ("drop-bias-before-norm",)])
def test_running_statistics_are_those_of_eager_whatever_stands_between(rules: tuple[str, ...]) -> None:
    """Random calls keep their order; what depends on them and what they depend on share kernels with norms."""
    inputs = "torch.randn(3, 6, 13, 13) * 2 + 9, torch.randn(3, 6, 13, 13) + 3"
    done = apply_rules(task_text(NORMS, inputs, NORMS_STATE), *rules, fuse="cpu", single=True)
    assert done.fired == (*rules, "fuse-all-cpp")
    assert "F.batch_norm" not in done.source
    compare(done.reference, done.source, 2e-6)


def test_batch_norm_in_train_mode_is_fused_unless_its_statistics_are_read_elsewhere() -> None:
    def fused(forward: str) -> str:
        text = task_text(forward, "N(4, 6, 40, 40)", "self.b = nn.BatchNorm2d(6)")
        source = apply_rules(text, fuse="cuda").source
        return source.split("if self.training:")[1].split("return")[0]

    assert "fused_0(a, self.b.running_mean, self.b.running_var, " in fused("return torch.relu(self.b(a))")
    assert "batch_norm" in fused("return torch.relu(self.b(a)) + self.b.running_mean.sum()")


@pytest.mark.exhaustive
@pytest.mark.toolchain
def test_a_norm_behind_a_reduction_has_the_statistics_of_its_own_channels() -> None:
    """Dimension 1 of what is left may be another one of what was reduced."""
    cases = [("sum(0)", 48), ("sum(2)", 24), ("mean(1, keepdim=True)", 1), ("sum(0, keepdim=True)", 24)]
    state = [f"self.n{place} = nn.BatchNorm1d({channels})" for place, (_, channels) in enumerate(cases)]
    forward = [f"torch.relu(self.n{place}(torch.sigmoid(a).{reduced} + 1))" for place, (reduced, _) in enumerate(cases)]
    text = task_text(f"return {', '.join(forward)}", "N(64, 24, 48)", "\n".join(state))
    done = apply_rules(text, fuse="cpu", single=True)
    assert "batch_norm" not in done.source.split("if self.training:")[1].split("return (y, y2, y3, y4)\n", 1)[1]
    compare(done.reference, done.source, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.toolchain
def test_two_groups_that_wait_for_each_other_do_not_both_become_kernels() -> None:
    forward = """
    e = torch.exp(b) + 1
    n = e.amax(0)
    m = torch.tanh(torch.softmax(a, 1) * 2 + 1)
    u = e * 2 + m
    v = torch.exp(m * 2) + n
    return u, v
    """
    done = apply_rules(task_text(forward, "N(64, 64), N(2, 64, 64)"), fuse="cpu")
    compare(done.reference, done.source, 2e-6)


@pytest.mark.parametrize(("rows", "wanted"), [(1 << 15, "tl.int32"), (1 << 16, "tl.int64")])
def test_positions_have_as_many_bits_as_the_tensor_needs(rows: int, wanted: str) -> None:
    program = LoopProgram((rows, 1 << 15))
    program.add("exp", program.load(fx.Graph().placeholder("a"), (1 << 15, 1)))
    signature = Signature(((0, (1 << 15, 1)),), ((1, True, program.logical),))
    text = triton_printer.TritonKernel("fused", program, signature, ((1 << 15, 1),)).definition()
    assert f"index = tl.program_id(0).to({wanted})" in text


def test_kernel_is_not_put_between_a_value_and_its_earlier_reader() -> None:
    """The convolution reads `exp(a)` and the sum reads the convolution: one kernel of both cannot be."""
    text = task_text("x = torch.exp(a) + 1\nreturn self.c(x) + x", "N(2, 3, 32, 32)", "self.c = nn.Conv2d(3, 3, 1)")
    body = apply_rules(text, fuse="cpu").source.split("def forward(self, a):")[2]
    assert body.index("fused_0") < body.index("conv2d") < body.index(" + ")


def test_equal_kernels_are_written_once_and_train_and_eval_share_them() -> None:
    text = task_text("return torch.exp(a) + 1, torch.exp(b) + 1", "N(64, 64), N(64, 64)")
    source = apply_rules(text, fuse="cpu").source
    assert source.count('extern "C"') == 1
    assert "if self.training" not in source


def test_nothing_small_other_typed_or_endless_is_fused() -> None:
    assert not apply_rules(task_text("return torch.exp(a) + 1", "N(8, 8)"), fuse="cpu").fired
    assert not apply_rules(task_text("return a * 2 + 1", "N(64, 64).double()"), fuse="cpu").fired
    long = "x = a\n" + "x = torch.exp(x)\n" * (MOST_MEMBERS + 5) + "return x"
    assert apply_rules(task_text(long, "N(64, 64)"), fuse="cpu").source.count('extern "C"') == 2
