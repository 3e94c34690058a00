"""Judge CUDA-L1's released kernels, with the five baselines, in one run that may be cut short and resumed.

    python benchmarks/cuda_l1_release.py h100.json RUN_DIR --seconds 480 --publish OUT_DIR

Candidates come first, then the baselines, each task's in one rotation. What has finished is published when the time is up,
and after an error too; the same command goes on where it stopped, on another machine as well once RUN_DIR is there.

Candidates are judged with every label allowed, so that the table can tell what is right under the paper's own contract
from what is a clean drop-in. Their text is not kept: `--publish` writes the run directory without sources.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import time
from pathlib import Path

from kernelwright.evaluation import Settings
from kernelwright.policies.baselines import ALL_BASELINES
from kernelwright.records import RunDirectory
from kernelwright.rl.bench import BenchEvent, bench, summarise
from kernelwright.tasks.suites import Suite, load_suite

SETTINGS = Settings(
    processes_min=2,
    processes_max=2,
    blocks=6,
    build_limit_s=150,
    run_limit_s=30,
    memory_limit_bytes=32 << 30,
    threads=2,
    forbid=frozenset(),
)


def main() -> None:
    """Measure, or only publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no evaluation after this long")
    parser.add_argument("--judges", type=int, default=3, help="candidates at once on each device")
    parser.add_argument("--rotations", type=int, default=5, help="tasks whose baselines compile at once on each device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--baselines", default=",".join(ALL_BASELINES))
    parser.add_argument("--limit", type=int, help="only the first tasks")
    parser.add_argument("--publish", type=Path, help="also write the run without sources here")
    parser.add_argument("--only-publish", action="store_true", help="measure nothing more")
    options = parser.parse_args()
    start = time.monotonic()
    suite = load_suite("cuda-l1", path=options.release)
    suite = Suite(suite.name, suite.entries[: options.limit])

    def tell(event: BenchEvent) -> None:
        outcome = event.outcome
        found = getattr(outcome, "reason", None) or getattr(outcome, "speedup", None) or outcome
        print(
            f"{time.monotonic() - start:6.0f}s {event.done}/{event.total} {event.task} {event.what}: {str(found)[:150]}",
            flush=True,
        )

    def late() -> bool:
        return time.monotonic() - start > options.seconds

    def measure(baselines: list[str], per_device: int) -> None:
        bench(
            suite,
            baselines=baselines,
            device=options.device,
            out=options.run,
            settings=SETTINGS,
            on_event=tell,
            per_device=per_device,
            deadline=late,
        )

    try:
        if not options.only_publish:
            measure(["eager"], options.judges)
            if not late():
                measure(options.baselines.split(","), options.rotations)
        run = RunDirectory(options.run)
        summarise(run, suite, run.read_json("errors.json") or {})
        print((options.run / "table.md").read_text())
    finally:
        if options.publish:
            publish(options.run, options.publish)


def publish(run: Path, target: Path) -> None:
    """Copy a run directory without the text of candidates and with its records packed."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "environment.json", "errors.json", "table.json", "table.md"):
        if (run / name).exists():
            shutil.copy(run / name, target / name)
    with gzip.open(target / "evaluations.jsonl.gz", "wt", encoding="utf-8", compresslevel=6) as file:
        for evaluation in RunDirectory(run).evaluations():
            file.write(evaluation.model_copy(update={"source": ""}).model_dump_json() + "\n")


if __name__ == "__main__":
    main()
