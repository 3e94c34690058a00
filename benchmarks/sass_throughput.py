"""Schedules measured per second by the GPU backend, kernel by kernel; the design target is 100 on a 20 us kernel.

    python benchmarks/sass_throughput.py --out throughput.json                        # the corpus, 10 s each
    python benchmarks/sass_throughput.py corpus:gemm_leakyrelu launch.toml --seconds 30 --out throughput.json

    python benchmarks/sass_throughput.py --side-by-side 6 --out throughput.json       # six processes share the GPU in turns

Needs a GPU. Schedules come from random legal play with a return to the original now and then. The wall-clock time of a
schedule is split into choosing and playing moves, building the cubin and asking the process that runs it (`measure`),
so that it can be seen whether the GPU or the host is the limit. Outputs of every schedule are compared with the
original's when `--check-all` is given, as a campaign that looks for wrong schedules would.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from kernelwright.assembly.gpu_backend import GpuBackend
from kernelwright.gpu import disassemble
from kernelwright.gpu.driver import gpu_identity
from kernelwright.gpu.launch_spec import Target
from kernelwright.gpu.launcher import TURNS_VARIABLE, LauncherFactory, cuda_launcher
from kernelwright.gpu.target import corpus_specs, load_target
from kernelwright.records.run_directory import capture_environment
from kernelwright.sass import Schedule, load

MOVES_PER_SCHEDULE = 3
RETURN_PROBABILITY = 0.05
_MEETING_TIMEOUT_S = 120.0


def measure(
    target: Target,
    seconds: float,
    *,
    check_all: bool = False,
    seed: int = 0,
    factory: LauncherFactory = cuda_launcher,
    begin_together: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Measure schedules of one kernel for a while and say how fast that went."""
    program = load(target.cubin, disassemble)
    schedule = Schedule(program.kernel(target.spec.entry))
    rng = random.Random(seed)
    playing_s, speedups, blocks, schedules = 0.0, [], [], 0
    with GpuBackend(program, target, check_all=check_all, factory=factory) as backend:
        control = backend.control()
        begin_together()
        begin = time.perf_counter()
        while (now := time.perf_counter()) - begin < seconds:
            if rng.random() < RETURN_PROBABILITY:
                while schedule.history:
                    schedule.undo()
            for _ in range(MOVES_PER_SCHEDULE):
                move = schedule.random_move(rng)
                if move is not None:
                    schedule.play(move)
            playing_s += time.perf_counter() - now
            verdict = backend.measure(schedule)
            schedules += 1
            if verdict.speedup is not None:
                speedups.append(verdict.speedup)
                blocks.append(verdict.blocks)
        wall_s = time.perf_counter() - begin
        return {
            "kernel": target.spec.name,
            "signature": target.spec.signature,
            "original_us": control.original_us,
            "noise_floor": control.noise_floor,
            "schedules": schedules,
            "measured": sum(backend.counts.values()),
            "measured_per_second": sum(backend.counts.values()) / wall_s,
            "share_of_time_in_moves": playing_s / wall_s,
            "blocks_median": statistics.median(blocks) if blocks else None,
            "best_speedup_seen_and_not_confirmed": max(speedups, default=None),
            "statuses": {str(status): count for status, count in backend.counts.items()},
            "restarts": backend.restarts,
        }


def measure_side_by_side(
    target: Target, seconds: float, processes: int, *, check_all: bool = False, factory: LauncherFactory = cuda_launcher
) -> dict[str, Any]:
    """Let several processes measure at the same time, one at a time on the GPU, and add up what they did."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[TURNS_VARIABLE] = f"{folder}/turns"
        try:
            with ProcessPoolExecutor(processes, context, initializer=_meet_at, initargs=(barrier,)) as pool:
                work = [pool.submit(_measure_one, target, seconds, check_all, seed, factory) for seed in range(processes)]
                found = [done.result() for done in work]
        finally:
            del os.environ[TURNS_VARIABLE]
    summed = ("schedules", "measured", "measured_per_second", "restarts")
    statuses: Counter[str] = Counter()
    for one in found:
        statuses.update(one["statuses"])
    return {
        **found[0],
        **{name: sum(one[name] for one in found) for name in summed},
        "noise_floor": max(one["noise_floor"] for one in found),
        "share_of_time_in_moves": statistics.mean(one["share_of_time_in_moves"] for one in found),
        "statuses": dict(statuses),
    }


def _meet_at(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


_barrier: Any = None


def _measure_one(target: Target, seconds: float, check_all: bool, seed: int, factory: LauncherFactory) -> dict[str, Any]:
    # A process that fails must not keep the others waiting.
    def meet() -> None:
        _barrier.wait(_MEETING_TIMEOUT_S)

    return measure(target, seconds, check_all=check_all, seed=seed, factory=factory, begin_together=meet)


def main() -> int:
    """Measure every target named, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="as `kernelwright sass optimize` takes them; else the corpus")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side-by-side", type=int, default=1, help="processes that share the GPU, one at a time on it")
    parser.add_argument("--check-all", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    gpu = gpu_identity()
    names = options.targets or [f"corpus:{name}" for name in corpus_specs()]
    results = []
    for name in names:
        target = load_target(name, gpu.architecture)
        if options.side_by_side > 1:
            found = measure_side_by_side(target, options.seconds, options.side_by_side, check_all=options.check_all)
        else:
            found = measure(target, options.seconds, check_all=options.check_all, seed=options.seed)
        results.append({**found, "side_by_side": options.side_by_side})
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        # After each one, so that a run that is cut short has shown something.
        record = {"environment": capture_environment("cuda"), "seconds": options.seconds, "results": results}
        options.out.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
