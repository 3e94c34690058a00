"""Translation validation: hand-made illegal schedules, each caught and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest

from kernelwright.sass import CubinError, Instruction, Neighbourhood, Schedule, ScoreboardEdit, check, check_report
from kernelwright.sass import load as load_program
from kernelwright.sass.latency import (
    Dependence,
    bound_cycles,
    is_guarded,
    memory_conflict,
    minimum_distances,
    port_of,
    table_spacing,
    vouches_for,
)
from kernelwright.sass.scoreboards import analyse_scoreboards
from tests.quick import exhaustive_but
from tests.sass.support import ARCHITECTURES, NAMES, build, compiled, first_pair, remembering


def kinds(sample, mutated):
    return {v.kind for v in check(sample.cubin, mutated, remembering)}


def registers(names, file):
    return {n for n in names if n.rstrip("0123456789") == file}


def swapped(file, dependence):
    """Neighbours with exactly this dependence, whose registers are of this file."""

    def wanted(a, b):
        relations = {"raw": a.defs & b.uses, "war": a.uses & b.defs, "waw": a.defs & b.defs}
        others = set().union(*(r for name, r in relations.items() if name != dependence))
        return bool(registers(relations[dependence], file)) and not others and not memory_conflict(a, b)

    return wanted


def across(fence, upwards):
    def wanted(a, b):
        first, second = (b, a) if upwards else (a, b)
        return second.opcode == fence and first.traits.is_memory

    return wanted


@dataclass(frozen=True)
class Taken:
    """The first two instructions of a block that are as wanted; one is taken to the other's place."""

    wanted: Callable[[Instruction, Instruction], bool]
    kind: str
    """What the checker must find."""
    upwards: bool = False
    """Whether the second goes to the place of the first."""
    are_neighbours: bool = False


TAKEN = {
    "raw": Taken(swapped("R", "raw"), "raw", are_neighbours=True),
    "war": Taken(swapped("R", "war"), "war", are_neighbours=True),
    "predicate raw": Taken(swapped("P", "raw"), "predicate", are_neighbours=True),
    "predicate war": Taken(swapped("P", "war"), "predicate", are_neighbours=True),
    "uniform raw": Taken(swapped("UR", "raw"), "uniform", are_neighbours=True),
    "uniform war": Taken(swapped("UR", "war"), "uniform", are_neighbours=True),
    "a carry": Taken(
        lambda a, b: "X" in b.modifiers and bool(registers(a.defs & b.uses, "P")), "predicate", are_neighbours=True
    ),
    "memory up across BAR": Taken(across("BAR", True), "barrier-crossing", upwards=True),
    "memory down across BAR": Taken(across("BAR", False), "barrier-crossing"),
    "memory up across DEPBAR": Taken(across("DEPBAR", True), "barrier-crossing", upwards=True),
    "a copy in another group": Taken(lambda a, b: (a.opcode, b.opcode) == ("LDGSTS", "LDGDEPBAR"), "ldgsts-group"),
    "loads and stores of one memory": Taken(
        lambda a, b: a.opcode == "STS" and b.opcode in ("STS", "LDS") and a.payload != b.payload, "memory-order"
    ),
    "an operation that vouches for an earlier one": Taken(
        lambda a, b: vouches_for(a, b) and not memory_conflict(a, b), "queue-order", upwards=True
    ),
}


@pytest.mark.parametrize("architecture", exhaustive_but(ARCHITECTURES, 90))
@pytest.mark.parametrize(
    "what",
    exhaustive_but(
        TAKEN,
        "raw",
        "memory up across BAR",
        "loads and stores of one memory",
        "an operation that vouches for an earlier one",
    ),
)
def test_an_instruction_in_the_place_of_another(what, architecture):
    taken = TAKEN[what]

    def wanted(sample, i, j):
        a, b = sample.kernel.instructions[i], sample.kernel.instructions[j]
        return (j == i + 1 or not taken.are_neighbours) and taken.wanted(a, b)

    for sample, i, j in first_pair((architecture,), NAMES, wanted):
        source, target = (j, i) if taken.upwards else (i, j)
        assert taken.kind in kinds(sample, sample.reordered(source, target))


@pytest.mark.exhaustive
@pytest.mark.parametrize("file_and_kind", [("R", "waw"), ("P", "predicate")])
def test_swapped_definitions(file_and_kind):
    file, kind = file_and_kind

    def wanted(sample, i, j):
        a, b = sample.kernel.instructions[i], sample.kernel.instructions[j]
        both = registers(a.defs & b.defs, file)
        return bool(both) and a.payload != b.payload and not is_guarded(a) and not is_guarded(b)

    for sample, i, j in first_pair(ARCHITECTURES, NAMES, wanted):
        found = check(sample.cubin, sample.reordered(j, i), remembering)
        assert any(v.kind == kind and "WAW" in v.detail for v in found)


@pytest.mark.parametrize("place", exhaustive_but([0, 1, 2], 1))
@pytest.mark.parametrize(
    ("name", "architecture"), exhaustive_but([("softmax", 89), ("sgemm", 90), ("attention_mma", 80)], ("sgemm", 90))
)
def test_short_stalls(name, architecture, place):
    """Where a dependence is as tight as the assembler dared, one cycle less is refused."""
    sample = build(name, architecture)
    instructions = sample.kernel.instructions
    distances = minimum_distances(instructions, sample.kernel.blocks)
    tight = sorted(
        {
            v - 1
            for (u, v, register, kind), cycles in distances.items()
            if u < v <= u + 4
            and kind is Dependence.RAW
            and cycles <= bound_cycles(kind, register, instructions[u], instructions[v])
            and instructions[v - 1].control.stall > 1
        }
    )
    assert len(tight) > 10
    index = tight[(len(tight) - 1) * place // 2]
    stall = instructions[index].control.stall
    assert "stall" in kinds(sample, sample.with_control(index, stall=stall - 1))


@pytest.mark.parametrize("architecture", exhaustive_but(ARCHITECTURES, 90))
@pytest.mark.parametrize("family", exhaustive_but(["alu", "memory", "special-function"], "memory"))
def test_two_instructions_too_close_for_their_port(family, architecture):
    def wanted(sample, i, j):
        a, b = sample.kernel.instructions[i], sample.kernel.instructions[j]
        first, second = port_of(a), port_of(b)
        return (
            j == i + 1
            and first == second
            and first is not None
            and first.family == family
            and a.control.stall == table_spacing(first, second)
            and not a.defs & b.uses
        )

    for sample, i, _ in first_pair((architecture,), NAMES, wanted):
        stall = sample.kernel.instructions[i].control.stall
        assert "port" in kinds(sample, sample.with_control(i, stall=stall - 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_load_too_soon_after_a_barrier(architecture):
    """The barrier holds the warp only some cycles after it issued; hardware then reads old data."""
    sample = build("row_sum", architecture)
    instructions = sample.kernel.instructions
    barrier = next(i for i, x in enumerate(instructions) if x.opcode == "BAR")
    load = next(i for i in range(barrier, len(instructions)) if instructions[i].opcode == "LDS")
    words = sample.words
    for i in range(barrier, load):
        words[i] = instructions[i].control.with_stall(1).encode(words[i])
    found = check(sample.cubin, sample.with_words(words), remembering)
    assert any(v.kind == "stall" and v.address == 16 * load and "BAR" in v.detail for v in found)


@pytest.mark.exhaustive
def test_a_distance_that_only_a_loop_keeps():
    """Producer at the loop's end, consumer at its begin: the distance runs over the back edge."""
    sample = build("gemm_leakyrelu", 80)
    kernel = sample.kernel
    loop = next(b for b in kernel.blocks if b.index in b.successors)
    distances = minimum_distances(kernel.instructions, kernel.blocks)
    u, v = min(
        (
            (u, v)
            for (u, v, register, kind), cycles in distances.items()
            if loop.start <= v < u < loop.stop
            and kind is not Dependence.WAR
            and cycles <= bound_cycles(kind, register, kernel.instructions[u], kernel.instructions[v]) + 10
        ),
        key=lambda pair: pair[1] - pair[0],
    )
    words = sample.words
    for i in (*range(u, loop.stop), *range(loop.start, v)):
        words[i] = kernel.instructions[i].control.with_stall(1).encode(words[i])
    found = check(sample.cubin, sample.with_words(words), remembering)
    assert any(x.kind == "stall" and x.address == 16 * v and f"{16 * u:#x}" in x.detail for x in found)


@pytest.mark.parametrize("architecture", exhaustive_but([80, 90], 90))
def test_dropped_waits(architecture):
    sample = build("softmax", architecture)
    waiting = [i for i, x in enumerate(sample.kernel.instructions) if x.control.wait_mask][:2]
    found = check(sample.cubin, sample.with_controls({index: {"wait_mask": 0} for index in waiting}), remembering)
    assert {16 * index for index in waiting} <= {v.address for v in found if v.kind == "wait"}


@pytest.mark.parametrize("architecture", exhaustive_but(ARCHITECTURES, 90))
def test_dropped_and_changed_scoreboards(architecture):
    sample = build("sgemm", architecture)
    controls = [i.control for i in sample.kernel.instructions]
    write = next(
        i for i, c in enumerate(controls) if c.write_barrier is not None and sample.kernel.instructions[i].opcode == "LDS"
    )
    read = next(i for i, c in enumerate(controls) if c.read_barrier is not None)
    dropped = {write: {"write_barrier": None}, read: {"read_barrier": None}}
    assert write != read
    assert {"write-barrier", "read-barrier"} <= kinds(sample, sample.with_controls(dropped))
    others = [sample.with_control(write, write_barrier=n) for n in range(6) if n != controls[write].write_barrier]
    assert "wait" in set().union(*(kinds(sample, other) for other in others))


@pytest.mark.parametrize("architecture", exhaustive_but(ARCHITECTURES, 90))
def test_every_wait_for_a_scoreboard_assigned_anew_is_needed(architecture):
    sample = build("sgemm", architecture)
    schedule = Schedule(sample.kernel)
    rng = random.Random(2)
    before = [i.control.wait_mask for i in sample.kernel.instructions]
    for _ in range(20):
        schedule.play(Neighbourhood(kinds=("scoreboard",)).draw(schedule, rng))
        added = [slot for slot, control in enumerate(schedule.controls()) if control.wait_mask != before[slot]]
        # A store or a barrier may order more than the registers that it reads.
        anchors = [slot for slot in added if sample.kernel.instructions[slot].traits.is_sync]
        if anchors and len(added) > len(anchors):
            break
    assert anchors
    words = schedule.words()
    assert kinds(sample, sample.with_words(words)) == set()
    for slot in added:
        control = replace(schedule.control(slot), wait_mask=before[slot])
        mutated = [control.encode(word) if i == slot else word for i, word in enumerate(words)]
        assert "wait" in kinds(sample, sample.with_words(mutated))


def test_a_scoreboard_that_is_counted_or_crowded_is_not_taken():
    sample = build("gemm_leakyrelu", 80)
    instructions = sample.kernel.instructions
    counted = {int(i.operands[0][2:]) for i in instructions if i.opcode == "DEPBAR"}
    loads = [i for i, it in enumerate(instructions) if it.control.write_barrier is not None and i not in sample.kernel.fixed]
    free = next(i for i in loads if instructions[i].control.write_barrier not in counted)
    assert "write-barrier" in kinds(sample, sample.with_control(free, write_barrier=min(counted)))
    assert not Schedule(sample.kernel).is_legal(
        ScoreboardEdit(free, 0, instructions[free].control.write_barrier ^ min(counted))
    )
    waits = {i: {"wait_mask": 63} for i in range(len(instructions))}
    one = {i: waits[i] | {"write_barrier": 5} for i in loads}
    assert "write-barrier" in kinds(sample, sample.with_controls(waits | one))


@pytest.mark.parametrize("architecture", exhaustive_but(ARCHITECTURES, 90))
def test_a_consumer_above_the_waiter_it_relies_on(architecture):
    """Waits are not repeated: whoever comes after the waiter relies on it (a guard edge)."""

    def wanted(sample, i, j):
        b = sample.kernel.instructions[j]
        if (i, j) not in relied(sample) or b.control.wait_mask or b.traits.is_memory or b.traits.is_sync:
            return False
        between = sample.kernel.instructions[i:j]
        return all(not (a.defs & (b.uses | b.defs) or a.uses & b.defs) for a in between)

    for sample, i, j in first_pair((architecture,), NAMES, wanted):
        assert "wait" in kinds(sample, sample.reordered(j, i))


@cache
def relied(sample):
    return analyse_scoreboards(sample.kernel.instructions, sample.kernel.blocks).relied


@pytest.mark.parametrize("architecture", exhaustive_but([80, 90], 90))
def test_shuffles_keep_their_order(architecture):
    sample = build("softmax", architecture)
    barrier = next(i for i, x in enumerate(sample.kernel.instructions) if x.opcode == "BAR")
    shuffles = [i for i, x in enumerate(sample.kernel.instructions) if x.opcode == "SHFL" and i < barrier]
    found = kinds(sample, sample.reordered(shuffles[-1], barrier))
    assert {"sync-order", "pinned"} <= found


@pytest.mark.parametrize(
    ("architecture", "bit"),
    exhaustive_but([(80, 0), (80, 17), (80, 33), (89, 26), (90, 9), (90, 66), (90, 90)], (90, 9)),
)
def test_a_changed_bit_outside_the_control_word(architecture, bit):
    sample = build("row_sum", architecture)
    index = next(i for i, x in enumerate(sample.kernel.instructions) if x.opcode == "FADD")
    words = sample.words
    words[index] ^= 1 << bit
    assert kinds(sample, sample.with_words(words)) & {"changed-instruction", "encoding", "crossed-block"}


def test_an_instruction_taken_to_another_block():
    sample = build("rmsnorm", 80)
    first, second = sample.kernel.blocks[1:3]
    words = sample.words
    words[first.start], words[second.start] = words[second.start], words[first.start]
    assert "crossed-block" in kinds(sample, sample.with_words(words))


@pytest.mark.exhaustive
def test_pinned_instructions_and_what_crosses_them():
    sample = build("softmax", 90)
    pinned = min(i for i in sample.kernel.fixed if i > 3)
    assert "pinned" in kinds(sample, sample.reordered(pinned, pinned - 1))
    assert "pinned" in kinds(sample, sample.reordered(pinned - 1, pinned + 1))


@pytest.mark.parametrize("architecture", exhaustive_but([80, 90], 90))
def test_control_words_without_an_encoding(architecture):
    sample = build("sgemm", architecture)
    instructions = sample.kernel.instructions
    plain = next(i for i, x in enumerate(instructions) if not x.control.yields and x.control.stall < 5)
    assert kinds(sample, sample.with_control(plain, stall=13)) & {"control", "encoding"}
    assert kinds(sample, sample.with_control(plain, stall=0, yields=True, reuse=0)) & {"control", "encoding"}


@pytest.mark.parametrize("architecture", exhaustive_but(ARCHITECTURES, 90))
def test_operand_reuse_across_a_changed_follower(architecture):
    sample = build("sgemm", architecture)
    instructions = sample.kernel.instructions
    fresh = next(
        i for i, x in enumerate(instructions)
        if x.opcode == "FFMA" and not x.control.reuse and not x.control.yields
    )  # fmt: skip
    assert kinds(sample, sample.with_control(fresh, reuse=1)) == {"reuse"}


@pytest.mark.parametrize("section", [".nv.info.softmax", ".nv.constant0.softmax", ".symtab"])
def test_bytes_outside_the_code(section):
    from kernelwright.sass.identity import ELF_SECTION

    assert ELF_SECTION.size == 64
    sample = build("softmax", 80)
    data = bytearray(sample.cubin)
    table = int.from_bytes(data[40:48], "little")
    count, names = int.from_bytes(data[60:62], "little"), int.from_bytes(data[62:64], "little")
    headers = [ELF_SECTION.unpack_from(data, table + 64 * i) for i in range(count)]
    strings = headers[names][4]
    offset = next(
        h[4] for h in headers if data[strings + h[0] :].split(b"\0", 1)[0].decode() == section
    )  # fmt: skip
    data[offset + 6] ^= 1
    assert kinds(sample, bytes(data)) == {"container"}


def test_the_padding_behind_the_code():
    sample = build("softmax", 80)
    section = sample.kernel.code.section
    data = bytearray(sample.cubin)
    data[section.offset_bytes + section.size_bytes - 3] ^= 1
    assert kinds(sample, bytes(data)) == {"changed-instruction"}


@pytest.mark.exhaustive
def test_a_block_that_relies_on_something_not_understood():
    """A result used without any wait in the original: the block may stay, but not change."""
    sample = build("softmax", 80)
    instructions = sample.kernel.instructions
    load = next(i for i, x in enumerate(instructions) if x.opcode == "LDG")
    words = [x.control.encode(x.word) for x in instructions]
    for i in range(load, len(words)):
        words[i] = replace(instructions[i].control, wait_mask=0).encode(words[i])
    odd = sample.with_words(words)
    program = load_program(odd, remembering)
    assert analyse_scoreboards(program.kernel().instructions, program.kernel().blocks).unprotected
    assert check(odd, odd, remembering) == []
    frozen = next(b for b in program.kernel().blocks if b.start <= load < b.stop)
    assert not set(range(frozen.start, frozen.stop)) & set(Schedule(program.kernel()).movable_slots)
    index = next(i for i in range(load, frozen.stop) if words[i] >> 105 & 15 == 4)
    words[index] = program.kernel().instructions[index].control.with_stall(5).encode(words[index])
    assert {v.kind for v in check(odd, sample.with_words(words), remembering)} == {"unexplained"}


def test_two_different_kernels():
    assert kinds(build("softmax", 80), compiled("row_sum", 80)) == {"container"}
    assert kinds(build("softmax", 80), compiled("softmax", 90)) == {"container"}
    [violation] = check(compiled("softmax", 90), compiled("softmax", 80), remembering)
    assert violation.detail == "the two cubins are for different architectures, sm_90 and sm_80"


def test_what_is_harmless_is_legal():
    sample = build("softmax", 80)
    assert check_report(sample.cubin, sample.cubin, remembering).moved == 0
    index = next(
        i for i, x in enumerate(sample.kernel.instructions) if x.control.stall < 8 and x.control.yields
    )  # fmt: skip
    control = sample.kernel.instructions[index].control
    used = next(i for i, x in enumerate(sample.kernel.instructions) if x.control.reuse)
    assert used != index
    # A longer stall, one more wait, no operand reuse: together, since each cubin is disassembled anew.
    harmless = {index: {"stall": control.stall + 1, "wait_mask": control.wait_mask | 32}, used: {"reuse": 0}}
    assert kinds(sample, sample.with_controls(harmless)) == set()


def test_unreadable_files_are_errors_not_violations():
    sample = build("softmax", 80)
    for broken in (b"", sample.cubin[:3000]):
        with pytest.raises(CubinError):
            check(sample.cubin, broken, remembering)
        with pytest.raises(CubinError):
            check(broken, sample.cubin, remembering)


def test_code_that_does_not_decode_is_a_violation():
    sample = build("softmax", 80)
    words = sample.words
    words[5] = (1 << 128) - 1
    assert kinds(sample, sample.with_words(words)) == {"encoding"}


def test_every_violation_says_where_and_why():
    sample = build("softmax", 80)
    index = next(i for i, x in enumerate(sample.kernel.instructions) if x.control.wait_mask)
    (violation,) = {
        v for v in check(sample.cubin, sample.with_control(index, wait_mask=0), remembering)
        if v.address == 16 * index and "no longer waits" in v.detail
    }  # fmt: skip
    assert violation.kind == "wait"
    assert sample.kernel.instructions[index].text in violation.detail
