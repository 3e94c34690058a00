from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kernelwright.contrastive.context import ConfiguredJudges, Judging, StageContext
from kernelwright.contrastive.evaluations import JudgedRun, Proposal
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.hacks import Review, Vote
from kernelwright.contrastive.metrics import CHEATING, hack_reasons, rollout_metrics, write_hacks
from kernelwright.contrastive.prompts import contrastive_prompt, plain_prompt, whole_source
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.contrastive.scoring import Attempt, RewardSmoother, Scorer, Verification
from kernelwright.errors import InfrastructureError
from kernelwright.judge import Settings
from kernelwright.models.chat import Completion, Sampling
from kernelwright.records import Candidate, Reason, RunDirectory, Verdict
from kernelwright.records.rewards import reward_named
from tests.contrastive.toys import ToyJudge, toy_code, toy_evaluation, toy_task

EVEN = toy_task("even", "amber")
SETTINGS = Settings.quick()


def attempt(text, task=EVEN, sample=0, finish_reason="stop"):
    completion = Completion(text=text, prompt_tokens=1, completion_tokens=1, finish_reason=finish_reason)
    return Attempt(
        task=task, prompt=plain_prompt(task, device="cpu", form="subclass"), completion=completion, step=0, sample=sample
    )


def answer(way):
    return f"```python\n{toy_code(way)}```"


def scorer(path, judge, **rest):
    judged = JudgedRun(RunDirectory(path), judge)
    reward = rest.pop("reward", reward_named("speedup"))
    return Scorer(judged, reward, form="subclass", stage="contrastive", model="toy", sampling=Sampling(), **rest)


def test_answers_earn_their_speedup_and_failures_the_floor(tmp_path):
    judge = ToyJudge()
    texts = [answer(4), answer(2), answer(3), "no code", answer(4)]
    scored = scorer(tmp_path, judge).score([attempt(text, sample=number) for number, text in enumerate(texts)])
    assert [item.reward for item in scored] == [2.0, 1.4, 0.0, 0.0, 2.0]
    assert [item.rollout.verdict for item in scored] == ["accepted", "accepted", "rejected", None, "accepted"]
    assert judge.count == 3  # the same candidate is judged once
    assert [kept.reward for kept in RolloutLog(tmp_path).rollouts()] == [2.0, 1.4, 0.0, 0.0, 2.0]


def test_a_batch_that_is_scored_again_after_a_kill_leaves_no_trace(tmp_path):
    batch = [attempt(answer(4)), attempt(answer(2), sample=1)]
    first = [item.reward for item in scorer(tmp_path, ToyJudge()).score(batch)]
    judge = ToyJudge()
    again = [item.reward for item in scorer(tmp_path, judge).score(batch)]
    assert again == first
    assert judge.count == 0
    assert len(list(RolloutLog(tmp_path).rollouts())) == 2


class Faulty(ToyJudge):
    """Cannot judge one of the ways."""

    def __init__(self, way):
        super().__init__()
        self._way = f"way = {way}"

    def evaluate(self, jobs, stop=None):
        for job in jobs:
            if self._way in job.candidate.source:
                yield job, InfrastructureError("the machine is at fault")
            else:
                yield job, toy_evaluation(job.task, job.candidate)


def test_what_could_not_be_judged_earns_nothing_either_way(tmp_path):
    scored = scorer(tmp_path, Faulty(2), smoother=RewardSmoother()).score([attempt(answer(way)) for way in (2, 4, 0)])
    assert scored[0].reward is None
    assert scored[0].rollout.reward is None
    assert None not in [item.reward for item in scored[1:]]


def test_a_machine_that_judges_hardly_anything_ends_the_run(tmp_path):
    with pytest.raises(InfrastructureError, match="run again to go on"):
        scorer(tmp_path, Faulty(2)).score([attempt(answer(2))])


def test_smoothing_keeps_the_order_and_clips(tmp_path):
    database = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    score = scorer(tmp_path, ToyJudge(), smoother=RewardSmoother(), database=database)
    rewards = [item.reward for item in score.score([attempt(answer(way)) for way in (3, 6, 0, 2, 4)])]
    assert rewards == sorted(rewards)
    assert max(map(abs, rewards)) <= 1.5
    assert [found.score for found in database.exemplars(EVEN.sha256, device="cpu")] == [2.0, 1.4, 1.0, 0.6]


class Remeasured(ToyJudge):
    """Measures a second time, and finds another speedup."""

    def __init__(self, speedup):
        super().__init__()
        self._speedup = speedup

    def evaluate(self, jobs, stop=None):
        for job, outcome in super().evaluate(jobs, stop):
            yield job, outcome.model_copy(update={"speedup": self._speedup, "speedup_low": self._speedup})


@pytest.mark.parametrize(("second", "counts"), [(3.9, 3.9), (1.1, 1.1)])
def test_a_suspicious_speedup_is_measured_again_before_it_counts(second, counts, tmp_path):
    first = Remeasured(4.0)
    verifier = Remeasured(second)
    database = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    score = scorer(tmp_path, first, verification=Verification(pools={"cpu": verifier}), database=database)
    (scored,) = score.score([attempt(answer(4))])
    assert verifier.count == 1
    assert scored.reward == pytest.approx(counts)
    assert database.best(EVEN.sha256, device="cpu").score == pytest.approx(counts)
    # Read back from disk, the re-measurement still counts and is not made again.
    later = scorer(tmp_path, ToyJudge(), verification=Verification(pools={"cpu": verifier}))
    assert later.score([attempt(answer(4), sample=1)])[0].reward == pytest.approx(counts)
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


def test_a_checker_s_vote_leads_to_deeper_checks_which_decide(tmp_path, monkeypatch):
    strict = []

    def deeper(pool, task, candidate, review, settings):
        assert settings is SETTINGS
        strict.append(candidate)
        rejected = {"verdict": Verdict.REJECTED, "reason": Reason.STALE_OUTPUT, "speedup": None, "speedup_low": None}
        return toy_evaluation(task, candidate).model_copy(update=rejected | {"confirms": True})

    monkeypatch.setattr("kernelwright.contrastive.scoring.deeper", deeper)
    checker = Doubting()
    verification = Verification(pools={"cpu": Remeasured(4.0)}, checker=checker, settings=SETTINGS)
    assert scorer(tmp_path, ToyJudge(), verification=verification).score([attempt(answer(2))])[0].reward == 1.4
    assert checker.read == 0  # what is not suspicious is not read
    scored = scorer(tmp_path, Remeasured(4.0), verification=verification).score([attempt(answer(way)) for way in (4, 3)])
    assert [item.reward for item in scored] == [0.0, 0.0]
    assert scored[0].rollout.reason is Reason.STALE_OUTPUT
    assert checker.read == len(strict) == 1
    (found,) = [json.loads(line) for line in (tmp_path / "hacks.jsonl").read_text().splitlines()]
    assert (found["family"], "stale-output" in found["name"]) == ("caching", True)


def test_metrics_of_a_batch(tmp_path):
    score = scorer(tmp_path, ToyJudge())
    scored = score.score([attempt(text) for text in (answer(4), answer(4), answer(3), answer(7), "words")])
    found = {(e.task_sha256, e.candidate_sha256): e for e in score.judged.evaluations()}
    values = rollout_metrics([item.rollout for item in scored], found)
    assert values["success_rate"] == pytest.approx(2 / 5)
    assert values["parse_rate"] == pytest.approx(4 / 5)
    assert values["hack_rate"] == pytest.approx(1 / 5)
    assert values["distinct"] == pytest.approx(3 / 4)
    assert values["speedup_max"] == values["speedup_p50"] == 2.0
    assert values["reward_mean"] == pytest.approx(4.0 / 5)
    assert hack_reasons(found.values()) == {"precision-downgrade": 1}
    assert Reason.WRONG_OUTPUT not in CHEATING


@pytest.mark.parametrize(("copies", "earned"), [("score", [2.0, 1.4, 2.0]), ("floor", [0.0, 1.4, 0.0])])
def test_a_copy_of_a_shown_exemplar_can_be_made_worthless(copies, earned, tmp_path):
    database = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    score = scorer(tmp_path, ToyJudge(), database=database, copies=copies)
    score.score([attempt(answer(4))])
    prompt = contrastive_prompt(EVEN, database.exemplars(EVEN.sha256, device="cpu"), device="cpu", form="subclass")
    commented = answer(4).replace("```python\n", "```python\n# mine\n")
    texts = [answer(4), answer(2), commented]
    scored = score.score([replace(attempt(text, sample=n), prompt=prompt) for n, text in enumerate(texts)])
    assert [item.reward for item in scored] == earned
    assert [item.rollout.reward for item in scored] == [2.0, 1.4, 2.0]
    found = {(e.task_sha256, e.candidate_sha256): e for e in score.judged.evaluations()}
    assert rollout_metrics([item.rollout for item in scored], found)["copy_rate"] == pytest.approx(1 / 3)


def shared_run(tmp_path, name, judge, *, settings=SETTINGS, confirming=False, timed=True):
    judges = ConfiguredJudges(judge, settings)
    context = StageContext(Judging(device="cpu", rewards=judges, reported=judges, cache=tmp_path / "judged.sqlite"))
    run = RunDirectory(tmp_path / name)
    return context.confirming(run) if confirming else context.judged(run, timed=timed)


def test_runs_on_one_machine_share_what_was_judged(tmp_path):
    source = whole_source(EVEN, toy_code(4), "subclass")
    mine = Proposal(EVEN, Candidate(source=source, policy="mine", parent="one"))
    theirs = Proposal(EVEN, Candidate(source=source, policy="theirs", parent="other"))
    judge = ToyJudge()
    (first,) = shared_run(tmp_path, "one", judge).judge([mine]).values()
    (second,) = shared_run(tmp_path, "other", judge).judge([theirs, theirs]).values()
    assert judge.count == 1
    assert second == first.model_copy(update={"policy": "theirs", "parent": "other"})
    # What one run took from another is in its own records, once, so that its rewards can be computed again.
    assert list(RunDirectory(tmp_path / "other").evaluations()) == [second]
    # Neither another strictness nor an independent re-measurement is served from there.
    shared_run(tmp_path, "again", judge, confirming=True).judge([mine])
    shared_run(tmp_path, "strict", judge, settings=Settings()).judge([mine])
    shared_run(tmp_path, "checked", judge, timed=False).judge([mine])
    assert judge.count == 4


def test_stage_two_learns_no_copies(tmp_path):
    from kernelwright.contrastive.self_supervised import _successes
    from kernelwright.contrastive.settings import stage_from

    database = ExemplarDatabase(tmp_path / "exemplars.sqlite")
    database.add(toy_evaluation(EVEN, Candidate(source=whole_source(EVEN, toy_code(2), "subclass"))))
    prompt = contrastive_prompt(EVEN, database.exemplars(EVEN.sha256, device="cpu"), device="cpu", form="subclass")
    batch = [replace(attempt(answer(way), sample=way), prompt=prompt) for way in (2, 4, 1)]
    scored = scorer(tmp_path / "run", ToyJudge()).score(batch)
    assert [item.copied for item in scored] == [True, False, False]
    config = stage_from("self-supervised", {"model": {"base": "unused"}})
    assert [example.answer for example in _successes(scored, config)] == [answer(4)]


def test_cheats_are_written_down_each_once_the_most_frequent_first(tmp_path):
    cheat = toy_code(7)
    other = "class ModelNew(Model):\n    way = 7\n    more = 1\n"
    renamed = cheat.replace("7", "7 # no different")
    scored = scorer(tmp_path / "arm", ToyJudge())
    scored.score([attempt(f"```python\n{text}```", sample=n) for n, text in enumerate([other, cheat, renamed, cheat])])
    scored.score([attempt(answer(4), sample=9), attempt(answer(1), sample=10)])
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
    from types import SimpleNamespace

    from kernelwright.contrastive import drawing as generation
    from kernelwright.contrastive.settings import SamplingSection
    from kernelwright.models.sampler import Sampled

    class Sampler:
        def prompt_ids(self, messages):
            return [5, 6]

        def sample_ids(self, asked, *, count, sampling):
            yield 0, 0, Sampled(0, [7, 8], 99, 3)
            yield 0, 1, Sampled(1, [7, 8, 9], None, 3)
            yield 0, 2, None

    monkeypatch.setattr(generation, "LocalModel", lambda *given, **named: Sampler())
    monkeypatch.setattr(generation, "stop_ids", lambda *given: (1, 99))
    sampler = generation.TokenSampler(None, SimpleNamespace(eos_token_id=1), SamplingSection(), 0)
    found = sampler.sample([plain_prompt(EVEN, device="cpu")], 3, 0)
    assert [answer.answer for answer in found] == [[7, 8, 99], [7, 8, 9], [1]]
    assert {tuple(answer.prompt) for answer in found} == {(5, 6)}
