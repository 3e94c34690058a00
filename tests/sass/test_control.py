"""Control words: layout, encodability, and the disassembler's own reading of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.sass.instruction import CONTROL_MASK, WORD_MASK, ControlWord

words = st.integers(0, WORD_MASK)
scoreboards = st.none() | st.integers(0, 5)
controls = st.builds(
    ControlWord,
    st.integers(0, 15),
    st.booleans(),
    scoreboards,
    scoreboards,
    st.integers(0, 63),
    st.integers(0, 7),
)


@given(words, controls)
def test_a_control_word_survives_encoding_and_touches_nothing_else(word, control):
    encoded = control.encode(word)
    assert ControlWord.decode(encoded) == control
    assert encoded & ~CONTROL_MASK == word & ~CONTROL_MASK


@given(controls.filter(ControlWord.is_encodable), st.integers(1, 15))
def test_a_new_stall_leaves_an_encodable_word(control, stall):
    changed = control.with_stall(stall)
    assert changed.stall == stall
    assert changed.is_encodable()
    assert (changed.write_barrier, changed.read_barrier, changed.wait_mask) == (
        control.write_barrier,
        control.read_barrier,
        control.wait_mask,
    )


@pytest.mark.parametrize(
    ("high", "text"),
    [
        (0x000FE400078E00FF, "B------:R-:W-:-:S02:---"),
        (0x000E620000002100, "B------:R-:W1:-:S01:---"),
        (0x008EE20000001000, "B---3--:R-:W3:-:S01:---"),
        (0x040FE400078E020B, "B------:R-:W-:-:S02:a--"),
        (0x000FCA00078E00FF, "B------:R-:W-:Y:S05:---"),
    ],
)
def test_words_of_real_code(high, text):
    assert str(ControlWord.decode(high << 64)) == text


@pytest.mark.parametrize(
    ("changes", "encodable"),
    [
        ({"stall": 12, "yields": False}, False),
        ({"stall": 12, "yields": True}, True),
        ({"stall": 0, "yields": False}, False),
        ({"stall": 4, "yields": True, "reuse": 1}, False),
        ({"stall": 4, "yields": False, "reuse": 7}, True),
    ],
)
def test_what_the_hardware_has_no_code_for(changes, encodable):
    base = {
        "stall": 1,
        "yields": False,
        "write_barrier": None,
        "read_barrier": None,
        "wait_mask": 0,
        "reuse": 0,
    }
    assert ControlWord(**base | changes).is_encodable() is encodable


def test_the_disassembler_reads_the_same_fields():
    """For compute capability 12.0 nvdisasm 12.8 printed the control fields itself; that of CUDA 13.1 no longer does."""
    recorded = (Path(__file__).parent / "control_notes.txt").read_text().splitlines()
    compared = 0
    for high, _, notes in (line.partition(" ") for line in recorded if not line.startswith("#")):
        control = ControlWord.decode(int(high, 16) << 64)
        fields = dict(re.findall(r"&(\w+)=(\S+)", notes))
        assert control.write_barrier == (int(fields["wr"], 16) if "wr" in fields else None)
        assert control.read_barrier == (int(fields["rd"], 16) if "rd" in fields else None)
        waited = {int(n) for n in fields.get("req", "{}").strip("{}").split(",") if n}
        assert {i for i in range(6) if control.wait_mask >> i & 1} == waited
        stall = re.search(r"\?(?:trans(\d+)|WAIT(\d+)_END_GROUP)", notes)
        if stall:
            assert control.stall == int(stall[1] or stall[2])
            assert control.yields == (stall[2] is not None)
            compared += 1
    assert compared > 100
