"""What modules of the package import and define. Several tests ask, and a process of tests reads each module once."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "kernelwright"
MODULE_NAME = re.compile(r"kernelwright(\.\w+)+")


@dataclass(frozen=True)
class Contents:
    """What tests ask of a module; its whole tree is not kept."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    """Wherever in it they stand."""
    named: tuple[str, ...]
    """Modules of the package that stand in a string: they are imported by their names at some time."""
    classes: tuple[tuple[str, tuple[str, ...]], ...]
    """Names, each with the last names of the bases."""
    has_docstring: bool


def contents(source: str) -> Contents:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return Contents(
        imports=tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)),
        named=tuple(text for text in strings if MODULE_NAME.fullmatch(text)),
        classes=tuple((node.name, _bases(node)) for node in nodes if isinstance(node, ast.ClassDef)),
        has_docstring=ast.get_docstring(tree) is not None,
    )


def _bases(node: ast.ClassDef) -> tuple[str, ...]:
    return tuple(base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases)


@functools.cache
def contents_of(path: Path) -> Contents:
    return contents(path.read_text(encoding="utf-8"))


def modules() -> list[Path]:
    """Those of the package."""
    return sorted(PACKAGE.rglob("*.py"))
