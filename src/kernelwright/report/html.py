"""Fills the pages of runs: self-contained files, escaped by Jinja, under a policy that lets nothing else in."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from kernelwright.errors import UsageError
from kernelwright.files import replace_file

LINE_LIMIT = 3000
CHARACTER_LIMIT = 300_000
"""Matching takes quadratic time on repetitive text, and a candidate chooses its own text."""

Span = tuple[str, int, int, int, int]
"""(tag, first line before, end before, first line after, end after); `tag` as difflib has it."""


def fill(
    name: str, *, style: str, script: str | None = None, filters: Mapping[str, Callable[..., str]], **values: Any
) -> str:
    """The page of a template of this package.

    The page's policy allows this style and this script alone. Values are escaped unless they are `Markup`.
    """
    engine = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    engine.filters |= filters
    allowed = f"style-src {_hash(style)}; " + ("" if script is None else f"script-src {_hash(script)}; ")
    return engine.from_string(asset(name)).render(
        policy=f"default-src 'none'; {allowed}base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=None if script is None else Markup(script),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )


def write_page(text: str, target: Path) -> Path:
    """Write a page to `target` in one step, and return `target`; raises UsageError where it cannot be written."""
    try:
        replace_file(target, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"Wanted to write the report to {target}, found: {error.strerror}. Choose another file.") from error
    return target


def asset(name: str) -> str:
    """The text of a file of this package."""
    return resources.files("kernelwright.report").joinpath(name).read_text(encoding="utf-8")


def flattened(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The leaves of nested objects with their dotted names, as text."""
    lines: list[tuple[str, str]] = []
    for name, item in value.items():
        if isinstance(item, dict) and item:
            lines += flattened(item, f"{prefix}{name}.")
        else:
            lines.append((f"{prefix}{name}", item if isinstance(item, str) else json.dumps(item)))
    return lines


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def differing_spans(before: str, after: str) -> list[Span] | None:
    """Edits from the lines of `before` to those of `after`; None when a text is too long to compare."""
    if max(len(before), len(after)) > CHARACTER_LIMIT:
        return None
    old, new = before.splitlines(), after.splitlines()
    if max(len(old), len(new)) > LINE_LIMIT:
        return None
    return list(difflib.SequenceMatcher(None, old, new, autojunk=True).get_opcodes())
