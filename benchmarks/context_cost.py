"""Measures what a CUDA context costs beside others, and what unjoined work in a stream gains, by connections of the device.

    python3 benchmarks/context_cost.py RUN_DIR             # on one GPU, and spread over all of the host
    python3 benchmarks/context_cost.py RUN_DIR --contexts-only    # with the usual connections, and no unjoined work

`CUDA_DEVICE_MAX_CONNECTIONS` says how many queues a context makes. With one a context took a third of the time on an H200,
and the judge accepted cheats on streams that nobody joins, since all streams share it. Two questions decide whether
processes in which candidates are *timed* may have one queue, where those in which they are *checked* have the usual eight:

- `contexts`: seconds until a process that is forked with torch imported has a context, has run a kernel, and has multiplied,
  where so many begin at once, and until all have ended. Each sees one GPU, as a judge's workers do. If the driver's lock is
  the host's, they take as long on several GPUs as on one;
- `unjoined`: time by events on the current stream around a product on another stream, joined and not joined. Where the two
  are alike the cheat gains nothing.

Every process is fresh. Writes `summary.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pynvml
import torch

from kernelwright.records import RunDirectory

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
CONNECTIONS = (None, 1)
AT_ONCE = (1, 16)
SIZE, CALLS = 4096, 20
DEVICE = "cuda:0"
"""The one GPU that a process sees."""


def visible_gpus() -> list[str]:
    """GPUs that `CUDA_VISIBLE_DEVICES` leaves, as it names them; torch is not asked, since no fork could use one then."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    pynvml.nvmlInit()
    return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]


def contexts(pipe: Connection, gpu: str) -> None:
    """Take the first steps of a worker, and say how long each took."""
    pipe.recv()
    os.environ["CUDA_VISIBLE_DEVICES"], device = gpu, DEVICE
    steps: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("context_s", lambda: torch.zeros(1, device=device)),
        ("kernel_s", lambda: torch.ones(1 << 20, device=device).mul_(2)),
        ("product_s", lambda: torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)),
    )
    found = {}
    for name, step in steps:
        start_s = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        found[name] = time.perf_counter() - start_s
    pipe.send(found)


def unjoined(pipe: Connection, gpu: str) -> None:
    """Time a product on another stream, which the current one waits for or not; and how long the device works at it."""
    pipe.recv()
    os.environ["CUDA_VISIBLE_DEVICES"], device = gpu, DEVICE
    torch.cuda.set_device(device)
    matrix = torch.randn(SIZE, SIZE, device=device)
    side = torch.cuda.Stream()
    found: dict[str, float] = {}
    for name, joins in (("joined_us", True), ("unjoined_us", False)):
        events, whole = [], []
        for _ in range(CALLS):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_s = time.perf_counter()
            begin.record()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                matrix @ matrix
            if joins:
                torch.cuda.current_stream().wait_stream(side)
            end.record()
            end.synchronize()
            torch.cuda.synchronize()
            whole.append(1e6 * (time.perf_counter() - start_s))
            events.append(1e3 * begin.elapsed_time(end))
        found[name] = statistics.median(events)
        found[name.replace("_us", "_until_quiet_us")] = statistics.median(whole)
    pipe.send(found)


def together(
    work: Callable[[Connection, str], None], count: int, gpus: Sequence[str]
) -> tuple[list[dict[str, float]], float, float]:
    """Answers of so many fresh processes that begin at once on GPUs in turn, and the seconds until the last has come, and
    then until the last has ended."""
    fork = multiprocessing.get_context("fork")
    ends = []
    for number in range(count):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=work, args=(theirs, gpus[number % len(gpus)]))
        process.start()
        theirs.close()
        ends.append((ours, process))
    start_s = time.perf_counter()
    for ours, _ in ends:
        ours.send(None)
    found = [ours.recv() for ours, _ in ends]
    took_s = time.perf_counter() - start_s
    for _, process in ends:
        process.join()
    return found, took_s, time.perf_counter() - start_s - took_s


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--contexts-only", action="store_true", help="only contexts, with the usual connections")
    options = parser.parse_args()
    run, rows, gpus = RunDirectory(options.run), [], visible_gpus()
    for connections in CONNECTIONS[:1] if options.contexts_only else CONNECTIONS:
        os.environ.pop(VARIABLE, None)
        if connections is not None:
            os.environ[VARIABLE] = str(connections)
        for spread in (gpus[:1], gpus)[: len(gpus)]:
            for count in AT_ONCE:
                found, took_s, ended_s = together(contexts, count, spread)
                means = {name: round(statistics.mean(one[name] for one in found), 3) for name in found[0]}
                each = {"each_s": round(took_s / count, 3), "each_end_s": round(ended_s / count, 3)}
                rows.append({"connections": connections, "gpus": len(spread), "at_once": count, **means, **each})
                print(rows[-1], flush=True)
        if not options.contexts_only:
            (told,), *_ = together(unjoined, 1, gpus)
            rows.append({"connections": connections, **{name: round(value, 1) for name, value in told.items()}})
            print(rows[-1], flush=True)
        run.write_json("summary.json", rows)
    # It asks torch for the GPU, after which no fork could use one.
    run.claim({"kind": "context cost"}, same=("kind",), device=DEVICE)


if __name__ == "__main__":
    main()
