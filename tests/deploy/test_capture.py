"""From launches to targets, and tuned kernels under torch.compile; real compilation, a stand-in for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.runtime import triton_heuristics
from triton.runtime import JITFunction, driver

from kernelwright.deploy import inductor
from kernelwright.deploy.cache import TunedCache
from kernelwright.deploy.capture import capture_launches
from kernelwright.deploy.deploy import Winner, deploy
from kernelwright.deploy.inductor import tunable_torch_compile, tuned_torch_compile
from kernelwright.errors import ToolchainError
from kernelwright.rewrites.templates.base import kernel_text
from tests.deploy import kernels
from tests.deploy.fake_triton import FakeDriver
from tests.deploy.test_deploy import saying
from tests.gpu.fakes import GPU
from tests.sass.support import retuned

N = 1000


@pytest.fixture
def fake(monkeypatch):
    def compute(grid, x, y, n, factor, *_):
        y[:n] = x[:n] * factor

    stand_in = FakeDriver(compute)
    monkeypatch.setattr(driver, "_active", stand_in)
    kernels.scale.device_caches.clear()
    yield stand_in
    kernels.scale.device_caches.clear()


def test_a_launch_becomes_a_target(fake):
    x, y = torch.randn(N), torch.empty(2 * N)[N:]
    with capture_launches() as captured:
        for _ in range(3):
            kernel = kernels.scale[lambda meta: (8, meta["BLOCK"] // 64)](x, y, N, 3.0, BLOCK=128)
        kernels.scale[(8,)](x, y, N, 3.0, BLOCK=256)
    assert [(launch.function, launch.count) for launch in captured.launches] == [("scale", 3), ("scale", 1)]
    target = captured.launches[0].target
    assert target.cubin == kernel.asm["cubin"]
    assert (target.architecture, target.spec.grid, target.spec.block) == (90, (8, 2, 1), (128, 1, 1))
    read, written, n, factor, *scratch = target.spec.arguments
    assert (read.role, read.init, read.shape) == ("input", "normal", (N,))
    assert read.scale == pytest.approx(1.0, rel=0.2)
    assert (written.role, written.shape) == ("inout", (N,))
    assert (n.type, n.value, factor.type, factor.value) == ("i32", N, "fp32", 3.0)
    assert [argument.kind for argument in scratch] == ["null", "null"]


def test_launches_compute_what_they_did_and_are_watched_no_longer_than_asked(fake):
    before = JITFunction.run
    x, y = torch.randn(N), torch.zeros(N)
    with capture_launches():
        kernels.scale[(8,)](x, y, N, 3.0, BLOCK=128)
        assert torch.equal(y, x * 3)
    assert JITFunction.run is before
    assert len(fake.launched) == 1


def test_launches_of_what_was_compiled_before_are_captured_too(fake):
    x, y = torch.randn(N), torch.zeros(N)
    compiled = kernels.scale[(8,)](x, y, N, 3.0, BLOCK=128)
    y.zero_()
    before = type(compiled).__getitem__
    with capture_launches() as captured:
        for _ in range(2):
            compiled[8, 1, 1](x, y, N, 3.0, 128)
    (launch,) = captured.launches
    assert (launch.function, launch.count, launch.target.cubin) == ("scale", 2, compiled.asm["cubin"])
    assert launch.target.spec.grid == (8, 1, 1)
    assert type(compiled).__getitem__ is before


def test_a_fused_kernel_is_looked_up_once_for_aligned_tensors_and_anew_for_others(fake, monkeypatch):
    made = {"torch": torch}
    exec("class _Launch" + kernel_text("fused.triton.txt").partition("class _Launch")[2], made)
    asked = []
    run = JITFunction.run
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)  # torch for a CPU has none
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **given: asked.append(args) or run(self, *args, **given))
    fake.default = lambda grid, x, y, *_: y.copy_(x + grid[0])
    launch = made["_Launch"](kernels.plus_one, 4, 4)
    base = torch.zeros(64)
    for offset, lookups in ((0, 1), (0, 1), (4, 1), (1, 2), (1, 3), (0, 3)):
        x, y = base[offset : offset + 32], torch.empty(32)
        launch(x, y)
        assert torch.equal(y, torch.full((32,), 4.0))
        assert len(asked) == lookups


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        (torch.tensor([3, 9, 5]), {"init": "integers", "low": 3, "high": 10}),
        (torch.tensor([0.25, 2.0]), {"init": "uniform", "low": 0.25, "high": 2.0}),
        (torch.ones(4), {"init": "ones"}),
        (torch.zeros(4), {"init": "zeros"}),
        (torch.tensor([-3.0, 4.0, float("nan")]), {"init": "normal", "scale": pytest.approx(12.5**0.5)}),
    ],
)
def test_fresh_inputs_are_drawn_like_the_real_ones(values, drawn):
    from kernelwright.deploy.capture import _contents

    assert _contents(values) == drawn


def test_a_launch_that_changes_nothing_cannot_be_checked_and_says_so(fake):
    x = torch.randn(N)
    y = x * 3.0
    with capture_launches() as captured:
        kernels.scale[(8,)](x, y, N, 3.0, BLOCK=128)
    assert captured.launches[0].target is None
    assert "nothing could be checked" in captured.launches[0].reason


@pytest.fixture
def compiled(monkeypatch, fake):
    """torch.compile's autotuner of one kernel, without a GPU."""
    from tests.deploy import compiled_kernel

    fake.default = lambda grid, x, y, n, *_: y.copy_(x * 2 + 1)
    monkeypatch.setattr(triton_heuristics.triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setattr(inductor, "gpu_identity", lambda device: GPU)
    autotuner = compiled_kernel.triton_poi_fused_add_mul_0
    monkeypatch.setattr(autotuner, "compile_results", [])
    monkeypatch.setattr(autotuner, "launchers", [])
    monkeypatch.setattr(autotuner, "_cached_launcher", None, raising=False)  # torch 2.11 has none
    return autotuner


def prepare(autotuner):
    """What `precompile` does, without a device to guard."""
    autotuner.compile_results = [autotuner._precompile_config(autotuner.configs[0])]
    autotuner.launchers = [autotuner.compile_results[0].make_launcher()]
    autotuner._cached_launcher = None


def run(autotuner):
    x, y = torch.randn(1024), torch.zeros(1024)
    autotuner.run(x, y, 1024, stream=0)
    assert torch.equal(y, x * 2 + 1)


def test_a_kernel_of_torch_compile_is_captured_tuned_and_used(fake, compiled, tmp_path, caplog):
    with tunable_torch_compile(), capture_launches() as captured:
        prepare(compiled)
        run(compiled)
        run(compiled)
    (launch,) = captured.launches
    assert (launch.function, launch.count) == ("triton_poi_fused_add_mul_0", 2)
    assert launch.target.spec.grid == (4, 1, 1)

    tuned, cache = retuned(launch.target.cubin), TunedCache(tmp_path)
    assert deploy(Winner(launch.target, tuned), cache, remeasure=saying(1.05)).refusal is None

    with tuned_torch_compile(cache):
        prepare(compiled)
        run(compiled)
    assert fake.launched[-1] == tuned
    assert caplog.records == []
    with tunable_torch_compile():
        prepare(compiled)
        run(compiled)
    assert fake.launched[-1] == launch.target.cubin


def test_what_was_never_compared_on_this_gpu_is_not_used_by_torch_compile(fake, compiled, tmp_path, caplog):
    with tunable_torch_compile(), capture_launches() as captured:
        prepare(compiled)
        run(compiled)
    target = captured.launches[0].target
    cache = TunedCache(tmp_path)
    deploy(Winner(target, retuned(target.cubin)), cache, remeasure=None, gpu=GPU.name)
    with tuned_torch_compile(cache):
        prepare(compiled)
        run(compiled)
    assert fake.launched[-1] == target.cubin
    assert "never compared on Fake GPU" in caplog.text


def test_what_was_compiled_in_this_process_before_is_compiled_anew(tmp_path):
    from torch._inductor.codecache import PyCodeCache

    text = "loaded = object()  # stands for a kernel"
    before = PyCodeCache.load(text).loaded
    assert PyCodeCache.load(text).loaded is before
    with tuned_torch_compile(TunedCache(tmp_path)):
        inside = PyCodeCache.load(text).loaded
    assert inside is not before
    assert PyCodeCache.load(text).loaded is not inside


def test_a_torch_with_other_settings_is_refused(monkeypatch):
    monkeypatch.setitem(inductor.SETTINGS, "no_such_setting", True)
    with pytest.raises(ToolchainError, match="no_such_setting"):
        with tunable_torch_compile():
            pass
