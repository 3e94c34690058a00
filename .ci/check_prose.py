"""Checks how pages and docstrings are written: the length of sentences, and habits that CONTRIBUTING.md forbids.

At most a tenth of the sentences of a page, or of a folder's docstrings, may have more than 25 words. Code and marked blocks
that a program writes are left out. The cells of a table are searched for the habits alone.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
MOST_LONG = 0.1

HABITS = {
    "opens with What, Whether, Back or Who": r"^(?:What|Whether|Back|Who)\b(?!.*\?$)",
    "ends in since, so or then": r"(?<!say )(?<!says )(?<!do )(?<!does )\b(?:since|so|then)(?: that)?\.$",
    "is N of": r"\b(?:has|have) \d[\d.]*x? of\b",
    "instead of, alongside": r"\bin place of\b|\bby (?:looks|turns)\b|\bbeside (?:it|them|one another|others)\b",
    "acts like a person": r"\b(?:promises nothing|for nobody|that nobody|spells?|spelled|owes|owed)\b",
    "private word": r"\b(?:fifths|tenths|carried winners?)\b",
    "status column": r"\bwhich no GPU has run\b",
    "bare task number": r"\blevel \d, \d+\b(?! \()",
    "three claims in a chain": r"^(?=(?:\S+ ){25})(?:.*[;:] ){3}",
}
OPENERS_OF_DOCSTRINGS = {"opens with Of, Where or That": r"^(?:Of|Where|That)\b"}


def plain(text: str) -> str:
    """Markdown without its marks: a code span or a number is one word, a link is its words."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"``?[^`]+``?", "Code", text))
    return re.sub(r"[*_|]+|<[^>]+>", " ", text)


def sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph, list item, cell or docstring."""
    joined = " ".join(plain(paragraph).split())
    return [one for one in re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z(0-9])", joined) if one]


def of_page(text: str) -> Iterator[tuple[str, bool]]:
    """Parts of a Markdown page, each with whether it is prose; a table's cells are not."""
    text = re.sub(r"^```.*?^```$|<!-- (\w+): begin.*?<!-- \1: end[^>]*-->|^(?:    .*\n)+", "\n", text, flags=re.M | re.S)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[#|])", text):
        if part.startswith("|"):
            yield from ((cell, False) for cell in re.split(r"(?<!\\)\|", part) if cell.strip(" -\n"))
        elif not part.lstrip().startswith("#"):
            yield re.sub(r"^\s*(?:[-*]|\d+\.) ", "", part), True


def of_module(source: str) -> Iterator[tuple[str, bool]]:
    """Paragraphs of a module's docstrings, those below fields included."""
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\s*(?:>>>|\|))", child.value.value)
                yield from ((part, True) for part in parts if not re.match(r"\s*(?:>>>|\||    )", part))


def faults(parts: list[tuple[str, bool]], habits: dict[str, str]) -> tuple[list[str], list[str]]:
    """(Long sentences where they are more than a tenth, sentences with a habit)."""
    prose = [one for part, is_prose in parts if is_prose for one in sentences(part)]
    long = [f"{len(one.split())} words: {one}" for one in prose if len(one.split()) > MOST_WORDS]
    every = [one for part, _ in parts for one in sentences(part)]
    found = [f"{what}: {one}" for one in every for what, pattern in habits.items() if re.search(pattern, one)]
    return (long if len(long) > MOST_LONG * len(prose) else []), found


def texts() -> Iterator[tuple[str, list[tuple[str, bool]], dict[str, str]]]:
    """(Name, parts, habits) of each page and of each folder of the package."""
    for path in sorted(
        [
            *ROOT.glob("*.md"),
            *(ROOT / "docs").glob("*.md"),
            *(ROOT / "examples").rglob("*.md"),
            *(ROOT / "recipes").glob("*.md"),
        ]
    ):
        yield str(path.relative_to(ROOT)), list(of_page(path.read_text(encoding="utf-8"))), HABITS
    package = ROOT / "src" / "kernelwright"
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        parts = [part for path in sorted(folder.glob("*.py")) for part in of_module(path.read_text(encoding="utf-8"))]
        yield str(folder.relative_to(ROOT)), parts, HABITS | OPENERS_OF_DOCSTRINGS


def main() -> int:
    """Print the faults, and those of texts named as arguments. Returns 1 if the list and the texts that fail differ."""
    failed = False
    for name, parts, habits in texts():
        long, found = faults(parts, habits)
        is_wrong = bool(long or found)
        if name in sys.argv[1:] or is_wrong:
            print(f"{name}: {len(long)} long sentences, {len(found)} habits", *long, *found, sep="\n  ")
        failed |= is_wrong
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
