"""Shares memory between the parent, which owns it, and one worker: inputs go in, outputs come out.

On the CPU an arena is an anonymous file (memfd) mapped by both sides; on CUDA it is one cudaMalloc of its own, shared
by handle, so that it shares no block with the parent's other memory. Tensors are laid out by `TensorSpec`s that the parent
makes; a worker only follows them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernelwright.errors import DeviceError
from kernelwright.judge.settings import GIB

ALIGNMENT_BYTES = 512
PAGE_BYTES = 2 << 20
"""Size of a page of a device's memory."""
_OUT_OF_MEMORY = 2
"""`cudaErrorMemoryAllocation`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Place and layout of a tensor in an arena."""

    dtype: str
    """Name inside `torch`, such as `float32`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    offset_bytes: int
    span_bytes: int
    """Bytes from the first element to the end of the last."""

    @classmethod
    def of(cls, tensor: torch.Tensor, offset_bytes: int = 0) -> TensorSpec:
        """The layout of `tensor`, strides kept."""
        elements = (
            0 if tensor.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        return cls(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            offset_bytes,
            elements * tensor.element_size(),
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TensorSpec:
        """Read what `to_json` has made."""
        return cls(value["dtype"], tuple(value["shape"]), tuple(value["stride"]), value["offset_bytes"], value["span_bytes"])

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of the arena's bytes (`memory`: uint8, one dimension)."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        piece = memory[self.offset_bytes : self.offset_bytes + self.span_bytes]
        return piece.view(dtype).as_strided(self.shape, self.stride)


def plan(tensors: Sequence[torch.Tensor], *, as_aligned: bool = False) -> tuple[tuple[TensorSpec, ...], int]:
    """Lay tensors out one after another; returns their specs and the bytes needed.

    Each begins at a multiple of `ALIGNMENT_BYTES`, or with `as_aligned` as far off one as in its own memory.
    """
    specs, offset = [], 0
    for tensor in tensors:
        off = int(tensor.storage_offset()) * tensor.element_size() % ALIGNMENT_BYTES if as_aligned else 0
        spec = TensorSpec.of(tensor, offset + off)
        specs.append(spec)
        offset += math.ceil(max(off + spec.span_bytes, 1) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(specs), max(offset, ALIGNMENT_BYTES)


class SharedArena:
    """The parent's side."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self._file: int | None = None
        self._pointer = 0
        if device.type == "cuda":
            self._pointer = _cuda_malloc(size_bytes)
            self.memory = wrap_cuda(self._pointer, size_bytes, device)
        else:
            self._file = os.memfd_create("kernelwright", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._file, size_bytes)
            # A worker that cuts the file short would end this process at its next look (SIGBUS).
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.memory = _map(self._file, size_bytes)

    def describe(self) -> dict[str, Any]:
        """A description by which a worker opens it; on the CPU it needs the file handle too."""
        if self.device.type == "cuda":
            return {"kind": "cuda", "size_bytes": self.size_bytes, "handle": _cuda_export(self._pointer).hex()}
        return {"kind": "cpu", "size_bytes": self.size_bytes}

    @property
    def files(self) -> tuple[int, ...]:
        """File handles to send along with `describe()`."""
        return () if self._file is None else (self._file,)

    def poison(self, size_bytes: int | None = None) -> None:
        """Fill it, or its first bytes, with NaN in every floating type: what is not written cannot be right by luck."""
        self.memory[:size_bytes].fill_(255)

    def close(self) -> None:
        """Free it. Views of it must not be used any more."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._pointer:
            _check(_cudart().cudaFree(ctypes.c_void_p(self._pointer)), "free an arena")
            self._pointer = 0

    def __del__(self) -> None:
        # Where the last of a worker's arenas finds no memory, nobody gets to close those that were made before it.
        if not sys.is_finalizing():
            with contextlib.suppress(DeviceError):
                self.close()


def open_arena(description: dict[str, Any], files: list[int], device: torch.device) -> torch.Tensor:
    """The worker's side: the arena's bytes, from `describe()` and the file handles that came with it."""
    if description["kind"] == "cpu":
        handle = files.pop(0)
        memory = _map(handle, description["size_bytes"])
        os.close(handle)
        return memory
    pointer = _cuda_import(bytes.fromhex(description["handle"]))
    return wrap_cuda(pointer, description["size_bytes"], device)


def close_arena(memory: torch.Tensor) -> None:
    """The worker's side: let go of what `open_arena` returned, of which no view may be used any more."""
    if memory.device.type == "cuda":
        _check(_cudart().cudaIpcCloseMemHandle(ctypes.c_void_p(memory.data_ptr())), "close an arena")


def _map(handle: int, size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(handle, size_bytes), dtype=torch.uint8)


# --- CUDA runtime, called directly: torch would share the whole block of its allocator -----------------------------


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def _cudart() -> ctypes.CDLL:
    """The CUDA runtime library that this torch has loaded."""
    major = (torch.version.cuda or "").split(".")[0]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        raise DeviceError(f"Wanted libcudart.so.{major}, which torch {torch.__version__} uses; {error}.") from error


def _check(status: int, doing: str) -> None:
    if status != 0:
        raise DeviceError(f"CUDA could not {doing}: error {status}. Is the GPU's memory full?")


def _cuda_malloc(size_bytes: int) -> int:
    pointer = ctypes.c_void_p()
    # Whole pages of its own. A handle shares the whole underlying allocation. And a worker on an H200 read gigabytes of a
    # size that was none at half of the memory's speed, in every call (docs/log.md).
    wanted = ctypes.c_size_t(math.ceil(size_bytes / PAGE_BYTES) * PAGE_BYTES)
    status = _cudart().cudaMalloc(ctypes.byref(pointer), wanted)
    if status == _OUT_OF_MEMORY:
        torch.cuda.empty_cache()  # what torch keeps for its next tensors is nobody else's until then
        status = _cudart().cudaMalloc(ctypes.byref(pointer), wanted)
    if status:
        _cudart().cudaGetLastError()  # or torch would find the error after its next kernel, and take it for that one's
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        raise DeviceError(
            f"Wanted an arena of {size_bytes / GIB:.2f} GiB; CUDA's error is {status}, with {free_bytes / GIB:.2f} of "
            f"{total_bytes / GIB:.2f} GiB free. Let fewer judges share the GPU."
        )
    return int(pointer.value or 0)


def _cuda_export(pointer: int) -> bytes:
    handle = _IpcHandle()
    _check(_cudart().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(pointer)), "export an arena")
    return bytes(ctypes.string_at(ctypes.addressof(handle), 64))


def _cuda_import(data: bytes) -> int:
    handle = _IpcHandle.from_buffer_copy(data)
    pointer = ctypes.c_void_p()
    opener = _cudart().cudaIpcOpenMemHandle
    opener.argtypes = (ctypes.c_void_p, _IpcHandle, ctypes.c_uint)
    _check(opener(ctypes.byref(pointer), handle, 1), "open an arena")
    return int(pointer.value or 0)


class _CudaBytes:
    """Makes raw device memory a tensor without copying (numba's CUDA array interface, version 3)."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }


def wrap_cuda(pointer: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Raw device memory as bytes, which stay whose they were."""
    return torch.as_tensor(_CudaBytes(pointer, size_bytes), device=device)
