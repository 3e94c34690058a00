"""Judge CUDA-L1's released kernels, with the five baselines, in one run that may be cut short and resumed.

    python benchmarks/cuda_l1_release.py h100.json RUN_DIR --seconds 440 --publish OUT_DIR

On several GPUs baselines are measured on the last one while candidates are judged on the others, and whoever is done helps
the others, so that a run that is cut short has both of the first tasks. The order is fixed and mixed: levels 1 and 2 first,
then level 3, whose compilations take minutes, then what compiles in every process, and tasks without a candidate last. What
was broken off, and what others on the machine may have caused (no memory left, no time to build), is done once more at the
end with few at once.

The same command goes on where it stopped, on another machine as well once RUN_DIR is there; `calls.json` says which machine
went on when. The tables are over the tasks whose candidate has been judged, and say how many those are.

Candidates are judged with every label allowed, so that the table can tell what is right under the paper's own contract
from what is a clean drop-in. Their text is not kept: `--publish` writes the run directory without sources.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from publishing import copy_plain

from kernelwright.evaluation import Settings, devices_of
from kernelwright.policies.baselines import ALL_BASELINES
from kernelwright.records import Evaluation, Reason, RunDirectory, capture_environment
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.rl.bench import BenchEvent, bench, summarise
from kernelwright.tasks.suites import Suite, SuiteEntry, load_suite

SETTINGS = Settings(
    # References judged against themselves (results/2026-11-21-judge-throughput-h200): 2 processes of 6 blocks miss 1 by 8 %
    # (root mean square), 3 of 20 by 5 %, with intervals a third as wide. A block of a short task takes 12 ms.
    processes_min=3,
    processes_max=3,
    blocks=6,
    triple_s=0.2,
    build_limit_s=150,
    run_limit_s=30,
    memory_limit_bytes=32 << 30,
    threads=2,
    forbid=frozenset(),
)
AGAIN = 2
"""How many at once on each device, where a first try was broken off or hampered."""


def main() -> None:
    """Measure, or only publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no evaluation after this long")
    parser.add_argument("--judges", type=int, default=8, help="candidates at once on each device")
    parser.add_argument("--rotations", type=int, default=8, help="tasks whose baselines compile at once on each device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--baselines", default=",".join(ALL_BASELINES))
    parser.add_argument("--limit", type=int, help="only the first tasks")
    parser.add_argument("--publish", type=Path, help="also write the run without sources here")
    parser.add_argument("--only-publish", action="store_true", help="measure nothing more")
    options = parser.parse_args()
    start = time.monotonic()
    suite = load_suite("cuda-l1", path=options.release)
    suite = Suite(suite.name, tuple(sorted(suite.entries, key=_turn)[: options.limit]))
    run = RunDirectory(options.run)

    def tell(event: BenchEvent) -> None:
        outcome = event.outcome
        found = getattr(outcome, "reason", None) or getattr(outcome, "speedup", None) or outcome
        print(
            f"{time.monotonic() - start:6.0f}s {event.done}/{event.total} {event.task} {event.what}: {str(found)[:150]}",
            flush=True,
        )

    def late() -> bool:
        return time.monotonic() - start > options.seconds

    def measure(judges: int, rotations: int, *, again: bool) -> None:
        bench(
            suite,
            baselines=options.baselines.split(","),
            device=options.device,
            out=options.run,
            settings=SETTINGS,
            on_event=tell,
            per_device=judges,
            deadline=late,
            baselines_per_device=rotations,
            baselines_beside=True,
            retry=_others_may_be_to_blame if again else None,
        )

    try:
        if not options.only_publish:
            _note_call(run, options)
            measure(options.judges, options.rotations, again=False)
            if not late():
                measure(AGAIN, AGAIN, again=True)
    except KeyboardInterrupt:
        print("broken off; what is finished is kept", flush=True)
    finally:
        write_tables(run, suite)
        if options.publish:
            publish(options.run, options.publish)
    print((options.run / "table.md").read_text())


def _turn(entry: SuiteEntry) -> tuple[bool, bool, bool, str]:
    """Long ones last; tasks of one kind, which need much memory at the same time, are not neighbours."""
    source = "" if entry.candidate is None else entry.candidate.source
    compiles = re.search(r"torch\.compile|import triton", source) is not None
    return entry.candidate is None, compiles, entry.level == 3, hashlib.sha256(entry.task.id.encode()).hexdigest()


def _others_may_be_to_blame(found: Evaluation) -> bool:
    if found.reason is Reason.OUT_OF_MEMORY or "out of memory" in found.detail:
        return True
    return found.policy != BASELINE_POLICY and found.reason in (Reason.BUILD_TIMEOUT, Reason.RUN_TIMEOUT)


def _note_call(run: RunDirectory, options: argparse.Namespace) -> None:
    """Which machine went on with the run when, and how many it did at once."""
    call = {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": options.seconds,
        "judges": options.judges,
        "rotations": options.rotations,
        "environment": capture_environment(devices_of(options.device)[0]),
    }
    run.write_json("calls.json", [*(run.read_json("calls.json") or []), call])


def write_tables(run: RunDirectory, suite: Suite) -> None:
    """The tables over the tasks that have been judged, with a paragraph that says which those are."""
    found = list(run.evaluations())
    judged = {one.task_sha256 for one in found if one.policy != BASELINE_POLICY}
    entries = tuple(entry for entry in suite.entries if entry.candidate is None or entry.task.sha256 in judged)
    errors = run.read_json("errors.json") or {}
    covered = coverage(suite, found)
    run.write_json("coverage.json", covered)
    if not entries or not found:
        run.write_text("table.md", "Nothing has been measured yet.\n")
        return
    summarise(run, Suite(suite.name, entries), errors)
    columns = list(covered["by_level"]["1"])
    rows = [["level", *columns], ["---", *["---:"] * len(columns)]]
    rows += [[level, *map(str, row.values())] for level, row in covered["by_level"].items()]
    head = "\n".join(f"| {' | '.join(row).replace('_', ' ')} |" for row in rows)
    text = f"""{head}

The tables below are over the tasks whose candidate has been judged and those that have none. A candidate was timed in
{SETTINGS.processes_max} processes of each side, a baseline in one; in each at least {SETTINGS.blocks} blocks, short ones
for {SETTINGS.triple_s:g} s. "baselines tried": all five; "baselines timed": each of them runs and is right. One without
a time may not have been compiled within {SETTINGS.build_limit_s:g} s. Errors of a task or of the machine: {len(errors)}.
Compilers that try kernels out share the GPU with those of other tasks while they choose, so that max-autotune may have
chosen worse than it does alone; whatever is timed shares the GPU with nobody.

"""
    run.write_text("table.md", text + (run.path / "table.md").read_text(encoding="utf-8"))


def coverage(suite: Suite, found: list[Evaluation]) -> dict[str, Any]:
    """How much of the suite has been measured, and why baselines have no time."""
    judged = {one.task_sha256 for one in found if one.policy != BASELINE_POLICY}
    latest = {(one.task_sha256, one.techniques[0]): one for one in found if one.policy == BASELINE_POLICY}
    wanted = [name for name in ALL_BASELINES if name != "eager"]

    def count(entries: list[SuiteEntry]) -> dict[str, int]:
        each = [[latest.get((entry.task.sha256, name)) for name in wanted] for entry in entries]
        return {
            "tasks": len(entries),
            "candidates": sum(entry.candidate is not None for entry in entries),
            "judged": sum(entry.task.sha256 in judged for entry in entries),
            "baselines_tried": sum(all(one is not None for one in ones) for ones in each),
            "baselines_timed": sum(all(one is not None and one.speedup is not None for one in ones) for ones in each),
        }

    entries = list(suite.entries)
    untimed = Counter(f"{name}: {one.reason}" for (_, name), one in latest.items() if one.speedup is None)
    return count(entries) | {
        "by_level": {str(level): count([one for one in entries if one.level == level]) for level in (1, 2, 3)},
        "without_a_time": dict(untimed.most_common()),
    }


def publish(run: Path, target: Path) -> None:
    """Copy a run directory without the text of candidates and with its records packed."""
    names = ("config", "environment", "calls", "errors", "coverage", "table")
    copy_plain(run, target, (*(f"{name}.json" for name in names), "table.md"))
    with gzip.open(target / "evaluations.jsonl.gz", "wt", encoding="utf-8", compresslevel=6) as file:
        for evaluation in RunDirectory(run).evaluations():
            file.write(evaluation.model_copy(update={"source": ""}).model_dump_json() + "\n")


if __name__ == "__main__":
    main()
