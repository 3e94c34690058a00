"""Measures how busy the judge keeps a device, compared with timing alone.

    python benchmarks/judge_throughput.py OUT_DIR --device cuda --per-device 6

Judges the reference of many built-in tasks against itself (nothing is cheaper to check and dearer to time than a candidate
that is right), several at once, and compares the evaluations a minute with what the plain timing loop would give: each
record says for how long its evaluation had the device alone for timing, so timing alone, back to back, would do one
evaluation in the mean of those times. Building, starting processes and compiling overlap with others' timing; checking needs
the device too and does not.

What counts is the time in which every judge has work: from when each has ended its first evaluation (which imports torch)
until no further one is begun. An evaluation that is only partly in it counts with that part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelwright.errors import KernelwrightError
from kernelwright.execution.executor import LocalExecutor
from kernelwright.execution.work import Evaluate, run_all
from kernelwright.judge import Settings, resolve_device
from kernelwright.records import Candidate, RunDirectory
from kernelwright.tasks.suites import load_suite


@dataclass(frozen=True, slots=True)
class Ended:
    """One evaluation: when it began and ended, and for how long it had the device alone."""

    begin_s: float
    end_s: float
    held_s: float


def busy(evaluations: Sequence[Ended], from_s: float, to_s: float) -> dict[str, float]:
    """Work done in a stretch of time; an evaluation counts by the part of its time that lies within."""
    parts = [max(0.0, min(one.end_s, to_s) - max(one.begin_s, from_s)) / (one.end_s - one.begin_s) for one in evaluations]
    count = sum(parts)
    held_s = sum(part * one.held_s for part, one in zip(parts, evaluations, strict=True))
    return {
        "wall_s": to_s - from_s,
        "evaluations": count,
        "evaluations_per_minute": 60 * count / (to_s - from_s),
        "timing_alone_evaluations_per_minute": 60 * count / held_s,
        "share_of_timing_alone": held_s / (to_s - from_s),
    }


def main() -> None:
    """Measure and write `summary.json` beside the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--per-device", type=int, default=4)
    parser.add_argument("--evaluations", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long every judge is to have work")
    parser.add_argument("--quick", action="store_true", help="few process triples: to try the script")
    options = parser.parse_args()
    device = str(resolve_device(options.device))
    settings = Settings.quick() if options.quick else Settings()
    run = RunDirectory(options.out)
    config = {
        "kind": "judge-throughput",
        "per_device": options.per_device,
        "settings": settings.model_dump(mode="json"),
    }
    run.claim(config, same=("kind", "per_device", "settings"), device=device)
    tasks = [entry.task for entry in load_suite("builtin").entries]
    works = []
    for index in range(options.evaluations):
        task = tasks[index % len(tasks)]
        same = task.source.replace("class Model(", "class ModelNew(")
        works.append(Evaluate(task, Candidate(source=f"{same}\n# {index}\n", policy="identity")))
    ended: list[Ended] = []
    errors = []
    stopped_s = 0.0
    start_s = time.monotonic()

    def stop() -> bool:
        nonlocal stopped_s
        busy_s = time.monotonic() - ended[options.per_device - 1].end_s if len(ended) >= options.per_device else 0.0
        is_late = busy_s > options.seconds
        if is_late and not stopped_s:
            stopped_s = time.monotonic()
        return is_late

    with LocalExecutor([device], settings, judges=options.per_device) as executor:
        for result in run_all(executor, works, stop):
            task, outcome = result.work.task, result.outcome
            if isinstance(outcome, KernelwrightError):
                errors.append(f"{task.id}: {outcome}")
                continue
            run.append(outcome)
            now_s, held_s = time.monotonic(), outcome.checks["device_s"]
            ended.append(Ended(now_s - outcome.elapsed_s, now_s, held_s))
            print(f"{now_s - start_s:6.1f}s {task.id} {outcome.verdict} {outcome.elapsed_s:.1f}s {held_s}", flush=True)
    if not stopped_s or len(ended) <= options.per_device:
        raise SystemExit("wanted more evaluations than judges within the time; raise --evaluations or --seconds")
    summary = {
        "device": device,
        "judges_per_device": options.per_device,
        **busy(ended, ended[options.per_device - 1].end_s, stopped_s),
        "errors": errors,
    }
    run.write_json("summary.json", summary)
    print(summary)


if __name__ == "__main__":
    main()
