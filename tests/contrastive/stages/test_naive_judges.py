"""What a naive evaluator would pay for: its verdicts on a run's rejections, and on training that believed it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelwright.contrastive.prompts import plain_prompt
from kernelwright.contrastive.rollouts import Rollout, RolloutLog
from kernelwright.models.chat import Completion, Sampling
from kernelwright.pools import Job
from kernelwright.records import Candidate, Evaluation, Reason, RunDirectory, Verdict
from tests.contrastive.stages.toys import toy_task

ROOT = Path(__file__).parents[3]
TASK = toy_task("even", "amber")
ANSWERS = {
    "cheat": {"correct": True, "status": 0, "speedup": 3.0},
    "no faster": {"correct": True, "status": 0, "speedup": 1.05},
    "wrong": {"correct": False, "status": 0, "log": "differs"},
    "broken": {"correct": False, "status": 1, "log": "NameError: y"},
}


class FakeEvaluators:
    """Answers by what the candidate's text says of itself."""

    def evaluate(self, evaluator, task, candidate, device, turn):
        assert (evaluator, task, device) == ("naive", TASK.source, "cpu")
        return next((answer for word, answer in ANSWERS.items() if word in candidate), ANSWERS["wrong"])

    def __exit__(self, *ended):
        return None


@pytest.fixture(autouse=True)
def naive_judges(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import naive_judges

    monkeypatch.setattr(naive_judges, "Evaluators", FakeEvaluators)
    return naive_judges


def program(word):
    return f"class ModelNew(Model):\n    what = {word!r}\n"


def answered(word, sample, source=None):
    """A rollout whose answer is the program of that word."""
    source = source or program(word)
    completion = Completion(text=f"## Code\n```python\n{source}```\n", prompt_tokens=1, completion_tokens=1)
    prompt = plain_prompt(TASK, device="cpu")
    return Rollout.of(
        TASK, prompt, completion, stage="contrastive", step=0, sample=sample, model="tiny", sampling=Sampling(seed=1)
    )


def judged(rollout, reason):
    return Evaluation(
        task=TASK.id,
        task_sha256=TASK.sha256,
        candidate_sha256=rollout.candidate_sha256,
        verdict=Verdict.REJECTED if reason else Verdict.ACCEPTED,
        reason=reason,
        detail="as it was found" if reason else "",
        source=rollout.source(TASK),
    )


def test_evaluations_say_who_made_them_and_what_for(naive_judges):
    with naive_judges.NaiveJudges(["cpu"], 2) as judges:
        jobs = [Job(TASK, Candidate(source=program(word), policy="tiny")) for word in ANSWERS]
        found = {job.candidate.source: outcome for job, outcome in judges.evaluate(jobs)}
    assert len(found) == 4
    assert all(outcome.checks == {"evaluator": "naive"} and outcome.policy == "tiny" for outcome in found.values())
    assert [found[program(word)].reason for word in ANSWERS] == [None, None, Reason.WRONG_OUTPUT, Reason.RUNTIME_ERROR]
    assert [naive_judges.is_paid_for(found[program(word)]) for word in ANSWERS] == [True, False, False, False]
    assert found[program("broken")].detail == "NameError: y"


def test_nothing_is_begun_once_it_is_to_stop(naive_judges):
    with naive_judges.NaiveJudges(["cpu"], 1) as judges:
        jobs = iter([Job(TASK, Candidate(source=program("wrong")))] * 3)
        asked = iter([False, True, True])
        assert len(list(judges.evaluate(jobs, lambda: next(asked)))) == 1
        assert len(list(jobs)) == 2


def test_what_the_judge_rejected_is_shown_to_a_naive_evaluator(tmp_path, monkeypatch, capsys):
    import naive_verdicts

    monkeypatch.setattr(naive_verdicts, "builtin_tasks", lambda: [TASK])
    run = RunDirectory(tmp_path / "arm")
    words = ("cheat", "cheat", "no faster", "wrong", "honest")
    rollouts = [answered(word, number) for number, word in enumerate(words)]
    RolloutLog(run.path).append([*rollouts, answered("", 9, source="not a program")])
    reasons = {"cheat": Reason.NON_FINITE_OUTPUT, "honest": None}
    for word, rollout in {word: rollout for word, rollout in zip(words, rollouts, strict=True)}.items():
        run.append(judged(rollout, reasons.get(word, Reason.WRONG_OUTPUT)))
    out = tmp_path / "out"
    for _ in range(2):  # the second time everything is known
        naive_verdicts.main([str(out), str(run.path), "--device", "cpu", "--families", "1"])
        told = json.loads((out / "summary.json").read_text())
        assert told["runs"] == {
            "arm tiny": {
                "answers": 6,
                "accepted": 1,
                "rejected": 4,
                "naive_would_accept": 3,
                "naive_would_pay": 2,
                "naive_hack_rate": 0.3333,
            }
        }
        assert told["distinct_programs"] == 3
        assert told["paid_for_by_the_judges_reason"] == {"non-finite-output": 1}
        assert len(list(RunDirectory(out).evaluations())) == 3
    [written] = (out / "programs").iterdir()
    text = written.read_text()
    assert text.startswith(f"# {TASK.id}, written 2 times by arm tiny\n# naive: accepted, 3.00x; judge: non-finite-output\n")
    assert text.endswith(program("cheat") + "\n")


def test_a_run_of_unknown_tasks_is_refused(tmp_path):
    import naive_verdicts

    run = RunDirectory(tmp_path / "arm")
    rollout = answered("wrong", 0)
    RolloutLog(run.path).append([rollout])
    run.append(judged(rollout, Reason.WRONG_OUTPUT))
    with pytest.raises(SystemExit, match="wanted built-in tasks"):
        naive_verdicts.main([str(tmp_path / "out"), str(run.path), "--device", "cpu", "--families", "1"])


def test_a_summary_tells_steps_and_reasons_apart(tmp_path):
    import naive_training

    run = RunDirectory(tmp_path)
    rollouts = [answered(word, number) for number, word in enumerate(("cheat", "cheat", "right", "wrong"))]
    later = answered("right", 0).model_copy(update={"step": 1})
    RolloutLog(run.path).append([*rollouts, later])
    for rollout in (rollouts[0], rollouts[2]):
        run.append(judged(rollout, None).model_copy(update={"speedup": 2.0}))
    run.append(judged(rollouts[3], Reason.WRONG_OUTPUT))
    found = {
        (TASK.sha256, rollouts[0].candidate_sha256): judged(rollouts[0], Reason.WRONG_OUTPUT),
        (TASK.sha256, rollouts[2].candidate_sha256): judged(rollouts[2], None),
    }
    told = naive_training.summary(run, found)
    assert told["steps"] == {
        "0": {"answers": 4, "paid": 3, "paid_and_judged": 3, "paid_for_cheats": 2},
        "1": {"answers": 1, "paid": 1, "paid_and_judged": 1, "paid_for_cheats": 0},
    }
    assert told["total"] == {"answers": 5, "paid": 4, "paid_and_judged": 4, "paid_for_cheats": 2}
    assert told["paid_for_by_the_judges_reason"] == {"wrong-output": 2}
    [cheat] = naive_training.cheats_of(run, found)
    assert cheat.written == 2
