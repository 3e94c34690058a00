"""Generated tasks: they follow from their seed, the split by structure holds, and every other way computes the same."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch

from kernelwright.tasks.generated import (
    NEW_SOURCES,
    NEW_TAILS,
    POINTWISE,
    SOURCES,
    TAILS,
    device_bound_tasks,
    family_of,
    family_tasks,
    variations,
)
from kernelwright.tasks.source import check_task_source
from tests.quick import exhaustive_but

TASKS = family_tasks(400, seed=1)
DRAWN = device_bound_tasks(128, 40)
SMALL = device_bound_tasks(128, 40, miniature=True)


def every(drawn):
    return (*drawn.train, *drawn.known, *drawn.new)


def structure_of(task):
    source, *_, tail = family_of(task).split("+")
    return source, tail


def ends(tasks):
    return {name for task in tasks for name in structure_of(task)}


def covering(tasks, parts_of, missing):
    """Few of the tasks in which every one of the parts comes up."""
    chosen = []
    for task in tasks:
        if new := set(parts_of(task)) & missing:
            chosen.append(task)
            missing = missing - new
    assert not missing
    return chosen


FAMILIES = covering(
    TASKS, lambda task: family_of(task).split("+"), {part.name for parts in (SOURCES, POINTWISE, TAILS) for part in parts}
)
MINIATURES = covering(every(SMALL), structure_of, ends(every(SMALL)))


def test_families_are_distinct_and_follow_from_the_seed():
    assert len({family_of(task) for task in TASKS}) == len(TASKS)
    assert family_tasks(400, seed=1) == TASKS
    assert family_tasks(5, seed=2) != TASKS[:5]


def test_half_of_the_held_out_tasks_have_a_part_that_no_training_task_has():
    assert [len(side) for side in (DRAWN.train, DRAWN.known, DRAWN.new)] == [128, 20, 20]
    assert not ends(DRAWN.train) & {*NEW_SOURCES, *NEW_TAILS}
    assert ends(DRAWN.known) <= ends(DRAWN.train)
    assert all(len(ends([task]) & {*NEW_SOURCES, *NEW_TAILS}) == 1 for task in DRAWN.new)
    assert len({structure_of(task) for task in every(DRAWN)}) == 168


def test_tasks_bound_by_the_device_follow_from_the_seed_and_miniatures_differ_in_size_alone():
    assert device_bound_tasks(128, 40) == DRAWN
    assert device_bound_tasks(128, 40, seed=1) != DRAWN
    assert [family_of(task) for task in every(SMALL)] == [family_of(task) for task in every(DRAWN)]


@pytest.mark.parametrize("task", every(device_bound_tasks(128, 80, miniature=True)), ids=family_of)
def test_the_reference_of_every_task_runs_on_its_own_inputs(task):
    namespace = {}
    exec(task.source, namespace)
    assert namespace["Model"](*namespace["get_init_inputs"]())(*namespace["get_inputs"]()).isfinite().all()


def shrunk(source):
    return source.replace("8192", "64").replace("2048", "64").replace("512", "64").replace("1024", "64")


@pytest.mark.parametrize("task", exhaustive_but([*FAMILIES, *MINIATURES], *FAMILIES[::2], *MINIATURES[::3]), ids=family_of)
def test_every_variation_computes_what_the_task_does(task):
    check_task_source(task.source, task.id)
    namespace = {}
    exec(task.source if task in MINIATURES else shrunk(task.source), namespace)
    torch.manual_seed(0)
    model, inputs = namespace["Model"](*namespace["get_init_inputs"]()), namespace["get_inputs"]()
    before = [item.clone() for item in inputs]
    expected = model(*inputs)
    for variation in variations(task, "cpu"):
        scope = dict(namespace)
        exec(variation.answer, scope)
        other = scope["ModelNew"](*namespace["get_init_inputs"]())
        other.load_state_dict(model.state_dict())
        output = other(*inputs)
        assert output.stride() == expected.stride(), variation.techniques
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, before, inputs))
    assert any(variations(task, "cpu"))


def test_kernels_are_for_gpus_and_are_python():
    for task in FAMILIES:
        on_cpu = {variation.answer for variation in variations(task, "cpu")}
        for variation in variations(task, "cuda"):
            ast.parse(variation.answer)
            assert ("triton" in variation.answer) == (variation.answer not in on_cpu)


INTERPRETED = """
import sys, torch
from kernelwright.tasks.generated import family_tasks, family_of, variations
wanted = {"gelu-formula", "silu", "hard-swish", "softsign", "clamps", "common-terms", "leaky-where",
          "softmax", "log-sum-exp", "rms-norm", "layer-norm", "unit-length", "sorted-max", "scanned-sum"}
count = 0
for task in family_tasks(400, seed=1):
    source, *rest = family_of(task).split("+")
    if source not in ("input", "linear", "diagonal-left") or not set(rest) & wanted:
        continue
    before = count
    text = task.source
    for size in ("8192", "2048", "1024", "512", "256"):
        text = text.replace(size, "24")
    namespace = {}
    exec(text, namespace)
    torch.manual_seed(0)
    model, inputs = namespace["Model"](*namespace["get_init_inputs"]()), namespace["get_inputs"]()
    expected = model(*inputs)
    for variation in variations(task, "cuda"):
        if "triton" not in variation.answer or variation.techniques[-1].endswith(("-256", "-16")):
            continue
        path = sys.argv[1] + f"/answer{count}.py"
        open(path, "w").write(variation.answer)
        scope = dict(namespace)
        exec(compile(variation.answer, path, "exec"), scope)
        other = scope["ModelNew"](*namespace["get_init_inputs"]())
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(*inputs), expected, rtol=1e-4, atol=1e-5)
        count += 1
    if count > before:
        wanted -= set(rest)
print(count, sorted(wanted))
"""


@pytest.mark.exhaustive
def test_kernels_compute_what_the_task_does_in_triton_s_interpreter(tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(tmp_path)],
        env=dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, _, left = done.stdout.strip().partition(" ")
    assert int(count) > 20
    assert left == "[]"
