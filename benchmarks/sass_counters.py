"""What limits each kernel of the SASS campaign on this GPU, by Nsight Compute's counters.

    python benchmarks/sass_counters.py --out counters.json                     # the campaign's kernels, as compiled
    python benchmarks/sass_counters.py corpus:softmax --out counters.json

Each kernel is launched in one process under `ncu`, which replays it until all counters are read, with the clocks left alone.
The second launch counts. For each kernel: how much of the peak of memory and of the multiprocessors it reaches, how often a
scheduler issues, warps per scheduler, and for what a warp waits between two instructions (cycles per issued instruction, the
greatest first). A schedule can shorten waits on fixed latencies, pipes and scoreboards; it cannot move more bytes a second.

Needs a GPU whose counters may be read, and `ncu`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sass_campaign import TARGETS

from kernelwright.errors import ToolchainError
from kernelwright.gpu.driver import gpu_identity
from kernelwright.gpu.launcher import cuda_launcher
from kernelwright.gpu.target import load_target
from kernelwright.records.run_directory import capture_environment

LAUNCHES = 2
TIMEOUT_S = 240.0
SHARES = {
    "memory_pct_of_peak": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct_of_peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_pct_of_peak": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_pct_of_peak": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "issue_slots_used_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_per_scheduler": "smsp__warps_active.avg.per_cycle_active",
    "multiprocessors_active_pct": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
}
_STALLS = [
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
]
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def main() -> int:
    """Profile every target named, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="as `kernelwright sass optimize` takes them; else the campaign's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.targets or list(TARGETS.values())
    if options.launch:
        launch(names)
        return 0
    if options.out is None:
        parser.error("--out is wanted")
    kernels = profiled(names)
    record = {"environment": capture_environment("cuda"), "kernels": kernels}
    options.out.write_text(json.dumps(record, indent=1))
    for name, found in kernels.items():
        waits = ", ".join(f"{reason} {cycles:.1f}" for reason, cycles in list(found["stall_cycles_per_issue"].items())[:4])
        print(
            f"{name:50} issue {found['issue_slots_used_pct']:5.1f} %  memory {found['memory_pct_of_peak']:5.1f} %  {waits}"
        )
    return 0


def launch(names: list[str]) -> None:
    """Launch every kernel, here: this is the process that ncu looks at."""
    architecture = gpu_identity().architecture
    for name in names:
        target = load_target(name, architecture)
        launcher = cuda_launcher(target.spec)
        handle = launcher.load(target.cubin)
        for _ in range(LAUNCHES):
            launcher.outputs(handle, 1)


def profiled(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return what ncu's counters say of each target, in the order of the names.

    Raises:
        ToolchainError: ncu is missing or could not read the counters.
    """
    metrics = [*SHARES.values(), *(STALL.format(reason) for reason in _STALLS), "gpu__time_duration.sum"]
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--metrics",
        ",".join(metrics),
    ]
    command += [sys.executable, __file__, "--launch", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"Wanted counters from ncu; got {error}.") from error
    # ncu's own lines begin with ==; the table with the first column's name.
    _, found, table = done.stdout.partition('"ID"')
    if not found:
        raise ToolchainError(
            f"Wanted counters from ncu; it ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}"
        )
    rows = list(csv.DictReader(io.StringIO(found + table)))[1:]  # the first row holds units
    if len(rows) != LAUNCHES * len(names):
        seen = sorted({row["Kernel Name"] for row in rows})
        raise ToolchainError(f"Wanted {LAUNCHES} launches of each of {len(names)} kernels; ncu saw {len(rows)}, of {seen}.")
    return {name: read(row) for name, row in zip(names, rows[LAUNCHES - 1 :: LAUNCHES], strict=True)}


def read(row: dict[str, str]) -> dict[str, Any]:
    """Turn a row of ncu's table into numbers; what this GPU has no counter for is left out."""

    def number(metric: str) -> float | None:
        try:
            return float(row.get(metric, "").replace(",", ""))
        except ValueError:
            return None

    waits = {reason: number(STALL.format(reason)) for reason in _STALLS}
    told = {reason: cycles for reason, cycles in waits.items() if cycles is not None}
    duration_ns = number("gpu__time_duration.sum")
    return {
        "duration_us": None if duration_ns is None else duration_ns / 1e3,
        **{label: number(metric) for label, metric in SHARES.items()},
        "stall_cycles_per_issue": dict(sorted(told.items(), key=lambda item: -item[1])),
    }


if __name__ == "__main__":
    sys.exit(main())
