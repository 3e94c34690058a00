"""The simulated issue: what it must and must not depend on. No number of it is a time."""

from __future__ import annotations

import random

import pytest

from kernelwright.sass import Move, Schedule, StallEdit
from kernelwright.sass.simulator import ideal_cycles, simulate
from tests.quick import exhaustive_but
from tests.sass.support import NAMES, build, play_random


@pytest.mark.parametrize("name", exhaustive_but(NAMES, *NAMES[:2]))
def test_the_original_is_at_or_above_the_bound_and_more_work_takes_longer(name):
    kernel = build(name, 90).kernel
    original = Schedule(kernel)
    one, four = (simulate(original, 90, warps) for warps in (1, 4))
    assert 0 < one < four < 4 * one + 1
    assert simulate(original, 90, 1, iterations=8) >= simulate(original, 90, 1, iterations=2)
    for warps in (1, 4):
        bound = ideal_cycles(kernel, 90, warps)
        assert bound.limits[bound.limited_by] == bound.cycles
        assert bound.cycles <= simulate(original, 90, warps)


def test_the_same_schedule_gives_the_same_cycles():
    schedule = Schedule(build("rmsnorm", 80).kernel)
    play_random(schedule, random.Random(1), 50)
    assert simulate(schedule, 80) == simulate(schedule.copy(), 80)
    before = simulate(Schedule(schedule.original), 80)
    while schedule.history:
        schedule.undo()
    assert simulate(schedule, 80) == before


@pytest.mark.exhaustive
def test_a_stall_in_a_loop_costs_in_every_pass_of_a_lone_warp():
    kernel = build("sgemm", 80).kernel
    original = Schedule(kernel)
    costs = set()
    for slot in original.movable_slots:
        schedule = original.copy()
        if schedule.is_legal(StallEdit(slot, 8)):
            schedule.play(StallEdit(slot, 8))
            costs.add(simulate(schedule, 80, warps=1) - simulate(original, 80, warps=1))
    assert max(costs) >= 24, "four passes, less what the loads had to be waited for anyway"


def test_a_load_taken_away_from_its_use_waits_less():
    """Whatever a move does to a lone warp, waiting is modelled: moves without a stall in the sum still differ."""
    kernel = build("row_sum", 80).kernel
    original = Schedule(kernel)
    cheaper = dearer = 0
    for slot in original.movable_slots:
        if kernel.instructions[slot].opcode != "LDG":
            continue
        for target in original.window(slot):
            if original.is_legal(Move(slot, target)):
                schedule = original.copy()
                schedule.play(Move(slot, target))
                change = simulate(schedule, 80, warps=1) - simulate(original, 80, warps=1)
                cheaper += change < 0
                dearer += change > 0
    assert cheaper
    assert dearer
