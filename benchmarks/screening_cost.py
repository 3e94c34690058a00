"""What screening costs on a processor: seconds of processor time, processes and tasks loaded, by phase.

    python benchmarks/screening_cost.py --tasks transformer_block,diag_matmul --out DIR

Screens all proposals of the built-in policy for some tasks, as a search over a suite does. Its compilers are real: C++
kernels and torch.compile. Elapsed time depends on what else the machine does; processor time hardly does.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelwright.judge import Settings
from kernelwright.records.screened import Screened
from kernelwright.search.searchers import ScreenJob, Searchers
from kernelwright.tasks import load_task

LOADED_S = 0.02
"""Seconds of the phase `task` above which a candidate's process had to load the task."""


def summary_of(found: Sequence[Screened], elapsed_s: float, processor_s: float) -> dict[str, Any]:
    """Counts and seconds of some estimates."""
    spent_s: Counter[str] = Counter()
    for one in found:
        spent_s.update(one.spent_s)
    return {
        "screened": len(found),
        "right": sum(one.correct for one in found),
        "elapsed_s": round(elapsed_s, 1),
        "processor_s": round(processor_s, 1),
        "processor_s_each": round(processor_s / max(1, len(found)), 2),
        "tasks_loaded": sum(one.spent_s.get("task", 0.0) > LOADED_S for one in found),
        "spent_s": {name: round(seconds, 2) for name, seconds in sorted(spent_s.items())},
        "candidates": [
            {
                "task": one.task,
                "techniques": one.techniques,
                "estimate": one.estimate,
                "reason": one.reason,
                "seconds": round(one.elapsed_s, 2),
            }
            for one in found
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Screen and write `screening_cost.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="transformer_block,diag_matmul,row_softmax", help="built-in ids, with commas")
    parser.add_argument("--budget", type=int, default=12, help="proposals for a task")
    parser.add_argument("--searchers", type=int, default=2, help="tasks at once")
    parser.add_argument("--out", type=Path, required=True, help="folder of the numbers")
    options = parser.parse_args(arguments)
    jobs = [ScreenJob(load_task(name), options.budget) for name in options.tasks.split(",")]
    start_s = time.monotonic()
    with Searchers(["cpu"], Settings(threads=1), options.searchers) as searchers:
        found = [one for _, one in searchers.screen(jobs) if isinstance(one, Screened)]
    elapsed_s = time.monotonic() - start_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = summary_of(found, elapsed_s, used.ru_utime + used.ru_stime)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "screening_cost.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
