"""Running a kernel again and again: what measuring needs, and how the CUDA driver does it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

from kernelwright.toolchain.driver import CudaDriver, GpuIdentity, KernelArguments, LoadedKernel
from kernelwright.tuning.buffers import initial_contents
from kernelwright.tuning.launch_spec import LaunchSpec, NullArgument, ScalarArgument, TensorArgument

_CHECK_SET = 0
_FLUSH_FACTOR = 2
"""The level-2 cache is emptied by writing this many times its size."""
_CTYPES: dict[str, Any] = {
    "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "i1": ctypes.c_uint8,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


class Launcher(Protocol):
    """Runs schedules of one kernel on one device. A handle stands for a loaded cubin."""

    def identity(self) -> GpuIdentity:
        """Return what the kernel runs on."""

    def load(self, cubin: bytes) -> Any:
        """Return a handle of a cubin."""

    def unload(self, handle: Any) -> None:
        """Forget a handle."""

    def sample_us(self, handle: Any, launches: int) -> float:
        """Return the mean time of `launches` launches, each on the next of the input sets."""

    def outputs(self, handle: Any, seed: int) -> list[bytes]:
        """Return the outputs of one launch on fresh inputs."""


LauncherFactory = Callable[[LaunchSpec], Launcher]
"""Makes the launcher in the process that runs schedules; must be importable by name."""


class CudaLauncher:
    """A launcher on the CUDA driver.

    Args:
        spec: how to launch.
        driver: the GPU; the first one when None.

    Raises:
        DeviceError: there is no GPU, or not enough memory on it.
    """

    def __init__(self, spec: LaunchSpec, driver: CudaDriver | None = None) -> None:
        self._spec = spec
        self._driver = CudaDriver() if driver is None else driver
        # Set 0 is for checks, so that checking does not disturb what is timed.
        self._pointers = [self._allocate() for _ in range(spec.input_sets + 1)]
        self._arguments = [self._pack(pointers) for pointers in self._pointers]
        for number in range(1, spec.input_sets + 1):
            self._fill(number, seed=number)
        self._begin, self._end = self._driver.event(), self._driver.event()
        self._launches: dict[int, list[Callable[[], None]]] = {}
        self._next = 0
        self._flush_bytes = _FLUSH_FACTOR * self._driver.identity().l2_bytes if spec.cold_l2 else 0
        self._flush = self._driver.allocate(self._flush_bytes) if self._flush_bytes else 0
        self._driver.synchronize()

    def identity(self) -> GpuIdentity:
        """Return the GPU."""
        return self._driver.identity()

    def load(self, cubin: bytes) -> LoadedKernel:
        """Load a cubin; the driver's refusal raises `CudaError`."""
        kernel = self._driver.load(cubin, self._spec.entry, self._spec.shared_bytes)
        self._launches[kernel.module] = [
            self._driver.launcher(kernel, self._spec.grid, self._spec.block, arguments) for arguments in self._arguments
        ]
        return kernel

    def unload(self, handle: LoadedKernel) -> None:
        """Unload a cubin."""
        del self._launches[handle.module]
        self._driver.unload(handle)

    def sample_us(self, handle: LoadedKernel, launches: int) -> float:
        """Return the mean time of a launch between two events; with a cold cache, of one launch each."""
        driver, prepared = self._driver, self._launches[handle.module]
        if self._flush_bytes:
            return sum(self._cold_us(prepared) for _ in range(launches)) / launches
        # One launch ahead keeps the GPU busy while the host queues the timed ones.
        self._step(prepared)
        driver.record(self._begin)
        for _ in range(launches):
            self._step(prepared)
        driver.record(self._end)
        return driver.elapsed_us(self._begin, self._end) / launches

    def outputs(self, handle: LoadedKernel, seed: int) -> list[bytes]:
        """Return the outputs of one launch on inputs drawn from `seed`."""
        self._fill(_CHECK_SET, seed)
        self._launches[handle.module][_CHECK_SET]()
        self._driver.synchronize()
        return [
            self._driver.download(self._pointers[_CHECK_SET][tensor.name], tensor.size_bytes)
            for tensor in self._spec.outputs
        ]

    def _cold_us(self, prepared: list[Callable[[], None]]) -> float:
        self._driver.fill(self._flush, 0, self._flush_bytes)
        self._driver.record(self._begin)
        self._step(prepared)
        self._driver.record(self._end)
        return self._driver.elapsed_us(self._begin, self._end)

    def _step(self, prepared: list[Callable[[], None]]) -> None:
        self._next = self._next % self._spec.input_sets + 1
        prepared[self._next]()

    def _allocate(self) -> dict[str, int]:
        return {tensor.name: self._driver.allocate(tensor.size_bytes) for tensor in self._spec.tensors}

    def _fill(self, number: int, seed: int) -> None:
        for tensor in self._spec.tensors:
            self._driver.upload(self._pointers[number][tensor.name], initial_contents(tensor, seed))

    def _pack(self, pointers: dict[str, int]) -> KernelArguments:
        values: list[Any] = []
        for argument in self._spec.arguments:
            match argument:
                case TensorArgument():
                    values.append(ctypes.c_uint64(pointers[argument.name]))
                case NullArgument():
                    values.append(ctypes.c_uint64(0))
                case ScalarArgument():
                    values.append(_scalar(argument))
        return KernelArguments(values)


def cuda_launcher(spec: LaunchSpec) -> Launcher:
    """Make a `CudaLauncher` on the first GPU."""
    return CudaLauncher(spec)


def _scalar(argument: ScalarArgument) -> Any:
    if argument.type == "fp16":
        import numpy as np

        return ctypes.c_uint16(int(np.float16(argument.value).view(np.uint16)))
    if argument.type == "bf16":
        bits = int.from_bytes(ctypes.c_float(argument.value), "little")
        return ctypes.c_uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    value = argument.value if argument.type in ("fp32", "fp64") else int(argument.value)
    return _CTYPES[argument.type](value)
