"""CUDA-L1's release loads with its kernels and published scores, and a wrong file is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelwright.errors import TaskError
from kernelwright.tasks.entries import Suite
from kernelwright.tasks.suites import load_suite

TASK = "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n"


def row(level: int = 1, task: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "level_id": level,
        "task_id": task,
        "ref_code": TASK,
        "custom_code": "class ModelNew: ...",
        "score_default": 2.5,
        "score_cuda_graph": None,
        **changes,
    }


def load(path: Path, *rows: dict[str, Any] | str, levels: tuple[int, ...] = (1, 2, 3)) -> Suite:
    file = path / "h100.json"
    file.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in rows) + "\n")
    return load_suite("cuda-l1", path=file, levels=levels)


def test_rows_become_tasks_with_candidates_in_numeric_order(tmp_path: Path) -> None:
    suite = load(tmp_path, row(2, 1), row(1, 10), "", row(1, 9))
    assert [entry.task.id for entry in suite.entries] == [
        "cuda-l1/level1/9",
        "cuda-l1/level1/10",
        "cuda-l1/level2/1",
    ]
    first = suite.entries[0]
    assert first.level == 1
    assert first.task.source == TASK
    assert first.task.origin == f"line 4 of {tmp_path / 'h100.json'}"
    assert first.candidate is not None
    assert first.candidate.source == "class ModelNew: ..."
    assert first.candidate.policy == "cuda-l1"


def test_published_scores_keep_their_column_names_and_drop_nulls(tmp_path: Path) -> None:
    suite = load(tmp_path, row(score_cudnn=3))
    assert suite.entries[0].published == {"score_default": 2.5, "score_cudnn": 3.0}


@pytest.mark.parametrize("code", [None, "None", "", "  \n"])
def test_rows_without_code_have_no_candidate_but_keep_their_score(tmp_path: Path, code: str | None) -> None:
    entry = load(tmp_path, row(custom_code=code)).entries[0]
    assert entry.candidate is None
    assert entry.published == {"score_default": 2.5}


def test_a_candidate_that_is_not_python_is_kept_for_the_judge(tmp_path: Path) -> None:
    candidate = load(tmp_path, row(custom_code="def (")).entries[0].candidate
    assert candidate is not None
    assert candidate.source == "def ("


def test_text_with_unicode_line_breaks_stays_one_row(tmp_path: Path) -> None:
    line = json.dumps(row(custom_code="a\u2028b"), ensure_ascii=False)
    candidate = load(tmp_path, line).entries[0].candidate
    assert candidate is not None
    assert candidate.source == "a\u2028b"


def test_levels_are_chosen(tmp_path: Path) -> None:
    assert [entry.level for entry in load(tmp_path, row(1), row(3), levels=(3,)).entries] == [3]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "found none"),
        ([row(4)], "found none"),
        (["{"], "line 1 of .* is not JSON"),
        (["[" * 200_000], "line 1 of .* is not JSON"),
        (["[1]"], "holds a list"),
        ([row(), {"level_id": 1, "code": "x"}], "line 2 of .* has no task_id, ref_code, custom_code"),
        ([row(task="1")], "whole number as task_id"),
        ([row(level_id=True)], "whole number as level_id"),
        ([row(ref_code=None)], "code of a task as ref_code"),
        ([row(ref_code="x = 1")], "found no Model"),
        ([row(ref_code="def (")], "line 1 of .* not valid Python"),
        ([row(custom_code=3)], "text or null as custom_code"),
        ([row(score_default="fast")], "a number or null as score_default"),
        ([row(score_default=float("nan"))], "a number or null as score_default"),
        ([row(score_default=float("inf"))], "a number or null"),
        ([row(), row()], "line 2 of .* second one"),
    ],
)
def test_wrong_contents(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        load(tmp_path, *rows)
    assert "\n" not in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such file"):
        load_suite("cuda-l1", path=tmp_path / "none.json")
    with pytest.raises(TaskError, match="is a directory"):
        load_suite("cuda-l1", path=tmp_path)
    junk = tmp_path / "junk"
    junk.write_bytes(b"\x80\x81\x00")
    with pytest.raises(TaskError, match="not UTF-8"):
        load_suite("cuda-l1", path=junk)
