"""Sweeps: several legal moves at once, each in the history, all of them taken back one by one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.sass import Move, Schedule, YieldEdit, check
from kernelwright.sass.neighbours import _lay_out, _shift, play_sweep
from tests.quick import exhaustive_but
from tests.sass.support import build, remembering

KERNELS = ("softmax", "gemm_leakyrelu", "sgemm")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_sweeps_are_legal_moves_and_can_be_taken_back(name, seed):
    program = build(name, 90).program
    schedule = Schedule(program.kernel())
    rng = random.Random(seed)
    states = [schedule.words()]
    lengths = []
    for _ in range(4):
        before = len(schedule.history)
        played = play_sweep(schedule, rng)
        assert len(schedule.history) == before + played
        lengths.append(played)
        states.append(schedule.words())
    assert all(lengths)
    assert check(program.image.data, schedule.cubin(program), remembering) == []
    for played, state in zip(reversed(lengths), reversed(states[:-1]), strict=True):
        for _ in range(played):
            schedule.undo()
        assert schedule.words() == state


@pytest.mark.parametrize("name", exhaustive_but(KERNELS, "softmax"))
def test_the_same_seed_sweeps_the_same(name):
    found = []
    for seed in (1, 1, 2):
        schedule = Schedule(build(name, 90).kernel)
        rng = random.Random(seed)
        for _ in range(3):
            play_sweep(schedule, rng)
        found.append(schedule.words())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("name", exhaustive_but(KERNELS, "softmax"))
def test_sweeps_move_many_and_flip_yields(name):
    schedule = Schedule(build(name, 90).kernel)
    rng = random.Random(0)
    assert max(play_sweep(schedule, rng) for _ in range(12)) > 1
    assert {type(move) for move in schedule.history} == {Move, YieldEdit}


class Always:
    """Chance that gives the same number each time."""

    def __init__(self, number):
        self.number = number

    def choice(self, _):
        return self.number

    def random(self):
        return 0.0

    def randint(self, _low, high):
        return min(3, high)


def stretches(schedule):
    loads = [i for i in schedule.movable_slots if schedule.kernel.instructions[i].opcode == "LDS"]
    return [loads[first : first + 3] for first in range(len(loads) - 2)]


@pytest.mark.parametrize("gap", [0, 2])
def test_loads_are_laid_out_with_a_gap_between_each_two(gap):
    found = set()
    for indices in stretches(Schedule(build("sgemm", 90).kernel)):
        schedule = Schedule(build("sgemm", 90).kernel)
        _lay_out(schedule, indices, Always(gap))
        slots = [schedule.slot_of(index) for index in indices]
        found.add(tuple(later - earlier for earlier, later in pairwise(slots)))
        assert slots == sorted(slots)
    assert (gap + 1, gap + 1) in found


@pytest.mark.parametrize("direction", [-1, 1])
def test_loads_are_shifted_by_the_same_distance(direction):
    found = set()
    for indices in stretches(Schedule(build("sgemm", 90).kernel)):
        schedule = Schedule(build("sgemm", 90).kernel)
        _shift(schedule, indices, Always(direction))
        found.add(tuple(schedule.slot_of(index) - index for index in indices))
    assert (3 * direction,) * 3 in found
