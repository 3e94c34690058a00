"""Launches a kernel again and again through the CUDA driver, times it, and compares outputs."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kernelwright.gpu.driver import CudaDriver, GpuIdentity, KernelArguments, LoadedKernel
from kernelwright.gpu.launch_spec import LaunchSpec, NullArgument, ScalarArgument, TensorArgument

TURNS_VARIABLE = "KERNELWRIGHT_GPU_TURNS"
"""Names a file. Processes that share one GPU and name the same file time their schedules one at a time."""
_CHECK_SET = 0
_FLUSH_FACTOR = 2
"""Size of the write that empties the level-2 cache, in sizes of the cache."""
_SEEDS_KEPT = 2
"""Seeds whose inputs stay on the GPU, so that checking many schedules on them draws and uploads them once."""
_CALIBRATION_LAUNCHES = 64
_CALIBRATION_BYTES = 4 << 20
_WARM_UP_US = 10_000.0
"""GPU time of a warm-up step, microseconds; steps go on until none is faster than the one before it."""
_WARM_UP_STEPS = range(3, 26)
"""Least and most steps; an idle GPU reaches its working clocks within a quarter of a second. These are our choice."""
_WARM_UP_GAIN = 0.01
_HOST_MARGIN = 2.0
"""Least ratio of a long enough kernel's time to the host's time for queueing a launch; our choice."""
_QUEUED_ALONGSIDE = 3
"""Calls queued alongside the timed launches: one launch ahead and two events."""
_LONGEST_HOLD_BYTES = 16 << 20


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


@contextlib.contextmanager
def turn_on_gpu() -> Iterator[None]:
    """Wait until no other process that shares the GPU is timing; the end of this process ends its turn, too."""
    path = os.environ.get(TURNS_VARIABLE)
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class CudaLauncher:
    """A launcher on the CUDA driver, of the first GPU unless another is given.

    Raises:
        DeviceError: there is no GPU, or not enough memory on it.
    """

    def __init__(self, spec: LaunchSpec, driver: CudaDriver | None = None) -> None:
        self._spec = spec
        self._driver = CudaDriver() if driver is None else driver
        # Set 0 is for checks, so that checking does not disturb what is timed.
        self._pointers = [self._allocate() for _ in range(spec.input_sets + 1)]
        self._arguments = [packed_arguments(spec, pointers) for pointers in self._pointers]
        # Allocated now, so that too little memory is not taken for a schedule's fault later.
        self._kept: list[tuple[int | None, dict[str, int]]] = [
            (None, self._allocate(filled_only=True)) for _ in range(_SEEDS_KEPT)
        ]
        for number in range(1, spec.input_sets + 1):
            self._upload(self._pointers[number], seed=number)
            self._poison(self._pointers[number])
        self._begin, self._end = self._driver.event(), self._driver.event()
        self._launches: dict[int, list[Callable[[], None]]] = {}
        self._next = 0
        self._flush_bytes = _FLUSH_FACTOR * self._driver.identity().l2_bytes if spec.cold_l2 else 0
        self._flush = self._driver.allocate(self._flush_bytes) if self._flush_bytes else 0
        self._hold: _Hold | None = None
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
        # The driver would free the code of a busy GPU later, and what is loaded next would lie elsewhere.
        self._driver.synchronize()
        del self._launches[handle.module]
        self._driver.unload(handle)

    def sample_us(self, handle: LoadedKernel, launches: int) -> float:
        """Return the mean time of a launch between two events; with a cold cache, of one launch each."""
        driver, prepared = self._driver, self._launches[handle.module]
        if self._hold is None:
            self._hold = self._calibrated(prepared)
        if self._flush_bytes:
            return sum(self._cold_us(prepared) for _ in range(launches)) / launches
        # What is queued ahead keeps the GPU busy while the host queues the timed launches: one launch, and before
        # kernels that are shorter than the host's own work a copy to the host, which leaves the caches nearly alone.
        held_bytes = self._hold.bytes_for(launches)
        if held_bytes:
            driver.queue_download(self._hold.host, self._hold.device, held_bytes)
        self._step(prepared)
        driver.record(self._begin)
        for _ in range(launches):
            self._step(prepared)
        driver.record(self._end)
        return driver.elapsed_us(self._begin, self._end) / launches

    def outputs(self, handle: LoadedKernel, seed: int) -> list[bytes]:
        """Return the outputs of one launch on inputs drawn from `seed`."""
        driver, pointers, kept = self._driver, self._pointers[_CHECK_SET], self._kept_inputs(seed)
        for tensor in self._spec.tensors:
            if tensor.name in kept:
                # Inputs too, lest an earlier schedule has written to them.
                driver.copy(pointers[tensor.name], kept[tensor.name], tensor.size_bytes)
        self._poison(pointers)
        self._launches[handle.module][_CHECK_SET]()
        driver.synchronize()
        return [driver.download(pointers[tensor.name], tensor.size_bytes) for tensor in self._spec.outputs]

    def _kept_inputs(self, seed: int) -> dict[str, int]:
        """Return the device copies of what is read from `seed`; the least recently used seed makes room."""
        for position, (known, pointers) in enumerate(self._kept):
            if known == seed:
                self._kept.append(self._kept.pop(position))
                return pointers
        _, pointers = self._kept.pop(0)
        self._upload(pointers, seed)
        self._kept.append((seed, pointers))
        return pointers

    def _calibrated(self, prepared: list[Callable[[], None]]) -> _Hold:
        """Bring the GPU to its working clocks, and return the hold that hides the host's time for queueing launches."""
        driver = self._driver
        earlier_us = math.inf
        for step in range(_WARM_UP_STEPS.stop):
            batches = 0
            total_us = queued_us = 0.0
            while total_us < _WARM_UP_US:
                begin_s = time.perf_counter()
                driver.record(self._begin)
                for _ in range(_CALIBRATION_LAUNCHES):
                    self._step(prepared)
                driver.record(self._end)
                queued_us = 1e6 * (time.perf_counter() - begin_s) / _CALIBRATION_LAUNCHES
                total_us += driver.elapsed_us(self._begin, self._end)
                batches += 1
            kernel_us = total_us / batches / _CALIBRATION_LAUNCHES
            if step >= _WARM_UP_STEPS.start and kernel_us > earlier_us * (1 - _WARM_UP_GAIN):
                break
            earlier_us = kernel_us
        if kernel_us > _HOST_MARGIN * queued_us:
            return _Hold(0, 0, 0.0)
        host, device = driver.allocate_host(_LONGEST_HOLD_BYTES), driver.allocate(_LONGEST_HOLD_BYTES)
        driver.queue_download(host, device, _CALIBRATION_BYTES)
        driver.record(self._begin)
        driver.queue_download(host, device, _CALIBRATION_BYTES)
        driver.record(self._end)
        copied_us = max(1.0, driver.elapsed_us(self._begin, self._end))
        return _Hold(host, device, _HOST_MARGIN * queued_us * _CALIBRATION_BYTES / copied_us)

    def _cold_us(self, prepared: list[Callable[[], None]]) -> float:
        self._driver.fill(self._flush, 0, self._flush_bytes)
        self._driver.record(self._begin)
        self._step(prepared)
        self._driver.record(self._end)
        return self._driver.elapsed_us(self._begin, self._end)

    def _step(self, prepared: list[Callable[[], None]]) -> None:
        self._next = self._next % self._spec.input_sets + 1
        prepared[self._next]()

    def _allocate(self, *, filled_only: bool = False) -> dict[str, int]:
        tensors = [tensor for tensor in self._spec.tensors if tensor.role != "output" or not filled_only]
        return {tensor.name: self._driver.allocate(tensor.size_bytes) for tensor in tensors}

    def _upload(self, pointers: dict[str, int], seed: int) -> None:
        for tensor in self._spec.tensors:
            if tensor.role != "output":
                self._driver.upload(pointers[tensor.name], initial_contents(tensor, seed))

    def _poison(self, pointers: dict[str, int]) -> None:
        for tensor in self._spec.tensors:
            if tensor.role == "output":
                self._driver.fill(pointers[tensor.name], POISON, tensor.size_bytes)


@dataclass(frozen=True, slots=True)
class _Hold:
    """A copy to page-locked memory that keeps the GPU from starting before the host has queued all launches.

    Copying `bytes_per_call` takes as long as queueing one call; 0 holds nothing.
    """

    host: int
    device: int
    bytes_per_call: float

    def bytes_for(self, launches: int) -> int:
        """Return the bytes to copy before so many launches."""
        return min(_LONGEST_HOLD_BYTES, round(self.bytes_per_call * (launches + _QUEUED_ALONGSIDE)))


def cuda_launcher(spec: LaunchSpec) -> Launcher:
    """Make a `CudaLauncher` on the first GPU."""
    return CudaLauncher(spec)


def cuda_launcher_on(device: int, spec: LaunchSpec) -> Launcher:
    """Make a `CudaLauncher` on one GPU of several."""
    return CudaLauncher(spec, CudaDriver(device))


def packed_arguments(spec: LaunchSpec, pointers: Mapping[str, int]) -> KernelArguments:
    """Arguments of a launch in the driver's form, with the address of each tensor by its name."""
    values: list[Any] = []
    for argument in spec.arguments:
        match argument:
            case TensorArgument():
                values.append(ctypes.c_uint64(pointers[argument.name]))
            case NullArgument():
                values.append(ctypes.c_uint64(0))
            case ScalarArgument():
                encoded = _encode(np.array([argument.value]), argument.type)
                values.append((ctypes.c_char * len(encoded)).from_buffer_copy(encoded))
    return KernelArguments(values)


# --- contents of tensors ----------------------------------------------------------------------------------------------


POISON = 0xFF
"""Byte that pure outputs are filled with before a checked launch: NaN in every float type."""

_NUMPY: dict[str, Any] = {
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "i1": np.uint8, "i8": np.int8, "u8": np.uint8,
    "i16": np.int16, "i32": np.int32, "i64": np.int64, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
_BF16_SHIFT = 16
PERIOD = (1 << 20) + 7
"""Drawn numbers repeat after so many, since drawing them takes most of the time that a fresh process needs. It is a prime,
so no two rows or tiles of a tensor are alike; our choice."""


def initial_contents(tensor: TensorArgument, seed: int) -> bytes:
    """Return the bytes a tensor holds before a launch, the same for the same name, spec and seed."""
    if tensor.role == "output":
        return bytes([POISON]) * tensor.size_bytes
    # Of the name too, so that two tensors of one shape do not hold the same numbers.
    generator = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    drawn = min(math.prod(tensor.shape), PERIOD)
    values: npt.NDArray[Any]
    if tensor.init == "normal":
        values = generator.standard_normal(drawn, dtype=np.float32) * np.float32(tensor.scale)
    elif tensor.init == "uniform":
        values = generator.uniform(tensor.low, tensor.high, drawn)
    elif tensor.init == "integers":
        values = generator.integers(int(tensor.low), int(tensor.high), drawn)
    else:
        values = np.full(drawn, 0 if tensor.init == "zeros" else 1)
    once = _encode(values, tensor.dtype)
    return once if len(once) == tensor.size_bytes else (once * -(-tensor.size_bytes // len(once)))[: tensor.size_bytes]


def difference(spec: LaunchSpec, expected: list[bytes], found: list[bytes]) -> str | None:
    """Say how outputs, the bytes of each, differ by more than the spec allows, or return None."""
    for tensor, left, right in zip(spec.outputs, expected, found, strict=True):
        if left == right:
            continue
        if spec.deterministic:
            differing = int(np.count_nonzero(np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)))
            return f"{differing} of {len(left)} bytes of {tensor.name} differ"
        wanted, actual = _decode(left, tensor.dtype), _decode(right, tensor.dtype)
        close = np.isclose(wanted, actual, rtol=spec.rtol, atol=spec.atol, equal_nan=True)
        if not close.all():
            return f"{int(np.count_nonzero(~close))} of {close.size} values of {tensor.name} are out of tolerance"
    return None


def _encode(values: npt.NDArray[Any], dtype: str) -> bytes:
    if dtype != "bf16":
        return np.ascontiguousarray(values.astype(_NUMPY[dtype])).tobytes()
    bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32).astype(np.uint64)
    # Round to nearest, ties to even, as the hardware does.
    rounded = (bits + 0x7FFF + ((bits >> _BF16_SHIFT) & 1)) >> _BF16_SHIFT
    return rounded.astype(np.uint16).tobytes()


def _decode(data: bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << _BF16_SHIFT).view(np.float32).astype(np.float64)
    return np.frombuffer(data, _NUMPY[dtype]).astype(np.float64)
