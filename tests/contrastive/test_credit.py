"""What of a failed answer training pushes down: its own lines, and not the form that right answers share with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kernelwright.contrastive.grpo import SHARED_BY, AcceptedLines

RIGHT = "def forward(self, x):\n    y = x + 1\n    return y"


def knowing(*tasks):
    shared = AcceptedLines()
    for task in tasks:
        shared.learn(task, RIGHT)
    return shared


def test_a_line_is_right_for_its_own_task_at_once_and_for_every_task_once_several_have_it():
    shared = knowing("amber")
    assert shared.holds("amber", "    return y")
    assert not shared.holds("amber", "return y"), "indentation is part of a line"
    assert not shared.holds("beryl", "    return y")
    shared = knowing("amber", *["beryl"] * SHARED_BY)
    assert not shared.holds("coral", "    return y"), "tasks count, not answers"
    assert knowing(*"abcdefg"[:SHARED_BY]).holds("coral", "    return y")


def test_only_what_stands_in_other_lines_is_blamed():
    tokens = ["def", " forward", "(self, x):\n", "   ", " y", " =", " x", " - 1\n    ", "return", " y", ""]
    assert knowing("amber").penalised("amber", tokens) == [False] * 3 + [True] * 5 + [False] * 3
    assert knowing("amber").penalised("beryl", tokens) == [True] * len(tokens)


def test_a_token_belongs_to_the_line_it_begins_in():
    shared = AcceptedLines()
    shared.learn("amber", "a\n\nb")
    assert shared.penalised("amber", ["a\n\n", "c"]) == [False, True]
    assert shared.penalised("amber", ["c\n\n", "b"]) == [True, False]
    assert shared.penalised("amber", ["a", "\n\nb", "c"]) == [False, False, True], "the last line is bc"


@given(
    st.lists(st.text("ab \n", max_size=4), max_size=12), st.lists(st.sampled_from(["", "a", "b", "ab", " a"]), max_size=4)
)
def test_how_an_answer_is_cut_into_tokens_changes_nothing_else(tokens, known):
    shared = AcceptedLines()
    shared.learn("amber", "\n".join(known))
    blamed = shared.penalised("amber", tokens)
    text, at = "".join(tokens), 0
    for token, blame in zip(tokens, blamed, strict=True):
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        assert blame == (text[start : end if end >= 0 else len(text)] not in "\n".join(known).split("\n"))
        at += len(token)
