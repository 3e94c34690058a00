"""Learns the order of proposals from finished searches, and says what it is worth on tasks that it was not learnt from.

    python -m kernelwright.rewrites.order.learning RUN_DIR... --out order.json

The weights of an order (`gains`) are a listwise ranker's: the softmax of the scores of a task's candidates is to come near
to the softmax of the logarithms of screening's estimates, by cross-entropy. So what counts is which are best, and not by how
much the others are worse.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_array

from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.records import RunDirectory, Task
from kernelwright.rewrites.order import Order, Place, features
from kernelwright.rewrites.tracing import UntraceableError, trace

STRENGTH = 2.0
"""Of the penalty on squared weights. Between 1 and 8 the result hardly depends on it."""
SHARPNESS = 5.0
"""Power of an estimate with which a candidate counts among those of its task: 1.15 times as fast counts twice. Between 3 and
14 the result hardly depends on it."""
WRONG = 0.5
"""What a candidate counts that was not right when it was screened. Our choice."""
LEAST, MOST = 0.3, 20.0
"""Estimates are cut there: far off they say little about other tasks. Our choice."""
SHARE_AT = (2, 4, 6, 8, 12)
"""Numbers of candidates at which orders are compared."""
SHUFFLES = 20
"""Random orders of each task that are compared with it."""
KNOWN = 0.7
"""Share of a task's candidates that other searches of it must know, so that their estimates are an order. Our choice."""


Techniques = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Searched:
    """A task that was searched, and the best estimate for each set of techniques, in the order they were looked at."""

    task_sha256: str
    place: Place
    gains: Mapping[Techniques, float]


def learn(searched: Sequence[Searched], strength: float = STRENGTH) -> Order:
    """The order that these searches lead to."""
    columns: dict[str, int] = {}
    rows, places, values, wanted, starts = [0], list[int](), list[float](), list[float](), list[int]()
    for one in searched:
        starts.append(len(wanted))
        powers = [min(max(gain, LEAST), MOST) ** SHARPNESS for gain in one.gains.values()]
        wanted += [power / sum(powers) for power in powers]
        for techniques in one.gains:
            for name, value in features(techniques, one.place):
                places.append(columns.setdefault(name, len(columns)))
                values.append(value)
            rows.append(len(values))
    if not wanted:
        return Order({})
    matrix = csr_array((values, places, rows), shape=(len(wanted), len(columns)))
    task_of_row = np.repeat(np.arange(len(starts)), np.diff([*starts, len(wanted)]))
    shares_wanted = np.array(wanted)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Cross-entropy and penalty, and their slopes."""
        scores = matrix @ weights
        scores -= np.maximum.reduceat(scores, starts)[task_of_row]
        logs = scores - np.log(np.add.reduceat(np.exp(scores), starts))[task_of_row]
        value = strength / 2 * weights @ weights - shares_wanted @ logs
        return float(value), matrix.T @ (np.exp(logs) - shares_wanted) + strength * weights

    found = minimize(loss, np.zeros(len(columns)), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    return Order(dict(zip(columns, found.x.tolist(), strict=True)))


def searches_in(run: RunDirectory) -> list[Searched]:
    """Read what the search of a suite found by screening.

    Raises:
        UsageError: nothing was screened there, or the tasks are not on record.
    """
    gains: defaultdict[str, dict[Techniques, float]] = defaultdict(dict)
    for look in run.screened():
        gain = look.estimate if look.correct and look.estimate else WRONG
        known = gains[look.task]
        known[look.techniques] = max(gain, known.get(look.techniques, 0.0))
    tasks = {one["id"]: Task.model_validate(one) for one in run.read_json("tasks.json") or []}
    if not gains or not tasks.keys() >= gains.keys():
        raise UsageError(
            f"Wanted the run of a search with its tasks; found none in `{run.path}`. Name one of `bench --policy`."
        )
    return [Searched(tasks[name].sha256, _place(tasks[name]), found) for name, found in gains.items()]


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


def shares(searched: Sequence[Searched], order: Callable[[Searched], Sequence[Techniques]]) -> dict[int, float]:
    """Geometric mean over tasks of the best of the first so many candidates, over the best of all."""
    found: dict[int, list[float]] = {count: [] for count in SHARE_AT}
    for one in searched:
        names = order(one)
        whole = max(1.0, *one.gains.values())
        for count, logs in found.items():
            logs.append(math.log(max(1.0, *(one.gains[each] for each in names[:count])) / whole))
    return {count: round(math.exp(sum(logs) / len(logs)), 3) for count, logs in found.items() if logs}


def found_elsewhere(one: Searched, searched: Sequence[Searched]) -> dict[Techniques, float]:
    """Mean logarithms of what other searches of a task found of those of its candidates that they looked at."""
    others = [other.gains for other in searched if other.task_sha256 == one.task_sha256 and other is not one]
    logs = {names: [math.log(gains[names]) for gains in others if names in gains] for names in one.gains}
    return {names: sum(several) / len(several) for names, several in logs.items() if several}


def _say_what_it_is_worth(searched: Sequence[Searched]) -> None:
    """Print what orders reach on all tasks, and on those of which another search says what an order could reach at best."""
    families = sorted({kind_of(one.place) for one in searched})
    apart = {name: learn([one for one in searched if kind_of(one.place) != name]) for name in families}
    elsewhere = {id(one): found_elsewhere(one, searched) for one in searched}
    twice = [one for one in searched if len(elsewhere[id(one)]) >= KNOWN * len(one.gains)]
    draw = random.Random(0)

    def learnt(one: Searched) -> Sequence[Techniques]:
        order = apart[kind_of(one.place)]
        return sorted(one.gains, key=lambda names: -order.gain(names, one.place))

    def shuffled(one: Searched) -> Sequence[Techniques]:
        return draw.sample([*one.gains], len(one.gains))

    def known(one: Searched) -> Sequence[Techniques]:
        return sorted(one.gains, key=lambda names: -elsewhere[id(one)].get(names, -math.inf))

    print(f"{len(searched)} tasks, {sum(len(one.gains) for one in searched)} candidates, {len(families)} families")
    print("best of the first      " + "".join(f"{count:8}" for count in SHARE_AT))
    for name, order, tasks in (
        ("as they were looked at", lambda one: [*one.gains], searched),
        ("at random", shuffled, [*searched] * SHUFFLES),
        ("learnt, family left out", learnt, searched),
        (f"the same of {len(twice)} searches", learnt, twice),
        ("as others found there", known, twice),
    ):
        print(f"{name:23}" + "".join(f"{share:8.3f}" for share in shares(tasks, order).values()))


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
    _say_what_it_is_worth(searched)
    learn(searched).write(options.out)
    print(f"written  {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
