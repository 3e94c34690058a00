"""Records: frozen, closed to unknown fields, with hashes that are the same everywhere."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kernelwright.records import (
    Candidate,
    Evaluation,
    Label,
    Reason,
    Task,
    TimingBlock,
    Verdict,
    canonical_json,
    sha256_of,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def evaluation(**changes):
    values = {"task": "t", "task_sha256": "a", "candidate_sha256": "b", "verdict": Verdict.ACCEPTED}
    return Evaluation(**(values | changes))


@given(JSON)
def test_canonical_json_reads_back_as_what_it_was(value):
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_order_of_keys_does_not_matter(value):
    turned = dict(reversed(list(value.items())))
    assert canonical_json(turned) == canonical_json(value)
    assert sha256_of(turned) == sha256_of(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_without_a_spelling_are_refused(number):
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": number})


def test_text_is_hashed_as_it_is():
    assert sha256_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_of("abc") != sha256_of(["abc"])
    assert canonical_json({"é": 1, "a": [1, 2]}) == '{"a":[1,2],"é":1}'


@pytest.mark.parametrize(
    "record",
    [
        Task(id="t", source="x"),
        Candidate(source="x"),
        TimingBlock(process=0, reference_us=(), candidate_us=()),
        evaluation(),
    ],
    ids=lambda record: type(record).__name__,
)
def test_records_are_frozen_and_closed(record):
    name = next(iter(type(record).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record, name, "changed")
    with pytest.raises(ValidationError, match="nonsense"):
        type(record).model_validate({**record.model_dump(), "nonsense": 1})


def test_the_text_is_the_identity_and_nothing_else_is():
    assert Task(id="a", source="x").sha256 == Task(id="b", source="x", origin="o").sha256 == sha256_of("x")
    assert Candidate(source="x", policy="a").sha256 == Candidate(source="x", techniques=("t",)).sha256
    assert Candidate(source="x").sha256 != Candidate(source="x ").sha256


BLOCKS = st.builds(
    TimingBlock,
    process=st.integers(0, 9),
    reference_us=st.lists(FINITE, max_size=3).map(tuple),
    candidate_us=st.lists(FINITE, max_size=3).map(tuple),
    null_us=st.lists(FINITE, max_size=3).map(tuple),
)


@given(
    st.sampled_from(Verdict),
    st.none() | st.sampled_from(Reason),
    st.lists(st.sampled_from(Label), unique=True),
    st.none() | FINITE,
    st.lists(BLOCKS, max_size=2),
    st.text(),
    st.dictionaries(st.text(), JSON, max_size=3),
)
def test_an_evaluation_goes_through_json(verdict, reason, labels, speedup, blocks, text, checks):
    record = evaluation(
        verdict=verdict,
        reason=reason,
        labels=tuple(labels),
        speedup=speedup,
        blocks=tuple(blocks),
        detail=text,
        source=text,
        checks=checks,
    )
    assert Evaluation.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize(
    ("changes", "improves"),
    [
        ({"speedup_low": 1.02, "noise_floor": 0.01}, True),
        ({"speedup_low": 1.01, "noise_floor": 0.01}, False),
        ({"speedup_low": 1.001}, True),
        ({"speedup_low": 1.0}, False),
        ({"speedup_low": None, "speedup": 5.0}, False),
        ({"speedup_low": 5.0, "verdict": Verdict.REJECTED}, False),
    ],
)
def test_only_a_lower_bound_above_the_noise_is_an_improvement(changes, improves):
    assert evaluation(**changes).is_improvement is improves


def test_accepted_is_the_verdict():
    assert evaluation().accepted
    assert not evaluation(verdict=Verdict.REJECTED).accepted


@pytest.mark.parametrize("values", [{"verdict": "perhaps"}, {"reason": "because"}, {"labels": ["nice"]}, {"speedup": "x"}])
def test_codes_that_are_not_in_the_book_are_refused(values):
    with pytest.raises(ValidationError):
        evaluation(**values)


def test_codes_are_words_with_hyphens():
    for code in (*Reason, *Label, *Verdict):
        assert code.value == code.value.lower()
        assert code.value.replace("-", "").isalnum()
        assert code.value.replace("-", "_").upper() == code.name


def test_a_copy_with_another_source_has_another_identity():
    for one in (Task(id="one", source="a"), Candidate(source="a")):
        before = one.sha256
        assert one.model_copy(update={"source": "b"}).sha256 != before == type(one).sha256.fget(one)
