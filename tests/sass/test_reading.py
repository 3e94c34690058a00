"""Containers, listings and instructions: what is read, and what is refused with a typed error."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.errors import UsageError
from kernelwright.gpu import disassemble
from kernelwright.sass import CubinError, ListingError, load
from kernelwright.sass.elf import read_cubin
from kernelwright.sass.instruction import parse_listing
from kernelwright.sass.opcodes import Pipe
from kernelwright.sass.scoreboards import analyse_scoreboards
from tests.quick import exhaustive_but
from tests.sass.support import ALL_SAMPLES, build, compiled


@pytest.mark.parametrize(("name", "architecture"), exhaustive_but(ALL_SAMPLES, ("softmax", 90)))
def test_a_kernel_is_read_whole_and_written_back_unchanged(name, architecture):
    sample = build(name, architecture)
    kernel = sample.kernel
    assert sample.program.image.architecture == architecture
    assert sample.with_words(sample.words) == sample.cubin
    assert [i for b in kernel.blocks for i in range(b.start, b.stop)] == list(range(len(kernel.instructions)))
    assert all(i.is_certain for i in kernel.instructions), "text and live ranges disagree"
    assert {i.text for i in kernel.instructions if i.opcode == "?"} == set()
    # Every transfer of control ends its block and is pinned, as is what the side tables list.
    for index, instruction in enumerate(kernel.instructions):
        if instruction.opcode in ("BRA", "EXIT", "CALL", "RET"):
            assert index in kernel.fixed
            assert index + 1 in {b.stop for b in kernel.blocks}
        if instruction.address in kernel.code.listed_offsets:
            assert index in kernel.fixed


@pytest.mark.parametrize(("name", "architecture"), exhaustive_but(ALL_SAMPLES, ("softmax", 90)))
def test_the_scoreboard_model_explains_the_assembler(name, architecture):
    """Every consumer of a variable-latency result is found protected, so nothing is left to luck."""
    kernel = build(name, architecture).kernel
    facts = analyse_scoreboards(kernel.instructions, kernel.blocks)
    assert facts.unprotected == set()
    assert len(facts.cleared) > 40


@pytest.mark.exhaustive
def test_the_corpus_has_the_instructions_it_is_for():
    def opcodes(name, architecture):
        return {i.opcode for i in build(name, architecture).kernel.instructions}

    assert {"HMMA", "LDGSTS", "LDSM", "LDGDEPBAR", "DEPBAR"} <= opcodes("gemm_leakyrelu", 80)
    assert {"HGMMA", "WARPGROUP"} <= opcodes("attention_wgmma", 90)
    assert {"HMMA"} <= opcodes("attention_mma", 90)
    assert {"FFMA"} <= opcodes("sgemm", 90)
    assert "HMMA" not in opcodes("sgemm", 80)
    assert {"SHFL", "BAR"} <= opcodes("softmax", 89)


def test_instructions_are_typed():
    by_text = {i.text: i for i in build("gemm_leakyrelu", 80).kernel.instructions}
    copy = next(i for i in by_text.values() if i.opcode == "LDGSTS")
    assert copy.modifiers == ("E", "BYPASS", "128")
    assert copy.predicate is None
    assert not copy.defs
    assert len(copy.uses) == 6, "shared address, 64-bit global address, hidden descriptor pair, predicate"
    fused = next(i for i in by_text.values() if i.opcode == "HMMA")
    assert fused.traits.pipe is Pipe.TENSOR
    assert len(fused.defs) == 4
    guarded = next(i for i in by_text.values() if i.predicate and i.opcode == "IMAD")
    assert guarded.defs < guarded.uses, "a guarded result keeps its old value when the guard is false"
    assert guarded.predicate.lstrip("!") in guarded.uses


def test_a_predicate_file_operand_stands_for_all_predicates():
    unpack = next(i for i in build("sgemm", 80).kernel.instructions if i.opcode == "R2P")
    assert unpack.defs == {f"P{i}" for i in range(7)}


@pytest.mark.parametrize("junk", [b"", b"\x7fELF", b"not a cubin" * 100, b"\x7fELF\x02\x01\x01" + bytes(200)])
def test_what_is_no_cubin_is_refused(junk):
    with pytest.raises(CubinError, match="wanted"):
        read_cubin(junk)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda good: b"\x50\xed\x55\xba" + good, "found a fatbinary; take one out"),
        (lambda good: good + bytes(4096), "found 4096 more bytes behind its last section"),
        (lambda good: good[:56] + bytes(2) + good[58:], "without program headers; link it"),
    ],
    ids=["fatbinary", "trailing bytes", "no program headers"],
)
def test_containers_that_are_no_cubin_alone_are_named(change, words):
    with pytest.raises(CubinError, match=words):
        read_cubin(change(compiled("softmax", 80)))


@pytest.mark.parametrize("new_format", [False, True])
@pytest.mark.parametrize("architecture", [75, 103, 121])
def test_an_architecture_that_is_not_supported_is_named_before_it_is_disassembled(architecture, new_format):
    data = bytearray(compiled("softmax", 80))
    data[48:50] = (0, architecture) if new_format else (architecture, data[49])
    if new_format:
        data[7:9] = (0x41, 8)
    message = (
        rf"^wanted a cubin for one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, found one for sm_{architecture}; compile"
    )
    with pytest.raises(CubinError, match=message):
        load(bytes(data), lambda _: pytest.fail("the disassembler was asked"))


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_a_damaged_container_is_read_or_refused(seed, flips):
    """Random damage to the container never raises anything but a typed error."""
    rng = random.Random(seed)
    data = bytearray(compiled("softmax", 80))
    headers = [*range(64), *range(len(data) - 1600, len(data))]
    for _ in range(flips):
        data[rng.choice(headers) if rng.random() < 0.8 else rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    try:
        image = read_cubin(bytes(data))
    except CubinError:
        return
    assert all(len(image.code_bytes(c)) == c.section.size_bytes for c in image.code)


@pytest.mark.exhaustive
@given(st.integers(0, 2**32))
@settings(max_examples=4, deadline=None)
def test_damaged_code_is_read_or_refused(seed):
    """Random damage to the code goes through the disassembler and still ends in a typed error."""
    rng = random.Random(seed)
    sample = build("softmax", 80)
    section = sample.kernel.code.section
    data = bytearray(sample.cubin)
    for _ in range(rng.choice((1, 3, 30))):
        data[section.offset_bytes + rng.randrange(section.size_bytes)] = rng.randrange(256)
    try:
        program = load(bytes(data), disassemble)
    except (UsageError, ListingError):
        return
    assert program.with_words({}) == bytes(data)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_cut_or_garbled_listing_is_read_or_refused(seed):
    rng = random.Random(seed)
    sample = build("softmax", 80)
    lines = _listing().splitlines()
    for _ in range(rng.randrange(1, 5)):
        where = rng.randrange(len(lines))
        lines[where] = rng.choice(("", lines[where][: rng.randrange(len(lines[where]) + 1)], lines[where][::-1]))
    if rng.random() < 0.5:
        del lines[rng.randrange(len(lines)) :]
    with suppress(CubinError, ListingError):
        load(sample.cubin, lambda _: "\n".join(lines))


def _listing() -> str:
    from tests.sass.support import remembering

    return remembering(compiled("softmax", 80))


def test_a_listing_without_live_ranges_is_an_infrastructure_error():
    sample = build("softmax", 80)
    bare = "\n".join(line.partition("// ")[0] for line in _listing().splitlines())
    with pytest.raises(ListingError, match="live ranges") as caught:
        load(sample.cubin, lambda _: bare)
    assert caught.value.exit_status == 3


def test_marks_are_read_by_column():
    table = """
\t.section\t.text.k,"ax",@progbits
                                     // +------------------+---------+
                                     // |       GPR        |  PRED   |
                                     // |   0000000000111  |         |
                                     // |  # 0123456789012 |  # 01   |
k:                                   // |                  |         |
        /*0000*/  @P1 IADD3 R12, R0, R2, RZ ;   /* 0x0000000000000001 */  // |                  |         |
                          /* 0x0000000000000002 */  // |  3 v:v:        ^ |  2 :v   |
.L_x_7:                              // |                  |         |
        /*0010*/  EXIT ;   /* 0x0000000000000003 */  // |                  |         |
                          /* 0x0000000000000004 */  // |  1  :            |         |
"""
    kernel = parse_listing(table)["k"]
    first, second = kernel.instructions
    assert first.text == "@P1 IADD3 R12, R0, R2, RZ"
    assert first.word == 1 | 2 << 64
    assert (first.defs, first.uses) == ({"R12"}, {"R0", "R2", "P1"})
    assert kernel.labels == {".L_x_7": second.address}
