"""KernelBench loads from a checkout in numeric order and from the hub, and says what is wrong with either."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kernelwright.errors import InfrastructureError, TaskError
from kernelwright.tasks.suites import load_suite

TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x + {number}

def get_inputs():
    return [torch.randn(4)]

def get_init_inputs():
    return []
"""


def write_checkout(root: Path, numbers: dict[int, list[int]]) -> Path:
    for level, tasks in numbers.items():
        folder = root / "KernelBench" / f"level{level}"
        folder.mkdir(parents=True)
        for number in tasks:
            (folder / f"{number}_Some_task_{number}.py").write_text(TASK.format(number=number))
    return root


def test_checkout_is_read_in_numeric_order(tmp_path: Path) -> None:
    suite = load_suite("kernelbench", path=write_checkout(tmp_path, {1: [10, 2, 1], 2: [3], 3: [1]}))
    assert [entry.task.id for entry in suite.entries] == [
        "kernelbench/level1/1",
        "kernelbench/level1/2",
        "kernelbench/level1/10",
        "kernelbench/level2/3",
        "kernelbench/level3/1",
    ]
    assert [entry.level for entry in suite.entries] == [1, 1, 1, 2, 3]
    assert "x + 10" in suite.entries[2].task.source
    assert suite.entries[2].task.origin.endswith("10_Some_task_10.py")
    assert all(entry.candidate is None for entry in suite.entries)


def test_levels_are_chosen_and_the_inner_folder_will_do(tmp_path: Path) -> None:
    write_checkout(tmp_path, {2: [3], 4: [7]})
    suite = load_suite("kernelbench", path=tmp_path / "KernelBench", levels=(4,))
    assert [entry.task.id for entry in suite.entries] == ["kernelbench/level4/7"]


def test_missing_checkout_file_and_level(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="there is nothing"):
        load_suite("kernelbench", path=tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(TaskError, match="it is a file"):
        load_suite("kernelbench", path=file)
    write_checkout(tmp_path, {1: [1]})
    with pytest.raises(TaskError, match="Wanted level 2"):
        load_suite("kernelbench", path=tmp_path)


def test_a_wrong_path_is_answered_with_what_was_looked_for_and_what_is_there(tmp_path: Path) -> None:
    write_checkout(tmp_path, {1: [1], 4: [1]})
    with pytest.raises(TaskError, match=r"found level 1, 4 only\. Choose among these, for bench with --levels 1,4"):
        load_suite("kernelbench", path=tmp_path)
    with pytest.raises(TaskError, match="that is one level itself"):
        load_suite("kernelbench", path=tmp_path / "KernelBench" / "level1")
    other = tmp_path / "other"
    for name in "abcdef":
        (other / name).mkdir(parents=True)
    with pytest.raises(TaskError, match=r"a folder level1 or KernelBench/level1, .*found a, b, c, d and 2 more\. Point"):
        load_suite("kernelbench", path=other)


def test_level_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="found none"):
        load_suite("kernelbench", path=write_checkout(tmp_path, {1: []}), levels=(1,))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("2_junk.py", b"\x00\xff\x7fELF", "not UTF-8"),
        ("2_broken.py", b"def (", "not valid Python"),
        ("2_other.py", b"x = 1", "found no Model"),
        ("2_empty.py", b"", "empty"),
        ("helper.py", b"x = 1", r"NUMBER_TITLE\.py .* found helper\.py"),
        ("1_again.py", b"x = 1", "one task 1"),
    ],
)
def test_junk_in_a_level(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write_checkout(tmp_path, {1: [1]})
    (tmp_path / "KernelBench" / "level1" / name).write_bytes(content)
    with pytest.raises(TaskError, match=message) as caught:
        load_suite("kernelbench", path=tmp_path, levels=(1,))
    assert "\n" not in str(caught.value)


def use_fake_hub(monkeypatch: pytest.MonkeyPatch, rows: dict[str, list[dict[str, Any]]]) -> None:
    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        assert name == "ScalingIntelligence/KernelBench"
        if split not in rows:
            raise ConnectionError("Could not reach the hub\nwith many lines of detail")
        return rows[split]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def test_hub_rows_become_tasks_in_numeric_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"problem_id": number, "name": "a", "code": TASK.format(number=number)} for number in (11, 2)]
    use_fake_hub(monkeypatch, {"level_1": rows})
    suite = load_suite("kernelbench", hub=True, levels=(1,))
    assert [entry.task.id for entry in suite.entries] == ["kernelbench/level1/2", "kernelbench/level1/11"]
    assert suite.entries[1].task.origin == "hf:ScalingIntelligence/KernelBench/level_1/11"
    assert "x + 11" in suite.entries[1].task.source


def test_hub_and_checkout_give_the_same_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_fake_hub(monkeypatch, {"level_2": [{"problem_id": 5, "code": TASK.format(number=5)}]})
    checkout = write_checkout(tmp_path, {2: [5]})
    from_hub = load_suite("kernelbench", hub=True, levels=(2,))
    from_path = load_suite("kernelbench", path=checkout, levels=(2,))
    assert from_hub.entries[0].task.id == from_path.entries[0].task.id
    assert from_hub.entries[0].task.sha256 == from_path.entries[0].task.sha256


def test_hub_with_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_hub(monkeypatch, {"level_1": [{"id": 1, "text": "x"}]})
    with pytest.raises(TaskError, match=r"has no problem_id, code\. It has id, text"):
        load_suite("kernelbench", hub=True, levels=(1,))


def test_hub_out_of_reach_is_an_infrastructure_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_hub(monkeypatch, {})
    with pytest.raises(InfrastructureError, match=r"Could not reach the hub.*--path") as caught:
        load_suite("kernelbench", hub=True)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 3


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InfrastructureError, match="pip install"):
        load_suite("kernelbench", hub=True)
