"""Chooses among a test's parameters: `make test` runs some of them, `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def exhaustive_but(values: Iterable[object], *kept: object) -> list[object]:
    """All values as parameters, those that are not kept with the marker `exhaustive`.

    Args:
        values: For a test of several arguments, tuples.
        kept: What `make test` runs.

    Raises:
        ValueError: one to be kept is not among the values.
    """
    listed = list(values)
    for one in kept:
        if one not in listed:
            raise ValueError(f"Wanted to keep one of {listed}; found {one!r}.")
    several = [value if isinstance(value, tuple) else (value,) for value in listed]
    marks = [() if value in kept else pytest.mark.exhaustive for value in listed]
    return [pytest.param(*values, marks=mark) for values, mark in zip(several, marks, strict=True)]
