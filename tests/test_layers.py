"""The package's import arrows point one way: a part may import only from the layers below its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"

LAYERS = (
    {"errors", "files"},
    {"config"},
    {"records"},
    {"report", "tasks", "sass"},
    {"gpu"},
    {"judge"},
    {"pools"},
    {"rewrites", "models"},
    {"deploy"},
    {"contrastive", "assembly"},
    {"search"},
    {"api"},
    {"cli"},
    {"__main__"},
)
MODULE_NAME = re.compile(r"kernelwright(\.\w+)+")
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imported_parts(source: str) -> set[str]:
    """First-level parts of the package that a text imports, wherever in it; `recipes` is named as such."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "kernelwright":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide an arrow"
            names.add(_part(node.module or ""))
        elif isinstance(node, ast.Import):
            names |= {_part(alias.name) for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"kernelwright(\.\w+)+", node.value)
        ):
            # A module named in a string is imported by its name at some time.
            names.add(_part(node.value))
    return names - {""}


def _part(module: str) -> str:
    package, _, rest = module.partition(".")
    if package == "recipes":
        return package
    return rest.partition(".")[0] if package == "kernelwright" else ""


def wrong_arrows(part: str, source: str) -> list[str]:
    found = imported_parts(source) - {part}
    return sorted(name for name in found if RANK.get(name, len(LAYERS)) >= RANK[part])


MODULES = sorted(path for path in (SOURCES / "kernelwright").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCES / "kernelwright")))
def test_a_module_imports_only_from_below(path):
    part = path.relative_to(SOURCES / "kernelwright").parts[0].removesuffix(".py")
    if part == "__init__":
        pytest.skip("the package's front door names its verbs from every layer")
    assert part in RANK, f"{part} has no layer"
    assert wrong_arrows(part, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("records", "from kernelwright.search import optimize", ["search"]),
        ("sass", "def f():\n    import kernelwright.gpu.nvcc", ["gpu"]),
        ("records", "from kernelwright import report", ["report"]),
        ("cli", "import recipes.cuda_l1", ["recipes"]),
        ("judge", "from kernelwright.tasks import load_task\nimport torch", []),
        ("sass", "importlib.import_module('kernelwright.deploy.triton_jit')", ["deploy"]),
        ("search", "from kernelwright.nowhere import x", ["nowhere"]),
    ],
)
def test_the_test_itself_sees_arrows_that_point_upwards(part, source, wrong):
    assert wrong_arrows(part, source) == wrong


def test_machine_code_is_read_without_torch():
    modules = sorted(
        ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
        for path in (SOURCES / "kernelwright" / "sass").rglob("*.py")
        if "corpus" not in path.parts
    )
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
