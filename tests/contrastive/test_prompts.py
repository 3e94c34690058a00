"""Prompts: what is in them, in which order, and what gives way when they get long."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.contrastive.answers import parse_answer
from kernelwright.contrastive.prompts import (
    answer_code,
    contrastive_prompt,
    whole_source,
)
from kernelwright.errors import PromptTooLongError
from tests.samples import TASK, exemplar, module

SLOW, FAST, FASTEST = exemplar(0.991, "slow"), exemplar(1.237, "fast"), exemplar(4.56, "fastest")


def text(prompt):
    system, user = prompt.messages
    assert (system.role, user.role) == ("system", "user")
    return user.content


def in_order(whole, *parts):
    places = [whole.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def test_the_parts_stand_in_the_papers_order():
    whole = text(contrastive_prompt(TASK, [FASTEST, SLOW, FAST], device="cuda:1", hardware="NVIDIA H200"))
    assert in_order(
        whole,
        "NVIDIA H200",
        TASK.source.strip(),
        "(score 1.00)",
        SLOW.source.strip(),
        "(score 1.23)",
        FAST.source.strip(),
        "(score 4.56)",
        "`## Performance Analysis`",
        "`## Algorithm Design`",
        "`## Code Implementation`",
        "# Requirements and restrictions",
        "scores 0",
    )


def test_without_exemplars_it_is_the_same_request_but_for_them():
    plain, contrastive = (
        text(contrastive_prompt(TASK, (), device="cpu")),
        text(contrastive_prompt(TASK, [FAST], device="cpu")),
    )
    assert plain == text(contrastive_prompt(TASK, [], device="cpu"))
    assert "score" not in plain.partition("# Requirements")[0]
    assert "above" not in plain
    assert plain.partition("# Earlier")[0].partition("# How")[0] == contrastive.partition("# Earlier")[0]
    assert plain.partition("# Requirements")[2] == contrastive.partition("# Requirements")[2]


def test_devices_have_their_own_means():
    gpu, cpu = text(contrastive_prompt(TASK, (), device="cuda:0")), text(contrastive_prompt(TASK, (), device="cpu"))
    assert "Triton" in gpu
    assert "an NVIDIA GPU" in gpu
    assert "Triton" not in cpu
    assert "no GPU" in cpu


def test_what_does_not_fit_is_left_out_the_best_go_first():
    every = contrastive_prompt(TASK, [SLOW, FAST, FASTEST], device="cpu")
    assert [found.candidate_sha256 for found in every.shown] == ["slow", "fast", "fastest"]
    length = sum(len(message.content) for message in every.messages)
    fewer = contrastive_prompt(TASK, [SLOW, FAST, FASTEST], device="cpu", limit_characters=length - 1)
    assert [found.candidate_sha256 for found in fewer.shown] == ["fast", "fastest"]
    long = dataclasses.replace(FASTEST, source=module(note="x" * length))
    short = contrastive_prompt(TASK, [SLOW, FAST, long], device="cpu", limit_characters=length)
    assert [found.candidate_sha256 for found in short.shown] == ["slow", "fast"]


def test_a_task_that_does_not_fit_is_refused():
    with pytest.raises(PromptTooLongError, match="at most 100 characters for the task diagonal"):
        contrastive_prompt(TASK, (), device="cpu", limit_characters=100)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 9), st.integers(0, 3000)), max_size=4), st.integers(3500, 9000))
def test_no_prompt_is_longer_than_its_limit(entries, limit):
    exemplars = [exemplar(score, f"e{number}", source="x" * length) for number, (score, length) in enumerate(entries)]
    prompt = contrastive_prompt(TASK, exemplars, device="cuda", limit_characters=limit)
    assert sum(len(message.content) for message in prompt.messages) <= limit
    assert [found.score for found in prompt.shown] == sorted(found.score for found in prompt.shown)
    assert all(found in exemplars for found in prompt.shown)


def test_code_with_fences_in_it_stays_in_one_block():
    tricky = exemplar(1.5, "t", source=module(note="\n```python\nclass Other: pass\n```\n"))
    whole = text(contrastive_prompt(TASK, [tricky], device="cpu"))
    shown = whole.partition("Implementation 1")[2].partition("# How")[0]
    assert parse_answer(shown).source == tricky.source


def test_the_same_request_has_the_same_hash():
    assert contrastive_prompt(TASK, (), device="cpu").sha256 == contrastive_prompt(TASK, (), device="cpu").sha256
    assert contrastive_prompt(TASK, (), device="cpu").sha256 != contrastive_prompt(TASK, (), device="cuda").sha256


SHORT = "class ModelNew(Model):\n    def forward(self, a, b):\n        return a[:, None] * b\n"


def test_an_answer_may_stand_upon_the_reference():
    source = whole_source(TASK, SHORT, "subclass")
    assert source.startswith(TASK.source.rstrip())
    assert answer_code(TASK, source, "subclass") == SHORT
    namespace = {}
    exec(source, namespace)
    assert issubclass(namespace["ModelNew"], namespace["Model"])
    assert whole_source(TASK, source, "subclass") == source, "a whole module is left as it is"
    assert whole_source(TASK, SHORT, "module") == answer_code(TASK, SHORT, "module") == SHORT


def test_the_short_form_is_asked_for_and_shown():
    shown = exemplar(1.5, "t", source=whole_source(TASK, SHORT, "subclass"))
    whole = text(contrastive_prompt(TASK, [shown], device="cpu", form="subclass"))
    assert "class ModelNew(Model)" in whole.partition("# How")[2]
    assert whole.count("def get_inputs") == 1
    assert SHORT.strip() in whole
