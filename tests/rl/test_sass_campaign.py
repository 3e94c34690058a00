"""The campaign and the paper's recipe, in a tiny form and on a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cwd / "triton")}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_campaign_in_small_goes_on_where_it_was_and_marks_what_is_simulated(tmp_path):
    script = ROOT / "benchmarks" / "sass_campaign.py"
    options = ["--backend", "simulated-issue", "--agents", "greedy,random", "--budget", "30", "--box", "60"]
    options += ["--minutes", "5", "--kernels", "rope"]
    done = run(script, tmp_path / "out", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {"kernels", "geomean", "max", "per_kernel", "controls", "wrong_outputs", "schedules_run"} <= set(summary)
    assert (summary["kernels"], summary["schedules_run"], summary["wrong_outputs"]) == (1, 60, 0)
    assert summary["simulated"] is True
    found = summary["per_kernel"]["rope"]
    assert found["deployed"] is False
    assert found["why_not_deployed"] == "simulated"
    assert {agent: c["schedules"] for agent, c in found["controls"].items()} == {"greedy": 30, "random": 30}
    assert len(summary["left_out"]) >= 14
    log = (tmp_path / "out" / "rope.log").read_text()
    again = run(script, tmp_path / "out", *options, cwd=tmp_path)
    assert again.returncode == 0
    assert (tmp_path / "out" / "rope.log").read_text() == log, "a finished kernel is not run again"
    hasty = run(script, tmp_path / "late", *options, "--minutes", "0.1", cwd=tmp_path)
    assert "left for the next call: rope" in hasty.stdout


def test_the_recipe_of_the_paper_in_small(tmp_path):
    text = (ROOT / "recipes" / "cuasmrl.toml").read_text()
    for name, value in {
        "kernels": '["softmax"]',
        "agents": '["greedy"]',
        "budget": "15",
        "backend": '"simulated-issue"',
    }.items():
        lines = [f"{name} = {value}" if line.startswith(f"{name} =") else line for line in text.splitlines()]
        text = "\n".join(lines)
    (tmp_path / "small.toml").write_text(text)
    done = run(ROOT / "recipes" / "cuasmrl.py", "small.toml", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "softmax: legal: True" in done.stdout
    assert "simulated, not times" in done.stdout
    assert "paper, A100: geomean 1.09, best 1.26; ours: a model, nothing to compare" in done.stdout
    assert json.loads((tmp_path / "out" / "softmax" / "config.json").read_text())["moves"] == "paper"


def test_the_campaign_has_the_papers_kernels_and_more():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import sass_campaign
        import sass_kernels
    assert len(sass_campaign.PAPER) == 6
    assert "sgemm" in sass_campaign.TARGETS
    assert len(sass_campaign.TARGETS) >= 11
    assert set(sass_kernels.SPECS) == set(sass_campaign.HEADROOM)
    assert sass_campaign.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert sass_campaign.geomean([]) is None


def test_a_kernel_without_a_deployed_winner_counts_as_one():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import sass_campaign
    summary = {
        "best": {"agent": "ppo", "speedup": 1.2, "low": 1.1, "high": 1.3, "noise_floor": 0.01},
        "agents": {"ppo": {"confirmed": None, "best_in_search": 1.3, "schedules": 5, "stopped_by": "schedules"}},
        "schedules_run": 5, "schedules_per_second": 10.0, "wrong_outputs": 1, "statuses": {}, "simulated": False,
        "unit": "us", "budget": 5, "simulated_bound": {"gain_at_most": 1.5, "limited_by": "issue slots"},
    }  # fmt: skip
    refused = sass_campaign.of_kernel(summary, {"deployed": False, "reason": "no-gain"})
    assert (refused["speedup"], refused["interval"], refused["why_not_deployed"]) == (1.0, None, "no-gain")
    final = {"deployed": True, "speedup": 1.15, "low": 1.12, "high": 1.18, "noise_floor": 0.01}
    held = sass_campaign.of_kernel(summary, final)
    assert (held["speedup"], held["interval"], held["seconds"]) == (1.15, [1.12, 1.18], 0.5)
