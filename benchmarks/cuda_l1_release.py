"""Judge CUDA-L1's released kernels, with the five baselines, in one run that may be cut short and resumed.

    python benchmarks/cuda_l1_release.py h100.json RUN_DIR --seconds 440 --publish OUT_DIR
    python benchmarks/cuda_l1_release.py h100.json RUN_DIR --published results/NAME --order shares

h100.json is one file of CUDA-L1's repository, github.com/deepreinforce-ai/CUDA-L1, as it is; nothing else of it is needed:

    optimized_cuda_code/h100.json    at commit 51e8356, 250 lines, 3,271,860 bytes, SHA-256
                                     bb3c6f83ca3502d4ff53512163e14171f09b1124c35d2134dfd43576baefe57e

That is what the published runs are of. `optimized_cuda_code/codes/h100.json` has other columns and is refused.

On several GPUs baselines are measured on the last one while candidates are judged on the others, and whoever is done helps
the others, so that a run that is cut short has both of the first tasks. The suite's order is fixed and mixed: levels 1 and
2 first, then level 3, whose compilations take minutes, then what compiles in every process, and tasks without a candidate
last. With `--order shares` each level has, of whatever is done next, the share that it has of all that is left; within a
level the order is the suite's. What was broken off, and what others on the machine may have caused (no memory left, no time
to build), is done once more at the end with few at once. What is left is printed before anything begins. `--only TASK` does
no more of it than the tasks that are named.

The same command goes on where it stopped, on another machine as well once RUN_DIR is there; `calls.json` says which machine
went on when. Where RUN_DIR is gone, `--published` makes a new one of the published folder: what is recorded there is known
by its hashes and not done again, errors are. Settings, tasks and version must be the folder's; commits and machines may
differ, and are printed. The tables are over the tasks whose candidate has been judged, and say how many those are.

Candidates are judged with every label allowed, so that the table can tell what is right under the paper's own contract
from what is a clean drop-in. Their text is not kept: `--publish` writes the run directory without sources.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from publishing import copy_plain, write_packed

from kernelwright.errors import UsageError
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Evaluation, Reason, RunDirectory, Task, capture_environment
from kernelwright.report.rows import BASELINE_POLICY
from kernelwright.rewrites.baselines import ALL_BASELINES
from kernelwright.search.bench import SAME, Agenda, BenchEvent, Spread, bench, config_of, owed_in, write_tasks
from kernelwright.search.bench_summary import summarise
from kernelwright.seconds import utc_now
from kernelwright.tasks.entries import Suite, SuiteEntry
from kernelwright.tasks.suites import load_suite

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
PLAIN = ("config.json", "environment.json", "calls.json", "errors.json", "coverage.json", "table.json", "table.md")
"""What is published beside the evaluations."""
ORDERS = ("fixed", "shares")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or only publish.

    Raises:
        UsageError: the run directory, or the published folder, is of another judge or of another release.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no evaluation after this long")
    parser.add_argument("--judges", type=int, default=8, help="candidates at once on each device")
    parser.add_argument("--rotations", type=int, default=8, help="tasks whose baselines compile at once on each device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--baselines", default=",".join(ALL_BASELINES))
    parser.add_argument("--limit", type=int, help="only the first tasks of the fixed order")
    parser.add_argument("--order", choices=ORDERS, default="fixed", help="of what is left; a run may change it")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="of what is left, these tasks alone and in this order")
    parser.add_argument("--published", type=Path, help="go on from this published folder in a new run directory")
    parser.add_argument("--publish", type=Path, help="also write the run without sources here")
    parser.add_argument("--only-publish", action="store_true", help="measure nothing more")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    suite = load_suite("cuda-l1", path=options.release)
    suite = Suite(suite.name, tuple(sorted(suite.entries, key=_turn)[: options.limit]))
    baselines = options.baselines.split(",")
    config = config_of(suite, baselines, (), SETTINGS)
    if options.published:
        go_on_from(options.published, options.run, suite, config)
    run = RunDirectory(options.run)
    run.require_same(config, same=SAME)
    levels = {entry.task.id: entry.level for entry in suite.entries}
    order = in_shares(levels) if options.order == "shares" else None
    if options.only:
        order = only(options.only, levels)

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
            baselines=baselines,
            device=options.device,
            out=options.run,
            settings=SETTINGS,
            on_event=tell,
            spread=Spread(judges, rotations, baselines_beside=True),
            agenda=Agenda(late, _others_may_be_to_blame if again else None, order),
        )

    print(what_is_left(run, suite, baselines), flush=True)
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


def go_on_from(published: Path, path: Path, suite: Suite, config: Mapping[str, Any]) -> None:
    """Make a run directory of a published folder, whole or not at all; one that was made of it earlier stays as it is.

    Args:
        published: The folder; nothing is written there.
        path: The run directory, new or empty, or begun with the same folder.
        suite: The tasks and candidates of the release.
        config: What this run is, as `config_of` says it.

    Raises:
        UsageError: the folder holds no run, or one of another judge or of another release; `path` holds another run.
    """
    if not (published / "config.json").is_file():
        raise UsageError(f"Wanted a published run in {published}; found no config.json there. Name the folder of one.")
    earlier = RunDirectory(published)
    # Of the same settings another version may make another verdict.
    earlier.require_same(dict(config), same=("kernelwright", *SAME))
    records = list(earlier.evaluations())
    if not records:
        raise UsageError(f"Wanted a published run in {published}; found no evaluations there. Name the folder of one.")
    _require_same_release(records, suite, published)
    if path.exists() and any(path.iterdir()):
        lacking = Counter(map(_identity, records)) - Counter(map(_identity, RunDirectory(path).evaluations()))
        if lacking:
            raise UsageError(
                f"Wanted a new directory, or one that was begun with {published}; {path} lacks {lacking.total()} of its "
                f"{len(records)} evaluations. Choose another directory."
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".published-") as folder:
        made = Path(folder, "run")
        # Whatever reads a run directory reads packed records in front of those that are appended.
        copy_plain(published, made, (*PLAIN, "evaluations.jsonl.gz", "evaluations.jsonl"))
        write_tasks(RunDirectory(made), suite)
        made.replace(path)


def _require_same_release(records: Sequence[Evaluation], suite: Suite, published: Path) -> None:
    entries = {entry.task.sha256: entry for entry in suite.entries}

    def is_known(found: Evaluation) -> bool:
        entry = entries.get(found.task_sha256)
        if entry is None or found.policy == BASELINE_POLICY:
            return entry is not None
        return entry.candidate is not None and entry.candidate.sha256 == found.candidate_sha256

    unknown = [found.task for found in records if not is_known(found)]
    if unknown:
        raise UsageError(
            f"Wanted the release that {published} is of; {len(unknown)} of its {len(records)} evaluations are of other "
            f"tasks or candidates, the first of {unknown[0]}. Name the release's file that it was made with."
        )


def _identity(found: Evaluation) -> tuple[str, str, str, str]:
    return (found.task_sha256, found.candidate_sha256, found.policy, found.started)


def what_is_left(run: RunDirectory, suite: Suite, baselines: Sequence[str]) -> str:
    """What is left of each level, how much of it has been an error so far, and what is to be done once more."""
    levels = {entry.task.id: entry.level for entry in suite.entries}
    failed = set(run.read_json("errors.json") or ())
    left = owed_in(run, suite, baselines, SETTINGS)
    again = owed_in(run, suite, baselines, SETTINGS, retry=_others_may_be_to_blame)
    candidates = [entry.task.id for entry in suite.entries if entry.candidate is not None]
    jobs = {job.task.id: f"{job.task.id} candidate" in failed for job in left.jobs}
    turns = {
        turn.task.id: any(f"{turn.task.id} {one.techniques[0]}" in failed for one in turn.baselines)
        for turn in left.rotations
    }

    def line(name: str, some: set[str]) -> str:
        counts = ", ".join(
            f"{len(some & owed.keys())} of {len(some.intersection(every))} {what}"
            f" ({sum(owed[task] for task in some & owed.keys())} after an error)"
            for what, every, owed in (("candidates", candidates, jobs), ("rotations of baselines", levels, turns))
        )
        return f"{name}: {counts}"

    each = [line(f"level {level}", {task for task in levels if levels[task] == level}) for level in (1, 2, 3)]
    machines = [_machine(call["environment"]) for call in run.read_json("calls.json") or []]
    return "\n".join(
        [
            f"Left to do, after {'; '.join(machines) or 'nothing'}:",
            *each,
            line("all", set(levels)),
            f"once more, others may be to blame: {len(again.jobs) - len(jobs)} candidates, "
            f"{len(again.rotations) - len(turns)} rotations of baselines",
        ]
    )


def _machine(environment: Mapping[str, Any]) -> str:
    """On what a call went on; that calls differ in it is no error, but should be seen."""
    gpus = ", ".join(sorted({gpu["name"] for gpu in environment.get("gpu") or []})) or environment["device"]
    return f"commit {environment['commit']} on {gpus} with torch {environment['packages']['torch']}"


def in_shares(levels: Mapping[str, int | None]) -> Callable[[Sequence[Task]], list[Task]]:
    """An order in which each level has, of any first tasks, the share that it has of all; within a level nothing changes.

    Args:
        levels: Of each task, by its id.
    """

    def order(tasks: Sequence[Task]) -> list[Task]:
        size = Counter(levels[task.id] for task in tasks)
        seen: Counter[int | None] = Counter()
        places = []
        for task in tasks:
            level = levels[task.id]
            seen[level] += 1
            # In the middle of its part of the way, so that no level has all of its first ones in front.
            places.append((seen[level] - 0.5) / size[level])
        return [tasks[index] for index in sorted(range(len(tasks)), key=places.__getitem__)]

    return order


def only(names: Sequence[str], known: Iterable[str]) -> Callable[[Sequence[Task]], list[Task]]:
    """An order that leaves out all tasks but these.

    Raises:
        UsageError: one of them is not among the known.
    """
    for name in names:
        if name not in known:
            raise UsageError(f"Wanted tasks of the release with --only, such as cuda-l1/level2/34; found {name}.")
    return lambda tasks: sorted((task for task in tasks if task.id in names), key=lambda task: names.index(task.id))


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
        "began": utc_now(),
        "seconds": options.seconds,
        "judges": options.judges,
        "rotations": options.rotations,
        "order": options.order,
        "only": options.only,
        "published": options.published and options.published.resolve().name,
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
    copy_plain(run, target, PLAIN)
    kept = (found.model_copy(update={"source": ""}) for found in RunDirectory(run).evaluations())
    text = "".join(found.model_dump_json() + "\n" for found in kept)
    # Without a time of writing the same records are the same bytes.
    write_packed(target, "evaluations.jsonl", gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
