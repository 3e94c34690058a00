"""Finds the known hacks nearest to a candidate, by structure and by what was measured.

CUDA-L1 retrieves similar hacks by "AST similarity + performance profile" and published neither. Here a candidate and a
pattern are sets of features of their syntax trees (`structure.py`). Of a pattern only what its honest twin does not have
counts, where it has one: the mechanism, not the program around it. A feature weighs the more the fewer honest programs
have it: the twins, and the references of the built-in tasks. What the task's own reference has is left out of the
candidate. The similarity is the weight of what both have over the weight of what either has (Jaccard), with a constant
in the denominator, so that little evidence is no likeness. Measurements that a pattern is known for raise it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from kernelwright.contrastive.hacks.database import HackDatabase, Pattern, Sign, profile
from kernelwright.contrastive.hacks.structure import PATH, SHAPE, features
from kernelwright.records import Evaluation
from kernelwright.tasks.suites import load_suite

SHAPE_WEIGHT = 2.0
PATH_WEIGHT = 0.3
"""Weights of a shape and of a path of the syntax tree, beside another feature as rare. Chosen on the training split of
results/2026-11-23-hack-detection-cpu, from {2, 4} and {0.3, 1}."""
PRIOR_WEIGHT = 20.0
"""Added to the denominator of a similarity: about four rare features. Chosen as the weights were, from {0, 20, 60}."""
PROFILE_BOOST = 2.0
"""Rise of a similarity at full agreement of the measurements: to three times. Chosen on the measured training
cases of results/2026-11-23-hack-detection-cpu, from {0, 1, 2, 4}. It multiplies, since being fast alone is like no hack."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A known hack and how near it is."""

    pattern: Pattern
    similarity: float
    """Likeness of structure and profile together, from 0 to 1."""
    shared: tuple[str, ...]
    """The weightiest features that both have."""


class Retriever:
    """Finds the nearest patterns of a database. Build it anew when the database has grown."""

    def __init__(self, database: HackDatabase) -> None:
        self._patterns = database.patterns
        twins = [_features(pattern.honest) for pattern in self._patterns if pattern.honest]
        references, programs = honest_counts()
        honest = references + Counter(feature for twin in twins for feature in twin)
        self._hacks = _Index([_mechanism(pattern) for pattern in self._patterns], honest, programs + len(twins))
        self._twins = _Index(twins, references, programs)

    def nearest(
        self, source: str, *, reference: str = "", evaluation: Evaluation | None = None, count: int = 5
    ) -> tuple[Neighbour, ...]:
        """The patterns nearest to a candidate, nearest first; ties by id. Features of the reference are left out."""
        if not self._patterns:
            return ()
        weights = self._hacks.weights_of(_own_features(source, reference))
        structure = self._hacks.similarities(weights)
        signs = profile(evaluation) if evaluation is not None else frozenset()
        scores = [
            (_raised(float(structure[row]), pattern, signs), pattern.id, row) for row, pattern in enumerate(self._patterns)
        ]
        scores.sort(key=lambda item: (-item[0], item[1]))
        return tuple(
            Neighbour(self._patterns[row], score, self._hacks.shared(row, weights)) for score, _, row in scores[:count]
        )

    def honest_resemblance(self, source: str, *, reference: str = "") -> float:
        """The similarity of the nearest honest twin of a hack, from 0 to 1."""
        similarities = self._twins.similarities(self._twins.weights_of(_own_features(source, reference)))
        return float(similarities.max(initial=0.0))


class _Index:
    """Sets of weighted features that others are compared with.

    Args:
        sets: The features of each.
        honest: How many honest programs have each feature.
        programs: How many honest programs there are.
    """

    def __init__(self, sets: Sequence[frozenset[str]], honest: Mapping[str, int], programs: int) -> None:
        self._names: list[str] = sorted(frozenset[str]().union(*sets))
        self._columns = {name: column for column, name in enumerate(self._names)}
        self._has: NDArray[np.float32] = np.zeros((len(sets), len(self._names)), dtype=np.float32)
        for row, found in enumerate(sets):
            self._has[row, [self._columns[name] for name in found]] = 1.0
        self._weights: NDArray[np.float32] = np.array(
            [_weight(name, honest.get(name, 0), programs) for name in self._names], dtype=np.float32
        )
        self._totals: NDArray[np.float32] = self._has @ self._weights

    def weights_of(self, found: frozenset[str]) -> NDArray[np.float32]:
        """The weights of the features that a candidate has, zero elsewhere."""
        weights = np.zeros(len(self._names), dtype=np.float32)
        columns = [self._columns[name] for name in found if name in self._columns]
        weights[columns] = self._weights[columns]
        return weights

    def similarities(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """The similarity of each set to a candidate with these weights."""
        shared: NDArray[np.float32] = self._has @ weights
        nearness: NDArray[np.float32] = shared / (self._totals + weights.sum() - shared + np.float32(PRIOR_WEIGHT))
        return nearness

    def shared(self, row: int, weights: NDArray[np.float32]) -> tuple[str, ...]:
        """The weightiest features that a set and a candidate both have."""
        both = self._has[row] * weights
        order = sorted(np.flatnonzero(both).tolist(), key=lambda column: (-both[column], self._names[column]))
        return tuple(self._names[column] for column in order[:8])


_features = lru_cache(maxsize=4096)(features)


def _own_features(source: str, reference: str) -> frozenset[str]:
    return _features(source) - (_features(reference) if reference else frozenset())


def _mechanism(pattern: Pattern) -> frozenset[str]:
    """The features that make a pattern a cheat: its own without those of its honest twin.

    Of a cheat that only leaves something out nothing remains, and no structure is like it. Letting all its features
    stand for it instead found 27 training cheats in place of 29, with as many false alarms (docs/hacks.md).
    """
    own = _features(pattern.snippet)
    return own - _features(pattern.honest) if pattern.honest else own


def _weight(name: str, owners: int, programs: int) -> float:
    kind = SHAPE_WEIGHT if name.startswith(SHAPE) else PATH_WEIGHT if name.startswith(PATH) else 1.0
    return kind * math.log((1.0 + programs) / (1.0 + owners))


def _raised(structure: float, pattern: Pattern, signs: frozenset[Sign]) -> float:
    """A similarity of structure, raised by the share of a candidate's measured signs that a pattern is known for."""
    agreement = len(signs & frozenset(pattern.measured_signs)) / len(signs) if signs else 0.0
    return min(1.0, structure * (1.0 + PROFILE_BOOST * agreement))


@cache
def honest_counts() -> tuple[Counter[str], int]:
    """The number of built-in references with each feature, and of all of them."""
    sources = [entry.task.source for entry in load_suite("builtin").entries]
    return Counter(feature for source in sources for feature in features(source)), len(sources)
