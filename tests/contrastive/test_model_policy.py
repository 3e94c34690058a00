"""A language model as a policy, with a model that says what it is told to: alone, and in a search before the real judge."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.answers import AnswerFailure
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.model_policy import policy_for_run
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.errors import ConfigError, NothingUsableError, PromptTooLongError
from kernelwright.judge import Settings
from kernelwright.models.chat import Completion, Sampling
from kernelwright.records import RunDirectory
from kernelwright.records.policy import Context
from kernelwright.search.optimize import optimize
from tests.samples import TASK, ScriptedModel, accepted, answer, module, rejected


def context(*history, seed=0):
    return Context(task=TASK, device="cpu", history=tuple(history), seed=seed)


def answers(count):
    return [answer(module(note=f"answer {number}")) for number in range(count)]


def judged(candidate, ratio=1.5):
    return accepted(ratio, candidate.source, policy=candidate.policy, parent=candidate.parent)


def test_answers_become_candidates(tmp_path):
    model = ScriptedModel([answer(module("torch.einsum('i,ij->ij', a, b)"))])
    policy = policy_for_run(model, tmp_path, sampling=Sampling(temperature=0.7, max_tokens=99))
    (candidate,) = policy.propose(context(), 1)
    assert "einsum" in candidate.source
    assert (candidate.policy, candidate.techniques, candidate.parent) == ("scripted+bucket", ("einsum",), None)
    assert (model.samplings[0].temperature, model.samplings[0].max_tokens) == (0.7, 99)
    assert "Earlier implementations" not in model.asked[0][1].content


def test_what_was_judged_is_shown_with_its_score_and_the_best_is_the_parent(tmp_path):
    model = ScriptedModel(answers(3))
    policy = policy_for_run(model, tmp_path)
    slow, fast, wrong = accepted(0.5), accepted(2.0), rejected()
    (candidate,) = policy.propose(context(slow, wrong, fast), 1)
    asked = model.asked[0][1].content
    assert "(score 0.48)" in asked
    assert "(score 1.90)" in asked
    assert wrong.source.strip() not in asked
    assert candidate.parent == fast.candidate_sha256


@pytest.mark.parametrize("sampler", ["random", "island", "none"])
def test_every_sampler_can_be_chosen(tmp_path, sampler):
    model = ScriptedModel(answers(1))
    policy = policy_for_run(model, tmp_path, sampler=sampler)
    policy.propose(context(accepted(1.5), accepted(3.0)), 1)
    assert ("Earlier implementations" in model.asked[0][1].content) == (sampler != "none")
    assert policy.name == f"scripted+{sampler}"


def test_an_unknown_sampler_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="bucket"):
        policy_for_run(ScriptedModel([]), tmp_path / "run", sampler="best")
    policy_for_run(ScriptedModel([]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_answers_to_one_prompt_wait_for_their_turn(tmp_path):
    model = ScriptedModel(answers(4))
    policy = policy_for_run(model, tmp_path, samples=4)
    history = []
    for _ in range(4):
        (candidate,) = policy.propose(context(*history), 1)
        history.append(judged(candidate))
    assert model.given == 4
    assert len(model.asked) == 1
    assert len({found.candidate_sha256 for found in history}) == 4


def test_the_same_code_twice_is_one_candidate(tmp_path):
    model = ScriptedModel([*answers(1), *answers(1), "No.", *answers(2)])
    found = policy_for_run(model, tmp_path, samples=5).propose(context(), 5)[:2]
    assert len({candidate.sha256 for candidate in found}) == len(found) == 2


def test_prompts_and_sampling_seeds_differ_and_follow_from_the_seed(tmp_path):
    def seeds(name, seed):
        model = ScriptedModel(answers(3))
        policy = policy_for_run(model, tmp_path / name)
        history = []
        for _ in range(3):
            history += [judged(candidate) for candidate in policy.propose(context(*history, seed=seed), 1)]
        return [sampling.seed for sampling in model.samplings]

    assert len(set(seeds("a", 1))) == 3
    assert seeds("b", 1) == seeds("c", 1) != seeds("d", 2)


def test_what_does_not_parse_is_recorded_and_the_next_answer_taken(tmp_path):
    broken = Completion(text="## Perf", prompt_tokens=1, completion_tokens=2, failure="stream-cut")
    model = ScriptedModel(["Sorry, no.", broken, "```python\nclass ModelNew(", *answers(1)])
    policy = policy_for_run(model, tmp_path)
    (candidate,) = policy.propose(context(), 1)
    assert "answer 0" in candidate.source
    recorded = list(RolloutLog(tmp_path).rollouts())
    assert [found.failure for found in recorded] == [
        AnswerFailure.NO_CODE,
        AnswerFailure.NO_ANSWER,
        AnswerFailure.TRUNCATED,
        None,
    ]
    assert [found.step for found in recorded] == [0, 1, 2, 3]
    assert recorded[3].candidate_sha256 == candidate.sha256


def test_a_model_without_anything_usable_is_given_up_with_reasons(tmp_path):
    model = ScriptedModel(lambda number: "No." if number % 2 else answer(module()))
    seen = accepted(1.5, module())
    policy = policy_for_run(model, tmp_path, patience=6)
    with pytest.raises(NothingUsableError, match=r"6 answers in a row.*3 times a candidate that was judged before"):
        policy.propose(context(seen), 1)
    assert model.given == 6
    assert len(list(RolloutLog(tmp_path).rollouts())) == 6


def failed(failure):
    return Completion(text="", prompt_tokens=0, completion_tokens=0, failure=failure)


def test_an_endpoint_that_fails_alike_three_times_ends_the_search_with_the_cause(tmp_path, caplog):
    junk = ["junk-answer: no event stream came (request 1)", "junk-answer: no event stream came (request 2)"]
    model = ScriptedModel(lambda number: failed(junk[number % 2]))
    with pytest.raises(NothingUsableError, match=r"3 answers in a row failed alike: junk-answer: no event stream came"):
        policy_for_run(model, tmp_path).propose(context(), 1)
    assert model.given == 3
    assert "no-answer: junk-answer: no event stream came (request 1)" in caplog.text


def test_failures_of_several_kinds_or_with_an_answer_between_them_do_not(tmp_path):
    script = [
        failed("timeout"),
        failed("timeout"),
        failed("stream-cut"),
        "No.",
        failed("timeout"),
        failed("timeout"),
        *answers(1),
    ]
    assert len(policy_for_run(ScriptedModel(script), tmp_path).propose(context(), 1)) == 1


def test_patience_begins_anew_with_each_candidate(tmp_path):
    model = ScriptedModel(lambda number: "No." if number % 4 else answers(99)[number])
    policy = policy_for_run(model, tmp_path, patience=4)
    assert len(policy.propose(context(), 5)) == 5


def test_fewer_than_asked_for_is_no_failure(tmp_path):
    policy = policy_for_run(ScriptedModel([*answers(2), *["No."] * 50]), tmp_path, patience=3)
    assert len(policy.propose(context(), 5)) == 2


def test_a_task_that_no_prompt_can_hold_is_refused(tmp_path):
    task = TASK.model_copy(update={"source": TASK.source + "# " + "x" * 50_000})
    policy = policy_for_run(ScriptedModel([]), tmp_path)
    with pytest.raises(PromptTooLongError):
        policy.propose(Context(task=task, device="cpu", history=(), seed=0), 1)


def test_a_killed_search_proposes_what_it_was_answered_without_asking_again(tmp_path):
    model = ScriptedModel(answers(3))
    first, second, third = policy_for_run(model, tmp_path, samples=3).propose(context(), 3)
    again = ScriptedModel([])
    resumed = policy_for_run(again, tmp_path).propose(context(judged(first)), 2)
    assert [candidate.sha256 for candidate in resumed] == [second.sha256, third.sha256]
    assert again.given == 0


def test_answers_paid_for_and_not_yet_recorded_come_from_the_transcript(tmp_path, monkeypatch):
    model = ScriptedModel(answers(2))
    with monkeypatch.context() as patch:
        patch.setattr(RolloutLog, "append", lambda self, rollouts: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            policy_for_run(model, tmp_path).propose(context(), 2)
    again = ScriptedModel(["never asked"])
    found = policy_for_run(again, tmp_path).propose(context(), 2)
    assert ["answer 0" in found[0].source, "answer 1" in found[1].source] == [True, True]
    assert again.given == 0


def test_a_shared_database_brings_what_other_searches_found(tmp_path):
    shared = tmp_path / "shared.sqlite"
    ExemplarDatabase(shared).add(accepted(2.0))
    model = ScriptedModel(answers(1))
    policy_for_run(model, tmp_path / "run", database=shared).propose(context(), 1)
    assert "(score 1.90)" in model.asked[0][1].content


class Stopped(Exception):
    """Stands for a kill."""


@pytest.mark.exhaustive
def test_a_search_with_a_model_before_the_real_judge_survives_a_kill(tmp_path):
    wrong = answer(module("a[:, None] + b"))
    model = ScriptedModel(["I would rather not.", *answers(1), wrong, *["Sorry."] * 99])
    settings = Settings.quick()
    out = tmp_path / "run"

    def search(asked, on_event=None, **given):
        policy = policy_for_run(asked, out, patience=3)
        return optimize(TASK, policy=policy, device="cpu", budget=5, out=out, settings=settings, on_event=on_event, **given)

    def stop(event):
        if event.evaluation is not None:
            raise Stopped

    with pytest.raises(Stopped):
        search(model, stop)
    assert model.given == 2
    said = []
    result = search(model, said.append)
    (right, off) = (found for found in RunDirectory(out).evaluations() if not found.confirms)
    assert result.evaluations == 2
    assert (right.accepted, off.accepted) == (True, False)
    assert right.policy == off.policy == "scripted+bucket"
    assert off.parent == right.candidate_sha256
    assert model.given == 6, "what was judged before the kill was not asked for again"
    recorded = list(RolloutLog(out).rollouts())
    assert [found.candidate_sha256 for found in recorded] == [
        None,
        right.candidate_sha256,
        off.candidate_sha256,
        *[None] * 3,
    ]
    assert any(event.lasting and "3 answers in a row held none" in event.message for event in said)
    shown = [
        exemplar.candidate_sha256
        for exemplar in ExemplarDatabase(out / "exemplars.sqlite").exemplars(TASK.sha256, device="cpu")
    ]
    assert shown == [right.candidate_sha256]


def test_a_search_that_never_got_a_candidate_fails(tmp_path):
    policy = policy_for_run(ScriptedModel([]), tmp_path, patience=2)
    with pytest.raises(NothingUsableError, match="2 times empty"):
        optimize(TASK, policy=policy, device="cpu", budget=2, out=tmp_path, settings=Settings.quick())
