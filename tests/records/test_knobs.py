"""Knobs that a candidate's source declares."""

from __future__ import annotations

import pytest

from kernelwright.records.knobs import fixed, knobs_of, shown

SOURCE = '''"""Größe."""
KNOBS = {"block": (128, 64), "stages": (3, 2)}  # the first is taken
KNOBS_SECOND = {
    "tile": ({"m": 64}, {"m": 128}),
}
OTHER = {"a": (1, 2)}
size = KNOBS["block"][0] * KNOBS_SECOND["tile"][0]["m"]
'''


def test_knobs_are_read_and_fixed_without_running_anything():
    assert knobs_of(SOURCE) == {
        "KNOBS.block": (128, 64),
        "KNOBS.stages": (3, 2),
        "KNOBS_SECOND.tile": ({"m": 64}, {"m": 128}),
    }
    text = fixed(SOURCE, {"KNOBS.block": 64, "KNOBS_SECOND.tile": {"m": 128}})
    assert knobs_of(text) == {"KNOBS.block": (64,), "KNOBS.stages": (3, 2), "KNOBS_SECOND.tile": ({"m": 128},)}
    assert "# the first is taken" in text
    names = {}
    exec(text, names)
    assert names["size"] == 64 * 128
    assert shown(text) == {"KNOBS.block": "64", "KNOBS.stages": "3", "KNOBS_SECOND.tile": "{'m': 128}"}
    assert fixed(SOURCE, {}).splitlines()[-1] == SOURCE.splitlines()[-1]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "KNOBS = 3",
        "KNOBS = {}",
        "KNOBS = {'form': 'tma'}",
        "KNOBS = {'block': ()}",
        "KNOBS = {'block': (f(), 2)}",
        "KNOBS = {1: (2, 3)}",
        "def f():\n    KNOBS = {'block': (1, 2)}",
        "KNOBS = {'block': (1, 2)} if",
        f"KNOBS = {{'block': (0x{'F' * 5000}, 2)}}",
    ],
)
def test_what_is_no_declaration_has_no_knobs(source):
    assert knobs_of(source) == {}
    assert fixed(source, {"KNOBS.block": 2}) == source
