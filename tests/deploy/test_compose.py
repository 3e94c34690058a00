"""A candidate's Triton kernels are captured, tuned, and carried by the candidate."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings

import pytest
import torch
from triton.runtime import driver

from kernelwright import sass
from kernelwright.deploy.compose import TunedLaunch, capture_candidate, carry, compose
from kernelwright.errors import DeviceError
from kernelwright.gpu import disassemble
from kernelwright.gpu.launch_spec import KernelLaunch
from kernelwright.judge.check.guard import static_labels
from kernelwright.records import Candidate, Label, Task
from tests.deploy.fake_triton import FakeDriver, triple_on_the_host
from tests.deploy.test_deploy import saying
from tests.gpu.fakes import GPU
from tests.sass.support import retuned

pytestmark = pytest.mark.exhaustive

TASK = Task(
    id="triple",
    source="""
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x * 3

def get_inputs():
    return [torch.randn(1024)]

def get_init_inputs():
    return []
""",
)
CANDIDATE = Candidate(
    source='''"""Three times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def triple(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 3.0, mask=i < n)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        triple[(8,)](x, y, x.numel(), BLOCK=128)
        return y
'''
)


@pytest.fixture(scope="module")
def launches():
    return capture_candidate(TASK, CANDIDATE, device="cpu", prepare=triple_on_the_host)


def carried(launch):
    """A launch with tuned code as a search returns it."""
    return TunedLaunch(launch, retuned(launch.target.cubin), saying(1.05)(launch.target, b""))


@pytest.fixture(scope="module")
def composed(launches):
    return compose(CANDIDATE, [carried(launch) for launch in launches])


def test_a_candidates_kernels_are_captured_in_a_process_of_its_own(launches):
    (launch,) = launches
    assert (launch.function, launch.count, launch.reason) == ("triple", 1, "")
    assert launch.target.spec.signature == "triple(*fp32, *fp32, i32) threads=128 shared=0"
    assert [(tensor.name, tensor.role) for tensor in launch.target.spec.tensors] == [("x_ptr", "input"), ("y_ptr", "inout")]


@pytest.mark.exhaustive
def test_a_candidate_that_does_not_run_is_said(tmp_path):
    broken = Candidate(source="raise ValueError('broken here')")
    with pytest.raises(DeviceError, match="broken here"):
        capture_candidate(TASK, broken, device="cpu", prepare=triple_on_the_host)


def load(source, path, gpu=GPU.name):
    """The module of a composed candidate, on a machine with this GPU."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._gpu_name = lambda: gpu
    return module


def runs(module, fake, count=3):
    model = module.ModelNew()
    for _ in range(count):
        x = torch.randn(1024)
        assert torch.equal(model(x), x * 3)
    return fake.launched


@pytest.fixture
def fake(monkeypatch):
    stand_in = FakeDriver(lambda grid, x, y, n, *_: y.copy_(x * 3))
    monkeypatch.setattr(driver, "_active", stand_in)
    return stand_in


def test_the_composed_candidate_runs_the_tuned_code_after_the_first_launch(launches, composed, fake, tmp_path):
    module = load(composed.source, tmp_path / "composed.py")
    first, *later = runs(module, fake)
    tuned = sass.load(retuned(launches[0].target.cubin), disassemble).kernel()
    assert len(set(later)) == 1
    assert later[0] != first
    assert sass.check(first, later[0], disassemble) == []
    assert [i.word for i in sass.load(later[0], disassemble).kernel().instructions] == [i.word for i in tuned.instructions]


def test_on_another_gpu_it_runs_what_triton_compiles(composed, fake, tmp_path):
    module = load(composed.source, tmp_path / "elsewhere.py", gpu="Another GPU")
    with pytest.warns(UserWarning, match="another build or GPU"):
        assert len(set(runs(module, fake))) == 1


def test_after_another_compiler_it_runs_what_triton_compiles(launches, fake, tmp_path):
    source = carry(CANDIDATE.source, {"triple": {"0" * 64: {".text.triple": b"x"}}}, GPU.name)
    module = load(source, tmp_path / "other.py")
    with pytest.warns(UserWarning, match="another build or GPU"):
        assert len(set(runs(module, fake))) == 1


def test_damaged_code_is_not_used(launches, fake, tmp_path):
    from kernelwright.sass.identity import cubin_identity

    identity = cubin_identity(launches[0].target.cubin)
    module = load(carry(CANDIDATE.source, {"triple": {identity: {".text.triple": b"x"}}}, GPU.name), tmp_path / "bad.py")
    with pytest.warns(UserWarning, match="is not used"):
        assert len(set(runs(module, fake))) == 1


def test_the_composed_candidate_needs_nothing_of_this_package(composed, tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(composed.source)
    code = (
        "import sys, runpy\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] == 'kernelwright': raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"module = runpy.run_path({str(path)!r})\n"
        "print(type(module['triple']).__name__, module['ModelNew'].__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["EmbeddedKernel", "ModelNew"]


def test_carrying_again_replaces_what_was_carried(composed):
    again = carry(composed.source, {"triple": {"1" * 64: {".text.triple": b"y"}}}, "Other")
    assert again.count("install_embedded(globals()") == 1
    assert again.startswith(CANDIDATE.source.rstrip())
    compile(again, "again", "exec")


def test_the_judges_static_look_still_sees_a_kernel_of_its_own(composed):
    assert Label.CUSTOM_KERNEL in static_labels(composed.source, TASK.source)


def test_what_got_no_faster_is_not_carried(launches):
    (launch,) = launches
    for kernel in (TunedLaunch(launch), TunedLaunch(launch, launch.target.cubin, saying(1.05)(launch.target, b""))):
        assert kernel.refusal == "nothing faster was found"
        assert compose(CANDIDATE, [kernel]) is None


def test_a_launch_that_cannot_be_described_is_passed_over():
    kernel = TunedLaunch(KernelLaunch("triple", None, "it has clusters", 1))
    assert kernel.refusal == "it has clusters"
    assert compose(CANDIDATE, [kernel]) is None


def test_the_composed_candidate_warns_of_nothing_where_it_fits(composed, fake, tmp_path):
    module = load(composed.source, tmp_path / "quiet.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs(module, fake)
