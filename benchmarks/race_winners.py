"""Writes the sources of a race's winners, so that another GPU can judge the very same text.

    python benchmarks/race_winners.py results/kernelbench-h200/cuda-l1-fifth-2 --out winners.jsonl
    kernelwright bench cuda-l1 --path h100.json --candidates winners.jsonl --baselines eager --out DIR    # on the other GPU

Each line has a task and a source, as `bench --candidates` reads them. `make_pages.py` compares what DIR measured with the
first GPU's numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from race_numbers import Run, later_by_task


def winners(runs: Iterable[Run]) -> dict[str, str]:
    """Source of the winner by task; of several runs the later one that decides the task."""
    runs = list(runs)
    sources = {one.candidate_sha256: one.source for run in runs for one in run.evaluations()}
    return {line["task"]: sources[line["candidate_sha256"]] for line in later_by_task(runs) if line["speedup"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--only", default="", metavar="LIST", help="only these tasks, such as level1/1,level2/40")
    options = parser.parse_args(arguments)
    asked = set(filter(None, options.only.split(",")))
    sources = winners(map(Run, options.runs))
    chosen = {task: sources[task] for task in sources if not asked or task.partition("/")[2] in asked}
    lines = (json.dumps({"task": task, "source": source}) + "\n" for task, source in chosen.items())
    options.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(chosen)} winners in {options.out}")


if __name__ == "__main__":
    main()
