"""The game: random legal play keeps the program's meaning, can be undone, and depends on the order alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.gpu import disassemble
from kernelwright.sass import ANY_MOVE, Move, MoveError, Schedule, check, load
from kernelwright.sass.schedule import retime
from tests.quick import exhaustive_but
from tests.sass.support import ALL_SAMPLES, NAMES, build, def_use_graph, remembering

samples = st.sampled_from(ALL_SAMPLES)
seeds = st.integers(0, 2**32)


def played(sample, seed, moves, **options):
    schedule = Schedule(sample.kernel)
    rng = random.Random(seed)
    for _ in range(moves):
        move = replace(ANY_MOVE, **options).draw(schedule, rng)
        if move is not None:
            schedule.play(move)
    return schedule


@pytest.mark.parametrize(("name", "architecture"), exhaustive_but(ALL_SAMPLES, ("softmax", 90)))
def test_random_play_keeps_the_def_use_graph_and_is_accepted_by_the_checker(name, architecture):
    """The mutated bytes are disassembled anew; nothing of the game's bookkeeping is used to judge."""
    sample = build(name, architecture)
    schedule = played(sample, f"{name}{architecture}", 400)
    mutated = schedule.cubin(sample.program)
    assert schedule.moved > 50
    listing = disassemble(mutated)
    kernel = load(mutated, lambda _: listing).kernels[0]
    before = def_use_graph(sample.kernel, list(range(len(sample.kernel.instructions))))
    assert def_use_graph(kernel, schedule.order) == before
    assert check(sample.cubin, mutated, lambda c: listing if c == mutated else remembering(c)) == []


@pytest.mark.exhaustive
@given(samples, seeds, st.integers(1, 60))
@settings(max_examples=12, deadline=None)
def test_any_number_of_moves_is_accepted_by_the_checker(which, seed, moves):
    sample = build(*which)
    schedule = played(sample, seed, moves)
    assert check(sample.cubin, schedule.cubin(sample.program), remembering) == []


@pytest.mark.exhaustive
@given(st.sampled_from(NAMES), seeds)
@settings(max_examples=6, deadline=None)
def test_the_papers_moves_are_accepted_too(name, seed):
    """Swaps of a memory instruction with its neighbour, the action space of CuAsmRL."""
    sample = build(name, 80)
    schedule = played(sample, seed, 30, max_distance=1, memory_only=True)
    assert all(abs(m.source - m.target) == 1 for m in schedule.history)
    assert check(sample.cubin, schedule.cubin(sample.program), remembering) == []


@pytest.mark.exhaustive
@given(samples, seeds, st.integers(0, 80))
@settings(max_examples=40, deadline=None)
def test_undo_restores_every_byte(which, seed, moves):
    sample = build(*which)
    schedule = played(sample, seed, moves)
    played_moves = list(schedule.history)
    for move in reversed(played_moves):
        assert schedule.undo() == move
    assert schedule.words() == sample.words
    assert schedule.cubin(sample.program) == sample.cubin
    with pytest.raises(MoveError):
        schedule.undo()


@pytest.mark.exhaustive
@given(samples, seeds)
@settings(max_examples=25, deadline=None)
def test_a_history_replays_to_the_same_bytes(which, seed):
    sample = build(*which)
    schedule = played(sample, seed, 40)
    again = Schedule(sample.kernel)
    for move in schedule.history:
        again.play(move)
    assert again.words() == schedule.words()
    assert again.issue_cycles == schedule.issue_cycles


@pytest.mark.exhaustive
@given(samples, seeds)
@settings(max_examples=25, deadline=None)
def test_words_are_a_permutation_with_encodable_control_words(which, seed):
    sample = build(*which)
    schedule = played(sample, seed, 80)
    instructions = sample.kernel.instructions
    assert sorted(schedule.order) == list(range(len(instructions)))
    assert all(schedule.order[i] == i for i in sample.kernel.fixed)
    for control, index in zip(schedule.controls(), schedule.order, strict=True):
        before = instructions[index].control
        assert control.is_encodable() or control == before
        assert (control.wait_mask, control.write_barrier, control.read_barrier) == (
            before.wait_mask,
            before.write_barrier,
            before.read_barrier,
        )


@pytest.mark.parametrize(
    ("name", "architecture"),
    exhaustive_but(ALL_SAMPLES, ("softmax", 90), (NAMES[0], 80)),
)
def test_the_original_order_gets_the_original_stalls(name, architecture):
    kernel = build(name, architecture).kernel
    for constraints in Schedule(kernel).constraints:
        block = constraints.block
        order = list(range(block.start, block.stop))
        assert retime(order, constraints) == [kernel.instructions[i].control.stall for i in order]


def test_windows_and_legal_moves_agree():
    schedule = Schedule(build("rmsnorm", 80).kernel)
    found = list(schedule.legal_moves(max_distance=3))
    assert len(found) > 200
    for move in found:
        assert schedule.is_legal(move)
        assert move.target in schedule.window(move.source)
        assert abs(move.source - move.target) <= 3
    memory = list(schedule.legal_moves(max_distance=1, memory_only=True))
    assert memory
    assert {schedule.kernel.instructions[m.source].traits.is_memory for m in memory} == {True}


@pytest.mark.parametrize(("name", "architecture"), exhaustive_but(ALL_SAMPLES, ("softmax", 90)))
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_what_is_not_legal_cannot_be_played(name, architecture, seed):
    sample = build(name, architecture)
    schedule = played(sample, seed, 5)
    words = schedule.words()
    rng = random.Random(seed)
    count = len(words)
    for _ in range(30):
        move = Move(rng.randrange(count), rng.randrange(count))
        if not schedule.is_legal(move):
            with pytest.raises(MoveError):
                schedule.play(move)
    assert schedule.words() == words


def test_a_program_names_its_kernels():
    program = build("softmax", 80).program
    assert program.kernel("softmax") is program.kernel()
    with pytest.raises(Exception, match="wanted kernel 'nothing'"):
        program.kernel("nothing")
