"""Reads and fixes the knobs that a candidate's source declares, so that a search can tune it without knowing what it does.

A declaration is an assignment at the module's top level to `KNOBS`, or to a name that begins with `KNOBS_`: a literal
dictionary from each knob to a tuple of its choices. The source takes the first one, as in `KNOBS["block"][0]`:

    KNOBS = {"block": (128, 64, 256), "stages": (3, 2)}

To fix a knob is to leave one choice in its tuple. Nothing of the source is executed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any

_SHOWN = 120
"""Characters of a choice that a record shows."""
Choices = dict[str, tuple[Any, ...]]


def knobs_of(source: str) -> Choices:
    """Choices of every knob, by the names of its declaration and its own, such as `KNOBS.block`."""
    found = _declarations(source).items()
    return {f"{name}.{knob}": choices for name, (_, declared) in found for knob, choices in declared.items()}


def fixed(source: str, values: Mapping[str, Any]) -> str:
    """The source with these knobs, by names as in `knobs_of`, left with one choice each."""
    text = source.encode("utf-8")
    # From the end, so that earlier places stay where they are.
    for name, (node, declared) in sorted(_declarations(source).items(), key=lambda one: -one[1][0].lineno):
        left = {knob: (values[key],) if (key := f"{name}.{knob}") in values else all_ for knob, all_ in declared.items()}
        starts = [0, *(place + 1 for place, byte in enumerate(text) if byte == ord("\n"))]
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        text = text[:begin] + repr(left).encode("utf-8") + text[end:]
    return text.decode("utf-8")


def shown(source: str) -> dict[str, str]:
    """Values of the knobs that a source takes, for a record."""
    return {name: repr(choices[0])[:_SHOWN] for name, choices in knobs_of(source).items()}


@functools.lru_cache(maxsize=64)
def _declarations(source: str) -> dict[str, tuple[ast.expr, Choices]]:
    if "KNOBS" not in source:
        return {}
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[str, tuple[ast.expr, Choices]] = {}
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if (name == "KNOBS" or name.startswith("KNOBS_")) and (choices := _choices(node.value)):
                found[name] = node.value, choices
    return found


def _choices(value: ast.expr) -> Choices | None:
    try:
        literal = ast.literal_eval(value)
        repr(literal)  # an integer of thousands of digits cannot be written down
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(literal, dict) or not literal:
        return None
    right = all(isinstance(knob, str) and isinstance(choices, tuple) and choices for knob, choices in literal.items())
    return literal if right else None
