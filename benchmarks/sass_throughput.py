"""Schedules measured per second by the GPU backend, kernel by kernel; the design target is 100 on a 20 us kernel.

    python benchmarks/sass_throughput.py --out throughput.json                        # the corpus, 10 s each
    python benchmarks/sass_throughput.py corpus:gemm_leakyrelu launch.toml --seconds 30 --out throughput.json

Needs a GPU. Schedules come from random legal play with a return to the original now and then. The wall-clock time of a
schedule is split into choosing and playing moves, building the cubin and asking the process that runs it (`measure`),
so that it can be seen whether the GPU or the host is the limit. Outputs of every schedule are compared with the
original's when `--check-all` is given, as a campaign that looks for wrong schedules would.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from kernelwright.records.run_directory import capture_environment
from kernelwright.sass import Schedule, load
from kernelwright.toolchain import disassemble
from kernelwright.toolchain.driver import gpu_identity
from kernelwright.tuning.corpus import corpus_specs
from kernelwright.tuning.launcher import LauncherFactory, cuda_launcher
from kernelwright.tuning.measure import GpuBackend
from kernelwright.tuning.target import Target, load_target

MOVES_PER_SCHEDULE = 3
RETURN_PROBABILITY = 0.05


def measure(
    target: Target, seconds: float, *, check_all: bool = False, seed: int = 0, factory: LauncherFactory = cuda_launcher
) -> dict[str, Any]:
    """Measure schedules of one kernel for a while and say how fast that went."""
    program = load(target.cubin, disassemble)
    schedule = Schedule(program.kernel(target.spec.entry))
    rng = random.Random(seed)
    playing_s, speedups, blocks, schedules = 0.0, [], [], 0
    with GpuBackend(program, target, check_all=check_all, factory=factory) as backend:
        control = backend.control()
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


def main() -> int:
    """Measure every target named, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="as `kernelwright sass optimize` takes them; else the corpus")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-all", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    gpu = gpu_identity()
    names = options.targets or [f"corpus:{name}" for name in corpus_specs()]
    results = []
    for name in names:
        target = load_target(name, gpu.architecture)
        results.append(measure(target, options.seconds, check_all=options.check_all, seed=options.seed))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        # After each one, so that a run that is cut short has shown something.
        record = {"environment": capture_environment("cuda"), "seconds": options.seconds, "results": results}
        options.out.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
