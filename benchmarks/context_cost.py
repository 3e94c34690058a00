"""Measures what a CUDA context costs beside others, and what unjoined work in a stream gains, by connections of the device.

    python3 benchmarks/context_cost.py RUN_DIR --device cuda:0

`CUDA_DEVICE_MAX_CONNECTIONS` says how many queues a context makes. With one a context took a third of the time on an H200,
and the judge accepted cheats on streams that nobody joins, since all streams share it. Two questions decide whether
processes in which candidates are *timed* may have one queue, where those in which they are *checked* have the usual eight:

- `contexts`: seconds until a process that is forked with torch imported has a context, has run a kernel, and has multiplied,
  where so many begin at once;
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
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kernelwright.records import RunDirectory

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
CONNECTIONS = (None, 1, 2, 4)
AT_ONCE = (1, 4, 8, 14)
SIZE, CALLS = 4096, 20


def contexts(pipe: Connection, device: str) -> None:
    """Take the first steps of a worker, and say how long each took."""
    pipe.recv()
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


def unjoined(pipe: Connection, device: str) -> None:
    """Time a product on another stream, which the current one waits for or not; and how long the device works at it."""
    pipe.recv()
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


def together(work: Callable[[Connection, str], None], count: int, device: str) -> tuple[list[dict[str, float]], float]:
    """Answers of so many fresh processes that begin at once, and the seconds until the last has come."""
    fork = multiprocessing.get_context("fork")
    ends = []
    for _ in range(count):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=work, args=(theirs, device))
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
    return found, took_s


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    run, rows = RunDirectory(options.run), []
    for connections in CONNECTIONS:
        os.environ.pop(VARIABLE, None)
        if connections is not None:
            os.environ[VARIABLE] = str(connections)
        for count in AT_ONCE:
            found, took_s = together(contexts, count, options.device)
            means = {name: round(statistics.mean(one[name] for one in found), 3) for name in found[0]}
            rows.append({"connections": connections, "at_once": count, **means, "each_s": round(took_s / count, 3)})
            print(rows[-1], flush=True)
        (told,), _ = together(unjoined, 1, options.device)
        rows.append({"connections": connections, **{name: round(value, 1) for name, value in told.items()}})
        print(rows[-1], flush=True)
        run.write_json("summary.json", rows)
    # It asks torch for the GPU, after which no fork could use one.
    run.claim({"kind": "context cost"}, same=("kind",), device=options.device)


if __name__ == "__main__":
    main()
