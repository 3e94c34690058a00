"""Exemplar samplers: the bucket sampler draws with exactly the probabilities it states."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.contrastive.samplers import SAMPLERS, BucketSampler, IslandSampler, sampler_named
from kernelwright.errors import ConfigError
from tests.samples import exemplar

POOL = [
    exemplar(score, name) for name, score in {"a": 0.9, "b": 1.05, "c": 1.1, "d": 1.5, "e": 1.6, "f": 1.69, "g": 2.5}.items()
]
BUCKETS = {-1: "a", 0: "bc", 2: "def", 5: "g"}
"""Edges are powers of 1.2: 0.833, 1, 1.2, 1.44, 1.728, 2.074, 2.488, 2.986."""


def names(exemplars):
    return "".join(found.candidate_sha256 for found in exemplars)


def exact_first(temperature=0.5):
    """The paper's formula, written out: exp((mean of the bucket - mean of all) / tau), normalised."""
    scores = {found.candidate_sha256: found.score for found in POOL}
    overall = sum(scores.values()) / len(scores)
    odds = {
        bucket: math.exp((sum(scores[name] for name in members) / len(members) - overall) / temperature)
        for bucket, members in BUCKETS.items()
    }
    return {bucket: value / sum(odds.values()) for bucket, value in odds.items()}


def chi_square(observed: Counter, expected: dict[str, float], draws: int) -> float:
    assert set(observed) <= set(expected)
    return sum((observed[key] - draws * share) ** 2 / (draws * share) for key, share in expected.items())


def test_buckets_have_logarithmic_edges():
    assert {bucket: names(members) for bucket, members in BucketSampler().buckets(POOL).items()} == BUCKETS
    edges = [exemplar(1.2**power, str(power)) for power in range(-5, 30)]
    assert list(BucketSampler().buckets(edges)) == list(range(-5, 30))


def test_stated_probabilities_are_the_papers():
    assert BucketSampler().probabilities(POOL) == pytest.approx(exact_first())
    assert BucketSampler(temperature=2.0).probabilities(POOL) == pytest.approx(exact_first(2.0))


def test_pairs_are_drawn_with_exactly_their_probabilities():
    first = exact_first()
    expected = {
        one + two: first[i] * first[j] / (1 - first[i]) / len(BUCKETS[i]) / len(BUCKETS[j])
        for i in BUCKETS
        for j in BUCKETS
        if i != j
        for one in BUCKETS[i]
        for two in BUCKETS[j]
    }
    assert sum(expected.values()) == pytest.approx(1)
    draws = 20_000
    rng = random.Random(20260102)
    observed = Counter(names(BucketSampler().sample(POOL, 2, rng)) for _ in range(draws))
    # 34 outcomes: chi-square of 33 degrees of freedom exceeds 63.9 once in a thousand. The seed is fixed.
    assert len(expected) == 34
    assert chi_square(observed, expected, draws) < 63.9
    uniform = dict.fromkeys(expected, 1 / len(expected))
    assert chi_square(observed, uniform, draws) > 1000, "the comparison would not notice other probabilities"


def test_fewer_buckets_than_asked_for_give_fewer_exemplars():
    rng = random.Random(0)
    same = [exemplar(1.0 + number / 100, str(number)) for number in range(9)]
    assert len(BucketSampler().sample(same, 2, rng)) == 1
    assert BucketSampler().sample([], 2, rng) == []


def test_extreme_scores_do_not_overflow():
    wild = [exemplar(-1.0, "a"), exemplar(0.0, "b"), exemplar(1.0, "c"), exemplar(1e6, "d")]
    drawn = BucketSampler().sample(wild, 4, random.Random(0))
    assert names(drawn)[0] == "d"
    assert len(drawn) == 3, "0 and below share the lowest bucket"


@given(
    scores=st.lists(st.floats(-1, 1e4), max_size=12),
    count=st.integers(0, 5),
    seed=st.integers(0, 9),
    name=st.sampled_from(sorted(SAMPLERS)),
)
def test_every_sampler_gives_different_known_exemplars_and_is_deterministic(scores, count, seed, name):
    pool = [exemplar(score, f"c{number}") for number, score in enumerate(scores)]
    drawn = sampler_named(name).sample(pool, count, random.Random(seed))
    assert len(drawn) <= count
    assert len({found.candidate_sha256 for found in drawn}) == len(drawn)
    assert all(found in pool for found in drawn)
    assert drawn == sampler_named(name).sample(pool, count, random.Random(seed))
    assert (drawn == []) == (name == "none" or not pool or count == 0)


def test_relatives_share_an_island():
    family = [exemplar(1.0, "root"), exemplar(1.2, "child", "root"), exemplar(1.4, "grandchild", "child")]
    siblings = [exemplar(1.1, "x", "unlisted"), exemplar(1.3, "y", "unlisted")]
    homes = IslandSampler(islands=1000).homes([*family, *siblings])
    assert homes["root"] == homes["child"] == homes["grandchild"]
    assert homes["x"] == homes["y"] != homes["root"]
    circle = [exemplar(1.0, "p", "q"), exemplar(1.0, "q", "p")]
    assert set(IslandSampler().homes(circle)) == {"p", "q"}


def test_without_migration_an_island_keeps_to_itself():
    pool = [exemplar(1.0 + number / 10, f"{root}{number}", root) for root in "klmnopqr" for number in range(3)]
    sampler = IslandSampler(migration=0.0)
    homes = sampler.homes(pool)
    rng = random.Random(1)
    draws = [sampler.sample(pool, 2, rng) for _ in range(200)]
    assert all(len({homes[found.candidate_sha256] for found in pair}) == 1 for pair in draws)
    assert {homes[pair[0].candidate_sha256] for pair in draws} == set(homes.values())
    mixed = [IslandSampler(migration=1.0).sample(pool, 2, rng) for _ in range(200)]
    assert any(len({homes[found.candidate_sha256] for found in pair}) == 2 for pair in mixed)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nonsense", {}, ", ".join(SAMPLERS)),
        ("bucket", {"tau": 1.0}, "ratio, temperature"),
        ("random", {"temperature": 1.0}, "known are none"),
    ],
)
def test_wrong_samplers_and_options_are_named(name, options, words):
    with pytest.raises(ConfigError, match=words):
        sampler_named(name, **options)
