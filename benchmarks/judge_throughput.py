"""How busy does the judge keep a device, compared with timing alone?

    python benchmarks/judge_throughput.py OUT_DIR --device cuda --per-device 4

Judges the reference of many built-in tasks against itself (nothing is cheaper to check and dearer to time than a candidate
that is right), several at once, and compares the evaluations a minute with what the plain timing loop would give: each
record says for how long its evaluation had the device alone for timing, so timing alone, back to back, would do one
evaluation in the mean of those times. Building, starting processes and compiling overlap with others' timing; checking needs
the device too and does not.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kernelwright.errors import KernelwrightError
from kernelwright.evaluation import Job, JudgePool, Settings, resolve_device
from kernelwright.records import Candidate, RunDirectory
from kernelwright.tasks.suites import load_suite


def main() -> None:
    """Measure and write `summary.json` beside the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--per-device", type=int, default=4)
    parser.add_argument("--evaluations", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=180.0, help="begin no evaluation after this long")
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
    jobs = []
    for index in range(options.evaluations):
        task = tasks[index % len(tasks)]
        same = task.source.replace("class Model(", "class ModelNew(")
        jobs.append(Job(task, Candidate(source=f"{same}\n# {index}\n", policy="identity")))
    timing_s, errors = [], []
    with JudgePool([device], settings, options.per_device) as pool:
        # Importing torch in each judge is not what is measured.
        for _ in pool.evaluate(jobs[: options.per_device]):
            pass
        start_s = time.monotonic()
        late = False

        def stop() -> bool:
            nonlocal late
            late = late or time.monotonic() - start_s > options.seconds
            return late

        for job, outcome in pool.evaluate(jobs[options.per_device :], stop=stop):
            if isinstance(outcome, KernelwrightError):
                errors.append(f"{job.task.id}: {outcome}")
                continue
            run.append(outcome)
            held_s = outcome.checks["device_s"]
            timing_s.append(held_s)
            print(
                f"{time.monotonic() - start_s:6.1f}s {job.task.id} {outcome.verdict} {outcome.elapsed_s:.1f}s {held_s}",
                flush=True,
            )
        wall_s = time.monotonic() - start_s
    count = len(timing_s)
    summary = {
        "device": device,
        "judges_per_device": options.per_device,
        "evaluations": count,
        "wall_s": wall_s,
        "evaluations_per_minute": 60 * count / wall_s,
        "timing_alone_evaluations_per_minute": 60 * count / sum(timing_s),
        "share_of_timing_alone": sum(timing_s) / wall_s,
        "errors": errors,
    }
    run.write_json("summary.json", summary)
    print(summary)


if __name__ == "__main__":
    main()
