"""Orders proposals by what earlier searches lead one to expect, so that a small budget is spent on the best.

    KERNELWRIGHT_ORDER=order.json kernelwright optimize TASK    # propose by an order of your own

A candidate is known by its techniques; a task by its operators, and by how many kernels it launches, how many bytes each of
them moves and how many operations there are to a byte: whether launches, memory or arithmetic limit it. An order holds
weights for each technique in each of these places. `order.json` beside this file is learnt from results/kernelbench-h200, by
`benchmarks/learn_order.py`. A technique that no search has used has no weight; its candidates come first, since nothing else
tells what it is worth.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from torch import fx

from kernelwright.errors import ConfigError
from kernelwright.rewrites.graph import is_call, is_tensor, numel, shape, value
from kernelwright.rewrites.templates.products import Operands, ProductTemplate
from kernelwright.rewrites.tracing import Trace, is_view_call

PACKAGED = Path(__file__).with_name("order.json")
VARIABLE = "KERNELWRIGHT_ORDER"
"""Variable that names a file to use instead of the packaged one."""
_NEAR = 1.5
"""Value of a feature that stands for an order of magnitude. Our choice; with 1 an order learns as much."""


@dataclass(frozen=True, slots=True)
class Place:
    """A task, as far as the order knows it."""

    operators: frozenset[str] = frozenset()
    launches: int = 0
    """Operators that compute something; 0 where there is no graph, of which no more is known."""
    bytes: int = 0
    """Size of all tensors of its graph."""
    operations: int = 0
    """Multiplications and additions of its products and convolutions."""

    @classmethod
    def of(cls, traced: Trace | None) -> Place:
        """The place of a traced task; of one without a graph nothing is known."""
        if traced is None:
            return cls()
        nodes = list(traced.training.graph.nodes)
        calls = [node for node in nodes if node.op == "call_function"]
        targets = [node.target for node in calls]
        names = {str(getattr(call, "overloadpacket", getattr(call, "__name__", call))) for call in targets}
        return cls(
            frozenset(name.rpartition(".")[2] for name in names),
            sum(is_tensor(node) and not is_view_call(node) for node in calls),
            sum(value(node).nbytes for node in nodes if is_tensor(node)),
            sum(_operations(node) for node in calls if is_tensor(node)),
        )

    def limits(self) -> Iterator[tuple[str, float]]:
        """Features that say whether launches, memory or arithmetic limit the task; none for a task that computes nothing.

        They are three quantities on logarithmic scales: launches, bytes for each launch, and operations for each byte.
        """
        if self.launches == 0:
            return
        yield from _magnitudes("launches", 2 * math.log10(self.launches), 0, 5)
        yield from _magnitudes("bytes a launch", math.log10(max(self.bytes, 1) / self.launches), 4, 9)
        yield from _magnitudes("operations a byte", math.log10(max(self.operations, 1) / max(self.bytes, 1)), -1, 3)


def _magnitudes(name: str, place: float, least: int, most: int) -> Iterator[tuple[str, float]]:
    """Features of a place on a scale: the whole numbers below and above it, each with a larger value the nearer it is.

    A place of 4.3 gives `name 4` seven tenths of `_NEAR` and `name 5` three tenths.
    """
    place = min(max(place, least), most)
    lower = math.floor(place)
    for whole, part in ((lower, 1.0 - (place - lower)), (lower + 1, place - lower)):
        if part > 0.0:
            yield f"{name} {whole}", _NEAR * part


def _operations(node: fx.Node) -> int:
    """Operations of a product or a convolution; 0 of any other call."""
    operands = Operands.of(node) if is_call(node, *ProductTemplate.operators) else None
    if operands is not None:
        return 2 * numel(node) * shape(operands.left)[-1]
    if "conv" in str(node.target):
        source, weight = node.args[:2]
        # Each element of a transposed convolution's input, as of another's output, meets a filter.
        meets = source if "transpose" in str(node.target) else node
        return 2 * numel(cast(fx.Node, meets)) * math.prod(shape(cast(fx.Node, weight))[1:])
    return 0


def features(techniques: Iterable[str], place: Place) -> Iterator[tuple[str, float]]:
    """Names and values of what is known about a candidate of a task."""
    limits = list(place.limits())
    for technique in techniques:
        yield technique, 1.0
        for operator in sorted(place.operators):
            yield f"{technique} on {operator}", 1.0
        for name, near in limits:
            yield f"{technique} at {name}", near


@dataclass(frozen=True, slots=True)
class Order:
    """Weights of features."""

    weights: Mapping[str, float]

    def gain(self, techniques: Iterable[str], place: Place) -> float:
        """Score among the task's candidates, the higher the likelier it is the best; 0 where nothing is known."""
        return sum(self.weights.get(name, 0.0) * value for name, value in features(techniques, place))

    def knows(self, techniques: Iterable[str]) -> bool:
        """True where searches have used all of these."""
        return all(name in self.weights for name in techniques)


def read_order(path: Path) -> Order:
    """An order from a file.

    Raises:
        ConfigError: there is none at this path.
    """
    try:
        weights = {str(name): float(weight) for name, weight in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Wanted an order of proposals in {path}; {error}. Make one with `python benchmarks/learn_order.py`."
        ) from error
    return Order(weights)


@cache
def _read_once(path: Path) -> Order:
    return read_order(path)


def order_in_use() -> Order:
    """The packaged order, or the one that the environment names; raises as `read_order`."""
    return _read_once(Path(os.environ.get(VARIABLE) or PACKAGED))
