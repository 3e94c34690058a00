"""The binding of the CUDA driver and the launcher on it, against a library that stands in for the driver.

The stand-in has the driver's names and argument lists, so a wrong order or width of arguments shows here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kernelwright.errors import DeviceError
from kernelwright.toolchain import driver
from kernelwright.toolchain.driver import CudaDriver, CudaError, KernelArguments
from kernelwright.tuning.contained import ContainedLauncher, Failure, Plan, ScheduleFailed
from kernelwright.tuning.launch_spec import LaunchSpec
from kernelwright.tuning.launcher import CudaLauncher

COMPILER = shutil.which("cc") or shutil.which("gcc")
VARIABLE = "FAKE_CUDA"
pytestmark = [pytest.mark.toolchain, pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")]

SPEC = LaunchSpec.model_validate(
    {
        "name": "increment",
        "entry": "kernel",
        "grid": [2, 1, 1],
        "block": [32, 1, 1],
        "shared_bytes": 65536,
        "arguments": [
            {"kind": "tensor", "name": "x", "dtype": "fp32", "shape": [64]},
            {"kind": "tensor", "name": "y", "dtype": "fp32", "shape": [64], "role": "output"},
            {"kind": "scalar", "name": "n", "value": 64},
            {"kind": "scalar", "name": "addend", "type": "fp32", "value": 1.5},
            {"kind": "null", "name": "scratch"},
        ],
    }
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", str(path), str(source)], check=True)
    return path


@pytest.fixture
def fake(library, monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", str(library))
    monkeypatch.setenv(VARIABLE, str(library))
    with CudaDriver() as opened:
        yield opened


def launcher_on_the_stand_in(spec):
    driver.LIBRARY = os.environ[VARIABLE]
    return CudaLauncher(spec)


def test_without_a_driver_it_says_so(monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-driver.so")
    with pytest.raises(DeviceError, match="wanted the CUDA driver, found"):
        CudaDriver()


def test_identity(fake):
    found = fake.identity()
    assert (found.name, found.architecture, found.driver, found.l2_bytes) == ("Fake GPU", 90, "13.0", 4096)


def test_errors_carry_the_drivers_names(fake):
    with pytest.raises(CudaError) as error:
        fake.load(b"refused", "kernel", 0)
    assert (error.value.call, error.value.status, error.value.name) == ("cuModuleLoadData", 200, "CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
        fake.load(b"image", "another", 0)
    with pytest.raises(CudaError, match="an error without a name"):
        fake.load(b"image", "kernel", 1 << 20)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE"):
        CudaDriver(7)


def test_memory_and_events(fake):
    pointer = fake.allocate(16)
    fake.upload(pointer, bytes(range(16)))
    fake.fill(pointer, 0xAB, 4)
    assert fake.download(pointer, 6) == b"\xab\xab\xab\xab\x04\x05"
    fake.free(pointer)
    begin, end = fake.event(), fake.event()
    fake.record(begin)
    fake.record(end)
    assert fake.elapsed_us(begin, end) == 0.0


def test_a_launch_passes_grid_block_and_arguments(fake):
    import ctypes

    x, y = fake.allocate(256), fake.allocate(256)
    fake.upload(x, np.arange(64, dtype=np.float32).tobytes())
    arguments = KernelArguments(
        [ctypes.c_uint64(x), ctypes.c_uint64(y), ctypes.c_int32(64), ctypes.c_float(0.5), ctypes.c_uint64(0)]
    )
    kernel = fake.load(b"image", "kernel", 0)
    assert kernel.registers == 42
    fake.launch(kernel, (2, 1, 1), (32, 1, 1), arguments)
    fake.synchronize()
    assert np.array_equal(np.frombuffer(fake.download(y, 256), np.float32), np.arange(64) + 0.5)
    with pytest.raises(CudaError):
        fake.launch(kernel, (1, 1, 1), (32, 1, 1), arguments)
    fake.unload(kernel)


def test_the_launcher_gives_right_outputs_and_times(fake):
    launcher = CudaLauncher(SPEC, fake)
    handle = launcher.load(b"image")
    (one,), (same,), (other,) = (launcher.outputs(handle, seed) for seed in (5, 5, 6))
    assert one == same != other
    assert np.isfinite(np.frombuffer(one, np.float32)).all()
    assert launcher.sample_us(handle, 4) == pytest.approx(20.0)
    launcher.unload(handle)
    cold = CudaLauncher(SPEC.model_copy(update={"cold_l2": True}), fake)
    assert cold.sample_us(cold.load(b"fast"), 2) == pytest.approx(10.0)


def test_the_whole_path_in_a_contained_process(fake):
    plan = Plan(coarse=2, fine=3, keen=4)
    with ContainedLauncher(SPEC, b"image", launcher_on_the_stand_in) as child:
        assert child.ready().gpu.name == "Fake GPU"
        assert child.compare(b"other image", [1, 2]) is None
        assert child.time(b"fast", plan).ratios == pytest.approx([2.0] * 4)
        with pytest.raises(ScheduleFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS") as failed:
            child.time(b"fault", plan)
        assert failed.value.failure is Failure.FAULT
        assert child.time(b"fast", plan).ratios[0] == pytest.approx(2.0)
