"""The binding of the CUDA driver and the launcher on it, against a library that stands in for the driver.

The stand-in has the driver's names and argument lists, so a wrong order or width of arguments shows here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernelwright.errors import CudaError, DeviceError
from kernelwright.gpu import driver
from kernelwright.gpu import launcher as launcher_module
from kernelwright.gpu.driver import CudaDriver, KernelArguments
from kernelwright.gpu.launch_spec import LaunchSpec
from kernelwright.gpu.launcher import CudaLauncher, cuda_launcher, cuda_launcher_on, initial_contents
from kernelwright.judge.schedules import ContainedLauncher, Plan, ScheduleFailedError, ScheduleFailure, serve
from tests.gpu.stand_in import COMPILER, VARIABLE, build

MODULE, FUNCTION, EVENT, DEVICE_MEMORY, HOST_MEMORY = 1, 2, 3, 4, 5
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
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake(library, monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", str(library))
    monkeypatch.setenv(VARIABLE, str(library))
    return CudaDriver()


@pytest.fixture
def count(library):
    """Counts what the stand-in has not freed, by kind."""
    return ctypes.CDLL(str(library)).fake_count


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


def test_errors_carry_the_drivers_names(fake, count):
    with pytest.raises(CudaError) as error:
        fake.load(b"kernel: refused", "kernel", 0)
    assert (error.value.call, error.value.status, error.value.name) == ("cuModuleLoadData", 200, "CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
        fake.load(b"kernel: image", "another", 0)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        fake.load(b"kernel: image", "kernel", 1 << 20)
    with pytest.raises(CudaError, match="an error without a name"):
        fake.allocate(1 << 40)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE"):
        CudaDriver(7)
    assert count(MODULE) == 0, "a module whose kernel is not to be had is unloaded"


def test_memory_and_events(fake):
    pointer = fake.allocate(16)
    fake.upload(pointer, bytes(range(16)))
    fake.fill(pointer, 0xAB, 4)
    assert fake.download(pointer, 6) == b"\xab\xab\xab\xab\x04\x05"
    begin, end = fake.event(), fake.event()
    fake.record(begin)
    fake.record(end)
    assert fake.elapsed_us(begin, end) == 0.0


def test_a_launch_passes_grid_block_and_arguments(fake):
    x, y = fake.allocate(256), fake.allocate(256)
    fake.upload(x, np.arange(64, dtype=np.float32).tobytes())
    arguments = KernelArguments(
        [ctypes.c_uint64(x), ctypes.c_uint64(y), ctypes.c_int32(64), ctypes.c_float(0.5), ctypes.c_uint64(0)]
    )
    kernel = fake.load(b"kernel: image", "kernel", 0)
    fake.launcher(kernel, (2, 1, 1), (32, 1, 1), arguments)()
    fake.synchronize()
    assert np.array_equal(np.frombuffer(fake.download(y, 256), np.float32), np.arange(64) + 0.5)
    with pytest.raises(CudaError):
        fake.launcher(kernel, (1, 1, 1), (32, 1, 1), arguments)()
    fake.unload(kernel)


def test_what_is_not_allocated_or_loaded_is_refused(fake, count):
    pointer = fake.allocate(16)
    for call in (
        lambda: fake.upload(pointer, bytes(17)),
        lambda: fake.download(pointer + 8, 9),
        lambda: fake.fill(pointer, 0, 17),
        lambda: fake.copy(pointer, pointer + 1, 16),
        lambda: fake.queue_download(pointer, pointer, 16),
        lambda: fake.elapsed_us(fake.event(), fake.event()),
    ):
        with pytest.raises(CudaError, match="INVALID"):
            call()
    other = fake.allocate(16)
    fake.upload(pointer, bytes(range(16)))
    fake.copy(other, pointer, 16)
    assert fake.download(other, 16) == bytes(range(16))
    kernel = fake.load(b"kernel: image", "kernel", 0)
    fake.unload(kernel)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        fake.unload(kernel)
    assert count(FUNCTION) == 0


@pytest.mark.parametrize("margin", [0.0, 1e9], ids=["long kernel", "short kernel"])
def test_the_gpu_is_held_back_before_kernels_shorter_than_the_hosts_work(fake, count, monkeypatch, margin):
    monkeypatch.setattr(launcher_module, "_HOST_MARGIN", margin)
    before = count(HOST_MEMORY)
    launcher = CudaLauncher(SPEC, fake)
    assert launcher.sample_us(launcher.load(b"kernel: fast"), 4) == pytest.approx(10.0)
    assert count(HOST_MEMORY) - before == (margin > 0)


def test_inputs_of_the_latest_seeds_stay_on_the_gpu_and_what_writes_to_them_shows_once(fake, monkeypatch):
    drawn = []

    def draw(tensor, seed):
        drawn.append(seed)
        return initial_contents(tensor, seed)

    launcher = CudaLauncher(SPEC, fake)
    handle = launcher.load(b"kernel: image")
    monkeypatch.setattr(launcher_module, "initial_contents", draw)
    first, second = launcher.outputs(handle, 5), launcher.outputs(handle, 6)
    fake.fill(launcher._pointers[0]["x"], 0, 256)
    assert (launcher.outputs(handle, 5), launcher.outputs(handle, 6)) == (first, second)
    assert drawn == [5, 6]
    launcher.outputs(handle, 7)
    launcher.outputs(handle, 6)
    launcher.outputs(handle, 5)
    assert drawn == [5, 6, 7, 5]


def test_the_launcher_gives_right_outputs_and_times(fake):
    launcher = CudaLauncher(SPEC, fake)
    handle = launcher.load(b"kernel: image")
    (one,), (same,), (other,) = (launcher.outputs(handle, seed) for seed in (5, 5, 6))
    assert one == same != other
    assert np.isfinite(np.frombuffer(one, np.float32)).all()
    assert launcher.sample_us(handle, 4) == pytest.approx(20.0)
    launcher.unload(handle)
    cold = CudaLauncher(SPEC.model_copy(update={"cold_l2": True}), fake)
    assert cold.sample_us(cold.load(b"kernel: fast"), 2) == pytest.approx(10.0)


def test_the_whole_path_in_a_contained_process(fake):
    plan = Plan(coarse=2, fine=3)
    with ContainedLauncher(SPEC, b"kernel: image", launcher_on_the_stand_in) as child:
        assert child.ready().gpu.name == "Fake GPU"
        assert child.compare(b"kernel: other image", [1, 2]) is None
        assert child.time(b"kernel: fast", plan).ratios == pytest.approx([2.0] * plan.fine)
        with pytest.raises(ScheduleFailedError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as failed:
            child.time(b"kernel: fault", plan)
        assert failed.value.failure is ScheduleFailure.FAULT
        assert child.time(b"kernel: fast", plan).ratios[0] == pytest.approx(2.0)


@pytest.mark.exhaustive
def test_a_faulted_process_is_lost_and_replaced(fake, monkeypatch):
    with ContainedLauncher(SPEC, b"kernel: image", launcher_on_the_stand_in) as child:
        child.ready()
        # Of the next process: its original runs, and some launch in the middle of a timing faults.
        monkeypatch.setenv("FAKE_CUDA_FAIL_AT", "3000")
        with pytest.raises(ScheduleFailedError):
            child.time(b"kernel: fault", Plan())
        with pytest.raises(ScheduleFailedError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            child.time(b"kernel: fast", Plan(coarse=100))
        monkeypatch.delenv("FAKE_CUDA_FAIL_AT")
        assert child.compare(b"kernel: fast", [1]) is None
        assert child.restarts == 2


def test_after_a_fault_nothing_works_in_that_process(library):
    code = (
        "import sys\n"
        "from kernelwright.errors import CudaError\n"
        "from kernelwright.gpu import driver\n"
        "driver.LIBRARY = sys.argv[1]\n"
        "from kernelwright.gpu.launcher import CudaLauncher\n"
        "from tests.gpu.test_driver import SPEC\n"
        "launcher = CudaLauncher(SPEC)\n"
        "bad = launcher.load(b'kernel: fault')\n"
        "for call in (lambda: launcher.outputs(bad, 1), lambda: launcher.load(b'kernel: image'),\n"
        "             lambda: launcher.unload(bad), lambda: launcher._driver.allocate(8)):\n"
        "    try:\n"
        "        call()\n"
        "    except CudaError as error:\n"
        "        print(error.name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["CUDA_ERROR_ILLEGAL_ADDRESS"] * 4, done.stderr


def test_the_process_that_runs_schedules_starts_without_torch_and_triton():
    code = (
        "import pickle, sys\n"
        "pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print([name for name in ('torch', 'triton', 'kernelwright.sass') if name in sys.modules])\n"
    )
    needed = (serve, functools.partial(cuda_launcher_on, 1), cuda_launcher, SPEC)
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(needed).hex()], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
