from __future__ import annotations

import itertools

import pytest

from kernelwright.contrastive.held_out import clusters_of, resemblance, shingles_of, split, split_of
from kernelwright.contrastive.settings import TasksSection
from kernelwright.errors import ConfigError
from kernelwright.records import Task
from kernelwright.tasks.generated import family_of, family_tasks
from kernelwright.tasks.suites import builtin_task


def renamed(task: Task, **words: str) -> Task:
    source = task.source
    for old, new in words.items():
        source = source.replace(old, new)
    return Task(id=f"{task.id}-copy", source=source)


def test_other_sizes_and_names_make_a_near_duplicate():
    task = builtin_task("gelu_tanh_composite")
    copy = renamed(task, ROWS="HEIGHT", inner="other", **{"512": "77", "0.044715": "0.05"})
    assert copy.source != task.source
    assert resemblance(shingles_of(task), shingles_of(copy)) == 1.0
    assert resemblance(shingles_of(task), shingles_of(builtin_task("linear_sum"))) < 0.5


def test_no_family_and_no_near_duplicate_stands_on_both_sides():
    section = TasksSection(suites=("families",), families_count=60, held_out=20)
    sides = split_of(section)
    assert len(sides.held_out) >= 20
    assert len(sides.train) + len(sides.held_out) == 60
    assert not {task.sha256 for task in sides.train} & {task.sha256 for task in sides.held_out}
    assert not {family_of(task) for task in sides.train} & {family_of(task) for task in sides.held_out}
    shingles = {task.sha256: shingles_of(task) for task in (*sides.train, *sides.held_out)}
    nearest = max(
        resemblance(shingles[one.sha256], shingles[other.sha256])
        for one, other in itertools.product(sides.train, sides.held_out)
    )
    assert nearest < section.similarity


def test_tasks_bound_by_the_device_bring_their_split():
    section = TasksSection(suites=("device-bound",), families_count=168, held_out=40, miniature=True)
    sides = split_of(section)
    assert len(sides.train) >= 120
    assert len(sides.held_out) == 40
    left = [shingles_of(task) for task in sides.held_out]
    near = [shingles_of(task) for task in sides.train]
    assert max(resemblance(one, other) for one in near for other in left) < section.similarity
    with pytest.raises(ConfigError, match="families_count = 40"):
        split_of(TasksSection(suites=("device-bound",), families_count=40, held_out=40))
    with pytest.raises(ValueError, match="stands alone"):
        TasksSection(suites=("device-bound", "builtin"))


def test_a_chain_of_near_duplicates_stays_together():
    base = builtin_task("gelu_tanh_composite")
    copies = [base, renamed(base, **{"512": "513"}), renamed(base, inner="deep")]
    others = [builtin_task("linear_sum"), builtin_task("diag_matmul")]
    clusters = clusters_of([*copies, *others], 0.8)
    assert sorted(len(cluster) for cluster in clusters) == [1, 1, 3]
    sides = split([*copies, *others], held_out=2, seed=0, similarity=0.8)
    assert {task.id for task in sides.held_out} == {"linear_sum", "diag_matmul"}


def test_the_split_follows_from_the_seed():
    tasks = family_tasks(30)
    again = split(tasks, held_out=8, seed=3, similarity=0.8)
    assert split(tasks, held_out=8, seed=3, similarity=0.8) == again
    assert split(tasks, held_out=8, seed=4, similarity=0.8) != again


def test_too_few_tasks_are_an_error():
    with pytest.raises(ConfigError, match=r"Lower tasks\.held_out"):
        split(family_tasks(5), held_out=5, seed=0, similarity=0.8)
