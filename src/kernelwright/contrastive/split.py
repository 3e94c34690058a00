"""Splits tasks into those to train on and those held out: no family or near-duplicate stands on both sides.

Tasks are joined into clusters: those of one family, and those whose models are near-duplicates. A cluster goes to one side
as a whole. The split follows from the tasks and the seed alone.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernelwright.contrastive.settings import TasksSection
from kernelwright.errors import ConfigError
from kernelwright.records import Task
from kernelwright.tasks.generated import device_bound_tasks, family_of, family_tasks
from kernelwright.tasks.suites import builtin_tasks, task_from_file

SHINGLE = 4
"""Tokens in a row that are compared. Our choice."""


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """The tasks of a run, by side, each in a fixed order."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]


def shuffled(tasks: Sequence[Task], seed: int, turn: int) -> list[Task]:
    """The tasks in an order of their own for each turn; stages with the same seed have the same orders."""
    order = list(tasks)
    random.Random(seed * 1_000_003 + turn).shuffle(order)
    return order


def split_of(section: TasksSection) -> TaskSplit:
    """The tasks that a configuration names, split.

    Raises:
        ConfigError: there are no tasks, a folder is missing, or too few tasks would be left to train on.
    """
    if "device-bound" in section.suites:
        return _device_bound(section)
    tasks = [task for task in _tasks(section) if task.id not in section.exclude]
    if not tasks:
        raise ConfigError("Wanted tasks to train on; found none. Set tasks.suites or tasks.directory.")
    return split(tasks, held_out=section.held_out, seed=section.split_seed, similarity=section.similarity)


def _device_bound(section: TasksSection) -> TaskSplit:
    """The split that the suite brings, without training tasks that are near-duplicates of held-out ones."""
    count = section.families_count - section.held_out
    if count < 1:
        raise ConfigError(
            f"Wanted tasks to train on beside {section.held_out} held out; found tasks.families_count = "
            f"{section.families_count}. Raise it."
        )
    drawn = device_bound_tasks(count, section.held_out, section.families_seed, miniature=section.miniature)
    held_out = drawn.known + drawn.new
    kept_apart = [shingles_of(task) for task in held_out]
    train = []
    for task in drawn.train:
        shingles = shingles_of(task)
        nearest = max((resemblance(shingles, other) for other in kept_apart), default=0.0)
        if task.id not in section.exclude and nearest < section.similarity:
            train.append(task)
    return TaskSplit(tuple(train), tuple(task for task in held_out if task.id not in section.exclude))


def _tasks(section: TasksSection) -> list[Task]:
    tasks: list[Task] = []
    if "builtin" in section.suites:
        tasks += builtin_tasks()
    if "families" in section.suites:
        tasks += family_tasks(section.families_count, section.families_seed)
    if section.directory is not None:
        if not section.directory.is_dir():
            raise ConfigError(f"Wanted a folder of tasks at tasks.directory = {section.directory}; there is none.")
        tasks += [task_from_file(path) for path in sorted(section.directory.glob("*.py"))]
    return tasks


def split(tasks: Sequence[Task], *, held_out: int, seed: int, similarity: float) -> TaskSplit:
    """Draw whole clusters at random for the held-out side until it has `held_out` tasks.

    Clusters larger than a third of `held_out` are left to training, so that no single idea decides the evaluation.

    Raises:
        ConfigError: there are too few tasks, or too few separate clusters.
    """
    clusters = clusters_of(tasks, similarity)
    random.Random(seed).shuffle(clusters)
    chosen: set[str] = set()
    for cluster in clusters:
        if len(chosen) >= held_out:
            break
        if len(cluster) <= max(1, held_out // 3):
            chosen |= {task.sha256 for task in cluster}
    train = tuple(task for task in tasks if task.sha256 not in chosen)
    if len(chosen) < held_out or not train:
        raise ConfigError(
            f"Wanted {held_out} held-out tasks and others to train on; found {len(tasks)} tasks in {len(clusters)} "
            "clusters. Lower tasks.held_out or add tasks."
        )
    return TaskSplit(train, tuple(task for task in tasks if task.sha256 in chosen))


def clusters_of(tasks: Sequence[Task], similarity: float) -> list[list[Task]]:
    """Tasks joined where they share a family or are near-duplicates; transitively."""
    shingles = [shingles_of(task) for task in tasks]
    families = [family_of(task) for task in tasks]
    leader = list(range(len(tasks)))
    for one in range(len(tasks)):
        for other in range(one):
            related = families[one] is not None and families[one] == families[other]
            if related or resemblance(shingles[one], shingles[other]) >= similarity:
                leader[_leader_of(one, leader)] = _leader_of(other, leader)
    clusters: dict[int, list[Task]] = {}
    for index, task in enumerate(tasks):
        clusters.setdefault(_leader_of(index, leader), []).append(task)
    return list(clusters.values())


def _leader_of(index: int, leader: Sequence[int]) -> int:
    while leader[index] != index:
        index = leader[index]
    return index


def resemblance(one: frozenset[tuple[str, ...]], other: frozenset[tuple[str, ...]]) -> float:
    """Shared share of two sets (Jaccard), from 0 to 1."""
    return len(one & other) / len(one | other) if one or other else 1.0


def shingles_of(task: Task) -> frozenset[tuple[str, ...]]:
    """Token runs of the task's `Model`, without docstrings, numbers and the names of its variables."""
    tree = ast.parse(task.source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    plain = _Anonymous()
    text = "\n".join(ast.unparse(plain.visit(node)) for node in classes)
    tokens = re.findall(r"\w+|[^\w\s]", text)
    if len(tokens) < SHINGLE:
        return frozenset({tuple(tokens)})
    return frozenset(tuple(tokens[start : start + SHINGLE]) for start in range(len(tokens) - SHINGLE + 1))


class _Anonymous(ast.NodeTransformer):
    """Drops docstrings and type hints; numbers become 0, variables and upper-case constants become `v`."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        numeric = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        return ast.copy_location(ast.Constant(0), node) if numeric else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg if node.arg == "self" else "v")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = node.id in {"self", "super", "torch", "nn", "F", "Model"}
        return node if known else ast.copy_location(ast.Name("v", node.ctx), node)
