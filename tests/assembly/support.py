"""One small kernel of the corpus, and GPUs that are only pretended."""

from __future__ import annotations

from functools import cache

import pytest

from kernelwright.assembly.backends import Measurement, Status
from kernelwright.gpu import disassemble
from kernelwright.gpu.driver import GpuIdentity
from kernelwright.gpu.target import corpus_specs
from kernelwright.sass import load

ORIGINAL_US = 20.0


@cache
def program_of(name="row_sum", architecture=80):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_ALWAYS_COMPILE", "1")
        target = corpus_specs()[name].build(name, architecture)
    return load(target.cubin, disassemble)


class PretendedLauncher:
    """Runs nothing: a schedule's time follows from how many bytes of it differ from the original's."""

    def __init__(self, spec, saved_us):
        self.spec = spec
        self.saved_us = saved_us
        self.original = None

    def identity(self):
        return GpuIdentity("Pretended GPU", 90, "13.0", 1 << 20)

    def load(self, cubin):
        self.original = self.original or cubin
        return cubin

    def unload(self, handle):
        pass

    def sample_us(self, handle, launches):
        return ORIGINAL_US - self.saved_us * sum(a != b for a, b in zip(handle, self.original, strict=True))

    def outputs(self, handle, seed):
        return [bytes((seed + i) % 256 for i in range(tensor.size_bytes)) for tensor in self.spec.outputs]


def faster_when_changed(device, spec):
    return PretendedLauncher(spec, 0.001)


def never_faster(device, spec):
    return PretendedLauncher(spec, 0.0)


class Careless(PretendedLauncher):
    """Computes something else as soon as a byte of code differs."""

    def outputs(self, handle, seed):
        return super().outputs(handle, seed + (handle != self.original))


def wrong_when_changed(device, spec):
    return Careless(spec, 0.001)


class WrongWhenMovedFar:
    """A backend whose schedules give wrong outputs once many instructions have moved."""

    name = "choosy"
    unit = "us"

    def measure(self, schedule):
        if schedule.moved > 6:
            return Measurement(Status.WRONG_OUTPUT, detail="output 0")
        return Measurement(Status.MEASURED, 10.0, 10.0 + schedule.moved / 10)
