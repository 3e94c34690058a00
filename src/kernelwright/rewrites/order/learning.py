"""Learns the order of proposals from finished searches, and says what it is worth on tasks that it was not learnt from.

    python -m kernelwright.rewrites.order.learning RUN_DIR... --out order.json

The weights of an order (`gains`) are a ridge regression of the logarithms of screening's estimates, each less the mean of
its task.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.records import RunDirectory, Task
from kernelwright.rewrites.normalise import UntraceableError
from kernelwright.rewrites.order.gains import Order, Place, features
from kernelwright.rewrites.tracing import trace

STRENGTH = 20.0
"""Of the ridge. Between 3 and 30 the result hardly depends on it."""
WRONG = 0.5
"""What a candidate counts that was not right when it was screened. Our choice."""
LEAST, MOST = 0.3, 20.0
"""Estimates are cut there: far off they say little about other tasks. Our choice."""
SHARE_AT = (2, 4, 6, 8, 12)
"""Numbers of candidates at which orders are compared."""


@dataclass(frozen=True, slots=True)
class Searched:
    """A task that was searched, and the best estimate for each set of techniques, in the order they were looked at."""

    task: str
    place: Place
    gains: Mapping[tuple[str, ...], float]


def learn(searched: Sequence[Searched], strength: float = STRENGTH) -> Order:
    """The order that these searches lead to."""
    columns: dict[str, int] = {}
    rows: list[np.ndarray] = []
    wanted: list[float] = []
    described = [[dict(features(names, one.place)) for names in one.gains] for one in searched]
    for found in (each for several in described for each in several):
        for name in found:
            columns.setdefault(name, len(columns))
    for one, several in zip(searched, described, strict=True):
        block = np.zeros((len(several), len(columns)))
        for row, found in zip(block, several, strict=True):
            for name, value in found.items():
                row[columns[name]] = value
        logs = [math.log(min(max(gain, LEAST), MOST)) for gain in one.gains.values()]
        # Which task has much to gain is not asked: its candidates are compared with one another.
        rows += list(block - block.mean(axis=0)) if several else []
        wanted += [each - sum(logs) / len(logs) for each in logs]
    if not rows:
        return Order({})
    matrix, logs_wanted = np.array(rows), np.array(wanted)
    # As many unknowns as there are candidates, in place of one for each feature.
    inner = np.linalg.solve(matrix @ matrix.T + strength * np.eye(len(matrix)), logs_wanted)
    return Order(dict(zip(columns, (matrix.T @ inner).tolist(), strict=True)))


def searches_in(run: RunDirectory) -> list[Searched]:
    """Read what the search of a suite found by screening.

    Raises:
        UsageError: nothing was screened there, or the tasks are not on record.
    """
    gains: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for look in run.screened():
        gain = look.estimate if look.correct and look.estimate else WRONG
        known = gains[look.task]
        known[look.techniques] = max(gain, known.get(look.techniques, 0.0))
    tasks = {one["id"]: Task.model_validate(one) for one in run.read_json("tasks.json") or []}
    if not gains or not tasks.keys() >= gains.keys():
        raise UsageError(
            f"Wanted the run of a search with its tasks; found none in `{run.path}`. Name one of `bench --policy`."
        )
    return [Searched(name, _place(tasks[name]), found) for name, found in gains.items()]


def _place(task: Task) -> Place:
    try:
        return Place.of(trace(task))
    except UntraceableError:
        return Place()


def kind_of(place: Place) -> str:
    """The family of a task, which is left out of training together: by the first of these operators that it has."""
    families = {
        "recurrent": ("lstm", "gru", "rnn"),
        "attention": ("scaled_dot_product_attention", "softmax"),
        "transposed convolution": ("conv_transpose",),
        "convolution": ("conv",),
        "product": ("linear", "matmul", "mm", "einsum"),
        "pool": ("pool",),
        "norm": ("norm",),
    }
    for name, signs in families.items():
        if any(sign in operator for operator in place.operators for sign in signs):
            return name
    return "other"


def shares(searched: Sequence[Searched], orders: Mapping[str, Order] | None) -> dict[int, float]:
    """Geometric mean over tasks of the best of the first so many candidates, over the best of all.

    Args:
        orders: By family; None for the order in which they were looked at.
    """
    found: dict[int, list[float]] = {count: [] for count in SHARE_AT}
    for one in searched:
        names = list(one.gains) if orders is None else _best_first(one, orders[kind_of(one.place)])
        whole = max(1.0, *one.gains.values())
        for count, logs in found.items():
            logs.append(math.log(max(1.0, *(one.gains[each] for each in names[:count])) / whole))
    return {count: round(math.exp(sum(logs) / len(logs)), 3) for count, logs in found.items() if logs}


def _best_first(one: Searched, order: Order) -> list[tuple[str, ...]]:
    return sorted(one.gains, key=lambda names: -order.gain(names, one.place))


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn, and say what the order is worth on families of tasks that it was not learnt from."""
    parser = argparse.ArgumentParser(
        prog="python -m kernelwright.rewrites.order.learning",
        description="Learn the order of proposals from finished searches.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="of `kernelwright bench --policy builtin`")
    parser.add_argument("--out", type=Path, required=True, help="file of the order")
    options = parser.parse_args(arguments)
    try:
        searched = [one for path in options.runs for one in searches_in(RunDirectory(path))]
    except KernelwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    families = sorted({kind_of(one.place) for one in searched})
    apart = {name: learn([one for one in searched if kind_of(one.place) != name]) for name in families}
    print(f"{len(searched)} tasks, {sum(len(one.gains) for one in searched)} candidates, {len(families)} families")
    print("best of the first      " + "".join(f"{count:8}" for count in SHARE_AT))
    for name, found in (
        ("as they were looked at", shares(searched, None)),
        ("learnt, family left out", shares(searched, apart)),
    ):
        print(f"{name:23}" + "".join(f"{share:8.3f}" for share in found.values()))
    learn(searched).write(options.out)
    print(f"written  {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
