"""Computes line differences between two sources, as spans that the page draws from the texts it already holds."""

from __future__ import annotations

import difflib

LINE_LIMIT = 3000
CHARACTER_LIMIT = 300_000
"""Matching takes quadratic time on repetitive text, and a candidate chooses its own text."""

Span = tuple[str, int, int, int, int]
"""(tag, first line before, end before, first line after, end after); `tag` as difflib has it."""


def spans(before: str, after: str) -> list[Span] | None:
    """Edits from the lines of `before` to those of `after`; None when a text is too long to compare."""
    if max(len(before), len(after)) > CHARACTER_LIMIT:
        return None
    old, new = before.splitlines(), after.splitlines()
    if max(len(old), len(new)) > LINE_LIMIT:
        return None
    return list(difflib.SequenceMatcher(None, old, new, autojunk=True).get_opcodes())
