"""The paper's recipe, in a tiny form and on a model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "cuasmrl.py"


@pytest.fixture
def recipe(tmp_path, monkeypatch, capsys):
    """Runs the recipe as its command does, in this process: exit status and what it printed."""

    def started(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(RECIPE), *arguments])
        try:
            runpy.run_path(str(RECIPE), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr()

    return started


def test_the_recipe_of_the_paper_in_small(recipe, tmp_path):
    text = (ROOT / "recipes" / "cuasmrl.toml").read_text()
    for name, value in {
        "kernels": '["softmax"]',
        "agents": '["greedy"]',
        "budget": "6",
        "backend": '"simulated-issue"',
    }.items():
        lines = [f"{name} = {value}" if line.startswith(f"{name} =") else line for line in text.splitlines()]
        text = "\n".join(lines)
    (tmp_path / "small.toml").write_text(text)
    status, said = recipe("small.toml", "out")
    assert status == 0, said.err
    assert "softmax: legal: True" in said.out
    assert "simulated, not times" in said.out
    assert "paper, A100: geomean 1.09, best 1.26; ours: a model, nothing to compare" in said.out
    assert json.loads((tmp_path / "out" / "softmax" / "config.json").read_text())["moves"] == "paper"


def test_a_recipe_without_kernels_is_refused(recipe, tmp_path):
    (tmp_path / "none.toml").write_text('kernels = []\nbackend = "simulated-issue"\n')
    status, said = recipe("none.toml", "out")
    assert status == 2, said.err
    assert said.err.startswith("error: Wanted a valid `kernels`, found []")
    assert "Correct the setting" in said.err
    assert not (tmp_path / "out").exists()
