"""The built-in suite is complete, and every mistake in asking for a suite is answered in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.tasks.source import check_task_source
from kernelwright.tasks.suites import CLASS_LEVELS, builtin_names, builtin_task, builtin_tasks, load_suite, task_class


def test_there_are_enough_tasks_and_each_class_has_one() -> None:
    classes = [task_class(task) for task in builtin_tasks()]
    assert len(classes) >= 44
    assert set(classes) == set(CLASS_LEVELS)


def test_ids_are_the_file_names_in_order() -> None:
    names = [task.id for task in builtin_tasks()]
    assert names == sorted(names) == list(builtin_names())
    assert all(name.isidentifier() and name == name.lower() for name in names)
    assert "diag_matmul" in names


def test_no_two_tasks_have_the_same_text() -> None:
    tasks = builtin_tasks()
    assert len({task.sha256 for task in tasks}) == len(tasks)


def test_every_task_has_the_names_a_task_needs() -> None:
    for task in builtin_tasks():
        check_task_source(task.source, task.id)


def test_unknown_name_is_answered_with_close_ones() -> None:
    with pytest.raises(TaskError, match=r"'diag_matmull'.* Did you mean diag_matmul"):
        builtin_task("diag_matmull")
    with pytest.raises(TaskError, match="none of them") as caught:
        builtin_task("zzzzzz")
    assert "Did you mean" not in str(caught.value)


def test_a_name_cannot_leave_the_suite() -> None:
    with pytest.raises(TaskError):
        builtin_task("../suites")
    with pytest.raises(TaskError):
        builtin_task("__init__")


def test_class_of_a_foreign_text_is_unknown() -> None:
    assert task_class(Task(id="a", source='"""Adds: two numbers."""')) is None
    assert task_class(Task(id="a", source="x = 1")) is None
    assert task_class(Task(id="a", source="def broken(")) is None


def test_builtin_suite_has_levels_and_no_candidates() -> None:
    suite = load_suite("builtin")
    assert suite.name == "builtin"
    assert {entry.task.id for entry in suite.entries} == set(builtin_names())
    assert {entry.level for entry in suite.entries} == {1, 2, 3}
    assert all(entry.candidate is None and not entry.published for entry in suite.entries)
    only_two = load_suite("builtin", levels=(2,))
    assert 0 < len(only_two.entries) < len(suite.entries)
    assert {entry.level for entry in only_two.entries} == {2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "kernelbnch"}, "Did you mean kernelbench"),
        ({"name": "builtin", "path": Path("x")}, "comes with the package"),
        ({"name": "builtin", "levels": ()}, "at least one level"),
        ({"name": "builtin", "levels": (7,)}, "tasks of level 7 in the suite builtin; found none"),
        ({"name": "builtin", "hub": True}, "only kernelbench"),
        ({"name": "cuda-l1", "hub": True, "path": Path("x")}, "only kernelbench"),
        ({"name": "kernelbench", "hub": True, "path": Path("x")}, "choose one"),
        ({"name": "kernelbench"}, "found no path"),
        ({"name": "cuda-l1"}, "found no path"),
    ],
)
def test_wrong_requests_are_one_clear_line(arguments: dict, message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        load_suite(**arguments)
    assert "\n" not in str(caught.value)
