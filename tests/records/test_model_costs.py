"""What a run's language model has cost, from the transcript alone."""

from __future__ import annotations

from kernelwright.models.chat import Completion, Message, ModelAnswer, Sampling
from kernelwright.models.transcript import Transcript
from kernelwright.records.model_costs import TRANSCRIPT, answers_on_record, model_costs

PROMPT = [Message("user", "Say hello.")]


def line(**fields):
    return {
        "kind": "answer",
        "model": "api:m",
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "cost": 0.5,
        "currency": "EUR",
    } | fields


def test_a_prompt_counts_once_for_the_answers_of_one_request(tmp_path):
    transcript = Transcript(tmp_path / TRANSCRIPT)
    for number in range(2):
        completion = Completion(text="hello", prompt_tokens=100, completion_tokens=10)
        answer = ModelAnswer(
            prompt=0, number=number, completion=completion, cost=0.25, currency="EUR", bears_prompt=number == 0
        )
        transcript.append("api:m", PROMPT, Sampling(), answer)
    found = model_costs(answers_on_record(tmp_path))
    assert (found.answers, found.prompt_tokens, found.completion_tokens) == (2, 100, 20)
    assert found.in_words == "2 answers, 100 prompt tokens, 20 answer tokens, 0.5 EUR"


def test_what_is_not_known_is_said():
    failed = line(prompt_tokens=0, completion_tokens=0, cost=None, failure="timeout")
    found = model_costs([line(), line(cost=None), line(currency="USD"), failed])
    assert (found.costs, found.unpriced, found.untold, found.failed) == ({"EUR": 0.5, "USD": 0.5}, 1, 1, 1)
    assert "0.5 EUR + 0.5 USD; the cost of 1 is unknown" in found.in_words
    assert "1 without their tokens told, so it may be more" in found.in_words
    assert "none with its tokens told" in model_costs([failed]).in_words
    assert model_costs([]).in_words == "0 answers"


def test_a_model_in_this_process_has_no_price():
    assert model_costs([line(model="local:tiny", cost=None)]).in_words.endswith("10 answer tokens")


def test_a_run_without_a_language_model_has_none(tmp_path):
    assert model_costs(answers_on_record(tmp_path)).answers == 0
