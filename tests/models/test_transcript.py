"""The transcript: what is in it, that a kill loses nothing that was answered, and that paid answers are used again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import pytest

from kernelwright.errors import PolicyError, UsageError
from kernelwright.models import transcript
from kernelwright.models.chat import ChatModel, Completion, Message, ModelAnswer, Sampling
from kernelwright.models.transcript import Recorded, Transcript, prompt_id
from tests.forks import forked

SAMPLING = Sampling(temperature=0.5, top_p=0.9, max_tokens=8, seed=4)


def conversation(text: str) -> list[Message]:
    return [Message("system", "be brief"), Message("user", text)]


def completion(text: str, failure: str | None = None) -> Completion:
    return Completion(text=text, prompt_tokens=3, completion_tokens=2, failure=failure)


class Scripted:
    """Answers with the prompt, its number and the seed, last prompt first; fails where told."""

    name = "scripted"

    def __init__(self, fails: Sequence[str] = ()) -> None:
        self.fails = fails
        self.asked: list[tuple[str, int, int]] = []

    def answers(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> Iterator[ModelAnswer]:
        for place in reversed(range(len(prompts))):
            text = prompts[place][-1].content
            self.asked.append((text, count, sampling.seed))
            for number in range(count):
                made = completion(f"{text} {number} {sampling.seed}", "stream-cut" if text in self.fails else None)
                yield ModelAnswer(prompt=place, number=number, completion=made, reasoning="hm", cost=0.25)


class WholeOnly(ChatModel):
    """A model that has all answers at the end."""

    name = "whole"

    def sample(self, prompts, *, count, sampling):
        return [[completion(f"{prompt[-1].content} {number}") for number in range(count)] for prompt in prompts]


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "runs" / "transcript.jsonl"


def test_every_prompt_and_answer_is_written(file):
    recorded = Recorded(Scripted(fails=["b"]), Transcript(file))
    answers = recorded.sample([conversation("a"), conversation("b")], count=2, sampling=SAMPLING)
    assert [[found.text for found in group] for group in answers] == [["a 0 4", "a 1 4"], ["b 0 4", "b 1 4"]]
    assert recorded.name == "scripted"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["prompt", "answer", "answer"] * 2
    assert lines[0]["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "b"}]
    time = datetime.fromisoformat(lines[1].pop("time_utc"))
    assert time.utcoffset() is not None
    assert lines[1] == {
        "kind": "answer",
        "model": "scripted",
        "prompt": lines[0]["id"],
        "number": 0,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 8,
        "seed": 4,
        "text": "b 0 4",
        "reasoning": "hm",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "finish_reason": "stop",
        "failure": "stream-cut",
        "cost": 0.25,
        "currency": "",
        "bears_prompt": True,
    }


def test_an_answer_is_on_disk_before_the_next_is_taken(file):
    recorded = Recorded(Scripted(), Transcript(file)).answers([conversation("a")], count=3, sampling=SAMPLING)
    for number in range(3):
        assert next(recorded).number == number
        assert [line.number for line in Transcript(file).answers()] == list(range(number + 1))


def test_each_line_is_forced_to_the_disk(file, monkeypatch):
    forced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: forced.append(number) or fsync(number))
    Recorded(Scripted(), Transcript(file)).sample([conversation("a")], count=3, sampling=SAMPLING)
    assert len(forced) == 3


def test_a_model_that_has_all_answers_at_the_end_is_recorded_too(file):
    Recorded(WholeOnly(), Transcript(file)).sample([conversation("a")], count=2, sampling=SAMPLING)
    assert [line.text for line in Transcript(file).answers()] == ["a 0", "a 1"]


def test_a_prompt_is_written_once(file):
    recorded = Recorded(Scripted(), Transcript(file))
    recorded.sample([conversation("a"), conversation("a")], count=2, sampling=SAMPLING)
    Recorded(Scripted(), Transcript(file)).sample([conversation("a")], count=5, sampling=SAMPLING)
    assert file.read_text().count('"kind":"prompt"') == 1


def test_a_killed_run_loses_no_answer_and_pays_none_twice(file):
    """Killed for good in the middle of the third answer's line."""

    def torn(path, lines):
        with path.open("ab") as file:
            file.write("".join(lines).encode()[:50])
        os.kill(os.getpid(), signal.SIGKILL)

    def ask():
        answers = Recorded(Scripted(), Transcript(file)).answers([conversation("a")], count=3, sampling=SAMPLING)
        next(answers), next(answers)
        transcript.append_lines = torn
        next(answers)

    _, status = os.waitpid(forked(ask, status=1), 0)
    assert os.WIFSIGNALED(status), "it came to its end"
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not file.read_bytes().endswith(b"\n")
    assert [line.text for line in Transcript(file).answers()] == ["a 0 4", "a 1 4"]

    model = Scripted()
    (answers,) = Recorded(model, Transcript(file)).sample([conversation("a")], count=3, sampling=SAMPLING)
    assert [found.text for found in answers[:2]] == ["a 0 4", "a 1 4"]
    ((_, count, seed),) = model.asked
    assert count == 1
    assert seed != SAMPLING.seed, "the same seed would give the first answer once more"
    assert [line.number for line in Transcript(file).answers()] == [0, 1, 2]

    unasked = Scripted()
    assert Recorded(unasked, Transcript(file)).sample([conversation("a")], count=3, sampling=SAMPLING) == [answers]
    assert unasked.asked == []


def test_only_answers_to_the_same_question_are_used_again_and_each_once(file):
    Recorded(Scripted(fails=["b"]), Transcript(file)).sample(
        [conversation("a"), conversation("b")], count=1, sampling=SAMPLING
    )
    model = Scripted()
    recorded = Recorded(model, Transcript(file))
    recorded.sample([conversation("a")], count=1, sampling=Sampling(temperature=0.6, max_tokens=8, seed=4))
    assert len(model.asked) == 1, "another temperature"
    recorded.sample([conversation("b")], count=1, sampling=SAMPLING)
    assert len(model.asked) == 2, "what failed is asked anew"
    recorded.sample([conversation("a")], count=1, sampling=SAMPLING)
    assert len(model.asked) == 2
    recorded.sample([conversation("a")], count=1, sampling=SAMPLING)
    assert len(model.asked) == 3, "one answer on file, asked for twice"
    other = Scripted()
    other.name = "another"
    Recorded(other, Transcript(file)).sample([conversation("a")], count=1, sampling=SAMPLING)
    assert len(other.asked) == 1, "another model"


def test_prompts_that_lack_different_numbers_of_answers_each_get_theirs(file):
    Recorded(Scripted(), Transcript(file)).sample([conversation("a")], count=1, sampling=SAMPLING)
    model = Scripted()
    answers = Recorded(model, Transcript(file)).sample(
        [conversation("a"), conversation("b"), conversation("c")], count=2, sampling=SAMPLING
    )
    assert [len(group) for group in answers] == [2, 2, 2]
    assert sorted((text, count) for text, count, _ in model.asked) == [("a", 1), ("b", 2), ("c", 2)]
    assert answers[2][1].text == "c 1 4"


def test_a_transcript_alone_answers_what_it_holds_and_no_more(file):
    paid = Recorded(Scripted(), Transcript(file)).sample([conversation("a")], count=2, sampling=SAMPLING)
    replayed = Recorded(None, Transcript(file), name="scripted")
    assert replayed.sample([conversation("a")], count=2, sampling=SAMPLING) == paid
    with pytest.raises(PolicyError, match=r"2 more answers to each of 1 prompts.*Give a model"):
        replayed.sample([conversation("a")], count=2, sampling=SAMPLING)


def test_a_transcript_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Choose another place"):
        Recorded(Scripted(), Transcript(tmp_path / "file" / "t.jsonl")).sample(
            [conversation("a")], count=1, sampling=SAMPLING
        )


def test_what_a_prompt_is_called_depends_on_all_of_it():
    assert prompt_id(conversation("a")) == prompt_id(tuple(conversation("a")))
    assert prompt_id(conversation("a")) != prompt_id(conversation("b"))
    assert prompt_id([Message("user", "a")]) != prompt_id([Message("system", "a")])


def test_half_a_surrogate_pair_from_a_cut_stream_is_recorded(file):
    class Cut(Scripted):
        def answers(self, prompts, *, count, sampling):
            yield ModelAnswer(prompt=0, number=0, completion=completion("a\ud83d"), reasoning="\ud83d")

    Recorded(Cut(), Transcript(file)).sample([conversation("a")], count=1, sampling=SAMPLING)
    assert [(line.text, line.reasoning) for line in Transcript(file).answers()] == [("a?", "?")]
