from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch

from kernelwright.tasks.generated.families import family_of, family_tasks, variations
from kernelwright.tasks.generated.family_parts import POINTWISE, SOURCES, TAILS
from kernelwright.tasks.source import check_task_source
from tests.quick import exhaustive_but

TASKS = family_tasks(400, seed=1)


def one_of_each_part():
    """Few tasks in which every source, pointwise part and tail comes up."""
    missing = {part.name for parts in (SOURCES, POINTWISE, TAILS) for part in parts}
    chosen = []
    for task in TASKS:
        parts = set(family_of(task).split("+"))
        if parts & missing:
            chosen.append(task)
            missing -= parts
    assert not missing
    return chosen


def shrunk(source):
    return source.replace("8192", "64").replace("2048", "64").replace("512", "64").replace("1024", "64")


def test_families_are_distinct_and_follow_from_the_seed():
    assert len({family_of(task) for task in TASKS}) == len(TASKS)
    assert family_tasks(400, seed=1) == TASKS
    assert family_tasks(5, seed=2) != TASKS[:5]


PARTS = one_of_each_part()


@pytest.mark.parametrize("task", exhaustive_but(PARTS, *PARTS[::2]), ids=family_of)
def test_every_variation_computes_what_the_task_does(task):
    check_task_source(task.source, task.id)
    namespace = {}
    exec(shrunk(task.source), namespace)
    torch.manual_seed(0)
    model = namespace["Model"](*namespace["get_init_inputs"]())
    inputs = namespace["get_inputs"]()
    expected = model(*inputs)
    found = list(variations(task, "cpu"))
    assert found
    for variation in found:
        scope = dict(namespace)
        exec(variation.answer, scope)
        other = scope["ModelNew"](*namespace["get_init_inputs"]())
        other.load_state_dict(model.state_dict())
        output = other(*inputs)
        assert output.stride() == expected.stride(), variation.techniques
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_kernels_are_for_gpus_and_are_python():
    for task in one_of_each_part():
        on_cpu = {variation.answer for variation in variations(task, "cpu")}
        for variation in variations(task, "cuda"):
            ast.parse(variation.answer)
            assert ("triton" in variation.answer) == (variation.answer not in on_cpu)


INTERPRETED = """
import sys, torch
from kernelwright.tasks.generated.families import family_tasks, family_of, variations
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
