"""Tasks bound by the device: their split by structure, their answers at miniature sizes, and their estimated times."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path

import pytest
import torch

from kernelwright.tasks.generated.device_bound import NEW_SOURCES, NEW_TAILS, device_bound_tasks, structure_of
from kernelwright.tasks.generated.families import family_of, variations
from kernelwright.tasks.source import check_task_source
from tests.quick import exhaustive_but

DRAWN = device_bound_tasks(128, 40)
SMALL = device_bound_tasks(128, 40, miniature=True)


def every(drawn):
    return (*drawn.train, *drawn.known, *drawn.new)


def parts(tasks):
    return {name for task in tasks for name in structure_of(task).split("+")}


def test_half_of_the_held_out_tasks_have_a_part_that_no_training_task_has():
    assert [len(side) for side in (DRAWN.train, DRAWN.known, DRAWN.new)] == [128, 20, 20]
    assert not parts(DRAWN.train) & {*NEW_SOURCES, *NEW_TAILS}
    assert parts(DRAWN.known) <= parts(DRAWN.train)
    assert all(len(parts([task]) & {*NEW_SOURCES, *NEW_TAILS}) == 1 for task in DRAWN.new)
    assert len({structure_of(task) for task in every(DRAWN)}) == 168


def test_tasks_follow_from_the_seed_and_miniatures_differ_in_size_alone():
    assert device_bound_tasks(128, 40) == DRAWN
    assert device_bound_tasks(128, 40, seed=1) != DRAWN
    assert [family_of(task) for task in every(SMALL)] == [family_of(task) for task in every(DRAWN)]


def one_of_each_part():
    missing = parts(every(SMALL))
    for task in every(SMALL):
        if found := parts([task]) & missing:
            missing -= found
            yield task


PARTS = list(one_of_each_part())


@pytest.mark.parametrize("task", exhaustive_but(PARTS, *PARTS[::3]), ids=family_of)
def test_every_answer_computes_what_its_task_does(task):
    check_task_source(task.source, task.id)
    scope = {}
    exec(task.source, scope)
    torch.manual_seed(0)
    model, inputs = scope["Model"](*scope["get_init_inputs"]()), scope["get_inputs"]()
    before = [item.clone() for item in inputs]
    expected = model(*inputs)
    for variation in variations(task, "cpu"):
        there = dict(scope)
        exec(variation.answer, there)
        other = there["ModelNew"](*scope["get_init_inputs"]())
        other.load_state_dict(model.state_dict())
        output = other(*inputs)
        assert output.stride() == expected.stride(), variation.techniques
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, before, inputs))


@pytest.fixture
def estimates():
    path = Path(__file__).parents[2] / "benchmarks" / "device_bound_estimates.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def check_estimates(found):
    assert all(0.3e-3 <= one.reference_s <= 3e-3 for one in found)
    assert all(one.graph_gain < 1.05 for one in found)
    assert statistics.geometric_mean([one.plain for one in found]) >= 2.0


@pytest.mark.exhaustive
def test_a_few_are_estimated_to_be_bound_by_the_device(estimates):
    check_estimates(estimates.estimates([*DRAWN.train[:4], *DRAWN.new[:4]]))


@pytest.mark.exhaustive
def test_all_are_estimated_to_be_bound_by_the_device(estimates):
    for side in (DRAWN.train, DRAWN.known, DRAWN.new):
        check_estimates(estimates.estimates(side))
