"""Evaluations that are made once: shared between runs, of baselines, and estimates in their place."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.evaluations import (
    COMPILE,
    EAGER,
    GRAPH,
    Deadline,
    Estimator,
    Proposal,
    RunEvaluations,
    TaskBaselines,
    disagree,
)
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.prompts import whole_source
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.contrastive.settings import RewardSection
from kernelwright.errors import ConfigError
from kernelwright.judge import Settings
from kernelwright.records import Candidate, RunDirectory, Verdict
from kernelwright.records.screened import screened_of
from kernelwright.rewrites.wrappers import baseline_source
from tests.contrastive.toys import (
    EVEN,
    ODD,
    Asked,
    ToyJudge,
    ToyScreens,
    toy_answer,
    toy_code,
    toy_context,
    toy_evaluation,
    toy_sample,
    toy_scorer,
)
from tests.samples import TASK, accepted, rejected

SETTINGS = Settings.quick()


def shared_run(tmp_path, name, judge, *, settings=SETTINGS, confirming=False, timed=True):
    context = toy_context(judge, settings=settings, shared=tmp_path / "judged.sqlite")
    run = RunDirectory(tmp_path / name)
    return context.confirming(run) if confirming else context.store(run, timed=timed)


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


class BaselineJudge(ToyJudge):
    """Measures a baseline of an even task at 1.6 times eager, and rejects one of an odd task."""

    def outcome(self, work):
        found = super().outcome(work)
        if work.candidate.policy != "baseline" or "even" not in work.task.id:
            return found
        speedups = {"speedup": 1.6, "speedup_low": 1.5, "speedup_high": 1.7}
        return found.model_copy(update={"verdict": Verdict.ACCEPTED, "reason": None, **speedups})


def baselines_in(path, device="cuda", name=GRAPH):
    judge = BaselineJudge()
    return TaskBaselines(RunEvaluations(RunDirectory(path / "baselines"), judge), device, name), judge


def test_each_task_s_baseline_is_measured_once_and_kept(tmp_path):
    baselines, judge = baselines_in(tmp_path)
    assert baselines.measure([EVEN, ODD, EVEN])
    assert baselines.best(EVEN.sha256) == (GRAPH, 1.6)
    assert baselines.best(ODD.sha256) == (EAGER, 1.0), "a graph that fails is no baseline"
    assert judge.count == 2
    again, judge = baselines_in(tmp_path)
    assert again.measure([EVEN, ODD], Deadline())
    assert (again.speedups, judge.count) == (baselines.speedups, 0)
    assert not baselines_in(tmp_path / "new")[0].measure([EVEN], Asked(lambda: True))
    # Another baseline of the same tasks is told apart, in the same directory.
    compiled, judge = baselines_in(tmp_path, "cpu", COMPILE)
    assert compiled.measure([EVEN])
    assert (compiled.best(EVEN.sha256), judge.count) == ((COMPILE, 1.6), 1)


def test_a_run_keeps_its_baselines_when_graphs_are_written_otherwise(tmp_path):
    other = Candidate(source=baseline_source(EVEN, GRAPH) + "# another text\n", policy="baseline", techniques=(GRAPH,))
    RunDirectory(tmp_path / "baselines").append(toy_evaluation(EVEN, other))
    kept, judge = baselines_in(tmp_path)
    assert kept.measure([EVEN])
    assert (kept.speedups, judge.count) == ({EVEN.sha256: 1.0}, 0)
    assert kept.measure([ODD])
    assert judge.count == 1


def test_a_cpu_has_no_graphs(tmp_path):
    baselines, judge = baselines_in(tmp_path, "cpu")
    assert baselines.measure([EVEN])
    assert (baselines.best(EVEN.sha256), judge.count) == ((EAGER, 1.0), 0)


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_verdicts_and_estimates_earn_the_ratio_to_the_best_baseline(tmp_path, share):
    reward = {"baseline": "best", "screened_share": share, "suspicious_leap": 3.0}
    rest = {"settings": SETTINGS, "screens": ToyScreens(), "device": "cuda"}
    scorer = toy_scorer(tmp_path, BaselineJudge(), reward=reward, **rest)
    assert scorer.measure_baselines([EVEN, ODD])
    samples = [toy_sample(toy_answer(4), EVEN), toy_sample(toy_answer(3), ODD), toy_sample("no code", EVEN)]
    scorer.score(samples)
    assert [sample.reward for sample in samples] == [1.25, 1.4, 0.0]
    rollouts = list(RolloutLog(tmp_path).rollouts())
    assert [(one.baseline, one.baseline_speedup) for one in rollouts[:2]] == [(GRAPH, 1.6), (EAGER, 1.0)]
    assert any(one.estimate is not None for one in rollouts) == bool(share)


def test_the_highest_milestone_is_for_what_beats_torch_compile_which_the_stage_measures(tmp_path):
    scorer = toy_scorer(tmp_path, BaselineJudge(), reward={"name": "milestone"})
    assert scorer.measure_baselines([EVEN])
    samples = [toy_sample(text, EVEN) for text in (toy_answer(4), toy_answer(2), toy_answer(0), "no code")]
    scorer.score(samples)
    assert [sample.reward for sample in samples] == [3.0, 2.0, 1.0, -1.0], "2.0 and 1.4 against 1.6, and eager"


def screening_scorer(path, share, screens, judge, exemplars=None):
    reward = {"screened_share": share, "reverify": False}
    return toy_scorer(path, judge, exemplars, reward=reward, screens=screens, settings=SETTINGS)


def batch():
    texts = [*(toy_answer(way) for way in (4, 2, 3)), "no code", toy_answer(4)]
    return [toy_sample(text, task, sample=number) for task in (EVEN, ODD) for number, text in enumerate(texts)]


def test_estimates_earn_rewards_and_are_neither_verdicts_nor_exemplars(tmp_path):
    judge, screens, exemplars = ToyJudge(), ToyScreens(), ExemplarDatabase(tmp_path / "exemplars.sqlite")
    scorer, samples, judged = screening_scorer(tmp_path, 1.0, screens, judge, exemplars), batch(), batch()
    scorer.score(samples)
    toy_scorer(tmp_path / "judged", ToyJudge()).score(judged)
    assert [sample.reward for sample in samples] == [sample.reward for sample in judged]
    assert judge.count == 0
    assert len(screens.seen) == len(set(screens.seen)) == 6
    assert [sample.evaluation for sample in samples] == [None] * 10
    assert list(RunDirectory(tmp_path).evaluations()) == []
    assert exemplars.exemplars(EVEN.sha256, device="cpu") == []
    kept = list(RolloutLog(tmp_path).rollouts())
    assert [one.verdict for one in kept] == [None] * 10
    assert [one.estimate for one in kept[:4]] == [2.0, 1.4, None, None]
    values = scorer.metrics(samples)
    assert values["screened_share"] == 1.0
    assert "screen_disagreement" not in values
    again, repeated = ToyScreens(), batch()
    screening_scorer(tmp_path, 1.0, again, judge).score(repeated)
    assert [sample.reward for sample in repeated] == [sample.reward for sample in samples]
    assert again.seen == [], "what was estimated before a kill is not estimated again"


@pytest.mark.parametrize("factor", [1.6, 4.0])
def test_the_judge_takes_every_outlier(tmp_path, factor):
    scorer, samples = screening_scorer(tmp_path, 0.9, ToyScreens(factor), ToyJudge()), batch()[:5]
    scorer.score(samples)
    assert samples[0].evaluation is not None, "above 3, or more than twice the best so far"
    assert samples[0].reward == 2.0
    assert scorer.metrics(samples)["screen_disagreement"] > 0


def test_the_judge_takes_a_share_and_what_cannot_be_screened(tmp_path):
    judge, samples = ToyJudge(), batch()
    scorer = screening_scorer(tmp_path, 1e-9, ToyScreens(0.5), judge)
    scorer.score(samples)
    assert judge.count == 6
    assert scorer.metrics(samples)["screened_share"] == 0.0
    assert scorer.metrics(samples)["screen_disagreement"] > 0.0
    store = RunEvaluations(RunDirectory(tmp_path), judge)
    half = Estimator(store, ToyScreens(), 0.5, 3.0, 2.0)
    assert 160 < sum(half.is_let_off((TASK.sha256, str(number))) for number in range(400)) < 240
    broken = ToyScreens(broken=(EVEN.id, ODD.id))
    elsewhere = ToyJudge()
    screening_scorer(tmp_path / "broken", 0.9, broken, elsewhere).score(batch())
    assert elsewhere.count == 6


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


def test_screened_rewards_need_judges_that_time_here(tmp_path):
    context = toy_context(ToyJudge(), settings=SETTINGS)
    store = context.store(RunDirectory(tmp_path))
    assert context.estimator(RewardSection(), store) is None
    with pytest.raises(ConfigError, match=r"reward\.screened_share"):
        context.estimator(RewardSection(screened_share=0.5), store)
