"""What do kernel launches of a process cost after its operators were observed once, and after they were profiled once?

    python benchmarks/profiler_cost.py OUT.json

In one process: a chain of small launches before, after the judge's own look at operators, by PyTorch's observer, and after
PyTorch's profiler, which only watched the processor. Why the judge does not ask that one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from kernelwright.judge.worker.harness import operators_of

LAUNCHES = 300
ROUNDS = 41


def launch_us(x: torch.Tensor) -> float:
    """Median over rounds of the time of one launch in a chain, by CUDA events."""
    taken = []
    for _ in range(ROUNDS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        time.sleep(1e-3)
        began.record()
        for _ in range(LAUNCHES):
            x.add_(1.0)
        ended.record()
        torch.cuda.synchronize()
        taken.append(began.elapsed_time(ended) * 1e3 / LAUNCHES)
    return statistics.median(taken)


def main() -> None:
    """Measure and write."""
    x = torch.zeros(256, device="cuda")
    launch_us(x)
    found = {"before_us": launch_us(x)}
    with tempfile.TemporaryDirectory() as folder:
        operators_of(lambda: x.add_(1.0), Path(folder))
    found["after_observer_us"] = launch_us(x)
    with torch.autograd.profiler.profile():
        x.add_(1.0)
    found["after_profiler_us"] = launch_us(x)
    found["after_profiler_again_us"] = launch_us(x)
    machine = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    Path(sys.argv[1]).write_text(json.dumps(found | machine) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
