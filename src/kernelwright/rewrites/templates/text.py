"""Reads the text of kernels, which lies in files beside this one, and fills in its places."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

FOLDER = Path(__file__).parent


@functools.cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def kernel_text(*names: str, **values: object) -> str:
    """Text of files one after another, with a value at each place that is written `$name` or `${name}`.

    Raises:
        KeyError: a place has no value.
    """
    joined = "".join(map(_read, names))
    return filled(joined, **values) if values else joined


@functools.cache
def knob_table(template: str) -> dict[str, Any]:
    """Knobs of a template that are worth a look, from `knobs.toml`."""
    table: dict[str, Any] = tomllib.loads(_read("knobs.toml"))[template]
    return table


def filled(text: str, **values: object) -> str:
    """The text with a value at each of its places.

    Raises:
        KeyError: a place has no value.
    """
    return Template(text).substitute(values)


def raw_literal(text: str) -> str:
    """Python text of a raw string that begins on a line of its own."""
    return f'r"""\n{text}"""'


def block(head: str, lines: Iterable[str]) -> list[str]:
    """Statements under the head of a loop, a function or a condition."""
    return [head, *(f"    {line}" for line in lines)]
