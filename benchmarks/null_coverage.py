"""Measures how often the judge's interval contains 1 when a candidate is the reference itself.

    python benchmarks/null_coverage.py RUN_DIR --repetitions 100

Writes one evaluation a repetition and `summary.json`. Run on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from kernelwright.judge import Judge, Settings
from kernelwright.records import Candidate, Evaluation, RunDirectory
from kernelwright.tasks import load_task


def main() -> None:
    """Repeat an A/A evaluation and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tasks", default="gelu_tanh_composite", help="comma-separated; taken in turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=100)
    options = parser.parse_args()
    tasks = [load_task(name) for name in options.tasks.split(",")]
    run = RunDirectory(options.run)
    settings = Settings()
    config = {
        "kind": "null-coverage",
        "tasks": [task.id for task in tasks],
        "settings": settings.model_dump(mode="json"),
    }
    run.claim(config, same=("kind", "tasks", "settings"), device=options.device)
    done = sum(1 for _ in run.evaluations())
    with Judge(options.device, settings) as judge:
        for number in range(done, options.repetitions):
            task = tasks[number % len(tasks)]
            # The same class under another name, not one derived from it: nothing at all may differ.
            source = task.source.replace("class Model(", "class ModelNew(").replace("super(Model,", "super(ModelNew,")
            found = judge.evaluate(task, Candidate(source=source, policy="identity"))
            run.append(found)
            interval = f"[{found.speedup_low:.3f}, {found.speedup_high:.3f}]" if found.speedup_low else found.reason
            print(
                f"{number + 1}/{options.repetitions} {task.id} {found.speedup} {interval} {found.elapsed_s:.1f} s",
                flush=True,
            )
    run.write_json("summary.json", summary(list(run.evaluations())))
    print((options.run / "summary.json").read_text())


def summary(evaluations: list[Evaluation]) -> dict[str, float]:
    """Counts and spreads over the repetitions."""
    timed = [(found, found.speedup, found.speedup_low, found.speedup_high) for found in evaluations if found.accepted]
    return {
        "repetitions": len(evaluations),
        "accepted": len(timed),
        "interval_contains_1": sum((low or 0.0) <= 1.0 <= (high or 0.0) for _, _, low, high in timed),
        "called_an_improvement": sum(found.is_improvement for found, *_ in timed),
        "speedup_median": statistics.median(speedup or 0.0 for _, speedup, *_ in timed),
        "speedup_min": min(speedup or 0.0 for _, speedup, *_ in timed),
        "speedup_max": max(speedup or 0.0 for _, speedup, *_ in timed),
        "half_width_median": statistics.median(((high or 0.0) - (low or 0.0)) / 2 for _, _, low, high in timed),
        "noise_floor_median": statistics.median(found.noise_floor or 0.0 for found, *_ in timed),
        "elapsed_s_median": statistics.median(found.elapsed_s for found, *_ in timed),
    }


if __name__ == "__main__":
    main()
