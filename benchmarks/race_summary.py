"""Sums up a searched suite: how far its confirmed winners are ahead of eager, torch.compile and each task's best baseline.

    python benchmarks/race_summary.py RUN_DIR

RUN_DIR is what `kernelwright bench SUITE --policy builtin` made, finished or not. Writes `summary.json` beside it and prints
a line for each task. A task counts once its winner is confirmed, or once nothing that was judged is faster; it then counts
as 1.0 against eager, since its user keeps the reference. Baselines whose outputs the next call overwrites do not count
towards the best.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernelwright.records import Evaluation, RunDirectory
from kernelwright.report.rows import BASELINE_POLICY

KEEPS_CONTRACT = ("compile", "cudagraph-fresh", "cudnn")
"""Baselines that a user could put in the reference's place."""


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return round(math.exp(sum(logs) / len(logs)), 4) if logs else None


def row_of(task: str, found: Sequence[Evaluation]) -> dict[str, Any]:
    """Winner and baselines of one task, as speedups over eager."""
    baselines = {one.techniques[0]: one for one in found if one.policy == BASELINE_POLICY and one.accepted}
    own = [one for one in found if one.policy != BASELINE_POLICY]
    latest = {(one.candidate_sha256, one.confirms): one for one in own}
    winners = [one for one in latest.values() if one.confirms and one.is_improvement]
    winner = max(winners, key=lambda one: one.speedup_low or 0.0, default=None)
    owed = any(one.is_improvement and (one.candidate_sha256, True) not in latest for one in own) and winner is None
    best_name, best = "eager", None
    for name in KEEPS_CONTRACT:
        one = baselines.get(name)
        if one is not None and (one.speedup or 0.0) > (best.speedup or 0.0 if best is not None else 1.0):
            best_name, best = name, one
    speedup = winner.speedup if winner is not None else 1.0
    row: dict[str, Any] = {"task": task, "judged": len(own), "complete": not owed and "compile" in baselines}
    row |= {"speedup": speedup, "low": winner and winner.speedup_low, "high": winner and winner.speedup_high}
    row |= {"techniques": list(winner.techniques) if winner else [], "best_baseline": best_name}
    row["baselines"] = {name: one.speedup for name, one in sorted(baselines.items())}
    row["reference_us"] = next((one.reference_us for one in (winner, *baselines.values()) if one is not None), None)
    row["best_baseline_speedup"] = best.speedup if best is not None else 1.0
    to_beat = (best.speedup_high or 1.0) if best is not None else 1.0
    row["ahead"] = winner is not None and (winner.speedup_low or 0.0) > to_beat
    return row


def part(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of some tasks."""
    compiled = [row["speedup"] / row["baselines"]["compile"] for row in rows if "compile" in row["baselines"]]
    return {
        "tasks": len(rows),
        "verified": sum(bool(row["techniques"]) for row in rows),
        "geomean_vs_eager": geomean(row["speedup"] for row in rows),
        "geomean_vs_compile": geomean(compiled),
        "geomean_best_baseline_vs_eager": geomean(row["best_baseline_speedup"] for row in rows),
        "geomean_vs_best_baseline": geomean(row["speedup"] / row["best_baseline_speedup"] for row in rows),
        "ahead_of_best_baseline": sum(row["ahead"] for row in rows),
        "below_best_baseline": sum(row["speedup"] < 0.98 * row["best_baseline_speedup"] for row in rows),
    }


def main(run_dir: Path) -> None:
    """Write and print."""
    run = RunDirectory(run_dir)
    names = [task["id"] for task in run.read_json("tasks.json") or []]
    found: dict[str, list[Evaluation]] = {name: [] for name in names}
    for one in run.evaluations():
        found[one.task].append(one)
    rows = [row_of(name, found[name]) for name in names]
    complete = [row for row in rows if row["complete"]]
    levels = sorted({row["task"].split("/")[1] for row in complete if row["task"].count("/") > 1})
    summary = part(complete) | {"asked": len(names), "screened": sum(1 for _ in run.screened())}
    summary["judged"] = sum(row["judged"] for row in rows)
    summary["levels"] = {level: part([row for row in complete if row["task"].split("/")[1] == level]) for level in levels}
    (run_dir / "summary.json").write_text(json.dumps(summary | {"rows": rows}, indent=1) + "\n")
    for row in sorted(rows, key=lambda row: -row["speedup"] / row["best_baseline_speedup"]):
        spread = f"[{row['low']:.3f}, {row['high']:.3f}]" if row["low"] else ""
        best = f"{row['best_baseline']} {row['best_baseline_speedup']:.2f}"
        what = ", ".join(row["techniques"]) or "no winner"
        mark = "" if row["complete"] else " (incomplete)"
        times = f"{row['reference_us'] or 0:9.1f} us {row['speedup']:7.3f} {spread:16}"
        print(f"{row['task']:24} {times} {best:22} {what}{mark}")
    print(json.dumps({name: value for name, value in summary.items() if name != "levels"}, indent=1))
    print(json.dumps(summary["levels"]))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
