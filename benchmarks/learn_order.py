"""Learns the order of proposals from finished searches, and says what it is worth on tasks that it was not learnt from.

    python benchmarks/learn_order.py RUN_DIR... --out order.json

The weights of an order (`rewrites/order.py`) are a listwise ranker's: the softmax of the scores of a task's candidates is to
come near to the softmax of the logarithms of the estimates, by cross-entropy. So it counts which are best, and not by
how much the others are worse.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
"""Factor of the penalty on squared weights. Between 1 and 8 the result hardly depends on it."""
SHARPNESS = 5.0
"""Power of an estimate with which a candidate counts among those of its task: 1.15 times as fast counts twice. Between 3 and
14 the result hardly depends on it."""
WRONG = 0.5
"""Estimate of a candidate that was not right when it was screened. Our choice."""
LEAST, MOST = 0.3, 20.0
"""Estimates are cut there: far off they say little about other tasks. Our choice."""
SMALL = 1e-3
"""Weights of techniques in places below it are left out of the file: a hundred change a score by a tenth at most."""
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
    """The order that these searches lead to.

    Args:
        strength: Factor of the penalty on squared weights.
    """
    columns: dict[str, int] = {}
    rows, places, values, wanted, starts = [0], list[int](), list[float](), list[float](), list[int]()
    for search in searched:
        starts.append(len(wanted))
        powers = [min(max(gain, LEAST), MOST) ** SHARPNESS for gain in search.gains.values()]
        wanted += [power / sum(powers) for power in powers]
        for techniques in search.gains:
            for name, value in features(techniques, search.place):
                places.append(columns.setdefault(name, len(columns)))
                values.append(value)
            rows.append(len(values))
    if not wanted:
        return Order({})
    matrix = csr_array((values, places, rows), shape=(len(wanted), len(columns)))
    given = (matrix, np.array(starts), np.array(wanted), strength)
    best = minimize(_loss, np.zeros(len(columns)), given, jac=True, method="L-BFGS-B", options={"maxiter": 500})
    return Order(dict(zip(columns, best.x.tolist(), strict=True)))


def _loss(
    weights: np.ndarray, matrix: csr_array, starts: np.ndarray, wanted: np.ndarray, strength: float
) -> tuple[float, np.ndarray]:
    """Cross-entropy and penalty, and their slopes.

    Args:
        matrix: Features of all candidates, those of a task one after another.
        starts: First row of each task.
        wanted: Share of each candidate in its task.
    """
    task_of_row = np.repeat(np.arange(len(starts)), np.diff([*starts, len(wanted)]))
    scores = matrix @ weights
    scores -= np.maximum.reduceat(scores, starts)[task_of_row]
    logs = scores - np.log(np.add.reduceat(np.exp(scores), starts))[task_of_row]
    value = strength / 2 * weights @ weights - wanted @ logs
    return float(value), matrix.T @ (np.exp(logs) - wanted) + strength * weights


def text_of(order: Order) -> str:
    """An order as JSON, with each technique whatever its weight: it was tried."""
    named = sorted(order.weights.items())
    kept = {name: round(weight, 4) for name, weight in named if abs(weight) >= SMALL or " " not in name}
    return json.dumps(kept, indent=0) + "\n"


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


def shares(ordered: Iterable[tuple[Searched, Sequence[Techniques]]]) -> dict[int, float]:
    """Geometric mean over tasks of the best of the first so many candidates, over the best of all.

    Args:
        ordered: Searches, each with its candidates in the order that is compared.
    """
    logs: dict[int, list[float]] = {count: [] for count in SHARE_AT}
    for search, names in ordered:
        whole = max(1.0, *search.gains.values())
        for count in SHARE_AT:
            logs[count].append(math.log(max(1.0, *(search.gains[name] for name in names[:count])) / whole))
    return {count: round(math.exp(sum(each) / len(each)), 3) for count, each in logs.items() if each}


def found_elsewhere(search: Searched, searched: Sequence[Searched]) -> dict[Techniques, float]:
    """Mean logarithms of what other searches of a task found of those of its candidates that they looked at."""
    others = [other.gains for other in searched if other.task_sha256 == search.task_sha256 and other is not search]
    logs = {names: [math.log(gains[names]) for gains in others if names in gains] for names in search.gains}
    return {names: sum(several) / len(several) for names, several in logs.items() if several}


def by_gain(search: Searched, gains: Mapping[Techniques, float]) -> list[Techniques]:
    """A search's candidates, those with the largest of these gains first and those without one last."""
    return sorted(search.gains, key=lambda names: -gains.get(names, -math.inf))


def by_order(search: Searched, order: Order) -> list[Techniques]:
    """A search's candidates as an order puts them."""
    return by_gain(search, {names: order.gain(names, search.place) for names in search.gains})


def _print_worth(searched: Sequence[Searched]) -> None:
    """Print what orders reach on all tasks, and on those of which another search says what an order could reach at best."""
    families = sorted({kind_of(search.place) for search in searched})
    apart = {name: learn([search for search in searched if kind_of(search.place) != name]) for name in families}
    learnt = [(search, by_order(search, apart[kind_of(search.place)])) for search in searched]
    elsewhere = [found_elsewhere(search, searched) for search in searched]
    twice = [place for place, search in enumerate(searched) if len(elsewhere[place]) >= KNOWN * len(search.gains)]
    draw = random.Random(0)
    compared: dict[str, list[tuple[Searched, list[Techniques]]]] = {
        "as they were looked at": [(search, [*search.gains]) for search in searched],
        "at random": [(search, draw.sample([*search.gains], len(search.gains))) for search in [*searched] * SHUFFLES],
        "learnt, family left out": learnt,
        f"the same of {len(twice)} searches": [learnt[place] for place in twice],
        "as others found there": [(searched[place], by_gain(searched[place], elsewhere[place])) for place in twice],
    }
    print(f"{len(searched)} tasks, {sum(len(search.gains) for search in searched)} candidates, {len(families)} families")
    print("best of the first      " + "".join(f"{count:8}" for count in SHARE_AT))
    for name, ordered in compared.items():
        print(f"{name:23}" + "".join(f"{share:8.3f}" for share in shares(ordered).values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn, and say what the order is worth on families of tasks that it was not learnt from."""
    parser = argparse.ArgumentParser(
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
    _print_worth(searched)
    options.out.write_text(text_of(learn(searched)), encoding="utf-8")
    print(f"written  {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
