"""Calls the CUDA driver through ctypes: the few functions that running a cubin needs.

Not `cuda.bindings`: these two dozen functions have had the same binary interface since CUDA 4, the binding
ties its major version to the driver's, and the processes that run untrusted schedules are restarted after
every fault, so they must start without torch and without a large import.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernelwright.errors import CudaError, DeviceError

LIBRARY = "libcuda.so.1"
_ATTRIBUTE_MAJOR = 75
_ATTRIBUTE_MINOR = 76
_ATTRIBUTE_L2_BYTES = 38
_FUNCTION_STATIC_SHARED_BYTES = 1
_FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8
_PREFER_SHARED = 1
_STATIC_SHARED_LIMIT_BYTES = 48 << 10
"""Above this a kernel must be told how much dynamic shared memory it may have (CUDA programming guide, 16.6.2)."""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """GPU and driver that a time or a check belongs to.

    Attributes:
        architecture: compute capability times ten.
        driver: highest CUDA release the driver supports, such as "13.0".
    """

    name: str
    architecture: int
    driver: str
    l2_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel of a loaded module; `module` and `function` are the driver's handles."""

    module: int
    function: int
    shared_bytes: int


class CudaDriver:
    """The primary context of one GPU, named by its ordinal. Use it from the thread that made it.

    Raises:
        DeviceError: there is no driver or no such GPU.
    """

    def __init__(self, device: int = 0) -> None:
        self._library = _library()
        self._ordinal = device
        self._device = handle = _device(self._library, device)
        context = ctypes.c_void_p()
        # The primary context is the one torch and Triton use, so their pointers and ours are the same.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)

    def identity(self) -> GpuIdentity:
        """Return the name, architecture, driver and cache size of the GPU."""
        return gpu_identity(self._ordinal)

    def load(self, cubin: bytes, entry: str, shared_bytes: int) -> LoadedKernel:
        """Load a cubin and return its kernel `entry`, whose launches will ask for `shared_bytes` of dynamic shared memory.

        Raises:
            CudaError: the driver refuses the image, or there is no such kernel in it.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        try:
            self._call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
            static_bytes = ctypes.c_int()
            self._call("cuFuncGetAttribute", ctypes.byref(static_bytes), _FUNCTION_STATIC_SHARED_BYTES, function)
            if shared_bytes and static_bytes.value + shared_bytes > _STATIC_SHARED_LIMIT_BYTES:
                # Both as Triton's loader does: the split between L1 and shared memory changes a kernel's time.
                self._call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
                self._call("cuFuncSetAttribute", function, _FUNCTION_MAX_DYNAMIC_SHARED_BYTES, ctypes.c_int(shared_bytes))
        except CudaError:
            self._library.cuModuleUnload(module)
            raise
        return LoadedKernel(module.value or 0, function.value or 0, shared_bytes)

    def unload(self, kernel: LoadedKernel) -> None:
        """Unload the module of a kernel."""
        self._call("cuModuleUnload", ctypes.c_void_p(kernel.module))

    def launcher(
        self, kernel: LoadedKernel, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: KernelArguments
    ) -> Callable[[], None]:
        """Return a launch on the default stream, prepared once for calls in a timed loop."""
        function, call = ctypes.c_void_p(kernel.function), self._library.cuLaunchKernel
        values = (function, *grid, *block, kernel.shared_bytes, None, arguments.packed, None)

        def launch() -> None:
            status = call(*values)
            if status:
                raise _error(self._library, "cuLaunchKernel", status)

        return launch

    def synchronize(self) -> None:
        """Wait until the GPU has done everything asked of it.

        Raises:
            CudaError: a kernel failed; it carries the driver's name of the failure.
        """
        self._call("cuCtxSynchronize")

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new device memory."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(1, size_bytes)))
        return pointer.value

    def upload(self, pointer: int, data: bytes | memoryview) -> None:
        """Copy host bytes to the device."""
        view = bytes(data)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), ctypes.c_char_p(view), ctypes.c_size_t(len(view)))

    def download(self, pointer: int, size_bytes: int) -> bytes:
        """Copy device memory to the host."""
        buffer = (ctypes.c_char * size_bytes)()
        self._call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(pointer), ctypes.c_size_t(size_bytes))
        return buffer.raw

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        """Copy device memory to device memory, in stream order."""
        self._call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size_bytes),
            ctypes.c_void_p(),
        )

    def allocate_host(self, size_bytes: int) -> int:
        """Return the address of new page-locked host memory; it is freed when the process ends."""
        pointer = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(pointer), ctypes.c_size_t(max(1, size_bytes)))
        return pointer.value or 0

    def queue_download(self, to: int, pointer: int, size_bytes: int) -> None:
        """Copy device memory to page-locked host memory, in stream order; returns before it is done."""
        self._call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(to),
            ctypes.c_uint64(pointer),
            ctypes.c_size_t(size_bytes),
            ctypes.c_void_p(),
        )

    def fill(self, pointer: int, byte: int, size_bytes: int) -> None:
        """Set device memory to one byte, in stream order."""
        self._call(
            "cuMemsetD8Async", ctypes.c_uint64(pointer), ctypes.c_ubyte(byte), ctypes.c_size_t(size_bytes), ctypes.c_void_p()
        )

    def event(self) -> ctypes.c_void_p:
        """Return a new event."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        return event

    def record(self, event: ctypes.c_void_p) -> None:
        """Record `event` on the default stream behind everything queued so far."""
        self._call("cuEventRecord", event, ctypes.c_void_p())

    def elapsed_us(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Wait for `end` and return the time between two recorded events."""
        self._call("cuEventSynchronize", end)
        elapsed_ms = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(elapsed_ms), begin, end)
        return 1000.0 * elapsed_ms.value

    def _call(self, name: str, *arguments: Any) -> None:
        _call(self._library, name, *arguments)


class KernelArguments:
    """Argument list of a launch in the driver's form; ctypes values in the kernel's order, pointers as `c_uint64`."""

    def __init__(self, values: Sequence[ctypes._SimpleCData[Any]]) -> None:
        self.values = tuple(values)
        self.packed = (ctypes.c_void_p * len(self.values))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in self.values)
        )


def gpu_identity(device: int = 0) -> GpuIdentity:
    """Return the name, architecture, driver and cache size of a GPU, without a context on it.

    Raises:
        DeviceError: there is no driver or no such GPU.
    """
    library = _library()
    handle = _device(library, device)
    name = ctypes.create_string_buffer(128)
    _call(library, "cuDeviceGetName", name, ctypes.c_int(len(name)), handle)
    version = ctypes.c_int()
    _call(library, "cuDriverGetVersion", ctypes.byref(version))
    numbers = []
    for attribute in (_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR, _ATTRIBUTE_L2_BYTES):
        value = ctypes.c_int()
        _call(library, "cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        numbers.append(value.value)
    return GpuIdentity(
        name=name.value.decode(errors="replace"),
        architecture=10 * numbers[0] + numbers[1],
        driver=f"{version.value // 1000}.{version.value % 1000 // 10}",
        l2_bytes=numbers[2],
    )


def _device(library: Any, ordinal: int) -> ctypes.c_int:
    _call(library, "cuInit", 0)
    handle = ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(handle), ordinal)
    return handle


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise _error(library, name, status)


def _error(library: Any, call: str, status: int) -> CudaError:
    text = ctypes.c_char_p()
    known = library.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value is not None
    return CudaError(call, status, text.value.decode() if known and text.value else "an error without a name")


_loaded: dict[str, Any] = {}
_lock = threading.Lock()


def _library() -> Any:
    with _lock:
        if LIBRARY not in _loaded:
            try:
                _loaded[LIBRARY] = ctypes.CDLL(LIBRARY)
            except OSError as error:
                raise DeviceError(
                    f"wanted the CUDA driver, found: {error}; run on a machine with an NVIDIA GPU and its driver"
                ) from error
        return _loaded[LIBRARY]
