"""The package's import arrows point one way: a part imports only from the layers below its own, and no two modules import
one another, deferred, type-only and dynamic imports included."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from tests.package import Contents, contents, contents_of, modules

SOURCES = Path(__file__).parents[1] / "src"

LAYERS = (
    {"errors", "files", "cores", "seconds", "version"},
    {"config"},
    {"records"},
    {"report", "tasks", "sass"},
    {"gpu"},
    {"judge"},
    {"execution"},
    {"rewrites", "models"},
    {"deploy"},
    {"contrastive", "assembly"},
    {"search"},
    {"api"},
    {"cli", "dynamo"},
    {"__main__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imported_parts(module: Contents) -> set[str]:
    """First-level parts of the package that a module imports, wherever in it; `recipes` is named as such."""
    names = {_part(name) for name in module.named}
    for node in module.imports:
        if isinstance(node, ast.Import):
            names |= {_part(alias.name) for alias in node.names}
        elif node.module == "kernelwright":
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, "relative imports hide an arrow"
            names.add(_part(node.module or ""))
    return names - {""}


def _part(module: str) -> str:
    package, _, rest = module.partition(".")
    if package == "recipes":
        return package
    return rest.partition(".")[0] if package == "kernelwright" else ""


def wrong_arrows(part: str, module: Contents) -> list[str]:
    found = imported_parts(module) - {part}
    return sorted(name for name in found if RANK.get(name, len(LAYERS)) >= RANK[part])


MODULES = modules()
FRONT_DOOR = "kernelwright"
"""Python imports it before any module of the package. It names the verbs of every layer."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(module: Contents, known: Collection[str]) -> set[str]:
    """Modules of the package that a module imports, wherever in it, by their full names."""
    found = {name if name in known else name.rpartition(".")[0] for name in module.named}
    for node in module.imports:
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in names}
        else:
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in known}


def circle_in(given: Mapping[str, Contents]) -> list[str]:
    """Modules of which each imports the next and the last the first; none where there is no such circle."""
    graph = {name: imported_modules(module, given.keys()) - {name, FRONT_DOOR} for name, module in given.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_a_module_imports_only_from_below():
    wrong = {}
    for path in MODULES:
        part = path.relative_to(SOURCES / "kernelwright").parts[0].removesuffix(".py")
        if part == "__init__":  # the package's front door names its verbs from every layer
            continue
        assert part in RANK, f"{part} has no layer"
        wrong[module_name(path)] = wrong_arrows(part, contents_of(path))
    assert {name: found for name, found in wrong.items() if found} == {}
    assert len(wrong) > 100


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("records", "from kernelwright.search import optimize", ["search"]),
        ("sass", "def f():\n    import kernelwright.gpu.compilers", ["gpu"]),
        ("records", "from kernelwright import report", ["report"]),
        ("cli", "import recipes.cuda_l1", ["recipes"]),
        ("judge", "from kernelwright.tasks import load_task\nimport torch", []),
        ("sass", "importlib.import_module('kernelwright.deploy.triton_jit')", ["deploy"]),
        ("search", "from kernelwright.nowhere import x", ["nowhere"]),
    ],
)
def test_the_test_itself_sees_arrows_that_point_upwards(part, source, wrong):
    assert wrong_arrows(part, contents(source)) == wrong


def test_no_two_modules_import_one_another():
    assert circle_in({module_name(path): contents_of(path) for path in MODULES}) == []


def test_the_test_itself_sees_circles():
    sources = {
        "kernelwright.a": "from kernelwright import b",
        "kernelwright.b": "if TYPE_CHECKING:\n    from kernelwright.c import D",
        "kernelwright.c": "def f():\n    importlib.import_module('kernelwright.a')",
    }
    given = {name: contents(source) for name, source in sources.items()}
    assert {*circle_in(given)} == {*given}
    assert circle_in(given | {"kernelwright.c": contents("import kernelwright")}) == []


def test_a_report_reads_records_alone():
    found = {part for path in MODULES if path.parent.name == "report" for part in imported_parts(contents_of(path))}
    assert found == {"report", "records", "errors", "files"}


def test_machine_code_is_read_without_torch():
    modules = [module_name(path) for path in MODULES if path.is_relative_to(SOURCES / "kernelwright" / "sass")]
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


TESTS = Path(__file__).parent
NO_COUNTERPART = {"exploits"}
"""The corpus of cheats against the judge."""


def test_every_folder_of_tests_has_a_counterpart_in_the_package():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}
    without = {str(folder) for folder in folders if not (SOURCES / "kernelwright" / folder).is_dir()}
    assert without == NO_COUNTERPART
