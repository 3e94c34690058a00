"""Rollouts on disk: nothing is lost, torn lines are skipped, and rewards can be computed again."""

from __future__ import annotations

import gzip

from kernelwright.contrastive.answers import AnswerFailure
from kernelwright.contrastive.prompts import contrastive_prompt
from kernelwright.contrastive.samples import Origin, Rollout, RolloutLog, Sample
from kernelwright.models.chat import Completion, Sampling
from tests.samples import TASK, accepted, answer, exemplar, module

PROMPT = contrastive_prompt(TASK, [exemplar(1.5, "best"), exemplar(0.5, "worst")], device="cpu")


def rollout(text, sample=0, **changes):
    completion = Completion(text=text, prompt_tokens=7, completion_tokens=3, **changes)
    origin = Origin(stage="search", model="scripted", sampling=Sampling(seed=11))
    made = Sample(task=TASK, prompt=PROMPT, completion=completion, step=4, sample=sample)
    made.parse(origin.form, origin.model)
    return Rollout.of(made, origin)


def test_a_rollout_has_what_was_asked_and_answered_and_found():
    source = module()
    made = rollout(answer(source))
    assert (made.task, made.step, made.seed, made.exemplars) == (TASK.id, 4, 11, ("worst", "best"))
    assert made.prompt == PROMPT.messages
    assert made.prompt_sha256 == PROMPT.sha256
    assert made.source(TASK) == source
    assert made.candidate_sha256 == accepted(source=source).candidate_sha256
    assert made.failure is None


def test_an_answer_without_a_candidate_is_a_rollout_too():
    made = rollout("Sorry.")
    assert (made.failure, made.candidate_sha256, made.source(TASK)) == (AnswerFailure.NO_CODE, None, None)
    assert rollout("", failure="stream-cut").failure is AnswerFailure.NO_ANSWER


def test_the_log_gives_back_what_was_written_and_keeps_a_prompt_once(tmp_path):
    made = [rollout(answer(module(note=str(number))), number) for number in range(3)]
    log = RolloutLog(tmp_path / "run")
    log.append(made[:2])
    log.append(made[2:])
    assert list(log.rollouts()) == made
    assert list(RolloutLog(tmp_path / "run").rollouts()) == made
    assert log.path.read_text().count("You are an expert") == 1
    assert list(RolloutLog(tmp_path / "nowhere").rollouts()) == []
    assert not (tmp_path / "nowhere").exists()


def test_a_torn_line_is_skipped_and_swallows_nothing(tmp_path):
    log = RolloutLog(tmp_path)
    log.append([rollout("one"), rollout("two", 1)])
    log.path.write_bytes(log.path.read_bytes()[:-40])
    after = RolloutLog(tmp_path)
    after.append([rollout("three", 2)])
    assert [found.completion for found in after.rollouts()] == ["one", "three"]
    assert all(found.prompt == PROMPT.messages for found in after.rollouts())


def test_a_published_run_s_packed_rollouts_are_read(tmp_path):
    written = [rollout(answer(module())), rollout("no", sample=1)]
    log = RolloutLog(tmp_path)
    log.append(written)
    (tmp_path / "rollouts.jsonl.gz").write_bytes(gzip.compress(log.path.read_bytes()))
    log.path.unlink()
    assert list(log.rollouts()) == written
    log.append([rollout("later", sample=2)])
    assert [each.sample for each in RolloutLog(tmp_path).rollouts()] == [0, 1, 2]


def test_text_that_is_no_unicode_can_be_kept(tmp_path):
    log = RolloutLog(tmp_path)
    log.append([rollout("half a pair: \ud83d", failure="cut \ud83d")])
    (found,) = log.rollouts()
    assert found.completion == "half a pair: ?"
