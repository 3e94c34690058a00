from __future__ import annotations

import json

import pytest

from kernelwright import cli
from kernelwright.contrastive import stages as training
from kernelwright.contrastive import trained_model as dependencies
from kernelwright.contrastive.context import StageResult


def written(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a model to train"),
        ("[model]\nbase = 'm'\n[tasks]\nheldout = 3\n", "`tasks.heldout`; did you mean `held_out`"),
        ("[model]\nbase = 'm'\n[optimiser]\nlearning_rate = -1\n", "optimiser.learning_rate"),
        ("model = ", "TOML"),
        ("[model]\nbase = 'm'\n[judge.settings]\nblock = 3\n", "`block`; did you mean `blocks`"),
        ("[model]\nbase = 'm'\n[tasks]\nsuites = []\n", "tasks to train on"),
        ("[model]\nbase = 'm'\n[judge]\ndevice = 'cuda:99'\n", "cuda:99"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_line_that_says_why(text, said, tmp_path, capsys):
    status = cli.main(["train", "sft", "--config", written(tmp_path / "c.toml", text), "--out", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert status == (3 if "cuda" in said else 2)
    assert said.lower() in error.lower() or (said == "cuda:99" and "CUDA" in error)
    assert "Traceback" not in error
    assert error.count("c.toml") == (0 if "cuda" in said else 1)


@pytest.mark.parametrize(
    ("stage", "base", "expected", "said"),
    [
        ("sft", "nothing", 2, "there is nothing at"),
        ("sft", "empty", 3, "a folder with config.json"),
        ("contrastive", "nothing", 2, "there is nothing at"),
    ],
)
def test_a_model_that_is_not_there_is_named_before_anything_is_judged(stage, base, expected, said, tmp_path, capsys):
    text = f"""
[model]
base = "{tmp_path}/{base}"
dtype = "float32"
[tasks]
directory = "{tmp_path}"
suites = []
held_out = 0
[judge]
device = "cpu"
"""
    (tmp_path / "empty").mkdir()
    task = (training.Path(__file__).parent / "test_augmentation.py").read_text().split("'''")[1]
    (tmp_path / "small.py").write_text(task)
    status = cli.main(["train", stage, "--config", written(tmp_path / "c.toml", text), "--out", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert status == expected
    assert f"{tmp_path}/{base}" in error
    assert said in error
    assert not list((tmp_path / "run").glob("*.jsonl")), "no stage began"


def test_a_model_on_the_command_line_takes_the_place_of_the_files(tmp_path, capsys):
    config = written(tmp_path / "c.toml", "[model]\nbase = 'owner/name-on-the-hub'\n")
    assert cli.main(["train", "sft", "--config", config, "--model", "models/nothing", "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "there is nothing at models/nothing" in error
    assert f"The file is {config}, besides --model." in error


def test_a_file_in_the_place_of_the_run_directory_is_told_before_the_model_is_looked_up(tmp_path, capsys):
    config = written(tmp_path / "c.toml", "[model]\nbase = 'nowhere'\n")
    assert cli.main(["train", "sft", "--config", config, "--out", config]) == 2
    assert capsys.readouterr().err == (
        f"error: Wanted a directory to write to at {config}; found {config}: Not a directory. Choose another one.\n"
    )


def test_a_missing_package_names_the_extra_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dependencies, "PACKAGES", (*dependencies.PACKAGES, "no_such_package"))
    config = written(tmp_path / "c.toml", "[model]\nbase = 'm'\n")
    assert cli.main(["train", "self-supervised", "--config", config, "--out", str(tmp_path / "run")]) == 3
    error = capsys.readouterr().err
    assert "no_such_package" in error
    assert "pip install 'kernelwright[train]'" in error


def test_the_result_is_one_json_object(tmp_path, capsys, monkeypatch):
    seen = []

    def train(config, out, *, log, limit_s):
        seen.append((type(config).__name__, limit_s))
        log("something")
        return StageResult(False, None, 3)

    monkeypatch.setattr(training, "train", train)
    config = written(tmp_path / "c.toml", "[model]\nbase = 'm'\n")
    arguments = ["train", "contrastive", "--config", config, "--out", str(tmp_path / "run"), "--time-limit", "5", "--json"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "stage": "contrastive",
        "run": str(tmp_path / "run"),
        "finished": False,
        "steps": 3,
        "final": None,
    }
    assert "something" in told.err
    assert seen == [("ContrastiveConfig", 5.0)]


def test_an_unknown_stage_is_wrong_usage(capsys):
    assert cli.main(["train", "dpo", "--config", "x.toml"]) == 2
    assert "self-supervised" in capsys.readouterr().err
