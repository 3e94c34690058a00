"""Screened rewards: the judge takes a share of all candidates and every outlier, and disagreements are counted."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.context import ConfiguredJudges, Judging
from kernelwright.contrastive.evaluations import Estimator, JudgedRun, disagree
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.contrastive.scoring import Scorer
from kernelwright.contrastive.settings import RewardSection
from kernelwright.errors import ConfigError
from kernelwright.judge import Settings
from kernelwright.models.chat import Sampling
from kernelwright.records import Candidate, RunDirectory
from kernelwright.records.rewards import reward_named
from kernelwright.records.screened import screened_of
from tests.contrastive.test_scoring import EVEN, answer, attempt
from tests.contrastive.toys import ToyJudge, toy_evaluation, toy_task
from tests.samples import TASK, accepted, rejected

OTHER = toy_task("odd", "amber")


class ToyScreens:
    """Estimates what the toy judge would find, times a factor."""

    def __init__(self, factor=1.0, broken=()):
        self.factor, self.broken, self.seen = factor, broken, []

    def prepare(self, tasks):
        pass

    def look(self, jobs):
        for job in jobs:
            if job.task.id in self.broken:
                continue
            self.seen.append(job.candidate.sha256)
            found = toy_evaluation(job.task, job.candidate)
            estimate = found.speedup * self.factor if found.accepted else None
            yield job, screened_of(job.task, job.candidate, correct=found.accepted, reason=found.reason, estimate=estimate)


def scoring(path, share, screens, judge):
    judged = JudgedRun(RunDirectory(path), judge)
    estimator = Estimator(judged, screens, share, above=3.0, leap=2.0)
    database = ExemplarDatabase(path / "exemplars.sqlite")
    scorer = Scorer(
        judged,
        reward_named("speedup"),
        form="subclass",
        stage="contrastive",
        model="toy",
        sampling=Sampling(),
        estimator=estimator,
        database=database,
    )
    return scorer, database


def batch():
    texts = [*(answer(way) for way in (4, 2, 3)), "no code", answer(4)]
    return [attempt(text, task, sample=number) for task in (EVEN, OTHER) for number, text in enumerate(texts)]


def test_estimates_earn_rewards_and_are_neither_verdicts_nor_exemplars(tmp_path):
    judge, screens = ToyJudge(), ToyScreens()
    scorer, database = scoring(tmp_path, 1.0, screens, judge)
    scored = scorer.score(batch())
    judging, _ = scoring(tmp_path / "judged", 0.0, ToyScreens(), ToyJudge())
    assert [item.reward for item in scored] == [item.reward for item in judging.score(batch())]
    assert judge.count == 0
    assert len(screens.seen) == len(set(screens.seen)) == 6
    assert [item.evaluation for item in scored] == [None] * 10
    assert list(RunDirectory(tmp_path).evaluations()) == []
    assert database.everything(EVEN.sha256, device="cpu") == []
    kept = list(RolloutLog(tmp_path).rollouts())
    assert [one.verdict for one in kept] == [None] * 10
    assert [one.estimate for one in kept[:4]] == [2.0, 1.4, None, None]
    values = scorer.metrics(scored)
    assert values["screened_share"] == 1.0
    assert "screen_disagreement" not in values
    again = ToyScreens()
    assert [item.reward for item in scoring(tmp_path, 1.0, again, judge)[0].score(batch())] == [one.reward for one in scored]
    assert again.seen == [], "what was estimated before a kill is not estimated again"


@pytest.mark.parametrize("factor", [1.6, 4.0])
def test_the_judge_takes_every_outlier(tmp_path, factor):
    judge = ToyJudge()
    scorer, _ = scoring(tmp_path, 1.0, ToyScreens(factor), judge)
    scored = scorer.score(batch()[:5])
    assert scored[0].evaluation is not None, "above 3, or more than twice the best so far"
    assert scored[0].reward == 2.0
    assert scorer.metrics(scored)["screen_disagreement"] == 1.0


def test_the_judge_takes_a_share_and_what_cannot_be_screened(tmp_path):
    judge = ToyJudge()
    scorer, _ = scoring(tmp_path, 0.0, ToyScreens(0.5), judge)
    scored = scorer.score(batch())
    assert judge.count == 6
    assert scorer.metrics(scored)["screened_share"] == 0.0
    assert scorer.metrics(scored)["screen_disagreement"] > 0.0
    half = [
        Estimator(JudgedRun(RunDirectory(tmp_path), judge), ToyScreens(), 0.5, 3.0, 2.0)._is_let_off(
            (TASK.sha256, str(number))
        )
        for number in range(400)
    ]
    assert 160 < sum(half) < 240
    elsewhere = ToyJudge()
    scoring(tmp_path / "broken", 1.0, ToyScreens(broken=(EVEN.id,)), elsewhere)[0].score(batch())
    assert elsewhere.count == 3


def test_they_disagree_on_what_is_right_and_on_what_is_fast():
    def screened(correct=True, estimate=1.5):
        return screened_of(TASK, Candidate(source="#"), correct=correct, estimate=estimate)

    found = accepted(1.5)
    assert not disagree(screened(), found)
    assert disagree(screened(estimate=2.5), found)
    assert disagree(screened(estimate=0.5), found)
    assert disagree(screened(), rejected())
    assert disagree(screened(correct=False, estimate=None), found)
    assert not disagree(screened(correct=False, estimate=None), rejected())


def test_screened_rewards_need_judges_that_time_here():
    judges = ConfiguredJudges(ToyJudge(), Settings.quick())
    section = RewardSection(screened_share=0.5)
    judged = JudgedRun.__new__(JudgedRun)
    assert Judging(device="cpu", rewards=judges, reported=judges).estimator(RewardSection(), judged) is None
    with pytest.raises(ConfigError, match=r"reward\.screened_share"):
        Judging(device="cpu", rewards=judges, reported=judges).estimator(section, judged)
