"""A launcher without a GPU: what a "cubin" does is spelled in its bytes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kernelwright.errors import CudaError, DeviceError
from kernelwright.gpu.driver import GpuIdentity
from kernelwright.gpu.launch_spec import LaunchSpec

GPU = GpuIdentity("Fake GPU", 90, "13.0", 1 << 20)
ORIGINAL_US = 20.0
HANGS = "FAKE_LAUNCHER_HANGS"

SPEC = LaunchSpec.model_validate(
    {
        "name": "fake",
        "entry": "kernel",
        "grid": [8, 1, 1],
        "block": [128, 1, 1],
        "arguments": [
            {"kind": "tensor", "name": "x", "dtype": "fp32", "shape": [64]},
            {"kind": "tensor", "name": "y", "dtype": "fp32", "shape": [64], "role": "output"},
        ],
    }
)


class FakeLauncher:
    """Times and outputs by the words in a cubin's bytes.

    `us=15` takes that long; `wrong`, `fault`, `hang` and `exit` do what they say when launched; `refused` does not
    load; `rough` is off by one unit in the last place.
    """

    def __init__(self, spec, defect=""):
        self.spec = spec
        self.defect = defect
        self.samples = 0

    def identity(self):
        return GPU

    def load(self, cubin):
        if b"refused" in cubin:
            raise CudaError("cuModuleLoadData", 200, "CUDA_ERROR_INVALID_IMAGE")
        return cubin

    def unload(self, handle):
        pass

    def sample_us(self, handle, launches):
        self._misbehave(handle)
        self.samples += 1
        drift = 1.0 + 0.0001 * self.samples
        for word in handle.split():
            if word.startswith(b"us="):
                return float(word[3:]) * drift
        return ORIGINAL_US * drift

    def outputs(self, handle, seed):
        self._misbehave(handle)
        value = (seed * 7919) % 251
        outputs = []
        for tensor in self.spec.outputs:
            data = bytearray((value + i) % 256 for i in range(tensor.size_bytes))
            if b"wrong" in handle:
                data[5] ^= 1
            if self.defect == "random":
                data[6:14] = os.urandom(8)  # one byte would be the same twice now and then
            outputs.append(bytes(data) if self.defect != "trivial" else bytes(len(data)))
        return outputs

    def _misbehave(self, handle):
        if b"fault" in handle:
            raise CudaError("cuCtxSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
        if b"hang" in handle:
            # Opening the pipe tells a test that waits at its other end that the schedule hangs now.
            if HANGS in os.environ:
                Path(os.environ[HANGS]).open("w").close()
            while True:
                time.sleep(60)
        if b"exit" in handle:
            os._exit(41)
        if b"defect" in handle:
            raise ValueError("a defect of the launcher")


def fake_launcher(spec):
    return FakeLauncher(spec)


def launcher_of_a_random_kernel(spec):
    return FakeLauncher(spec, "random")


def launcher_of_a_trivial_kernel(spec):
    return FakeLauncher(spec, "trivial")


def no_gpu(spec):
    raise DeviceError("wanted the CUDA driver, found none")


class SometimesWrong(FakeLauncher):
    """A real cubin whose code sections end in an odd byte sum is wrong; used with schedules of real kernels."""

    def __init__(self, spec):
        super().__init__(spec)
        self.original = None

    def load(self, cubin):
        if self.original is None:
            self.original = cubin
        return cubin

    def sample_us(self, handle, launches):
        self.samples += 1
        moved = sum(a != b for a, b in zip(handle, self.original, strict=True))
        return ORIGINAL_US - 0.001 * moved

    def _misbehave(self, handle):
        pass


def faster_by_every_changed_byte(spec):
    return SometimesWrong(spec)


class Noted(FakeLauncher):
    """Writes its process's number into a file at every sample."""

    def sample_us(self, handle, launches):
        with open(os.environ["FAKE_LAUNCHER_SAMPLES"], "a") as file:
            file.write(f"{os.getpid()}\n")
        return super().sample_us(handle, launches)


class LuckyAtFirst(FakeLauncher):
    """A schedule is faster than the original while its first copies are loaded, and slower ever after."""

    def __init__(self, spec):
        super().__init__(spec)
        self.loaded = 0

    def load(self, cubin):
        self.loaded += cubin.startswith(b"lucky")
        return cubin

    def sample_us(self, handle, launches):
        if not handle.startswith(b"lucky"):
            return ORIGINAL_US
        return ORIGINAL_US / 2 if self.loaded <= 2 else ORIGINAL_US / 0.8


def lucky_at_first(spec):
    return LuckyAtFirst(spec)


class Placed(FakeLauncher):
    """The time depends on where the code lies: loading takes the first free place, of several sets of places in turns."""

    def __init__(self, sets):
        super().__init__(SPEC)
        self.sets = sets
        self.turn = 0
        self.loaded = {}

    def load(self, cubin):
        if not self.loaded:
            self.turn = (self.turn + 1) % self.sets
        place = next(p for p in range(8) if p not in self.loaded)
        self.loaded[place] = self.turn
        return place

    def unload(self, handle):
        del self.loaded[handle]

    def sample_us(self, handle, launches):
        return ORIGINAL_US * (1.0 + 0.03 * (((0, 3, 1, 2), (2, 0, 3, 3))[self.loaded[handle]][handle]))


def who_samples_when(spec):
    return Noted(spec)
