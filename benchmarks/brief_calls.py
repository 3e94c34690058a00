"""What makes the host's part of a brief call on a GPU slow, by CUDA events around single calls.

    python benchmarks/brief_calls.py modes      # after a pause, a busy wait, another process on the GPU, repeated calls
    python benchmarks/brief_calls.py cores      # the same loop on each core of the processor in turn
    python benchmarks/brief_calls.py contexts   # how long processes take to make their CUDA contexts, one and eight

Prints JSON: quartiles in microseconds (`modes`), medians in microseconds (`cores`), seconds (`contexts`). Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import torch

CALLS = 60
Call = Callable[[int], Any]


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("modes", "cores", "contexts"))
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    found = {"modes": modes, "cores": cores, "contexts": contexts}[options.what]()
    print(json.dumps(found, indent=1))


def operators() -> dict[str, Call]:
    """Brief ones, warmed up; a call's number picks one of four inputs."""
    x = [torch.randn(16, 16384, device="cuda") for _ in range(4)]
    images = [torch.randn(16, 3, 32, 32, device="cuda") for _ in range(4)]
    h = [torch.randn(128, 512, device="cuda") for _ in range(4)]
    convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)).cuda()
    mlp = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)).cuda()
    compiled = torch.compile(torch.nn.functional.gelu)
    made: dict[str, Call] = {
        "gelu": lambda k: torch.nn.functional.gelu(x[k % 4]),
        "gelu, compiled": lambda k: compiled(x[k % 4]),
        "conv": lambda k: convolution(images[k % 4]),
        "mlp": lambda k: mlp(h[k % 4]),
    }
    for call in made.values():
        for k in range(20):
            call(k)
    torch.cuda.synchronize()
    return made


def timed_us(call: Call, k: int, *, ready: bool = True) -> float:
    """One call between two events; `ready` has the device switch to this process first."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if ready:
        start.record()
        torch.cuda.synchronize()
    start.record()
    call(k)
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop) * 1e3)


def modes() -> dict[str, dict[str, list[float]]]:
    """Quartiles of every operator after whatever may come between two calls."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_flush_on_request, args=(theirs,), daemon=True)
    other.start()

    def flush(wait: Callable[[], None]) -> None:
        ours.send(1)
        wait()
        ours.recv()

    def spin() -> None:
        while not ours.poll(0):
            pass

    def busy(seconds: float) -> None:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            pass

    between: dict[str, tuple[Callable[[], None], int]] = {"nothing": (lambda: None, 0)}
    for milliseconds in (0.2, 1.0, 4.0):
        between[f"pause of {milliseconds:g} ms"] = (partial(time.sleep, milliseconds / 1e3), 0)
        between[f"busy wait of {milliseconds:g} ms"] = (partial(busy, milliseconds / 1e3), 0)
    for repeats in (0, 1, 3):
        between[f"another process, asleep, then {repeats} calls"] = (lambda: flush(lambda: None), repeats)
        between[f"another process, awake, then {repeats} calls"] = (lambda: flush(spin), repeats)
    found: dict[str, dict[str, list[float]]] = {}
    for name, call in operators().items():
        found[name] = {}
        for mode, (prepare, repeats) in between.items():
            samples = []
            for k in range(CALLS):
                prepare()
                for repeat in range(repeats):
                    call(k + 1 + repeat)
                    torch.cuda.synchronize()
                samples.append(timed_us(call, k))
            found[name][mode] = [round(value, 1) for value in statistics.quantiles(samples, n=4)]
    ours.send(None)
    other.join()
    return found


def _flush_on_request(connection: Connection) -> None:
    buffer = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    while (asked := connection.recv()) is not None:
        buffer.fill_(asked)
        torch.cuda.synchronize()
        connection.send(asked)


def cores() -> list[dict[str, float]]:
    """Three rounds over the cores."""
    call = operators()["conv"]
    mine = sorted(os.sched_getaffinity(0))
    rounds = []
    for _ in range(3):
        found = {}
        for core in mine:
            os.sched_setaffinity(0, {core})
            found[str(core)] = round(statistics.median(timed_us(call, k, ready=False) for k in range(CALLS)), 1)
        rounds.append(found)
    return rounds


def contexts() -> dict[str, list[float]]:
    """How long each of some processes that begin together takes."""
    return {f"{count} at once": _together(count) for count in (1, 8)}


def _together(count: int) -> list[float]:
    context = multiprocessing.get_context("fork")
    took: Any = context.Queue()
    begin = context.Event()
    processes = [context.Process(target=_make_context, args=(took, begin)) for _ in range(count)]
    for process in processes:
        process.start()
    begin.set()
    found = sorted(took.get() for _ in processes)
    for process in processes:
        process.join()
    return found


def _make_context(took: Any, begin: Event) -> None:
    begin.wait()
    start_s = time.perf_counter()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    took.put(round(time.perf_counter() - start_s, 2))


if __name__ == "__main__":
    main()
