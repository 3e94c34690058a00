"""Screening agrees with the judge where what it puts first is about as fast as the best judged candidate."""

from __future__ import annotations

import argparse
import json

import pytest

from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.records.screened import screened_of
from tests.samples import TASK, accepted, rejected

VERDICTS = {
    "same": {"a": (2.0, 1.9), "b": (1.5, 1.4)},
    "near": {"a": (1.96, 1.8), "b": (2.0, 1.4)},
    "noise": {"a": (1.9, 1.8), "b": (2.0, 1.4)},
    "missed": {"a": (1.0, 1.8), "b": (2.0, 1.4)},
    "one-judged": {"a": (2.0, 1.8)},
}
"""Speedup by the judge and estimate by screening of each candidate; half-widths of intervals are 5 %."""


@pytest.fixture
def screen_agreement(script):
    return script("screen_agreement")


@pytest.fixture
def run(tmp_path):
    made = RunDirectory(tmp_path / "race")
    for name, candidates in VERDICTS.items():
        task = Task(id=name, source=f"{TASK.source}# {name}\n")
        for source, (speedup, estimate) in candidates.items():
            made.append(screened_of(task, Candidate(source=source), correct=True, estimate=estimate))
            found = {"task": name, "task_sha256": task.sha256, "policy": "builtin"}
            # The confirmation comes after the first verdict, which counts.
            for confirms, measured in ((False, speedup), (True, 1.0)):
                made.append(accepted(measured, source, **found, confirms=confirms))
    return made


def test_ratios_tell_how_much_screening_lost(screen_agreement, run, capsys):
    screen_agreement.main([str(run.path), "--each"])
    lines, _, text = capsys.readouterr().out.partition("{")
    assert json.loads("{" + text) == {
        "screen_agreement": [2, 4],
        "ratio": {"tasks": 4, "median": 0.965, "worst": 0.5},
        "ratio_beyond_noise": {"tasks": 1, "median": 0.5, "worst": 0.5},
    }
    assert lines.splitlines()[0] == "0.500  race  missed  of 2  beyond noise"
    assert "one-judged" not in lines


def test_nothing_is_told_of_no_tasks(screen_agreement, tmp_path, capsys):
    screen_agreement.main([str(tmp_path)])
    nothing = {"tasks": 0}
    assert json.loads(capsys.readouterr().out) == {
        "screen_agreement": [0, 0], "ratio": nothing, "ratio_beyond_noise": nothing,
    }  # fmt: skip


ALL_JUDGED = {
    "first-rejected": {"a": (None, 3.0), "b": (2.0, 1.9), "c": (1.5, 1.4)},
    "third-best": {"a": (1.5, 1.9), "b": (1.2, 1.8), "c": (2.0, 1.7)},
    "fourth-best": {"a": (1.0, 1.3), "b": (1.0, 1.25), "c": (1.0, 1.2), "d": (2.0, 1.1)},
    "none-worth-it": {"a": (0.8, 0.9), "b": (0.7, 0.8)},
}
"""As `VERDICTS`; None was rejected."""


@pytest.fixture
def agreement(tmp_path, script):
    """What `search_h200.py` sums up of tasks of which every candidate is judged."""
    made, tasks = RunDirectory(tmp_path / "campaign"), []
    for name, candidates in ALL_JUDGED.items():
        task = Task(id=name, source=f"{TASK.source}# {name}\n")
        tasks.append(task)
        for source, (speedup, estimate) in candidates.items():
            made.append(screened_of(task, Candidate(source=source), correct=True, estimate=estimate))
            found = {"task": name, "task_sha256": task.sha256, "policy": "builtin"}
            made.append(accepted(speedup, source, **found) if speedup else rejected(source=source, **found))
    made.write_json("state.json", {"done": [task.sha256 for task in tasks]})
    campaign = script("search_h200").Campaign(made, tasks, "cpu", argparse.Namespace(commit=""))
    return campaign.summary()["screen_agreement"]


def test_first_best_of_three_and_rule_are_compared_with_the_best_of_all(agreement):
    each = {one["task"]: one for one in agreement["each"]}
    told = ("agrees", "rejected_before", "apart", "best_of_three_agrees", "judged_by_rule", "by_rule", "rule_agrees")
    assert {task: tuple(one[name] for name in told) for task, one in each.items()} == {
        "first-rejected": (True, 1, False, True, 2, 2.0, True),
        # The estimates of both others are clearly above what the first measured.
        "third-best": (False, 0, True, True, 3, 2.0, True),
        "fourth-best": (False, 0, True, False, 3, 1.0, False),
        "none-worth-it": (True, 0, False, True, 0, None, True),
    }
    assert {name: value for name, value in agreement.items() if name != "each"} == {
        "tasks": 4, "agree": 2, "first_replaced": 1, "first_apart_from_best": 2, "best_of_three_agree": 3,
        "rule_agree": 3, "rule_without_winner": 1, "rule_judged": 8,
    }  # fmt: skip
