"""Compares winners with CUDA-L1's own kernels, where both were judged on one GPU in the same minutes.

    python benchmarks/race_beside.py results/kernelbench-h200/cuda-l1-winners-tenth-4-h200 \\
        results/kernelbench-h200/cuda-l1-kernels-tenth-4-h200 --summary results/kernelbench-h200/summary.json

The first run judged the sources that `race_winners.py` writes, the second the suite's own kernels under the contract
`kernelbench`. A task without a winner counts as eager, and so does one whose winner is rejected. Where a kernel breaks its
contract its user takes the best baseline, whose speedup is that of the summary: it was timed at another time, maybe on
another GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from race_numbers import Run, geomean

from kernelwright.report.rows import BASELINE_POLICY


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each task, and the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("winners", type=Path, metavar="WINNERS_RUN")
    parser.add_argument("kernels", type=Path, metavar="KERNELS_RUN")
    parser.add_argument("--summary", type=Path, required=True, help="of the race, for the best baselines")
    options = parser.parse_args(arguments)
    ours = {one.task: one.speedup for one in Run(options.winners).evaluations() if one.policy != BASELINE_POLICY}
    theirs = Run(options.kernels).released()
    summary = json.loads(options.summary.read_text(encoding="utf-8"))
    known = [line for group in ("rows", "h100_rows") for line in summary.get(group, [])]
    best = {line["task"]: line["best_baseline_speedup"] for line in known if line["best_baseline_speedup"]}
    kept, broken = list[float](), list[float]()
    for task, speedup in theirs.items():
        mine, theirs_or_best = ours.get(task) or 1.0, speedup or best[task]
        (kept if speedup else broken).append(mine / theirs_or_best)
        what = "their kernel" if speedup else "the best baseline"
        print(f"{task}: ours {mine:.2f} of eager, {what} {theirs_or_best:.2f}, ratio {mine / theirs_or_best:.2f}")
    print(f"{len(kept)} kernels that keep their contract: {geomean(kept)}")
    print(f"{len(broken)} that break it, the best baseline in their place: {geomean(broken)}")
    print(f"all {len(theirs)}: {geomean(kept + broken)}")


if __name__ == "__main__":
    main()
