"""Orders proposals by the gain that earlier searches lead one to expect, so that a small budget is spent on the best.

    KERNELWRIGHT_ORDER=order.json kernelwright optimize TASK    # propose by an order of your own

A candidate is known by its techniques, a task by its operators and its size. An order holds a weight for each technique, and
for each technique on each operator. `order.json` beside this file is learnt from results/kernelbench-h200, by `learning`. A
technique that no search has used has no weight, which makes it neither better nor worse than the others.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernelwright.errors import ConfigError
from kernelwright.rewrites.graph import is_tensor, numel
from kernelwright.rewrites.tracing import Trace

PACKAGED = Path(__file__).with_name("order.json")
VARIABLE = "KERNELWRIGHT_ORDER"
"""Variable that names a file to take in place of the packaged one."""
SMALL = 1e-3
"""Weights below it are left out of the file: a hundred of them would change a gain by a tenth at most."""


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
        raise ConfigError(
            f"Wanted an order of proposals in {path}; {error}. Make one with `python -m {__package__}.learning`."
        ) from error
    return Order(weights)


@cache
def _read_once(path: Path) -> Order:
    return read_order(path)


def order_in_use() -> Order:
    """The packaged order, or the one that the environment names; raises as `read_order`."""
    return _read_once(Path(os.environ.get(VARIABLE) or PACKAGED))
