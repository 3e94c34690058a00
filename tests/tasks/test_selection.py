"""Tasks are chosen by every name they have, and a user's candidates find their tasks, or it is said which do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelwright import cli
from kernelwright.errors import CandidateError, TaskError
from kernelwright.tasks import load_task
from kernelwright.tasks.entries import Suite, chosen_tasks, with_candidates
from kernelwright.tasks.suites import load_suite

TASK = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + {number}\n"
TASK += "def get_inputs():\n    return [torch.randn(4)]\ndef get_init_inputs():\n    return []\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for level, number, title in ((1, 1, "Square_product_"), (1, 2, "Relu"), (2, 1, "Conv_Relu")):
        folder = tmp_path / "checkout" / "KernelBench" / f"level{level}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}_{title}.py").write_text(TASK.format(number=10 * level + number))
    return tmp_path / "checkout"


@pytest.fixture
def suite(checkout: Path) -> Suite:
    return load_suite("kernelbench", path=checkout, levels=(1, 2))


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"class ModelNew: '{name}'\n")
    return folder


@pytest.mark.parametrize(
    "name", ["kernelbench/level2/1", "level2/1", "level2/1_Conv_Relu", "1_Conv_Relu", "1_Conv_Relu.py", "level2/1.py"]
)
def test_a_task_is_named_by_its_id_the_end_of_it_or_its_file(suite: Suite, name: str) -> None:
    assert [entry.task.id for entry in chosen_tasks(suite, [name]).entries] == ["kernelbench/level2/1"]


def test_chosen_tasks_keep_the_order_of_the_suite_and_come_once(suite: Suite) -> None:
    chosen = chosen_tasks(suite, ["level2/1", "level1/1", "1_Square_product_"])
    assert [entry.task.id for entry in chosen.entries] == ["kernelbench/level1/1", "kernelbench/level2/1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1", r"found '1', which is kernelbench/level1/1, kernelbench/level2/1\. Name it in full"),
        ("level1/7", r"none of its 3, such as kernelbench/level1/1\. Check the name"),
        ("1_Conv_Rely", "Did you mean .*1_Conv_Relu"),
    ],
)
def test_a_name_of_no_task_or_of_several_is_refused(suite: Suite, name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        chosen_tasks(suite, [name])


@pytest.mark.parametrize(
    "name",
    ["level2/1.py", "level2/1_mine.py", "1_Conv_Relu.py", "kernelbench/level2/1.py", "level_2_problem_1_sample_0_kernel.py"],
)
def test_a_file_is_the_candidate_of_the_task_it_is_named_after(suite: Suite, tmp_path: Path, name: str) -> None:
    found = with_candidates(suite, write(tmp_path / "mine", name, "notes.py"))
    (entry,) = found.suite.entries
    assert entry.task.id == "kernelbench/level2/1"
    assert entry.candidate is not None
    assert entry.candidate.source == f"class ModelNew: '{name}'\n"
    assert found.without == ("kernelbench/level1/1", "kernelbench/level1/2")
    assert found.unknown == ("notes.py",)


def test_a_folder_that_is_a_level_itself_and_builtin_names(suite: Suite, tmp_path: Path) -> None:
    found = with_candidates(suite, write(tmp_path / "mine/level1", "1.py", "2.py"))
    assert [entry.task.id for entry in found.suite.entries] == ["kernelbench/level1/1", "kernelbench/level1/2"]
    builtin = with_candidates(load_suite("builtin"), write(tmp_path / "other", "diag_matmul.py"))
    assert [entry.task.id for entry in builtin.suite.entries] == ["diag_matmul"]


def test_lines_of_json_name_a_task_by_our_keys_or_by_those_of_the_release(suite: Suite, tmp_path: Path) -> None:
    rows = [
        {"task": "level1/2", "source": "a"},
        {"level_id": 2, "task_id": 1, "custom_code": "b"},
        {"level_id": 1, "task_id": 1, "custom_code": "None"},
        {"task": "level9/9", "source": "c"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = with_candidates(suite, file)
    assert [(one.task.id, one.candidate.source) for one in found.suite.entries if one.candidate] == [
        ("kernelbench/level1/2", "a"),
        ("kernelbench/level2/1", "b"),
    ]
    assert found.unknown == ("mine.jsonl:4",)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"level1/1.py": "a", "level1/1_again.py": "b"}, r"found level1/1\.py and level1/1_again\.py\. Judge them in runs"),
        ({"1.py": "a"}, "which is kernelbench/level1/1, kernelbench/level2/1"),
        ({"a.py": "a", "b.py": "b"}, r"such as level1/1\.py; found a\.py, b\.py\. Rename"),
        ({"level1/1.py": ""}, "the file is empty"),
        ({}, "no candidate at all"),
    ],
)
def test_candidates_that_cannot_be_attached(suite: Suite, tmp_path: Path, files: dict[str, str], message: str) -> None:
    folder = write(tmp_path / "mine", *files)
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises((CandidateError, TaskError), match=message):
        with_candidates(suite, folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON"),
        ("[]", "found a list"),
        ('{"task": "a", "source": 1}', "found task, source"),
        ('{"task": "a", "code": "b"}', "found task, code"),
        ("{}", "no key"),
    ],
)
def test_a_broken_line_is_named(suite: Suite, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "mine.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(CandidateError, match=f"line 2 of .*{message}"):
        with_candidates(suite, tmp_path / "mine.jsonl")


def test_an_id_that_records_show_is_a_task_where_its_suite_is_named(checkout: Path) -> None:
    assert load_task("kernelbench/level1/2", checkout).source == TASK.format(number=12)
    with pytest.raises(TaskError, match=r"a checkout of KernelBench, .*found no path\. Name it with --path"):
        load_task("kernelbench/level1/2")
    with pytest.raises(TaskError, match=r"which is none of its 2, such as kernelbench/level1/1\."):
        load_task("kernelbench/level1/9", checkout)
    with pytest.raises(TaskError, match="beside --path; found 'diag_matmul'"):
        load_task("diag_matmul", checkout)


def test_bench_judges_what_was_chosen_and_says_what_is_left_out(monkeypatch, capsys, checkout: Path, tmp_path: Path) -> None:
    suites = []

    def taken(suite: Suite, **_: object) -> None:
        suites.append(suite)
        raise TaskError("enough")

    monkeypatch.setattr("kernelwright.search.bench.bench", taken)
    mine = write(tmp_path / "mine", "level1/1.py", "level2/1.py", "notes.py")
    bench = ["bench", "kernelbench", "--path", str(checkout), "--levels", "1,2", "--device", "cpu"]
    bench += ["--out", str(tmp_path / "run")]
    assert cli.main([*bench, "--candidates", str(mine), "--only", "level1/1,level1/2"]) == 2
    said = capsys.readouterr().err
    assert "left out, as they name no task of this run: level2/1.py, notes.py\n" in said
    assert "left out, as they have no candidate: kernelbench/level1/2\n" in said
    assert cli.main([*bench, "--limit", "1", "--candidates", str(mine)]) == 2
    assert [[entry.task.id for entry in suite.entries] for suite in suites] == [["kernelbench/level1/1"]] * 2
    assert cli.main([*bench, "--candidates", str(mine), "--policy", "builtin"]) == 2
    assert "wanted --candidates without --policy" in capsys.readouterr().err
