"""Computes from records how many tasks a race decides in a part of its time, by the order in which the judge takes them.

    python benchmarks/judge_order.py results/kernelbench-h200/cuda-l1-fifth-5-h100 ...

What a task costs is the sum of its evaluations' times in the run, and tasks are taken one after another until the time is
over. Orders: by the best estimate; by what it gains a second, where a second is one of the task's longest look by screening
(`schedule.promise`); and the same with the task's true cost, which nobody knows before. Beside each number of tasks is the
sum of the logarithms of their best estimates. Nothing is measured anew, and judges beside one another are left out.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from race_numbers import Run

from kernelwright.records.decisions import SCHEDULE, best_estimate, gain_per_second
from kernelwright.records.screened import Screened

SHARES = (0.25, 0.5, 0.75)
"""Parts of the time that all tasks take."""


def records_of(run: Run) -> tuple[dict[str, float], dict[str, list[Screened]]]:
    """Seconds that the judge spent on each task, and what screening knew of it."""
    costs: dict[str, float] = defaultdict(float)
    looks: dict[str, list[Screened]] = defaultdict(list)
    for found in run.evaluations():
        costs[found.task] += found.elapsed_s
    for look in run.screened():
        looks[look.task].append(look)
    return {task: cost for task, cost in costs.items() if task in looks}, looks


def decided(costs: Mapping[str, float], gains: Mapping[str, float], share: float, key: Callable[[str], float]) -> str:
    """Tasks that fit into a part of the time, the largest key first, and what they gain."""
    left_s, count, gain = share * sum(costs.values()), 0, 0.0
    for task in sorted(costs, key=key, reverse=True):
        left_s -= costs[task]
        if left_s < 0:
            break
        count, gain = count + 1, gain + gains[task]
    return f"{count} ({gain:.1f})"


def rows_of(run: Run) -> Iterator[str]:
    """A line for each part of the time."""
    costs, looks = records_of(run)
    gains = {task: math.log(best_estimate(looks[task])) for task in costs}
    orders: tuple[Callable[[str], float], ...] = (
        lambda task: gains[task],
        lambda task: gain_per_second(looks[task]),
        lambda task: max(gains[task], math.log(SCHEDULE.least_gain)) / costs[task],
    )
    for share in SHARES:
        cells = (decided(costs, gains, share, one) for one in orders)
        yield f"| {run.path.name} | {len(costs)} | {share} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    print("| run | tasks | share of the time | by estimate | by gain a second | with true costs |")
    print("|---|---:|---:|---:|---:|---:|")
    for path in parser.parse_args(arguments).runs:
        print(*rows_of(Run(path)), sep="\n")


if __name__ == "__main__":
    main()
