"""Chooses the earlier candidates that a prompt shows: by performance bucket, by island, at random, or none.

CUDA-L1 compares the first three (table 5): shown at random, exemplars were worse than none at all (2.14x against
2.41x); chosen by bucket or island they were better (3.12x and 3.21x).
"""

from __future__ import annotations

import math
import random
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

from kernelwright.contrastive.exemplars import Exemplar
from kernelwright.errors import ConfigError

BUCKET_RATIO = 1.2
"""Upper edge of a bucket / its lower edge: nine buckets from 0.8x to 4x, each wider than the noise of a measurement.
CUDA-L1 does not give its edges; our choice."""

TEMPERATURE = 0.5
"""tau, in units of speedup: a bucket that is 0.5x better is e times as likely. CUDA-L1 does not give it; our choice."""

ISLANDS = 4
"""Number of islands. Our choice; CUDA-L1 names the method only."""

MIGRATION = 0.1
"""Share of the island sampler's draws from all islands: a stand-in for moving the best between them. Our choice."""

LEAST_SCORE = 0.001
"""Scores below it count as it: the bound of a very noisy measurement may be 0."""

Key = TypeVar("Key", int, str)


class ExemplarSampler(Protocol):
    """Chooses exemplars of one task."""

    @property
    def name(self) -> str:
        """Name in a configuration, such as `bucket`."""
        ...

    def sample(self, exemplars: Sequence[Exemplar], count: int, rng: random.Random) -> list[Exemplar]:
        """At most `count` of `exemplars`, all different. Each must have a score, as in `ExemplarDatabase.exemplars`."""
        ...


@dataclass(frozen=True, slots=True)
class BucketSampler:
    """CUDA-L1's choice (section 2.4.3, equation 1): distinct performance buckets, the better the likelier.

    A bucket's probability is proportional to exp((mean of its scores - mean of all) / temperature); within a bucket each
    candidate is as likely as any other. After the first bucket is drawn, the others keep their proportions. Where there
    are fewer buckets than asked for, there are fewer exemplars: two of a bucket would show no contrast.
    """

    name: ClassVar[str] = "bucket"
    ratio: float = BUCKET_RATIO
    temperature: float = TEMPERATURE
    one_level: bool = False
    """True when all come from the first bucket drawn: an ablation."""

    def buckets(self, exemplars: Sequence[Exemplar]) -> dict[int, list[Exemplar]]:
        """Exemplars by bucket; bucket k holds scores from ratio**k up to, not including, ratio**(k+1)."""
        found: dict[int, list[Exemplar]] = defaultdict(list)
        for exemplar in exemplars:
            found[self._bucket(exemplar.known_score())].append(exemplar)
        return dict(sorted(found.items()))

    def probabilities(self, exemplars: Sequence[Exemplar]) -> dict[int, float]:
        """Each bucket's probability of being drawn first."""
        means = {bucket: _mean(members) for bucket, members in self.buckets(exemplars).items()}
        return _softmax(means, self.temperature)

    def sample(self, exemplars: Sequence[Exemplar], count: int, rng: random.Random) -> list[Exemplar]:
        """One candidate from each of at most `count` buckets, or that many from one."""
        buckets = self.buckets(exemplars)
        if self.one_level and exemplars:
            (bucket,) = _draw(self.probabilities(exemplars), 1, rng)
            return rng.sample(buckets[bucket], min(count, len(buckets[bucket])))
        chosen = _draw(self.probabilities(exemplars), count, rng)
        return [rng.choice(buckets[bucket]) for bucket in chosen]

    def _bucket(self, score: float) -> int:
        # The summand keeps an edge such as 1.2**2, whose logarithm is rounded, in the bucket that it begins.
        return math.floor(math.log(max(score, LEAST_SCORE)) / math.log(self.ratio) + 1e-9)


@dataclass(frozen=True, slots=True)
class IslandSampler:
    """Families that evolve apart: a prompt shows relatives, so ideas of one island do not crowd out the others'.

    A candidate lives where its earliest known ancestor lives, and an ancestor's hash says where that is. An island is
    drawn uniformly, then its members by exp(score / temperature), without repetition.
    """

    name: ClassVar[str] = "island"
    islands: int = ISLANDS
    temperature: float = TEMPERATURE
    migration: float = MIGRATION

    def sample(self, exemplars: Sequence[Exemplar], count: int, rng: random.Random) -> list[Exemplar]:
        """At most `count` of one island, or, as rarely as `migration` says, of all."""
        if not exemplars:
            return []
        homes = self.homes(exemplars)
        island = rng.choice(sorted(set(homes.values())))
        wanderer = rng.random() < self.migration
        members = {
            exemplar.candidate_sha256: exemplar
            for exemplar in exemplars
            if wanderer or homes[exemplar.candidate_sha256] == island
        }
        odds = _softmax({name: exemplar.known_score() for name, exemplar in members.items()}, self.temperature)
        return [members[name] for name in _draw(odds, count, rng)]

    def homes(self, exemplars: Sequence[Exemplar]) -> dict[str, int]:
        """The island of each candidate, by hash."""
        parents = {exemplar.candidate_sha256: exemplar.parent for exemplar in exemplars}
        homes = {}
        for name in parents:
            ancestor, passed = name, {name}
            while (parent := parents.get(ancestor)) is not None and parent not in passed:
                ancestor = parent
                passed.add(parent)
            homes[name] = zlib.crc32(ancestor.encode()) % self.islands
        return homes


@dataclass(frozen=True, slots=True)
class RandomSampler:
    """Every candidate as likely as any other."""

    name: ClassVar[str] = "random"

    def sample(self, exemplars: Sequence[Exemplar], count: int, rng: random.Random) -> list[Exemplar]:
        """`count` of all, without repetition."""
        return rng.sample(list(exemplars), min(count, len(exemplars)))


@dataclass(frozen=True, slots=True)
class NoSampler:
    """No exemplars: vanilla reinforcement learning, or independent samples of a frozen model."""

    name: ClassVar[str] = "none"

    def sample(self, exemplars: Sequence[Exemplar], count: int, rng: random.Random) -> list[Exemplar]:
        """Nothing."""
        return []


SAMPLERS: Mapping[str, type[BucketSampler | IslandSampler | RandomSampler | NoSampler]] = {
    sampler.name: sampler for sampler in (BucketSampler, IslandSampler, RandomSampler, NoSampler)
}
"""Every sampler by its name; choices of configurations, the command line and the recipe derive from it."""
CONTRASTIVE = tuple(name for name in SAMPLERS if name != NoSampler.name)
"""Names of those that show exemplars."""


def options_of(name: str) -> tuple[str, ...]:
    """Names of a sampler's options.

    Raises:
        ConfigError: there is no such sampler.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"Wanted an exemplar sampler, found `{name}`; known are {', '.join(SAMPLERS)}.")
    return tuple(field.name for field in fields(SAMPLERS[name]))


def sampler_named(name: str, **options: Any) -> ExemplarSampler:
    """A sampler by its name in `SAMPLERS`, with its own fields as options.

    Raises:
        ConfigError: there is no such sampler, or it has no such option.
    """
    known = options_of(name)
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(f"Wanted an option of the sampler `{name}`, found `{option}`; known are {listed}.")
    return SAMPLERS[name](**options)


def _mean(exemplars: Sequence[Exemplar]) -> float:
    return sum(exemplar.known_score() for exemplar in exemplars) / len(exemplars)


def _softmax(values: Mapping[Key, float], temperature: float) -> dict[Key, float]:
    """Probabilities proportional to exp(value / temperature).

    The paper subtracts the mean of all scores before the exponential, to steady it. Any constant gives the same
    probabilities; the largest value is the one that cannot overflow.
    """
    if not values:
        return {}
    largest = max(values.values())
    odds = {key: math.exp((value - largest) / temperature) for key, value in values.items()}
    total = sum(odds.values())
    return {key: value / total for key, value in odds.items()}


def _draw(probabilities: Mapping[Key, float], count: int, rng: random.Random) -> list[Key]:
    """Keys one after the other, without repetition, the remaining ones in their proportions."""
    left = dict(probabilities)
    drawn: list[Key] = []
    while left and len(drawn) < count:
        # Far below the best, odds underflow to 0; when nothing else is left, such keys are as likely as each other.
        weights = list(left.values()) if sum(left.values()) > 0 else None
        (key,) = rng.choices(list(left), weights)
        drawn.append(key)
        del left[key]
    return drawn
