"""Every package that the sources import is declared in pyproject.toml, as a dependency or in an extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from tests.package import Contents, contents, contents_of

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py"}
"""Imported under another name than they are installed under."""


def imported_packages(module: Contents) -> set[str]:
    """First parts of what a module imports, wherever in it, the standard library left out."""
    names: set[str] = set()
    for node in module.imports:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif node.module:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"kernelwright", "recipes"}


def declared_packages(text: str) -> set[str]:
    project = tomllib.loads(text)["project"]
    extras = (one for name, extra in project["optional-dependencies"].items() if name != "dev" for one in extra)
    return {re.match(r"[\w.-]+", one)[0].lower() for one in (*project["dependencies"], *extras)}


def undeclared(imported: set[str], declared: set[str]) -> set[str]:
    return {name for name in imported if DISTRIBUTIONS.get(name, name.replace("_", "-")) not in declared}


def test_every_import_is_declared():
    declared = declared_packages((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    sources = (path for folder in ("src", "recipes") for path in (ROOT / folder).rglob("*.py"))
    imported = set().union(*(imported_packages(contents_of(path)) for path in sources))
    assert {"torch", "jinja2"} <= imported
    assert undeclared(imported, declared) == set()


def test_the_test_itself_sees_what_is_not_declared():
    text = '[project]\ndependencies = ["torch>=2"]\n[project.optional-dependencies]\nray = ["ray>=2,<3"]\ndev = ["pytest"]\n'
    imported = imported_packages(contents("import torch.nn, os\ndef f():\n    from ray.util import x\n    import pytest"))
    assert undeclared(imported, declared_packages(text)) == {"pytest"}
