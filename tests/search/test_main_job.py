"""The benchmark that runs the main job over a suite, with a stand-in for the command."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kernelwright.records import Evaluation, RunDirectory, Verdict
from kernelwright.tasks.suites import load_suite

TASKS = {entry.task.id: entry.task for entry in load_suite("builtin").entries}
"""Parsed once: Python before 3.11.9 cannot in several threads at a time (python/cpython issue 106905)."""
SPEEDUPS = {"diag_matmul": 4.0, "leaky_relu": None, "layer_norm": 1.0}
"""Of the confirmed winner; None where nothing was confirmed, 1.0 for a wrapper that only just counts."""


@pytest.fixture
def main_job(script):
    return script("main_job")


def record(task, number, speedup, *, confirms=False):
    accepted = speedup is not None
    return Evaluation(
        task=task.id,
        task_sha256=task.sha256,
        candidate_sha256=f"{number:064d}",
        verdict=Verdict.ACCEPTED if accepted else Verdict.REJECTED,
        reason=None if accepted else "wrong-output",
        device="cpu",
        speedup=speedup,
        speedup_low=speedup and speedup * 0.99,
        speedup_high=speedup and speedup * 1.01,
        noise_floor=0.0 if accepted else None,
        reference_us=100.0 if accepted else None,
        policy="builtin",
        techniques=("diagonal-operand",),
        labels=("wrapper-only",) if speedup and speedup < 2 else (),
        source=f"# {number}",
        confirms=confirms,
        started="2026-01-01T00:00:00+00:00",
        elapsed_s=1.0,
    )


class Command:
    """Writes what a run of the command leaves behind."""

    def __init__(self):
        self.asked = []

    def __call__(self, words):
        self.asked.append(words)
        name, out = words[words.index("optimize") + 1], Path(words[words.index("--out") + 1])
        task = TASKS[name]
        run = RunDirectory(out)
        run.claim({"kind": "optimize", "task": name}, same=("kind", "task"), device="cpu")
        run.append(record(task, 0, None))
        if (speedup := SPEEDUPS[name]) is not None:
            run.append(record(task, 1, speedup * 2))  # the search's own measurement flattered it
            run.append(record(task, 1, speedup * 1.1, confirms=True))
            run.write_text("optimized.py", "# the winner\n")
        return 0


def test_every_task_is_run_once_and_only_confirmed_speedups_count(main_job, tmp_path, capsys):
    command = Command()
    main_job.main([str(tmp_path / "run"), "--device", "cpu", "--budget", "5", "--tasks", ",".join(SPEEDUPS)], command)
    assert sorted(words[words.index("optimize") + 1] for words in command.asked) == sorted(SPEEDUPS)
    assert all(words[words.index("--budget") + 1] == "5" for words in command.asked)
    told = json.loads((tmp_path / "run" / "main_job.json").read_text())
    rows = {row["task"]: row for row in told["rows"]}
    assert rows["diag_matmul"]["speedup"] == pytest.approx(4.4)
    assert rows["leaky_relu"]["speedup"] is None
    assert rows["leaky_relu"]["rejected"] == {"wrong-output": 1}
    summary = told["summary"]
    assert (summary["tasks"], summary["improved"], summary["wrapper_only_winners"]) == (3, 2, 1)
    assert summary["geomean"] == pytest.approx((4.4 * 1.1 * 1.0) ** (1 / 3))
    assert summary["geomean_of_other_winners"] == pytest.approx(4.4**0.5)
    table = (tmp_path / "run" / "main_job.md").read_text().splitlines()
    assert table[2].startswith("| diag_matmul | 100 | 4.40 |")
    assert "none confirmed" in table[-1]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == summary


def test_no_task_begins_after_the_deadline_and_what_is_published_can_be_scored_again(main_job, tmp_path):
    command, run = Command(), str(tmp_path / "run")
    with pytest.raises(SystemExit, match="found none"):
        main_job.main([run, "--device", "cpu", "--tasks", "diag_matmul", "--seconds", "0"], command)
    assert command.asked == []
    words = [run, "--device", "cpu", "--tasks", "diag_matmul", "--publish", str(tmp_path / "kept")]
    main_job.main(words, command)
    main_job.main([*words, "--only-publish"], command)
    assert len(command.asked) == 1
    kept = tmp_path / "kept"
    assert sorted(path.name for path in kept.iterdir()) == ["diag_matmul", "main_job.json", "main_job.md"]
    assert RunDirectory(kept / "diag_matmul").read_json("config.json")["task"] == "diag_matmul"
    lines = gzip.decompress((kept / "diag_matmul" / "evaluations.jsonl.gz").read_bytes()).decode().splitlines()
    assert [Evaluation.model_validate_json(line).confirms for line in lines] == [False, False, True]
    assert (kept / "diag_matmul" / "optimized.py").read_text() == "# the winner\n"


def test_a_task_that_ended_without_an_evaluation_is_in_the_table_and_a_run_of_none_says_so(main_job, tmp_path):
    class Broken(Command):
        def __call__(self, words):
            name = words[words.index("optimize") + 1]
            if name == "diag_matmul":
                return super().__call__(words)
            Path(words[words.index("--out") + 1]).mkdir(parents=True, exist_ok=True)
            return 3

    run = tmp_path / "run"
    with pytest.raises(SystemExit, match="found none"):
        main_job.main([str(run), "--device", "cpu", "--tasks", "leaky_relu", "--publish", str(tmp_path / "kept")], Broken())
    main_job.main([str(run), "--device", "cpu", "--tasks", "leaky_relu,diag_matmul"], Broken())
    summary = json.loads((run / "main_job.json").read_text())["summary"]
    assert (summary["tasks"], summary["without_evaluation"], summary["improved"]) == (2, 1, 1)
    assert "| leaky_relu |  | no evaluation | | | |" in (run / "main_job.md").read_text()
