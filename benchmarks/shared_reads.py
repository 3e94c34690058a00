"""Measures how fast a process reads a GPU's memory: its own, and what another process shares with it.

    python3 benchmarks/shared_reads.py RUN_DIR

A judge's worker reads its inputs from memory that the judge owns. On an H200 eager sums 8 GiB in 2.1 ms where it owns them,
which is how candidates are screened, and in 3.6 ms where it is judged (results/kernelbench-h200/today-left-2-h200). Which
of these has the slow reads? None of whole pages has (results/2026-11-27-whole-pages-h200); the judge's memory was none.

- `pytorch`: a tensor of the process that reads it;
- `malloc`: a `cudaMalloc` of its own, and `exported`: the same once there is a handle for other processes;
- `arena`: the judge's `SharedArena` as a worker opens it, and `arena's owner`: the same, read by the process that owns it;
- `odd malloc` and `odd arena`: the same, of a size that is no multiple of a page, as the judge's was;
- `virtual`: memory of its own by the driver's virtual memory management (`cuMemCreate`, `cuMemMap`), and `virtual shared`:
  the same of another process, by a file handle.

Or is it not the memory: before each timed call of a judge another process has used the GPU, to write the inputs, and the
driver has switched contexts. So each kind is read again and again, then each time after a small kernel of the other process
(`switched`), after the other process has written as much as is read, into shared memory if it is shared (`written`), and
then after one element of each page has been read as well (`touched`), which brings its address back but not its contents.

`read` sums the memory as float32, `copy` doubles it into a tensor of the reader's own. Times are medians of events around
single calls. Each kind has memory of its own, given back before the next. A kind that fails is written down with its error.
Writes `summary.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernelwright.judge.settings import GIB
from kernelwright.judge.worker import arena as arena_module
from kernelwright.judge.worker.arena import PAGE_BYTES, SharedArena, close_arena, open_arena, wrap_cuda
from kernelwright.records import RunDirectory

DEVICE = torch.device("cuda:0")
SIZES = (1 * GIB, 8 * GIB)
CALLS = 9
ODD_BYTES = (480 << 10) + 512
"""The part of a page by which a judge's arena of large inputs is longer than they are."""
TURN, WRITE = "turn", "write"
"""What the reader says when the other process is to run a small kernel, or to write as much as the reader will read."""
PINNED, FILE_HANDLE, ON_DEVICE, READ_WRITE = 1, 1, 1, 3
"""Of the driver's enumerations: `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`,
`CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`."""


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def driver(name: str, *arguments: Any) -> None:
    """Call a function of the driver, or raise RuntimeError with its status."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


class VirtualMemory:
    """Memory by the driver's virtual memory management, made here or by another process.

    Args:
        size_bytes: A multiple of 2 MiB.
        shared: Whether others may have a file handle of it.
        file: Such a handle, of another process's memory.
    """

    def __init__(self, size_bytes: int, shared: bool = False, file: int | None = None) -> None:
        self._size, self._handle, self._pointer = ctypes.c_size_t(size_bytes), ctypes.c_uint64(), ctypes.c_uint64()
        place = Location(ON_DEVICE, 0)
        if file is None:
            properties = Properties(PINNED, FILE_HANDLE if shared else 0, place)
            driver("cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(properties), ctypes.c_uint64(0))
        else:
            driver("cuMemImportFromShareableHandle", ctypes.byref(self._handle), ctypes.c_void_p(file), FILE_HANDLE)
        zero = ctypes.c_uint64(0)
        driver("cuMemAddressReserve", ctypes.byref(self._pointer), self._size, ctypes.c_size_t(0), zero, zero)
        driver("cuMemMap", self._pointer, self._size, ctypes.c_size_t(0), self._handle, zero)
        access = Access(place, READ_WRITE)
        driver("cuMemSetAccess", self._pointer, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        self.memory = wrap_cuda(int(self._pointer.value), size_bytes, DEVICE)

    def file(self) -> int:
        """A file handle for another process."""
        made = ctypes.c_int()
        driver("cuMemExportToShareableHandle", ctypes.byref(made), self._handle, FILE_HANDLE, ctypes.c_uint64(0))
        return made.value

    def close(self) -> None:
        """Give it back."""
        torch.cuda.synchronize()
        driver("cuMemUnmap", self._pointer, self._size)
        driver("cuMemAddressFree", self._pointer, self._size)
        driver("cuMemRelease", self._handle)


def timed_us(call: Callable[[], Any], before: Callable[[], Any]) -> float:
    """Median time of single calls by events, microseconds."""
    found = []
    for _ in range(CALLS):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found)


def speeds(memory: torch.Tensor, turn: Callable[[str], Any] | None = None) -> dict[str, float]:
    """How fast this process reads the bytes, and reads and writes them, TB/s; also after a `turn` of another process."""
    numbers = memory.view(torch.float32).uniform_()
    made, found = torch.empty_like(numbers), dict[str, float]()
    ways: dict[str, Callable[[], Any]] = {"": torch.cuda.synchronize}
    if turn is not None:

        def touch() -> None:
            turn(WRITE)
            memory[::PAGE_BYTES].sum()
            torch.cuda.synchronize()

        ways |= {"switched_": lambda: turn(TURN), "written_": lambda: turn(WRITE), "touched_": touch}
    for way, before in ways.items():
        read_us = timed_us(lambda: numbers.sum(), before)
        copy_us = timed_us(lambda: torch.mul(numbers, 2.0, out=made), before)
        found |= {
            f"{way}read_us": round(read_us, 1),
            f"{way}read_tb_s": round(memory.numel() / read_us / 1e6, 3),
            f"{way}copy_us": round(copy_us, 1),
            f"{way}copy_tb_s": round(2 * memory.numel() / copy_us / 1e6, 3),
        }
    return found


def arena_of(kind: str, size_bytes: int) -> SharedArena:
    """Of whole pages, or as the judge made it before its memory was."""
    if not kind.startswith("odd"):
        return SharedArena(DEVICE, size_bytes)
    with mock.patch.object(arena_module, "PAGE_BYTES", 1):
        return SharedArena(DEVICE, size_bytes + ODD_BYTES)


def own(kind: str, size_bytes: int, turn: Callable[[str], Any]) -> dict[str, float]:
    """Speeds of memory of this process."""
    if kind == "pytorch":
        return speeds(torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE), turn)
    if kind == "virtual":
        made = VirtualMemory(size_bytes)
        try:
            return speeds(made.memory, turn)
        finally:
            made.close()
    arena = arena_of(kind, size_bytes)
    try:
        if kind == "exported":
            arena.describe()
        return speeds(arena.memory[:size_bytes], turn)
    finally:
        arena.close()


def reader(pipe: Connection) -> None:
    """Measure what is asked for, until None is; have the other process use the GPU now and then."""
    torch.cuda.set_device(DEVICE)
    torch.zeros(1, device=DEVICE)

    def turn(what: str) -> None:
        torch.cuda.synchronize()
        pipe.send(what)
        pipe.recv()

    while (asked := pipe.recv()) is not None:
        kind, size_bytes, description = asked
        try:
            if kind.endswith("arena"):
                memory = open_arena(description, [], DEVICE)
                found: dict[str, Any] = speeds(memory[:size_bytes], turn)
                torch.cuda.synchronize()
                close_arena(memory)
            elif kind == "virtual shared":
                made = VirtualMemory(size_bytes, file=recv_handle(pipe))
                found = speeds(made.memory, turn)
                made.close()
            else:
                found = own(kind, size_bytes, turn)
        except (RuntimeError, OSError) as error:
            found = {"error": str(error).splitlines()[0]}
        torch.cuda.empty_cache()
        pipe.send(found)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    options = parser.parse_args()
    run, rows = RunDirectory(options.run), []
    run.claim({"kind": "shared reads"}, same=("kind",), device=str(DEVICE))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=reader, args=(theirs,))
    process.start()
    torch.cuda.set_device(DEVICE)
    small = torch.zeros(1 << 20, device=DEVICE)

    def ask(kind: str, size_bytes: int, written: torch.Tensor, description: dict[str, Any] | None = None) -> dict[str, Any]:
        ours.send((kind, size_bytes, description))
        if kind == "virtual shared":
            send_handle(ours, made.file(), process.pid)
        while (answer := ours.recv()) in (TURN, WRITE):
            if answer == TURN:
                small.add_(1)
            else:
                written.uniform_()
            torch.cuda.synchronize()
            ours.send(None)
        return answer  # type: ignore[no-any-return]

    def note(kind: str, size_bytes: int, found: dict[str, Any]) -> None:
        rows.append({"memory": kind, "gib": size_bytes // GIB, **found})
        print(rows[-1], flush=True)
        run.write_json("summary.json", rows)

    for size_bytes in SIZES:
        elsewhere = torch.empty(size_bytes // 4, device=DEVICE)
        for kind in ("pytorch", "malloc", "odd malloc", "exported", "virtual"):
            note(kind, size_bytes, ask(kind, size_bytes, elsewhere))
        del elsewhere
        for kind in ("arena", "odd arena"):
            arena = arena_of(kind, size_bytes)
            memory = arena.memory[:size_bytes]
            note(kind, size_bytes, ask(kind, size_bytes, memory.view(torch.float32), arena.describe()))
            note(f"{kind}'s owner", size_bytes, speeds(memory))
            del memory
            arena.close()
        torch.cuda.empty_cache()
        made = VirtualMemory(size_bytes, shared=True)
        note("virtual shared", size_bytes, ask("virtual shared", size_bytes, made.memory.view(torch.float32)))
        made.close()
    ours.send(None)
    process.join()


if __name__ == "__main__":
    main()
