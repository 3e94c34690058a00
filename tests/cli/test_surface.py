"""Public signatures, options and answers are those of `tests/golden/surface.json`, which `tests/surface.py` makes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.surface import GOLDEN, answers, commands, functions

EXPECTED: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())


@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize(("part", "now"), [("functions", functions), ("commands", commands), ("invocations", answers)])
def test_the_surface_is_as_before(part, now):
    actual, expected = json.loads(json.dumps(now())), EXPECTED[part]
    assert {name: value for name, value in actual.items() if value != expected.get(name)} == {}
    assert set(expected) - set(actual) == set()
