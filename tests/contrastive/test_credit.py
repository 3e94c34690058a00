"""What of a failed answer training pushes down: its own lines, and not the form that right answers share with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kernelwright.contrastive.grpo import SHARED_BY, AcceptedLines
from kernelwright.contrastive.samples import Origin, Rollout, TokenizedSample
from kernelwright.models.chat import Sampling
from kernelwright.records import Verdict
from tests.contrastive.toys import EVEN, ODD, toy_sample

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


class Words:
    """A tokenizer whose tokens are places in a list of words; the last one ends an answer and has no text."""

    texts = ("x = 1", "\n", "x = 2", "")

    def decode(self, tokens, skip_special_tokens):
        return "".join(self.texts[token] for token in tokens)


def learnt_sample(task, tokens, verdict, advantage):
    sample = toy_sample(Words().decode(tokens, True), task)
    sample.tokens, sample.advantage = TokenizedSample([], tokens), advantage
    sample.token_advantages = [advantage] * len(tokens)
    origin = Origin(stage="contrastive", model="toy", sampling=Sampling())
    sample.rollout = Rollout.of(sample, origin).model_copy(update={"verdict": verdict})
    return sample


def test_a_failed_answer_is_blamed_where_it_differs_from_right_ones_of_its_batch():
    right = learnt_sample(EVEN, [0, 1, 3], Verdict.ACCEPTED, 1.0)
    failed = learnt_sample(EVEN, [0, 1, 2, 3], Verdict.REJECTED, -1.0)
    elsewhere = learnt_sample(ODD, [0, 1, 2, 3], Verdict.REJECTED, -0.5)
    lucky = learnt_sample(EVEN, [0, 1, 2, 3], Verdict.REJECTED, 0.5)
    samples = [right, failed, elsewhere, lucky]
    share = AcceptedLines().spare(samples, Words())
    assert [sample.token_advantages for sample in samples] == [[1.0] * 3, [0.0, 0.0, -1.0, -1.0], [-0.5] * 4, [0.5] * 4]
    assert share == 2 / 6, "of six tokens with a text in failed answers"
    # A run that goes on knows the lines of before.
    again = AcceptedLines()
    again.learn_from([right.rollout])
    assert again.holds(EVEN.sha256, "x = 1")
