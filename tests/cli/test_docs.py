"""The documents say what the program does: codes, fields, options and settings are all described."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from kernelwright import cli
from kernelwright.records import Contract

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def first_cells(text: str) -> set[str]:
    """Code spans in the first cells of a page's tables."""
    cells = re.findall(r"^\| ([^|]*(?:\\\|[^|]*)*) \|", text, re.MULTILINE)
    return {code.split()[0] for cell in cells for code in re.findall(r"`([^`]+)`", cell)}


def test_every_contract_has_a_line():
    assert set(Contract) <= first_cells(page("verdicts.md"))


def test_every_command_has_a_section():
    for name in cli.group.commands_at:
        assert f"## kernelwright {name}\n" in page("cli.md")


def test_agents_that_play_are_the_documented_ones():
    from kernelwright.assembly.agents import AGENTS

    assert set(AGENTS) <= first_cells(page("assembly-game.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_names_of_the_package_in_pages_exist(path):
    for name in sorted(set(re.findall(r"`(kernelwright(?:\.\w+)+)", path.read_text(encoding="utf-8")))):
        *modules, last = name.split(".")
        for length in range(len(modules), 0, -1):
            try:
                found = importlib.import_module(".".join(modules[:length]))
            except ModuleNotFoundError:
                continue
            for part in modules[length:]:
                found = getattr(found, part)
            assert hasattr(found, last) or importlib.import_module(name), name
            break


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_to_files_and_headings_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, heading = target.partition("#")
        there = (path.parent / name) if name else path
        assert there.exists(), f"{path.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", found).strip().lower().replace(" ", "-") for found in headings}
            assert heading in slugs, f"{path.name} links to {target}"


def test_the_folder_map_names_folders_that_exist():
    folders = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for cell in folders for name in re.findall(r"`([^`]+/)`", cell)}
    packages = {
        f"src/kernelwright/{path.name}/"
        for path in (ROOT / "src" / "kernelwright").iterdir()
        if path.is_dir() and any(path.glob("*.py"))
    }
    assert packages <= named
    assert {name for name in named if not (ROOT / name).is_dir()} == set()


def test_the_readme_names_the_two_commands_that_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) < 125


def test_the_example_in_the_start_page_is_a_task_and_a_candidate():
    from kernelwright.tasks.source import check_task_source

    _, task, candidate, *_ = re.findall(r"```python\n(.*?)```", page("start.md"), re.DOTALL)
    check_task_source(task, "start.md")
    assert "class ModelNew(torch.nn.Module)" in candidate
    compile(candidate, "start.md", "exec")


def test_every_published_folder_has_a_row_in_the_index_and_no_other():
    rows = re.findall(
        r"^\| \[([^\]]+)\]\(([^)]+)\)", (ROOT / "results" / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert all(text == target for text, target in rows)
    assert {target for _, target in rows} == {path.name for path in (ROOT / "results").iterdir() if path.is_dir()}


def test_the_readme_fits_on_a_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_examples_import_of_the_package_exists(path):
    for module, names in re.findall(
        r"^from (kernelwright[\w.]*) import (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE
    ):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")
