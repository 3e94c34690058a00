from __future__ import annotations

import math

import pytest

from kernelwright.contrastive.held_out import (
    HeldOutResult,
    HeldOutTask,
    advantage,
    evaluate_held_out,
    geomean,
    summary,
)
from kernelwright.contrastive.settings import ExemplarSection, HeldOutConfig, PromptSection
from kernelwright.models.chat import Completion
from kernelwright.records import Reason, RunDirectory, Verdict
from tests.contrastive.toys import ToyJudge, toy_code, toy_context, toy_tasks

TASKS = toy_tasks(("opal", "pearl"))


class Scripted:
    """Answers with given ways in turn, and remembers how often exemplars were shown."""

    name = "scripted"

    def __init__(self, *ways):
        self._ways = ways
        self.asked = []

    def sample(self, prompts, *, count, sampling):
        self.asked += [prompt[-1].content.count("(score ") for prompt in prompts]
        answers = [f"```python\n{toy_code(self._ways[number % len(self._ways)])}```" for number in range(count)]
        return [[Completion(text=text, prompt_tokens=1, completion_tokens=1) for text in answers] for _ in prompts]


class Twice(ToyJudge):
    """A confirming judge that finds everything 1.5 times slower than the first did."""

    def outcome(self, work):
        found = super().outcome(work)
        if found.speedup is None:
            return found
        return found.model_copy(update={"speedup": found.speedup / 1.5, "speedup_low": found.speedup / 1.6})


def test_the_best_of_the_answers_counts_by_its_second_measurement(tmp_path):
    run = RunDirectory(tmp_path)
    judge, again = ToyJudge(), Twice()
    context = toy_context(judge, confirmers=again)
    chat = Scripted(2, 4, 7, 99)
    result = evaluate_held_out("even", chat, TASKS, HeldOutConfig(samples=8), PromptSection(), run, context)
    assert result.correct() == 0.5
    assert [task.speedup for task in result.tasks] == [pytest.approx(2.0 / 1.5), None] * 2
    assert [task.correct for task in result.tasks] == [4, 0, 4, 0]
    assert [task.improvement for task in result.tasks] == [True, False, True, False]
    assert result.speedups() == [pytest.approx(2.0 / 1.5), 1.0] * 2
    assert result.hack_rate() == pytest.approx(0.25)
    assert (judge.count, again.count) == (16, 2)
    # Another model with the same answers costs nothing, and a finished one is read back.
    evaluate_held_out("copy", Scripted(4), TASKS, HeldOutConfig(samples=8), PromptSection(), run, context)
    assert (judge.count, again.count) == (16, 2)
    assert evaluate_held_out("even", Scripted(0), TASKS, HeldOutConfig(), PromptSection(), run, context) == result


def test_a_best_that_the_second_measurement_rejects_gives_way_to_the_next(tmp_path):
    class Strict(ToyJudge):
        def outcome(self, work):
            found = super().outcome(work)
            if "way = 4" not in work.candidate.source:
                return found
            return found.model_copy(update={"verdict": Verdict.REJECTED, "reason": Reason.WRONG_OUTPUT, "speedup": None})

    context = toy_context(ToyJudge(), confirmers=Strict())
    config = HeldOutConfig(samples=4, confirm_tries=2)
    result = evaluate_held_out("next", Scripted(2, 4), TASKS[:1], config, PromptSection(), RunDirectory(tmp_path), context)
    assert [task.speedup for task in result.tasks] == [1.4]


def test_a_best_that_gained_too_little_counts_as_the_reference_and_is_not_measured_again(tmp_path):
    again = Twice()
    context = toy_context(ToyJudge(), confirmers=again)
    run, tasks = RunDirectory(tmp_path), TASKS[:1]
    below, above = (
        evaluate_held_out(name, Scripted(2), tasks, HeldOutConfig(confirm_above=limit), PromptSection(), run, context)
        for name, limit in (("below", 1.41), ("above", 1.4))
    )
    assert (below.speedups(), below.tasks[0].first, below.correct()) == ([1.0], (1.4,) * 8, 1.0)
    assert (above.speedups(), again.count) == ([pytest.approx(1.4 / 1.5)], 1)


def test_rounds_show_the_scores_of_those_before(tmp_path):
    chat = Scripted(2, 4)
    config = HeldOutConfig(samples=8, rounds=4, exemplars=ExemplarSection(sampler="bucket"))
    context = toy_context(ToyJudge())
    evaluate_held_out("rounds", chat, TASKS[:1], config, PromptSection(), RunDirectory(tmp_path), context)
    assert chat.asked == [0, 2, 2, 2]


def test_a_measurement_that_runs_out_of_time_goes_on(tmp_path):
    run = RunDirectory(tmp_path)
    out = toy_context(ToyJudge(), out_of_time=lambda: True)
    config = HeldOutConfig(samples=4)
    assert evaluate_held_out("late", Scripted(4), TASKS, config, PromptSection(), run, out) is None
    done = toy_context(ToyJudge())
    assert evaluate_held_out("late", Scripted(4), TASKS, config, PromptSection(), run, done) is not None


def test_the_geometric_mean_and_its_interval():
    mean = geomean([2.0, 0.5, 4.0, 1.0])
    assert mean.estimate == pytest.approx(math.sqrt(2))
    assert mean.low < mean.estimate < mean.high
    assert geomean([1.5] * 9).low == geomean([1.5] * 9).high == pytest.approx(1.5)
    narrow, wide = geomean([1.0, 2.0] * 40), geomean([1.0, 2.0] * 4)
    assert narrow.high / narrow.low < wide.high / wide.low
    with pytest.raises(ValueError, match="above 0"):
        geomean([])


def result_of(name, *speedups):
    return HeldOutResult(
        model=name,
        tasks=tuple(
            HeldOutTask(
                task=str(n), task_sha256=str(n), answers=8, correct=s is not None, hacks=0, speedup=s, improvement=True
            )
            for n, s in enumerate(speedups)
        ),
    )


def test_the_summary_names_the_sampler_that_did_best_on_training_tasks():
    results = {
        "zero-shot": result_of("zero-shot", None, None, 1.0, 1.0),
        "sft": result_of("sft", 1.0, None, 1.2, 1.2),
        "self-supervised": result_of("self-supervised", 1.0, 1.1, 1.2, 1.2),
        "vanilla-grpo": result_of("vanilla-grpo", 1.2, 1.2, 1.2, 1.2),
        "contrastive-bucket": result_of("contrastive-bucket", 1.5, 1.5, 1.5, 1.5),
        "contrastive-island": result_of("contrastive-island", 2.0, 2.0, 2.0, 2.0),
    }
    told = summary(results, {"bucket": 1.8, "island": 1.7, "random": 9.0})
    assert told["contrastive_sampler"] == "bucket"
    assert told["speedup_contrastive"] == told["speedup_contrastive_bucket"] == pytest.approx(1.5)
    assert told["correct_zero_shot"] == 0.5
    assert told["correct_after_sft"] == 0.75
    assert told["correct_after_self_supervised"] == 1.0
    assert told["contrastive_over_vanilla_grpo"] == pytest.approx(1.25)
    assert told["intervals"]["contrastive_over_vanilla_grpo"] == [pytest.approx(1.25)] * 2
    assert told["held_out_tasks"] == 4
    assert "speedup_contrastive_random" not in told
    assert advantage(results["contrastive-island"], results["contrastive-bucket"]).estimate == pytest.approx(4 / 3)
