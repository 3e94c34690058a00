"""Moves beyond one instruction: clusters, stalls, yields and reuse, all legal, undone and replayed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.sass import (
    MOVE_KINDS,
    ClusterMove,
    MoveError,
    Neighbourhood,
    ReuseEdit,
    Schedule,
    StallEdit,
    YieldEdit,
    check,
    kind_of,
    move_from_json,
    move_to_json,
)
from kernelwright.sass.neighbours import loop_slots
from kernelwright.sass.reuse import may_keep
from tests.quick import exhaustive_but
from tests.sass.support import ALL_SAMPLES, NAMES, build, play_random, remembering

seeds = st.integers(0, 2**32)


def kinds_in(sample, schedule):
    return {v.kind for v in check(sample.cubin, schedule.cubin(sample.program), remembering)}


@pytest.mark.exhaustive
@given(st.sampled_from(ALL_SAMPLES), seeds, st.integers(1, 120))
@settings(max_examples=6, deadline=None)
def test_any_mixture_of_moves_is_accepted_by_the_checker_and_undone(which, seed, moves):
    sample = build(*which)
    schedule = Schedule(sample.kernel)
    played = play_random(schedule, random.Random(seed), moves)
    assert check(sample.cubin, schedule.cubin(sample.program), remembering) == []
    again = Schedule(sample.kernel)
    for move in played:
        again.play(move_from_json(move_to_json(move)))
    assert again.words() == schedule.words()
    twin = schedule.copy()
    for move in reversed(played):
        assert schedule.undo() == move
    assert schedule.words() == sample.words
    assert twin.words() == again.words()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gemm_leakyrelu", "attention_mma"])
@pytest.mark.parametrize("architecture", [86, 100, 120])
def test_what_is_played_elsewhere_is_accepted_too(architecture, name):
    """Legal play gives words that the disassembler reads.

    On 12.0 each of these kernels once had a seed of which it refused an HMMA.
    """
    sample = build(name, architecture)
    for seed in (2, 3):
        schedule = Schedule(sample.kernel)
        assert len(play_random(schedule, random.Random(seed), 60)) == 60
        assert check(sample.cubin, schedule.cubin(sample.program), remembering) == []


@pytest.mark.exhaustive
def test_a_tensor_instruction_keeps_nothing_where_the_assembler_keeps_nothing():
    """For 12.0 there is no code for an HMMA that keeps its first operand and does not yield."""
    kept = {}
    for architecture in (100, 120):
        kernel = build("attention_mma", architecture).kernel
        fused = [i for i in kernel.instructions if i.opcode == "HMMA"]
        kept[architecture] = sum(
            may_keep(first, follower, operand, architecture) for first in fused for follower in fused for operand in range(3)
        )
    assert kept[120] == 0
    assert kept[100] > 0


def test_every_kind_is_found_and_legal():
    """Those of all kinds are played one after the other and checked as one: each check disassembles anew."""
    sample = build("attention_mma", 90)
    schedule = Schedule(sample.kernel)
    for kind in MOVE_KINDS:
        before = schedule.words()
        played = play_random(schedule, random.Random(3), 5, Neighbourhood(kinds=(kind,)))
        assert len(played) == 5
        assert {kind_of(move) for move in played} == {kind}
        assert schedule.words() != before
    assert kinds_in(sample, schedule) == set()


def test_a_stall_never_falls_below_what_is_needed():
    sample = build("softmax", 80)
    schedule = Schedule(sample.kernel)
    slot = schedule.movable_slots[5]
    assert not schedule.is_legal(StallEdit(slot, -1))
    assert not schedule.is_legal(StallEdit(slot, 16))
    before = schedule.control(slot).stall
    schedule.play(StallEdit(slot, 2))
    assert schedule.control(slot).stall == before + 2
    assert kinds_in(sample, schedule) == set()
    schedule.play(StallEdit(slot, -2))
    assert schedule.words() == sample.words


def test_a_cluster_stays_behind_what_it_depends_on():
    sample = build("gemm_leakyrelu", 80)
    schedule = Schedule(sample.kernel)
    refused = 0
    for slot in schedule.movable_slots[:60]:
        for shift in (-3, -1, 1, 3):
            move = ClusterMove(slot, 3, slot + shift)
            if not schedule.is_legal(move):
                refused += 1
                with pytest.raises(MoveError):
                    schedule.play(move)
                continue
            schedule.play(move)
            assert schedule.order[slot + shift : slot + shift + 3] == [slot, slot + 1, slot + 2]
            schedule.undo()
    assert refused > 20
    assert schedule.words() == sample.words


def test_a_yield_that_may_cost_the_cycle_that_is_needed_stays():
    sample = build("softmax", 80)
    instructions = sample.kernel.instructions
    short = next(i for i in Schedule(sample.kernel).movable_slots if instructions[i].control.stall == 1)
    assert not Schedule(sample.kernel).is_legal(YieldEdit(short))
    mutated = sample.with_control(short, yields=not instructions[short].control.yields, reuse=0)
    assert {v.kind for v in check(sample.cubin, mutated, remembering)} == {"yield"}


@pytest.mark.exhaustive
def test_new_neighbours_keep_what_ptxas_would_keep_for_them():
    sample = build("sgemm", 90)
    schedule = Schedule(sample.kernel)
    play_random(schedule, random.Random(5), 400, Neighbourhood(kinds=("move",)))
    gained = [
        (slot, operand)
        for slot, index in enumerate(schedule.order)
        for operand in range(3)
        if (schedule.control(slot).reuse & ~sample.kernel.instructions[index].control.reuse) >> operand & 1
    ]
    assert len(gained) > 3
    assert kinds_in(sample, schedule) == set()
    words = schedule.words()
    for slot, operand in gained[:3]:
        schedule.play(ReuseEdit(slot, operand))
        assert not schedule.control(slot).reuse >> operand & 1
        schedule.play(ReuseEdit(slot, operand))
    assert schedule.words() == words


@pytest.mark.exhaustive
def test_ptxas_keeps_every_operand_that_the_rule_allows():
    """What the rule rests on: in the compiler's own code it never allows what the compiler left out."""
    found = 0
    samples = [(name, 90) for name in ("sgemm", "attention_mma", "rmsnorm")] + [("sgemm", 120), ("attention_mma", 120)]
    for name, architecture in samples:
        kernel = build(name, architecture).kernel
        for block in kernel.blocks:
            for i in range(block.start, block.stop - 1):
                first, follower = kernel.instructions[i : i + 2]
                for operand in range(3):
                    if not first.control.yields and may_keep(first, follower, operand, kernel.architecture):
                        assert first.control.reuse >> operand & 1, first.text
                        found += 1
    assert found > 50


@pytest.mark.exhaustive
def test_an_operand_kept_for_nobody_is_refused():
    sample = build("sgemm", 80)
    wrong = 0
    for slot in Schedule(sample.kernel).movable_slots:
        control = sample.kernel.instructions[slot].control
        if control.yields or control.reuse or control.stall > 11:
            continue
        kinds = {v.kind for v in check(sample.cubin, sample.with_control(slot, reuse=1), remembering)}
        assert kinds & {"reuse", "encoding", "changed-instruction", "def-use"}, slot
        wrong += 1
        if wrong > 2:
            return
    pytest.fail("wanted instructions without reuse bits")


@pytest.mark.exhaustive
def test_a_lost_reuse_bit_comes_back_where_the_new_follower_reads_the_same():
    """Two runs swapped as one keep what they share inside."""
    sample = build("sgemm", 80)
    found = 0
    for slot in Schedule(sample.kernel).movable_slots:
        control = sample.kernel.instructions[slot].control
        schedule = Schedule(sample.kernel)
        move = ClusterMove(slot, 2, slot + 4)
        if control.reuse and schedule.is_legal(move):
            schedule.play(move)
            found += bool(schedule.control(slot + 4).reuse)
            assert kinds_in(sample, schedule) == set()
        if found >= 2:
            break
    assert found >= 2


@pytest.mark.parametrize(
    "value", [None, [], ["move"], ["move", 1], ["move", 1, "2"], ["jump", 1, 2], "move", ["yield", True]]
)
def test_what_spells_no_move(value):
    with pytest.raises(MoveError, match="wanted a move"):
        move_from_json(value)


@pytest.mark.parametrize("name", exhaustive_but(NAMES, "softmax", "batched_gemm"))
def test_loops_are_found(name):
    assert bool(loop_slots(build(name, 80).kernel)) == (name not in ("softmax", "layernorm"))
