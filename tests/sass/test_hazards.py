"""Illegal schedules of hand-made code, for hazards that the compiled corpus does not have.

The instructions are real ones of nvcc with other registers; each case is legal as written, and one change makes it
wrong. All stalls are long, so that nothing but the hazard in question is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kernelwright.gpu import disassemble
from kernelwright.sass import HintEdit, Schedule, check, load
from kernelwright.sass.dependences import constrain
from kernelwright.sass.latency import port_of
from tests.quick import exhaustive_but
from tests.sass.support import hand_made, word

_PAYLOAD = {
    80: {
        "FADD": 0x20B027221,
        "LDG": 0xC1E19000000000402007981,
        "STG": 0xC1019040000000902007986,
        "LDS": 0x8000000000008087984,
        "MOV": 0xF000000000500007802,
        "ERRBAR": 0x79AB,
        "DADD": 0x20000000002047229,
        "BRA.DIV": 0xB800000000000027F007947,
        "BAR": 0x100000000000000007B1D,
        "EXIT": 0x3800000000000000000794D,
        "SELF": 0x383FFFFFFFFFFF000007947,
        "ISETP": 0x3F26270000000012000780C,
        "R2P": 0x904007804,
    },
    90: {
        "UTMALDG": 0x800800000000008060075B4,
        "UMOV": 0x40000047882,
        "MEMBAR": 0x7992,
        "LDG": 0xC1E19000002000602097981,
        "LDS": 0x80008000000000406067984,
        "FADD": 0x805057221,
        "STG": 0xC1019060000000904007986,
        "EXIT": 0x3800000000000000000794D,
        "SELF": 0x383FFFFFFFFFFC00FC7947,
    },
}
_FIELDS = {"d": 16, "a": 24, "b": 32, "c": 64}


@dataclass(frozen=True)
class Case:
    """Code, the order of a mutant and the kinds of violation of which one must be found."""

    architecture: int
    code: Sequence[str]
    order: Sequence[int]
    kinds: frozenset[str]


def assemble(architecture: int, line: str) -> int:
    """`FADD d=8 a=4 b=4 B------:R-:W-:-:S05:---`: an opcode, registers by operand slot, a control word."""
    name, *fields, control = line.split()
    payload = _PAYLOAD[architecture][name]
    for field in fields:
        shift, value = _FIELDS[field[0]], int(field[2:])
        payload = payload & ~(0xFF << shift) | value << shift
    return word(payload, control)


PLAIN = "B------:R-:W-:Y:S15:---"
END = (f"EXIT {PLAIN}", "SELF B------:R-:W-:Y:S00:---")
CASES = {
    "a branch on a uniform condition falls through, too": Case(
        80,
        (
            "LDG d=4 a=2 B------:R0:W1:Y:S15:---",
            # To the EXIT behind the store: (6 - 1 - 1) * 16 bytes on, with the two low bits a flag.
            f"BRA.DIV b=66 {PLAIN}",
            "FADD d=8 a=4 b=4 B-1----:R-:W-:Y:S15:---",
            f"FADD d=9 a=4 b=4 {PLAIN}",
            f"STG a=2 b=9 {PLAIN}",
            f"EXIT {PLAIN}",
            *END,
        ),
        (0, 1, 3, 2, 4, 5, 6, 7),
        frozenset({"wait"}),
    ),
    "FP64 without a scoreboard goes behind the operation that vouches for it": Case(
        80,
        (
            f"DADD d=10 a=6 c=6 {PLAIN}",
            "DADD d=12 a=8 c=8 B------:R-:W0:Y:S15:---",
            "FADD d=20 a=10 b=10 B0-----:R-:W-:Y:S15:---",
            f"STG a=2 b=20 {PLAIN}",
            *END,
        ),
        (1, 0, 2, 3, 4, 5),
        frozenset({"queue-order"}),
    ),
    "FP64 is read above the wait for the operation that vouches for it": Case(
        80,
        (
            f"DADD d=10 a=6 c=6 {PLAIN}",
            "DADD d=12 a=8 c=8 B------:R-:W0:Y:S15:---",
            "FADD d=20 a=12 b=12 B0-----:R-:W-:Y:S15:---",
            f"FADD d=21 a=10 b=10 {PLAIN}",
            f"STG a=2 b=21 {PLAIN}",
            *END,
        ),
        (0, 1, 3, 2, 4, 5, 6),
        frozenset({"wait"}),
    ),
    "a load from global memory does not vouch for one from shared memory": Case(
        80,
        (
            f"LDS d=10 a=30 {PLAIN}",
            "LDS d=11 a=31 B------:R-:W0:Y:S15:---",
            "LDG d=12 a=2 B------:R-:W1:Y:S15:---",
            "FADD d=20 a=12 b=12 B-1----:R-:W-:Y:S15:---",
            "FADD d=21 a=11 b=11 B0-----:R-:W-:Y:S15:---",
            f"FADD d=22 a=10 b=10 {PLAIN}",
            f"STG a=2 b=22 {PLAIN}",
            *END,
        ),
        (0, 1, 2, 3, 5, 4, 6, 7, 8),
        frozenset({"wait"}),
    ),
    "a load overwrites what a store to global memory may not have read yet": Case(
        80,
        (
            "STG a=2 b=9 B------:R0:W-:Y:S15:---",
            "FADD d=20 a=5 b=5 B0-----:R-:W-:Y:S15:---",
            "LDS d=9 a=30 B------:R-:W1:Y:S15:---",
            "FADD d=21 a=9 b=20 B-1----:R-:W-:Y:S15:---",
            *END,
        ),
        (0, 2, 1, 3, 4, 5),
        frozenset({"wait"}),
    ),
    "a load passes the wait for a fence to complete": Case(
        90,
        (
            "MEMBAR B------:R1:W-:Y:S15:---",
            "LDG d=5 a=2 B-1----:R3:W2:Y:S15:---",
            "LDG d=8 a=2 B------:R5:W4:Y:S15:---",
            "FADD d=9 a=5 b=8 B--2-4-:R-:W-:Y:S15:---",
            f"STG a=4 b=9 {PLAIN}",
            END[0],
        ),
        (0, 2, 1, 3, 4, 5),
        frozenset({"wait"}),
    ),
    "a bulk copy may read its uniform registers late": Case(
        90,
        (
            "UTMALDG B------:R1:W-:Y:S15:---",
            *(f"FADD d={register} a=5 b=8 {PLAIN}" for register in range(20, 25)),
            "UMOV d=20 B-1----:R-:W-:Y:S15:---",
            f"UMOV d=9 {PLAIN}",
            END[0],
        ),
        (0, 1, 2, 3, 4, 5, 7, 6, 8),
        frozenset({"wait"}),
    ),
    "a constant is not the reader of a kept operand": Case(
        80,
        (
            # The bits that would name the first operand of the move are those of R0.
            "FADD d=20 a=0 b=5 B------:R-:W-:-:S11:a--",
            f"MOV d=25 {PLAIN}",
            f"FADD d=21 a=0 b=6 {PLAIN}",
            f"STG a=2 b=21 {PLAIN}",
            *END,
        ),
        (2, 0, 1, 3, 4, 5),
        frozenset({"reuse"}),
    ),
}


def cubins(case: Case) -> tuple[bytes, bytes]:
    words = [assemble(case.architecture, line) for line in case.code]
    mutated = [words[i] for i in case.order]
    return hand_made(words, case.architecture), hand_made(mutated, case.architecture)


@pytest.mark.parametrize("name", exhaustive_but(CASES, next(iter(CASES))))
def test_a_hazard_is_seen(name):
    case = CASES[name]
    original, mutated = cubins(case)
    assert original != mutated
    assert {v.kind for v in check(original, mutated, disassemble)} & case.kinds
    # The game does not get there either.
    kernel = load(original, disassemble).kernel()
    slots = [slot for slot, index in enumerate(case.order) if slot != index]
    if case.kinds != {"reuse"}:
        assert any(
            case.order.index(u) > case.order.index(v)
            for constraints in constrain(kernel)
            for v, sources in constraints.predecessors.items()
            for u in sources
        ) or not set(slots) & set(Schedule(kernel).movable_slots)


@pytest.mark.parametrize(
    ("line", "changed", "kind"),
    exhaustive_but(
        [
            ("ERRBAR B------:R-:W-:Y:S00:---", "ERRBAR B------:R-:W-:Y:S05:---", "control"),
            ("BAR B------:R-:W-:Y:S15:---", "BAR B------:R-:W-:-:S02:---", "stall"),
        ],
        ("BAR B------:R-:W-:Y:S15:---", "BAR B------:R-:W-:-:S02:---", "stall"),
    ),
)
def test_how_long_a_synchronising_instruction_holds_is_kept(line, changed, kind):
    code = [f"FADD d=8 a=4 b=4 {PLAIN}", line, *[f"FADD d=9 a=8 b=4 {PLAIN}"] * 3, *END]
    original = [assemble(80, text) for text in code]
    mutated = [assemble(80, changed if text == line else text) for text in code]
    found = check(hand_made(original, 80), hand_made(mutated, 80), disassemble)
    assert {v.kind for v in found} == {kind}


@pytest.mark.exhaustive
def test_a_drain_stays_one_whatever_moves_around_it():
    adds = [f"FADD d={20 + i} a=4 b=4 {PLAIN}" for i in range(6)]
    code = [*adds[:3], "ERRBAR B------:R-:W-:Y:S00:---", *adds[3:], f"FADD d=30 a=25 b=22 {PLAIN}", *END]
    original = hand_made([assemble(80, text) for text in code], 80)
    program = load(original, disassemble)
    schedule = Schedule(program.kernel())
    schedule.play(next(schedule.legal_moves()))
    assert check(original, schedule.cubin(program), disassemble) == []
    assert schedule.control(3).stall == 0


def test_unpacking_some_predicates_does_not_hide_who_wrote_the_others():
    """The mask leaves P1 alone, so the guard reads the comparison, at whatever distance the unpacking is from both."""

    def code(comparison: str) -> bytes:
        words = [assemble(80, t) for t in (f"ISETP a=3 {comparison}", "R2P B------:R-:W-:-:S02:---")]
        guarded = assemble(80, f"FADD d=8 a=4 b=4 {PLAIN}") & ~0x7000 | 0x1000
        return hand_made([*words, guarded, *(assemble(80, t) for t in END)], 80)

    original = code("B------:R-:W-:Y:S13:---")
    found = check(original, code("B------:R-:W-:-:S06:---"), disassemble)
    assert {v.kind for v in found} == {"stall"}


def test_code_that_nothing_is_seen_to_lead_to_could_be_reached_from_everywhere():
    guarded = f"EXIT {PLAIN}"
    code = [assemble(80, text) for text in (f"FADD d=8 a=4 b=4 {PLAIN}", guarded, f"FADD d=9 a=8 b=4 {PLAIN}", *END)]
    code[1] &= ~0x7000
    # The disassembler leaves such code out where it knows that, so it is shown a guard that is not there.
    listing = disassemble(hand_made(code, 80)).replace("@P0 EXIT", "EXIT").replace("00000094d", "00000794d")
    code[1] |= 0x7000
    kernel = load(hand_made(code, 80), lambda _: listing).kernel()
    lost = next(block for block in kernel.blocks if block.start == 2)
    assert all(lost.index in block.successors for block in kernel.blocks)
    final = kernel.blocks[-1]
    assert [b.index for b in kernel.blocks if final.index in b.successors] == [final.index]


@pytest.mark.parametrize(
    ("opcode", "eviction", "modifier", "kinds"),
    [
        ("LDG", 0, "EF", set()),
        ("LDG", 2, "EL", set()),
        ("LDG", 3, "LU", {"hint"}),
        ("LDG", 4, "EU", set()),
        ("LDG", 5, "NA", set()),
        ("LDG", 6, None, {"encoding", "hint"}),
        ("LDG", 7, None, {"encoding", "hint"}),
        ("STG", 0, "EF", set()),
        ("STG", 5, "NA", set()),
        ("STRONG", 0, None, {"changed-instruction"}),
    ],
)
def test_a_cache_hint_is_free_where_it_only_advises(opcode, eviction, modifier, kinds):
    """The codes are those that ptxas emits for each policy of PTX."""
    words = [assemble(80, t) for t in ("LDG d=4 a=2 B------:R0:W1:Y:S15:---", "STG a=2 b=4 B-1----:R-:W-:Y:S15:---", *END)]
    slot = int(opcode == "STG")
    if opcode == "STRONG":
        words[0] |= 0xC000 << 64
    hinted = list(words)
    hinted[slot] = words[slot] & ~(7 << 84) | eviction << 84
    original, mutated = hand_made(words, 80), hand_made(hinted, 80)
    found = {v.kind for v in check(original, mutated, disassemble)}
    assert found <= kinds
    assert bool(found) == bool(kinds)
    schedule = Schedule(load(original, disassemble).kernel())
    move = HintEdit(slot, eviction ^ 1)
    assert schedule.is_legal(move) == (not kinds)
    if modifier is not None and not kinds:
        schedule.play(move)
        assert schedule.words() == [instruction.word for instruction in load(mutated, disassemble).kernel().instructions]
        assert modifier in load(mutated, disassemble).kernel().instructions[slot].modifiers
        schedule.undo()
        assert schedule.words()[slot] == words[slot]


def test_a_load_reads_its_descriptor_at_once_so_that_the_next_one_may_be_built():
    code = (
        f"UMOV d=6 {PLAIN}",
        "LDG d=9 a=2 B------:R0:W1:Y:S15:---",
        f"UMOV d=7 {PLAIN}",
        f"FADD d=8 a=5 b=5 {PLAIN}",
        END[0],
    )
    words = [assemble(90, text) for text in code]
    original = hand_made(words, 90)
    assert Schedule(load(original, disassemble).kernel()).movable_slots == (0, 1, 2, 3)
    words[1], words[2] = words[2], words[1]
    assert {v.kind for v in check(original, hand_made(words, 90), disassemble)} == {"uniform"}


@pytest.mark.parametrize(("architecture", "is_variable"), exhaustive_but([(80, True), (89, True), (90, False)], (80, True)))
def test_where_fp64_counts_on_scoreboards(architecture, is_variable):
    code = [assemble(80, text) for text in (f"DADD d=10 a=6 c=6 {PLAIN}", f"EXIT {PLAIN}")]
    kernel = load(hand_made(code, architecture), disassemble).kernel()
    double = kernel.instructions[0]
    assert double.opcode == "DADD"
    assert double.is_variable_latency is is_variable
    assert port_of(double).family == "slow"
