"""`kernelwright evaluate`: verdicts, bad input, and what is left on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelwright import cli
from kernelwright.cli.options import JudgeOptions
from kernelwright.records import Label, RunDirectory, Verdict

TASK = """import torch


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x):
        return torch.relu(x) + self.width


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return [3]
"""

GOOD = TASK.split("def get_inputs")[0].replace("class Model(", "class ModelNew(")

CONTRACT = ["verdict", "reason", "detail", "contract", "contracts", "speedup", "speedup_low", "speedup_high"]
CONTRACT += ["labels", "task", "device", "run"]

pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def evaluate(*arguments: str, device: str = "cpu") -> int:
    return cli.main(["evaluate", *arguments, "--device", device])


def refused(capsys: pytest.CaptureFixture[str], status: int, *words: str) -> None:
    """Check for one clear line, and nothing on stdout."""
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def test_an_accepted_candidate_ends_with_0_and_one_json_object(place, capsys):
    assert evaluate("task.py", "good.py", "--json", "--check-only") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert list(found) == CONTRACT
    assert found["verdict"] == "accepted"
    assert found["reason"] is None
    assert found["speedup"] is None
    assert "not-retimed" in found["labels"]
    assert (found["task"], found["device"]) == ("task", "cpu")
    run = RunDirectory(Path(found["run"]))
    assert [evaluation.verdict for evaluation in run.evaluations()] == [Verdict.ACCEPTED]
    assert run.read_json("config.json")["task_source"] == TASK
    assert run.read_json("config.json")["settings"]["timed"] is False
    assert run.read_json("environment.json")["packages"]["torch"]


def test_what_a_task_prints_is_not_among_the_result(place, capsys):
    said = TASK.replace("return torch.relu", "print('called')\n        return torch.relu")
    (place / "task.py").write_text("print('loaded')\n" + said)
    assert evaluate("task.py", "good.py", "--json", "--check-only") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"] == "accepted"
    assert "loaded" in captured.err
    assert "called" in captured.err


def test_a_check_alone_can_be_forbidden(place, capsys):
    assert evaluate("task.py", "good.py", "--json", "--check-only", "--forbid", "not-retimed") == 1
    assert json.loads(capsys.readouterr().out)["reason"] == "forbidden-label"


@pytest.mark.exhaustive
def test_a_timed_candidate_has_an_interval_around_its_speedup(place, capsys):
    assert evaluate("task.py", "good.py", "--json", "--processes", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["speedup_low"] <= found["speedup"] <= found["speedup_high"]


def test_a_wrong_candidate_ends_with_1_and_speedups_of_null(place, capsys):
    (place / "wrong.py").write_text(GOOD.replace("torch.relu(x)", "x"))
    assert evaluate("task.py", "wrong.py", "--json", "--out", "run") == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found) == CONTRACT
    assert found["verdict"] == "rejected"
    assert found["reason"] == "wrong-output"
    assert [found[key] for key in ("speedup", "speedup_low", "speedup_high")] == [None] * 3
    assert found["run"] == "run"


@pytest.mark.exhaustive
def test_the_contract_decides_verdict_and_exit_status(place, capsys):
    (place / "strided.py").write_text(GOOD.replace("torch.relu(x)", "torch.relu(x).t().contiguous().t()"))
    kept = {"drop-in": {"kept": False, "missing": ["wrong-strides"]}, "kernelbench": {"kept": True, "missing": []}}
    for options, status in ((), 1), (("--contract", "kernelbench"), 0), (("--contract", "drop-in"), 1):
        assert evaluate("task.py", "strided.py", "--json", "--check-only", *options) == status
        assert json.loads(capsys.readouterr().out)["contracts"] == kept
    assert evaluate("task.py", "strided.py", "--check-only") == 1
    words = capsys.readouterr().out
    assert "contract     drop-in, which decides: not kept: wrong-strides" in words
    assert "contract     kernelbench: kept" in words
    assert "\nto change    " in words


def test_a_syntax_error_in_a_candidate_is_a_verdict_in_words(place, capsys):
    (place / "broken.py").write_text("class ModelNew(:\n")
    assert evaluate("task.py", "broken.py", "--out", "run") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["verdict", "rejected"]
    assert "syntax-error: the source is not valid Python" in lines[1]
    assert "(candidate.py, line 1)" in lines[2]
    assert lines[-1].split() == ["run", "run"]


def test_evaluations_in_one_directory_add_up_and_make_a_report(place, capsys):
    for name in ("good.py", "broken.py"):
        (place / "broken.py").write_text("class ModelNew(:\n")
        evaluate("task.py", name, "--out", "run", "--check-only")
    capsys.readouterr()
    assert cli.main(["report", "run"]) == 0
    assert capsys.readouterr().out == "run/report.html\n"
    page = (place / "run" / "report.html").read_text()
    assert "1</b> accepted, not faster" in page
    assert "syntax-error" in page


def make_empty(path: Path) -> None:
    path.write_text(" \n")


def make_binary(path: Path) -> None:
    path.write_bytes(b"\x7fELF\x02\x01\x01\xff\xfe")


def make_null(path: Path) -> None:
    path.write_bytes(b"class ModelNew: pass\0")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such file"),
        (Path.mkdir, "directory"),
        (make_empty, "is empty"),
        (make_binary, "not UTF-8"),
        (make_null, "null bytes"),
    ],
    ids=["missing", "directory", "empty", "binary", "null bytes"],
)
def test_an_unreadable_candidate_ends_with_2(place, capsys, make, words):
    make(place / "candidate.py")
    assert evaluate("task.py", "candidate.py") == 2
    refused(capsys, 2, "ModelNew", words)
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class Model(:\n", "not valid Python"),
        ("x = 1\n", "Model"),
        (TASK.replace("class Model(", "class Other("), "Model"),
        (TASK.replace("return [3]", "return [3, 4]"), "Model"),
        (TASK.replace("return [3]", "return []"), "Model"),
        (TASK.replace("return [3]", "return 3"), "get_init_inputs"),
        (TASK.replace("return [torch.randn(64, 64)]", "return 1 / 0"), "get_inputs"),
        ("", "empty"),
    ],
    ids=["syntax", "nothing", "no Model", "too many", "too few", "no list", "inputs raise", "empty"],
)
def test_a_task_that_cannot_be_used_ends_with_2(place, capsys, source, words):
    (place / "task.py").write_text(source)
    assert evaluate("task.py", "good.py") == 2
    refused(capsys, 2, words)


def test_a_gpu_that_is_not_there_ends_with_3(place, capsys):
    torch = pytest.importorskip("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert evaluate("task.py", "good.py", device=f"cuda:{count}" if count else "cuda") == 3
    refused(capsys, 3)


def test_auto_says_that_it_works_on_the_cpu(place, capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (place / "broken.py").write_text("class ModelNew(:\n")
    assert evaluate("task.py", "broken.py", "--json", device="auto") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["device"] == "cpu"
    assert "working on the CPU" in captured.err


def test_options_win_over_the_settings_file(place):
    file = place / "judge.toml"
    file.write_text('processes_min = 4\nrun_limit_s = 7\nforbid = ["tf32"]\n')
    asked = JudgeOptions(
        settings_file=file,
        processes=2,
        strict_fp32=True,
        allow=("tf32",),
        forbid=("wrapper-only",),
        build_timeout=11.0,
    )
    settings = asked.settings()
    assert (settings.processes_min, settings.processes_max) == (2, 2)
    assert (settings.run_limit_s, settings.build_limit_s) == (7, 11)
    assert settings.strict_fp32
    assert settings.timed
    assert settings.forbid == {Label.WRAPPER_ONLY}


@pytest.mark.parametrize(
    ("file", "typed", "strict"),
    [
        ("strict_fp32 = true", {"tf32_products": True}, False),
        ("tf32_products = true", {"strict_fp32": True}, True),
        ("tf32_products = true", {}, False),
    ],
)
def test_a_precision_that_is_typed_wins_over_the_files(file, typed, strict, place):
    (place / "judge.toml").write_text(file)
    settings = JudgeOptions(settings_file=place / "judge.toml", **typed).settings()
    assert (settings.strict_fp32, settings.tf32_products) == (strict, not strict)


def test_tf32_is_off_or_allowed_in_products_and_not_both(place, capsys):
    assert evaluate("task.py", "good.py", "--strict-fp32", "--tf32-products") == 2
    refused(capsys, 2, "wanted --strict-fp32 or --tf32-products, found both")
    (place / "judge.toml").write_text("strict_fp32 = true\ntf32_products = true\n")
    assert evaluate("task.py", "good.py", "--settings", "judge.toml") == 2
    refused(capsys, 2, "wanted strict_fp32 or tf32_products, found both")


def test_products_in_tf32_are_in_the_record(place):
    assert evaluate("task.py", "good.py", "--out", "run", "--check-only", "--tf32-products") == 0
    (record,) = (place / "run" / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(record)["checks"]["tf32_products"] is True
    assert json.loads((place / "run" / "config.json").read_text())["settings"]["tf32_products"] is True


def test_the_candidates_words_cannot_drive_the_terminal(place, capsys):
    (place / "loud.py").write_text(GOOD + "\nraise ValueError('\\x1b[2J\\x07')\n")
    assert evaluate("task.py", "loud.py") == 1
    out = capsys.readouterr().out
    assert "build-failed" in out
    assert not any(ord(character) < 32 and character != "\n" for character in out)


@pytest.mark.parametrize("words", ["nothing", "a file", "found none of evaluations.jsonl"])
def test_report_refuses_what_is_no_run_directory(place, capsys, words):
    (place / "folder").mkdir()
    target = {"nothing": "nowhere", "a file": "task.py"}.get(words, "folder")
    assert cli.main(["report", target]) == 2
    refused(capsys, 2, words)
    assert not (place / "nowhere").exists()


@pytest.mark.parametrize("records", [b'{"task":', b"\xff\x00\n", b'{"a": 1}\n'])
def test_report_refuses_records_of_which_none_can_be_read(place, capsys, records):
    (place / "run").mkdir()
    (place / "run" / "evaluations.jsonl").write_bytes(records)
    assert cli.main(["report", "run"]) == 2
    refused(capsys, 2, "found none that is whole")


@pytest.mark.parametrize("arguments", [["report", "x" * 300], ["bench", "kernelbench", "--path", "x" * 300]])
def test_a_name_that_is_too_long_is_wrong_usage(place, capsys, arguments):
    assert cli.main(arguments) == 2
    refused(capsys, 2, "too long a name")


def test_a_bench_is_strict_as_a_whole_or_also(place, capsys):
    assert cli.main(["bench", "builtin", "--strict-fp32", "--strict-fp32-too"]) == 2
    refused(capsys, 2, "wanted --strict-fp32-too without")
    assert cli.main(["bench", "builtin", "--tf32-products", "--tf32-products-too"]) == 2
    refused(capsys, 2, "wanted --tf32-products-too without")
    assert cli.main(["bench", "builtin", "--policy", "builtin", "--tf32-products-too"]) == 2
    refused(capsys, 2, "wanted --tf32-products-too without --policy")


def test_a_directory_of_another_run_is_refused_and_stays_as_it_is(place, capsys):
    config = '{"kind": "optimize", "task": "other"}'
    for name, text in (("config.json", config), ("evaluations.jsonl", "")):
        (place / "run").mkdir(exist_ok=True)
        (place / "run" / name).write_text(text)
    assert evaluate("task.py", "good.py", "--out", "run") == 2
    refused(capsys, 2, "belongs to a run with another `kind`")
    assert (place / "run" / "config.json").read_text() == config


def test_a_task_that_does_not_work_leaves_no_new_directory(place, capsys):
    (place / "task.py").write_text(TASK.replace("return [torch.randn(64, 64)]", "raise ValueError('no inputs')"))
    assert evaluate("task.py", "good.py") == 2
    refused(capsys, 2, "no inputs")
    assert list((place / "runs").iterdir()) == []


@pytest.mark.parametrize("ending", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_a_task_that_ends_the_program_is_a_broken_task(place, capsys, ending):
    (place / "task.py").write_text(f"{ending}\n{TASK}")
    assert evaluate("task.py", "good.py", "--json") == 2
    refused(capsys, 2, "it raised SystemExit")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["task.py", "good.py", "--timeout", "inf"], "wanted a finite number, found inf"),
        (["task.py", "good.py", "--timeout", "nan"], "wanted a finite number, found nan"),
        (["task.py", "good.py", "--build-timeout", "inf"], "wanted a finite number, found inf"),
        (["x" * 5000, "good.py"], "File name too long"),
        (["", "good.py"], "found '', which is none of them"),
        (["task.py", "good.py", "--allow", "tf32", "--forbid", "tf32"], "allowed or forbidden, found `tf32`"),
        (["task.py", "good.py", "--check-only", "--processes", "3"], "wanted --processes without --check-only"),
    ],
)
def test_numbers_and_names_that_cannot_be_meant(place, capsys, arguments, words):
    assert evaluate(*arguments) == 2
    refused(capsys, 2, words)
    assert not (place / "runs").exists()


def test_a_device_of_too_many_digits_is_wrong_usage(place, capsys):
    assert evaluate("task.py", "good.py", device="cuda:" + "9" * 20) == 2
    refused(capsys, 2, "wanted auto, cpu, cuda or cuda:N")
