"""The main job over a whole suite: what does `kernelwright optimize` make of each task?

    python benchmarks/main_job.py RUN_DIR --device cuda --budget 16
    python benchmarks/main_job.py RUN_DIR --only-publish --publish results/NAME

Runs the command for one task after another, several at once on each device, and writes `main_job.json` and `main_job.md`:
each task's confirmed speedup with its interval, and how. A task without a confirmed improvement counts 1.0. Killed or cut
short, it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from publishing import copy_plain, packed_bytes, write_packed

from kernelwright.judge import devices_of
from kernelwright.records import Evaluation, Label, RunDirectory, Task
from kernelwright.report.table import UNSOLVED_SPEEDUP, statistics_of
from kernelwright.tasks.suites import load_suite

Run = Callable[[Sequence[str]], int]


def command(task: Task, device: str, budget: int, out: Path) -> list[str]:
    """What a user would type."""
    return [
        *(sys.executable, "-m", "kernelwright", "optimize", task.id, "--device", device),
        *("--budget", str(budget), "--out", str(out), "--json"),
    ]


def run_command(words: Sequence[str]) -> int:
    """Its exit status; what it prints goes beside its run directory."""
    out = Path(words[words.index("--out") + 1])
    with out.with_suffix(".log").open("a") as log:
        return subprocess.run(words, stdout=log, stderr=log, check=False).returncode


def do_all(
    tasks: Sequence[Task], folder: Path, devices: Sequence[str], at_once: int, budget: int, deadline_s: float, run: Run
) -> None:
    """Optimize tasks, beginning none after the deadline of `time.monotonic`."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def serve(device: str) -> None:
        while time.monotonic() < deadline_s:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            out = folder / task.id
            out.mkdir(parents=True, exist_ok=True)  # it has been begun, even if the command never gets to it
            started = time.monotonic()
            status = run(command(task, device, budget, out))
            print(f"{device} {task.id}: status {status} after {time.monotonic() - started:.0f} s", flush=True)

    with ThreadPoolExecutor(at_once * len(devices)) as threads:
        for served in [threads.submit(serve, device) for device in devices for _ in range(at_once)]:
            served.result()


def row_of(task: Task, records: Sequence[Evaluation]) -> dict[str, Any]:
    """What is known of a task."""
    tried = [found for found in records if not found.confirms]
    confirmed = [found for found in records if found.confirms and found.is_improvement]
    best = max(confirmed, key=lambda found: found.speedup_low or 0.0, default=None)
    reasons = Counter(str(found.reason) for found in tried if found.reason is not None)
    timed = [found.reference_us for found in tried if found.reference_us is not None]
    row: dict[str, Any] = {
        "task": task.id,
        "evaluations": len(tried),
        "accepted": sum(found.accepted for found in tried),
        "rejected": dict(reasons.most_common()),
        "reference_us": median(timed) if timed else None,
        "speedup": None,
    }
    if best is not None:
        row |= {
            "speedup": best.speedup,
            "speedup_low": best.speedup_low,
            "speedup_high": best.speedup_high,
            "techniques": list(best.techniques),
            "labels": [str(label) for label in best.labels],
        }
    return row


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all tasks, and over those whose winner is more than a wrapper."""
    own = [row for row in rows if Label.WRAPPER_ONLY not in row.get("labels", [])]
    speedups, own_speedups = (statistics_of([row["speedup"] or UNSOLVED_SPEEDUP for row in some]) for some in (rows, own))
    return {
        "tasks": len(rows),
        "without_evaluation": sum(row["evaluations"] == 0 for row in rows),
        "improved": sum(row["speedup"] is not None for row in rows),
        "geomean": speedups.geomean,
        "median": speedups.p50,
        "max": speedups.largest,
        "wrapper_only_winners": len(rows) - len(own),
        "geomean_of_other_winners": own_speedups.geomean,
        "evaluations": sum(row["evaluations"] for row in rows),
        "accepted": sum(row["accepted"] for row in rows),
        "rejected": dict(sum((Counter(row["rejected"]) for row in rows), Counter()).most_common()),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown, the largest speedup first."""
    lines = ["| task | reference, us | speedup | 95 % interval | how | labels |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -(row["speedup"] or 0.0)):
        reference = f"{row['reference_us']:.0f}" if row["reference_us"] is not None else ""
        if row["speedup"] is None:
            what = "none confirmed" if row["evaluations"] else "no evaluation"
            lines.append(f"| {row['task']} | {reference} | {what} | | | |")
        else:
            interval = f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
            how, labels = ", ".join(row["techniques"]), ", ".join(row["labels"])
            lines.append(f"| {row['task']} | {reference} | {row['speedup']:.2f} | {interval} | {how} | {labels} |")
    return "\n".join(lines) + "\n"


def collect(tasks: Sequence[Task], folder: Path) -> list[dict[str, Any]]:
    """The rows of tasks that have been begun, those included whose run ended without an evaluation."""
    begun = [task for task in tasks if (folder / task.id).is_dir()]
    return [row_of(task, list(RunDirectory(folder / task.id).evaluations())) for task in begun]


def publish(folder: Path, target: Path, tasks: Sequence[Task]) -> None:
    """Tables, and each task's run with its evaluations packed, without the report that can be made of it."""
    copy_plain(folder, target, ("main_job.json", "main_job.md"))
    for run in (RunDirectory(folder / "tasks" / task.id) for task in tasks):
        if run.evaluations_path.exists():
            own = target / run.path.name
            write_packed(own, run.evaluations_path.name, packed_bytes(run.evaluations_path))
            copy_plain(run.path, own, ("config.json", "environment.json", "optimized.py"))


def main(arguments: Sequence[str] | None = None, run: Run = run_command) -> None:
    """Run, tabulate and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto", help="`cuda` is every GPU")
    parser.add_argument("--budget", type=int, default=16, help="evaluations of each task")
    parser.add_argument("--at-once", type=int, default=2, help="tasks at once on each device, each with several judges")
    parser.add_argument("--tasks", help="comma-separated; the whole built-in suite otherwise")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no task after this long")
    parser.add_argument("--publish", type=Path, help="also write what is to be kept here")
    parser.add_argument("--only-publish", action="store_true", help="run nothing more")
    options = parser.parse_args(arguments)
    wanted = options.tasks.split(",") if options.tasks else None
    tasks = [entry.task for entry in load_suite("builtin").entries if wanted is None or entry.task.id in wanted]
    if unknown := set(wanted or ()) - {task.id for task in tasks}:
        parser.error(f"no tasks of the built-in suite: {', '.join(sorted(unknown))}")
    if not options.only_publish:
        deadline_s = time.monotonic() + options.seconds
        devices = devices_of(options.device)
        do_all(tasks, options.folder / "tasks", devices, options.at_once, options.budget, deadline_s, run)
    rows = collect(tasks, options.folder / "tasks")
    if not any(row["evaluations"] for row in rows):
        raise SystemExit(f"Wanted evaluations under {options.folder / 'tasks'}; found none. Its .log files say why.")
    summary = summary_of(rows)
    (options.folder / "main_job.json").write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")
    (options.folder / "main_job.md").write_text(table_of(rows))
    print(json.dumps(summary))
    if options.publish is not None:
        publish(options.folder, options.publish, tasks)


if __name__ == "__main__":
    main()
