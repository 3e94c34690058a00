"""Which earlier candidates a prompt shows: by performance bucket, by island, at random, or none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from kernelwright.rl.exemplars import Exemplar


class ExemplarSampler(Protocol):
    """Chooses exemplars of one task.

    Attributes:
        name: As in a configuration: `bucket`, `island`, `random` or `none`.
    """

    name: str

    def sample(self, exemplars: Sequence[Exemplar], count: int, rng: random.Random) -> list[Exemplar]:
        """At most `count` of `exemplars`, all different; every one has a score."""
        ...


def sampler_named(name: str, **options: float) -> ExemplarSampler:
    """A sampler by its name.

    Args:
        name: `bucket`, `island`, `random` or `none`.
        options: Its own fields, such as `temperature`.

    Raises:
        ConfigError: there is no such sampler, or it has no such option.
    """
    raise NotImplementedError
