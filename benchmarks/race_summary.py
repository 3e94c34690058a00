"""Sums up searched suites: how far winners are ahead of eager, compile, each task's best baseline and CUDA-L1's kernels.

    python benchmarks/race_summary.py RUN_DIR
    python benchmarks/race_summary.py RUN_DIR... --out results/kernelbench-h200 --page docs/kernelbench.md

A RUN_DIR is what `kernelwright bench SUITE --policy builtin` made, finished or not, or a run of the suite's own candidates.
Alone it gets a `summary.json`. With --out the summary of all goes there with a README, beside a packed copy of each run
without the sources of what was only screened, but for tasks of which the judge would still take a candidate. Runs that
--without-sources names leave these out too. With --page the part of that page between two marks is written anew; a page
that does not exist is made; it has the numbers, the largest wins and losses, and links to the README, which also tells
each RUN_DIR's `notes.md` and every task without a winner. A line for each task and the numbers of each level are printed.

Each suite has its own group of keys. CUDA-L1's shapes have plain ones, and `h100_` on an H100. On whichever GPU, KernelBench
as it is today has `today_`, robust-kbench `robust_`, modules of libraries `modules_` and, in bfloat16, `modules_bf16_`, and
any other suite `other_`. A task that several runs of a group decided has the numbers of the later one. One that none
decided keeps measured baselines.

A task counts once it is decided and its baselines are measured: its winner is confirmed, or the judge owes nothing more.
What is only screened is counted apart. A decided task without winner counts 1.0 against eager, whose user keeps the
reference, and so less than 1 against a faster baseline. Keys that end in `_filled` count 1.0 against any baseline, as
CUDA-L1's table does. Keys that begin with `floor_` are over all tasks with baselines, and the reference stands where the
judge still owes something. Baselines whose outputs the next call overwrites are not the best one. Decided tasks are
certainly ahead of the best baseline, certainly behind it, or within noise: the interval of their ratio holds 1. A winner
may only wrap the reference, as torch.compile in a CUDA graph does: `ahead_by_wrapper_alone` counts those that are ahead,
and in `geomean_vs_best_baseline_own_code` each counts 1.0 at most. Keys that end in `_cuda_l1` compare with CUDA-L1's
kernels on whichever GPU; those that end in `_same_gpu` only where kernel and winner ran on the same kind of GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from publishing import copy_plain, packed_bytes, write_packed
from race_numbers import GROUPS, Run, against_best, is_counted, summary_of
from race_page import HEAD, MARKS, NOTES, PAGE, README, headline, outlines, row, sections

from kernelwright.records.decisions import CUT_SHORT

PLAIN = (
    "config.json",
    "environment.json",
    "errors.json",
    "entries.json",
    "exhausted.json",
    CUT_SHORT,
    "table.json",
    NOTES,
)


def publish(run: Run, target: Path, keeps_sources: bool = True) -> None:
    """A packed copy that `rescore` and `report` accept; what was only screened comes without its source.

    Tasks of which the judge would still take a candidate keep theirs: unpacked, the copy is a run that `bench --out` goes
    on with.

    Args:
        run: The run.
        target: Folder of the copy.
        keeps_sources: Whether these tasks keep theirs; without them the copy is smaller and no search goes on with it.
    """
    packed, is_there = run.path / "evaluations.jsonl.gz", run.path.resolve() == target.resolve()
    if is_there and packed.exists():
        return  # a published run stays as it is, to the byte
    open_tasks = run.open_tasks() if keeps_sources else set()
    if not is_there:
        copy_plain(run.path, target, PLAIN)
    write_packed(target, "evaluations.jsonl", packed.read_bytes() if packed.exists() else packed_bytes(run.evaluations_path))
    estimates = "".join(
        (one if one.task in open_tasks else one.model_copy(update={"source": ""})).model_dump_json() + "\n"
        for one in run.screened()
    )
    if estimates:
        write_packed(target, "screened.jsonl", gzip.compress(estimates.encode(), mtime=0))
    if tasks := run.read_json("tasks.json"):
        write_packed(target, "tasks.json", gzip.compress(json.dumps(tasks).encode(), mtime=0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="folder for the summary and packed copies of the runs")
    parser.add_argument(
        "--without-sources", default="", metavar="NAME,...", help="runs whose copies have no screened sources"
    )
    parser.add_argument("--page", type=Path, help="page whose marked part is written anew")
    options = parser.parse_args(arguments)
    runs = [Run(path) for path in options.runs]
    names = [run.path.resolve().name for run in runs]
    if options.out is None and len(runs) > 1:
        parser.error("several runs need --out for their summary")
    if len(set(names)) < len(names):
        parser.error(f"wanted runs with different names, found {', '.join(names)}: rename a folder")
    bare = set(filter(None, options.without_sources.split(",")))
    if unknown := bare - set(names):
        parser.error(f"wanted names of the runs {', '.join(names)}, found {', '.join(sorted(unknown))}")
    summary = summary_of(runs)
    if not summary:
        parser.error("wanted a run of `kernelwright bench --policy`; found none")
    folder = options.out or runs[0].path
    if options.out is not None:
        for run, name in zip(runs, names, strict=True):
            publish(run, options.out / name, keeps_sources=name not in bare)
        (folder / "README.md").write_text(f"{README}\n{sections(summary, runs)}\n", encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        known = options.page.read_text(encoding="utf-8") if options.page.exists() else PAGE
        before, _, rest = known.partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        body = f"{MARKS[0]}\n\n{outlines(summary, runs, folder, options.page.parent)}\n{MARKS[1]}"
        options.page.write_text(f"{before}{body}{after}", encoding="utf-8")
    for group in GROUPS:
        if f"{group}rows" in summary:
            print(GROUPS[group], HEAD.splitlines()[0], sep="\n")
            for line in sorted(summary[f"{group}rows"], key=lambda line: (not is_counted(line), -against_best(line))):
                print(row(line), "" if is_counted(line) else f"({line['outcome']})")
            print("", *headline(summary, group), "", sep="\n")
    print(f"written  {folder / 'summary.json'}", *([options.page] if options.page else []))


if __name__ == "__main__":
    main()
