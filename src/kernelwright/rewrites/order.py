"""Orders proposals by the gain that earlier searches lead one to expect, so that a small budget is spent on the best.

    python -m kernelwright.rewrites.order RUN_DIR... --out order.json    # learn from searches of your own
    KERNELWRIGHT_ORDER=order.json kernelwright optimize TASK             # and propose by it

A candidate is known by its techniques, a task by its operators and its size. What is learnt is a weight for each technique,
and for each technique on each operator: a ridge regression of the logarithms of screening's estimates, each less the mean of
its task. `order.json` beside this file is learnt from results/kernelbench-h200. A technique that no search has used has no
weight, which makes it neither better nor worse than the others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from kernelwright.errors import ConfigError, KernelwrightError, UsageError
from kernelwright.records import RunDirectory, Task
from kernelwright.rewrites.graph import is_tensor, numel
from kernelwright.rewrites.normalise import UntraceableError
from kernelwright.rewrites.tracing import Trace, trace

PACKAGED = Path(__file__).with_name("order.json")
VARIABLE = "KERNELWRIGHT_ORDER"
"""Variable that names a file to take in place of the packaged one."""
STRENGTH = 20.0
"""Of the ridge. Between 3 and 30 the result hardly depends on it."""
WRONG = 0.5
"""What a candidate counts that was not right when it was screened. Our choice."""
LEAST, MOST = 0.3, 20.0
"""Estimates are cut there: far off they say little about other tasks. Our choice."""
SMALL = 1e-3
"""Weights below it are left out of the file: a hundred of them would change a gain by a tenth at most."""
SHARE_AT = (2, 4, 6, 8, 12)
"""Numbers of candidates at which orders are compared."""


@dataclass(frozen=True, slots=True)
class Place:
    """A task, as far as the order knows it."""

    operators: frozenset[str] = frozenset()
    elements: int = 1
    """Of its largest tensor."""

    @classmethod
    def of(cls, traced: Trace | None) -> Place:
        """That of a traced task; of one without a graph nothing is known."""
        if traced is None:
            return cls()
        nodes = list(traced.training.graph.nodes)
        calls = [node.target for node in nodes if node.op == "call_function"]
        names = {str(getattr(call, "overloadpacket", getattr(call, "__name__", call))) for call in calls}
        return cls(
            frozenset(name.rpartition(".")[2] for name in names),
            max((numel(node) for node in nodes if is_tensor(node)), default=1),
        )


@dataclass(frozen=True, slots=True)
class Searched:
    """A task that was searched, and the best estimate for each set of techniques, in the order they were looked at."""

    task: str
    place: Place
    gains: Mapping[tuple[str, ...], float]


def features(techniques: Iterable[str], place: Place) -> Iterator[tuple[str, float]]:
    """Names and values of what is known about a candidate of a task."""
    # Of the order of 1, as all others are.
    size, length = (math.log(max(place.elements, 1)) - 15) / 5, math.log1p(len(place.operators)) - 1.5
    for technique in techniques:
        yield technique, 1.0
        yield f"{technique} by size", size
        yield f"{technique} by length", length
        for operator in place.operators:
            yield f"{technique} on {operator}", 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """Weights of features."""

    weights: Mapping[str, float]

    def gain(self, techniques: Iterable[str], place: Place) -> float:
        """Logarithm of the expected speedup over the mean of the task's candidates; 0 where nothing is known."""
        return sum(self.weights.get(name, 0.0) * value for name, value in features(techniques, place))

    def write(self, path: Path) -> None:
        """Keep it."""
        kept = {name: round(weight, 4) for name, weight in sorted(self.weights.items()) if abs(weight) >= SMALL}
        path.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")


def read_order(path: Path) -> Order:
    """An order that was written.

    Raises:
        ConfigError: there is none at this path.
    """
    try:
        weights = {str(name): float(weight) for name, weight in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"Wanted an order of proposals in {path}; {error}. Make one as {__name__} says.") from error
    return Order(weights)


@cache
def _read_once(path: Path) -> Order:
    return read_order(path)


def order_in_use() -> Order:
    """The packaged order, or the one that the environment names; raises as `read_order`."""
    return _read_once(Path(os.environ.get(VARIABLE) or PACKAGED))


# --- learning ---------------------------------------------------------------------------------------------------------


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
        prog="python -m kernelwright.rewrites.order", description="Learn the order of proposals from finished searches."
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
