"""Turns answers into rewards: what each earns, what is looked at again, and what is written down."""

from __future__ import annotations

import json

import pytest

from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.families import CHEATING
from kernelwright.contrastive.hacks import Review, Vote
from kernelwright.contrastive.metrics import hack_reasons, rollout_metrics, write_hacks
from kernelwright.contrastive.prompts import contrastive_prompt, whole_source
from kernelwright.contrastive.samples import RolloutLog, read_drawn, write_drawn
from kernelwright.contrastive.settings import SamplingSection, stage_from
from kernelwright.contrastive.supervised import examples_of_successes
from kernelwright.errors import InfrastructureError
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Reason, Verdict
from tests.contrastive.toys import EVEN, ToyJudge, toy_answer, toy_code, toy_evaluation, toy_sample, toy_scorer

SETTINGS = Settings.quick()


def scored(scorer, texts, **rest):
    """Samples of these answers, scored."""
    samples = [toy_sample(text, sample=number, **rest) for number, text in enumerate(texts)]
    scorer.score(samples)
    return samples


def rewards(samples):
    return [sample.reward for sample in samples]


def ways(*numbers):
    return [toy_answer(way) for way in numbers]


def test_answers_earn_their_speedup_and_failures_the_floor(tmp_path):
    judge = ToyJudge()
    samples = scored(toy_scorer(tmp_path, judge), [*ways(4, 2, 3), "no code", toy_answer(4)])
    assert rewards(samples) == [2.0, 1.4, 0.0, 0.0, 2.0]
    assert judge.count == 3  # the same candidate is judged once
    rollouts = list(RolloutLog(tmp_path).rollouts())
    assert [rollout.verdict for rollout in rollouts] == ["accepted", "accepted", "rejected", None, "accepted"]
    assert [rollout.reward for rollout in rollouts] == [2.0, 1.4, 0.0, 0.0, 2.0]


def test_a_batch_that_is_scored_again_after_a_kill_leaves_no_trace(tmp_path):
    first = rewards(scored(toy_scorer(tmp_path, ToyJudge()), ways(4, 2)))
    judge = ToyJudge()
    assert rewards(scored(toy_scorer(tmp_path, judge), ways(4, 2))) == first
    assert judge.count == 0
    assert len(list(RolloutLog(tmp_path).rollouts())) == 2


def test_a_batch_is_on_disk_as_it_was_drawn(tmp_path):
    samples = scored(toy_scorer(tmp_path, ToyJudge()), ways(4, 2))
    write_drawn(tmp_path / "step" / "attempts.json", samples)
    (first, _) = json.loads((tmp_path / "step" / "attempts.json").read_text())
    assert set(first) == {"task", "prompt", "completion", "step", "sample"}
    assert read_drawn(tmp_path / "step" / "attempts.json") == [
        toy_sample(text, sample=n) for n, text in enumerate(ways(4, 2))
    ]


class Faulty(ToyJudge):
    """Cannot judge one of the ways."""

    def __init__(self, way):
        super().__init__()
        self._way = f"way = {way}"

    def outcome(self, work):
        if self._way in work.candidate.source:
            return InfrastructureError("the machine is at fault")
        return super().outcome(work)


def test_what_could_not_be_judged_earns_nothing_either_way(tmp_path):
    samples = scored(toy_scorer(tmp_path, Faulty(2), reward={"smoothing": True}), ways(2, 4, 0))
    assert samples[0].reward is None
    assert samples[0].rollout.reward is None
    assert None not in rewards(samples[1:])


def test_a_machine_that_judges_hardly_anything_ends_the_run(tmp_path):
    with pytest.raises(InfrastructureError, match="run again to go on"):
        scored(toy_scorer(tmp_path, Faulty(2)), ways(2))


def test_smoothing_keeps_the_order_and_clips(tmp_path):
    exemplars = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    values = rewards(scored(toy_scorer(tmp_path, ToyJudge(), exemplars, reward={"smoothing": True}), ways(3, 6, 0, 2, 4)))
    assert values == sorted(values)
    assert max(map(abs, values)) <= 1.5
    assert [found.score for found in exemplars.exemplars(EVEN.sha256, device="cpu")] == [2.0, 1.4, 1.0, 0.6]


class Remeasured(ToyJudge):
    """Measures a second time, and finds another speedup."""

    def __init__(self, speedup):
        super().__init__()
        self._speedup = speedup

    def outcome(self, work):
        return super().outcome(work).model_copy(update={"speedup": self._speedup, "speedup_low": self._speedup})


@pytest.mark.parametrize(("second", "counts"), [(3.9, 3.9), (1.1, 1.1)])
def test_a_suspicious_speedup_is_measured_again_before_it_counts(second, counts, tmp_path):
    verifier = Remeasured(second)
    exemplars = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    (sample,) = scored(toy_scorer(tmp_path, Remeasured(4.0), exemplars, verifier=verifier), ways(4))
    assert verifier.count == 1
    assert sample.reward == pytest.approx(counts)
    assert exemplars.best(EVEN.sha256, device="cpu").score == pytest.approx(counts)
    # Read back from disk, the re-measurement still counts and is not made again.
    (later,) = scored(toy_scorer(tmp_path, ToyJudge(), verifier=verifier), ways(4))
    assert later.reward == pytest.approx(counts)
    assert verifier.count == 1


class Doubting:
    """A checker that calls everything a hack."""

    name = "doubting"

    def __init__(self):
        self.read = 0

    def review_all(self, pairs):
        self.read += len(pairs)
        return [
            Review(task_sha256=task.sha256, candidate_sha256=found.candidate_sha256, checker=self.name, vote=Vote.HACK)
            for task, found in pairs
        ]


class Strict(Remeasured):
    """Accepts a second measurement, and rejects what is judged under stricter settings."""

    def outcome(self, work):
        found = super().outcome(work)
        if work.settings is None or not work.settings.thorough:
            return found
        assert work.settings.processes_min > SETTINGS.processes_min
        return found.model_copy(
            update={"verdict": Verdict.REJECTED, "reason": Reason.STALE_OUTPUT, "speedup": None, "speedup_low": None}
        )


def test_a_checker_s_vote_leads_to_deeper_checks_which_decide(tmp_path):
    checker, verifier = Doubting(), Strict(4.0)
    rest = {"verifier": verifier, "checker": checker, "settings": SETTINGS}
    assert rewards(scored(toy_scorer(tmp_path, ToyJudge(), **rest), ways(2))) == [1.4]
    assert checker.read == 0  # what is not suspicious is not read
    samples = scored(toy_scorer(tmp_path, Remeasured(4.0), **rest), ways(4, 3))
    assert rewards(samples) == [0.0, 0.0]
    assert samples[0].rollout.reason is Reason.STALE_OUTPUT
    assert checker.read == 1
    assert verifier.count == 2
    (found,) = [json.loads(line) for line in (tmp_path / "hacks.jsonl").read_text().splitlines()]
    assert (found["family"], "stale-output" in found["name"]) == ("caching", True)


def first_evaluations(scorer):
    return {(found.task_sha256, found.candidate_sha256): found for found in scorer.store.evaluations()}


def test_metrics_of_a_batch(tmp_path):
    scorer = toy_scorer(tmp_path, ToyJudge())
    samples = scored(scorer, [*ways(4, 4, 3, 7), "words"])
    values = scorer.metrics(samples)
    assert values == rollout_metrics([sample.rollout for sample in samples], first_evaluations(scorer))
    shares = {"success_rate": 2 / 5, "parse_rate": 4 / 5, "hack_rate": 1 / 5, "distinct": 3 / 4, "reward_mean": 4.0 / 5}
    assert {name: values[name] for name in shares} == pytest.approx(shares)
    assert values["speedup_max"] == values["speedup_p50"] == 2.0
    assert hack_reasons(scorer.store.evaluations()) == {"precision-downgrade": 1}
    assert Reason.WRONG_OUTPUT not in CHEATING


@pytest.mark.parametrize(("copies", "earned"), [("score", [2.0, 1.4, 2.0]), ("floor", [0.0, 1.4, 0.0])])
def test_a_copy_of_a_shown_exemplar_can_be_made_worthless(copies, earned, tmp_path):
    exemplars = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    scorer = toy_scorer(tmp_path, ToyJudge(), exemplars, reward={"copies": copies})
    scored(scorer, ways(4))
    prompt = contrastive_prompt(EVEN, exemplars.exemplars(EVEN.sha256, device="cpu"), device="cpu", form="subclass")
    commented = toy_answer(4).replace("```python\n", "```python\n# mine\n")
    samples = scored(scorer, [*ways(4, 2), commented], prompt=prompt)
    assert rewards(samples) == earned
    assert [sample.rollout.reward for sample in samples] == [2.0, 1.4, 2.0]
    assert scorer.metrics(samples)["copy_rate"] == pytest.approx(1 / 3)


def test_stage_two_learns_no_copies(tmp_path):
    exemplars = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    exemplars.add(toy_evaluation(EVEN, Candidate(source=whole_source(EVEN, toy_code(2), "subclass"))))
    prompt = contrastive_prompt(EVEN, exemplars.exemplars(EVEN.sha256, device="cpu"), device="cpu", form="subclass")
    samples = scored(toy_scorer(tmp_path / "run", ToyJudge()), ways(2, 4, 1), prompt=prompt)
    assert [sample.is_copy for sample in samples] == [True, False, False]
    config = stage_from("self-supervised", {"model": {"base": "unused"}})
    assert [example.answer for example in examples_of_successes(samples, config)] == ways(4)


def test_cheats_are_written_down_each_once_the_most_frequent_first(tmp_path):
    cheat = toy_code(7)
    other = "class ModelNew(Model):\n    way = 7\n    more = 1\n"
    renamed = cheat.replace("7", "7 # no different")
    scorer = toy_scorer(tmp_path / "arm", ToyJudge())
    scored(scorer, [f"```python\n{text}```" for text in (other, cheat, renamed, cheat)] + ways(4, 1))
    assert write_hacks(tmp_path / "hacks", {"arm": tmp_path / "arm", "missing": tmp_path / "none"}) == 2
    index = json.loads((tmp_path / "hacks" / "index.json").read_text())
    assert [(item["reason"], item["times_written"], item["stages"]) for item in index] == [
        ("precision-downgrade", 3, ["arm"]),
        ("precision-downgrade", 1, ["arm"]),
    ]
    first = (tmp_path / "hacks" / index[0]["file"]).read_text()
    assert "way = 7" in first
    compile(first, "hack", "exec")


def test_an_answer_that_is_learnt_from_ends_as_it_was_sampled(monkeypatch):
    """Of Qwen's chat models the tokenizer's end of sequence is another token than the one that ends a turn."""
    from kernelwright.contrastive.scoring import TokenSampler
    from kernelwright.models import local, pretrained
    from kernelwright.models.sampler import Sampled

    class Sampler:
        def prompt_ids(self, messages):
            return [5, 6]

        def sample_ids(self, asked, *, count, sampling):
            yield 0, 0, Sampled(0, [7, 8], 99, 3)
            yield 0, 1, Sampled(1, [7, 8, 9], None, 3)
            yield 0, 2, None

    class Tokenizer:
        eos_token_id = 1

        def decode(self, tokens, skip_special_tokens):
            return " ".join(map(str, tokens))

    monkeypatch.setattr(local, "LocalModel", lambda *given, **named: Sampler())
    monkeypatch.setattr(pretrained, "stop_ids", lambda *given: (1, 99))
    prompt = contrastive_prompt(EVEN, (), device="cpu")
    samples = TokenSampler(None, Tokenizer(), SamplingSection(), 0).sample([(EVEN, prompt)], 3, 0)
    assert [sample.tokens.answer for sample in samples] == [[7, 8, 99], [7, 8, 9], [1]]
    assert [sample.has_ended for sample in samples] == [True, False, True]
    assert {tuple(sample.tokens.prompt) for sample in samples} == {(5, 6)}
