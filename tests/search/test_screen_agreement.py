"""Screening agrees with the judge where its first candidate is about as fast as the best judged one."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from kernelwright.records import Candidate, RunDirectory, Task
from kernelwright.records.screened import screened_of
from tests.samples import TASK, accepted

VERDICTS = {
    "same": {"a": (2.0, 1.9), "b": (1.5, 1.4)},
    "near": {"a": (1.96, 1.8), "b": (2.0, 1.4)},
    "noise": {"a": (1.9, 1.8), "b": (2.0, 1.4)},
    "missed": {"a": (1.0, 1.8), "b": (2.0, 1.4)},
    "one-judged": {"a": (2.0, 1.8)},
}
"""Speedup by the judge and estimate by screening of each candidate; half-widths of intervals are 5 %."""


@pytest.fixture
def screen_agreement(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("screen_agreement")


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
