"""The launcher on the CUDA driver's stand-in (`fake_cuda.c`), for real cubins, in any process."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from kernelwright.gpu import driver
from kernelwright.gpu.driver import CudaDriver
from kernelwright.gpu.launch_spec import NullArgument, TensorArgument
from kernelwright.gpu.launcher import CudaLauncher

COMPILER = shutil.which("cc") or shutil.which("gcc")
VARIABLE = "FAKE_CUDA"
_OUTPUT_BYTES = 256


def build(folder: Path) -> Path:
    """Compile the stand-in; return the library."""
    path = folder / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", "-o", str(path), str(source)], check=True)
    return path


class StandInLauncher(CudaLauncher):
    """Tells the stand-in what the kernel's arguments are before it launches."""

    def load(self, cubin):
        self._tell()
        return super().load(cubin)

    def outputs(self, handle, seed):
        self._tell()
        return super().outputs(handle, seed)

    def _tell(self):
        arguments = self._spec.arguments
        kinds = ("p" if isinstance(a, TensorArgument) else "0" if isinstance(a, NullArgument) else "n" for a in arguments)
        number, output = next((i, a) for i, a in enumerate(arguments) if isinstance(a, TensorArgument) and a.role != "input")
        os.environ["FAKE_CUDA_ARGUMENTS"] = "".join(kinds)
        os.environ["FAKE_CUDA_OUTPUT"] = f"{number}:{min(_OUTPUT_BYTES, output.size_bytes)}"


def stand_in(spec):
    return stand_in_on(0, spec)


def stand_in_on(device, spec):
    driver.LIBRARY = os.environ[VARIABLE]
    return StandInLauncher(spec, CudaDriver(device))
