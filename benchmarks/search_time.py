"""Where each second of a search goes: every proposal judged, as it was, beside screening first.

    python benchmarks/search_time.py --task transformer_block --budget 6 --out DIR

Runs the same search twice on the CPU and writes `search_time.json` and `search_time.md`: seconds by phase, from the records.
Phases overlap where several processes are at work, so that their sum may exceed the elapsed time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelwright.judge import Settings
from kernelwright.records import RunDirectory
from kernelwright.records.policy import Look
from kernelwright.rewrites.builtin import BuiltinPolicy
from kernelwright.search.optimize import optimize
from kernelwright.tasks import load_task

HOW: dict[Look, str] = {"judged": "every proposal judged", "screened": "screened, the best judged"}


def seconds_of(run: RunDirectory) -> dict[str, float]:
    """Seconds of a run by phase."""
    spent_s: Counter[str] = Counter()
    for one in run.screened():
        for name, seconds in one.spent_s.items():
            spent_s[f"screening: {name}"] += seconds
    for found in run.evaluations():
        kind = "confirming" if found.confirms else "judging"
        told = dict(found.checks.get("spent_s", {}))
        for name, seconds in told.items():
            spent_s[f"{kind}: {name.partition(' ')[2]}, both sides"] += seconds
        waited_s = float(found.checks.get("waited_s", 0.0))
        spent_s[f"{kind}: waiting for the device"] += waited_s
        spent_s[f"{kind}: inputs, truth, comparing, flushing caches"] += max(
            0.0, found.elapsed_s - waited_s - sum(told.values())
        )
    return {name: round(seconds, 2) for name, seconds in sorted(spent_s.items())}


def table_of(found: dict[str, dict[str, Any]]) -> str:
    """As Markdown, phases below one another."""
    names = sorted({name for one in found.values() for name in one["spent_s"]})
    lines = ["| seconds | " + " | ".join(HOW[look] for look in HOW) + " |", "|---|" + "---:|" * len(HOW)]
    for title, key in (("from start to confirmed winner", "elapsed_s"), ("proposals", "proposals"), ("judged", "judged")):
        lines.append(f"| **{title}** | " + " | ".join(f"{found[look][key]:g}" for look in HOW) + " |")
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{found[look]['spent_s'].get(name, 0.0):.1f}" for look in HOW) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Search twice and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="transformer_block", help="file or built-in id")
    parser.add_argument("--budget", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder of the two run directories and the table")
    options = parser.parse_args(arguments)
    task, found = load_task(options.task), {}
    for look in HOW:
        policy = BuiltinPolicy()
        policy.look = look
        out = options.out / look
        start_s = time.monotonic()
        result = optimize(task, policy=policy, device=options.device, budget=options.budget, out=out, settings=Settings())
        run = RunDirectory(out)
        found[look] = {
            "elapsed_s": round(time.monotonic() - start_s, 1),
            "proposals": result.screened or result.evaluations,
            "judged": sum(1 for _ in run.evaluations()),
            "speedup_low": result.best.speedup_low if result.best else None,
            "spent_s": seconds_of(run),
        }
        print(json.dumps({look: found[look]}, indent=1), flush=True)
    record = {"task": task.id, "device": options.device, "budget": options.budget, **found}
    (options.out / "search_time.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (options.out / "search_time.md").write_text(table_of(found), encoding="utf-8")
    print(table_of(found))


if __name__ == "__main__":
    main()
