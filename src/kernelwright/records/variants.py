"""Proposes other values for the knobs of screened candidates: a sample of all, then neighbours of the best."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence, Set
from typing import Any

from kernelwright.records import Candidate
from kernelwright.records.decisions import ranked
from kernelwright.records.knobs import Choices, fixed, knobs_of
from kernelwright.records.screened import Screened

WORTH = 0.7
"""Estimate, in multiples of the best one, below which a candidate's knobs are left alone. Our choice."""
SAMPLED = 6
"""Values drawn at random before the search follows the best. Our choice."""
SPACE_MAX = 4096
"""Combinations beyond which only a sample of so many is considered."""
Values = dict[str, Any]


def variants(screened: Sequence[Screened], taken: Set[str], count: int) -> list[Candidate]:
    """At most `count` candidates with knobs fixed that are not among those taken, the most promising first.

    They follow from the records alone. Each has the candidate that declares the choices as its parent.
    """
    order = ranked(screened)
    best = order[0].estimate or 0.0 if order else 0.0
    found: dict[str, Candidate] = {}
    for root in order:
        choices = {name: values for name, values in knobs_of(root.source).items() if len(values) > 1}
        family = [one for one in order if one.parent == root.candidate_sha256 or one is root]
        if not choices or (family[0].estimate or 0.0) < WORTH * best:
            continue
        for values in _values(root, choices, family):
            candidate = Candidate(
                source=fixed(root.source, values),
                policy=root.policy,
                techniques=root.techniques,
                passes=root.passes,
                parent=root.candidate_sha256,
            )
            if candidate.sha256 not in taken:
                found.setdefault(candidate.sha256, candidate)
            if len(found) >= count:
                return list(found.values())
    return list(found.values())


def _values(root: Screened, choices: Choices, family: Sequence[Screened]) -> Iterator[Values]:
    """Values to try: a sample, then those that differ from the best tried in one knob, then all others."""
    names, generator = list(choices), random.Random(root.candidate_sha256)
    if math.prod(map(len, choices.values())) <= SPACE_MAX:
        combinations = list(itertools.product(*choices.values()))
        generator.shuffle(combinations)
    else:
        combinations = [tuple(generator.choice(choices[name]) for name in names) for _ in range(SPACE_MAX)]
    every = [dict(zip(names, one, strict=True)) for one in combinations]
    default = {name: choices[name][0] for name in names}
    every = [one for one in every if one != default]
    yield from every[:SAMPLED]
    for one in family:
        near = {name: values[0] for name, values in knobs_of(one.source).items() if name in choices}
        for name in names:
            yield from ({**near, name: value} for value in choices[name] if value != near[name])
    yield from every
