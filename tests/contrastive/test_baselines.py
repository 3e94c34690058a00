"""Rewards against the best baseline: a graph around the reference earns nothing, and the record says what it was."""

from __future__ import annotations

from kernelwright.contrastive import evaluations as sampled
from kernelwright.contrastive.evaluations import EAGER, GRAPH, BestBaselines, Estimator, JudgedRun
from kernelwright.contrastive.scoring import Scorer
from kernelwright.models.chat import Sampling
from kernelwright.records import RunDirectory, Verdict
from kernelwright.records.rewards import reward_named
from kernelwright.rewrites.baselines import baseline_source
from tests.contrastive.test_estimating import ToyScreens
from tests.contrastive.test_scoring import EVEN, answer, attempt
from tests.contrastive.toys import ToyJudge, toy_evaluation, toy_task

ODD = toy_task("odd", "beryl")


class GraphJudge(ToyJudge):
    """Measures a graph of an even task at 1.6 times eager, and rejects one of an odd task."""

    def evaluate(self, jobs, stop=None):
        for job in jobs:
            if stop is not None and stop():
                return
            if job.candidate.policy != "baseline":
                yield from super().evaluate([job], stop)
                continue
            assert "CUDAGraph" in job.candidate.source
            self.count += 1
            found = toy_evaluation(job.task, job.candidate)
            if "even" in job.task.id:
                found = found.model_copy(
                    update={
                        "verdict": Verdict.ACCEPTED,
                        "reason": None,
                        "speedup": 1.6,
                        "speedup_low": 1.5,
                        "speedup_high": 1.7,
                    }
                )
            yield job, found


def best(path, device="cuda"):
    judge = GraphJudge()
    return BestBaselines(JudgedRun(RunDirectory(path / "baselines"), judge), device), judge


def test_each_task_s_baseline_is_measured_once_and_kept(tmp_path):
    baselines, judge = best(tmp_path)
    assert baselines.measure([EVEN, ODD, EVEN])
    assert baselines.of(EVEN.sha256) == (GRAPH, 1.6)
    assert baselines.of(ODD.sha256) == (EAGER, 1.0), "a graph that fails is no baseline"
    assert judge.count == 2
    again, judge = best(tmp_path)
    assert again.measure([EVEN, ODD], lambda: False)
    assert (again.speedups, judge.count) == (baselines.speedups, 0)
    assert not best(tmp_path / "new")[0].measure([EVEN], lambda: True)


def test_a_run_keeps_its_baselines_when_graphs_are_written_otherwise(tmp_path, monkeypatch):
    first, _ = best(tmp_path)
    first.measure([EVEN])
    monkeypatch.setattr(sampled, "baseline_source", lambda task, name: f"{baseline_source(task, name)}# another text\n")
    again, judge = best(tmp_path)
    assert again.measure([EVEN])
    assert (again.speedups, judge.count) == (first.speedups, 0)
    assert again.measure([ODD])
    assert judge.count == 1


def test_a_cpu_has_no_graphs(tmp_path):
    baselines, judge = best(tmp_path, "cpu")
    assert baselines.measure([EVEN])
    assert (baselines.of(EVEN.sha256), judge.count) == ((EAGER, 1.0), 0)


def test_verdicts_and_estimates_earn_the_ratio_to_the_best_baseline(tmp_path):
    baselines, judge = best(tmp_path)
    baselines.measure([EVEN, ODD])
    for share, name in ((0.0, "judged"), (0.9, "screened")):
        judged = JudgedRun(RunDirectory(tmp_path / name), judge)
        scorer = Scorer(
            judged,
            reward_named("speedup", baselines=baselines.speedups),
            form="subclass",
            stage="contrastive",
            model="toy",
            sampling=Sampling(),
            estimator=Estimator(judged, ToyScreens(), share, above=3.0, leap=3.0) if share else None,
            baselines=baselines,
        )
        scored = scorer.score([attempt(answer(4), EVEN), attempt(answer(3), ODD), attempt("no code", EVEN)])
        assert [item.reward for item in scored] == [1.25, 1.4, 0.0]
        assert [(item.rollout.baseline, item.rollout.baseline_speedup) for item in scored[:2]] == [
            (GRAPH, 1.6),
            (EAGER, 1.0),
        ]
    assert [item.rollout.estimate is not None for item in scored].count(True) >= 1
