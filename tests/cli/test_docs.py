"""The documents say what the program does: codes, fields, options and settings are all described."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import click
import pytest

from kernelwright import cli
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Contract, Evaluation, Label, Reason, Task, TimingBlock

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def first_cells(text: str) -> set[str]:
    """Code spans in the first cells of a page's tables."""
    cells = re.findall(r"^\| ([^|]*(?:\\\|[^|]*)*) \|", text, re.MULTILINE)
    return {code.split()[0] for cell in cells for code in re.findall(r"`([^`]+)`", cell)}


def test_every_reason_label_and_contract_has_a_line():
    described = first_cells(page("verdicts.md"))
    assert {*Reason, *Label, *Contract} - described == set()


def test_no_line_describes_a_code_that_does_not_exist():
    assert first_cells(page("verdicts.md")) <= {*Reason, *Label, *Contract}


@pytest.mark.parametrize("record", [Evaluation, TimingBlock, Task, Candidate])
def test_every_field_of_a_record_is_described(record):
    written = {field.serialization_alias or field.alias or name for name, field in record.model_fields.items()}
    assert written - first_cells(page("record-format.md")) == set()


def test_every_setting_is_described_and_no_other():
    section = page("cli.md").partition("## Settings of the judge")[2]
    assert first_cells(section) == set(Settings.model_fields)


def test_every_setting_is_described_with_its_default():
    section = page("cli.md").partition("## Settings of the judge")[2]
    described = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE))
    found = Settings()
    values = found.model_dump(mode="json") | {"tf32_products": found.tf32_products}  # which is written where it is on
    assert {name: json.loads(value) for name, value in described.items()} == values


@pytest.mark.parametrize("name", [name for name in cli.group.commands_at if name != "sass"])
def test_every_command_and_option_is_described(name):
    command = cli.group.get_command(click.Context(cli.group), name)
    text = page("cli.md")
    assert f"## kernelwright {name}" in text
    options = {option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts}
    missing = {option for option in options if f"{option}`" not in text and f"{option} " not in text}
    assert {option for option in missing if f"{option}]" not in text} == set()


def sass_commands(group: click.Group, name: str) -> list[tuple[str, click.Command]]:
    found = []
    for part, command in group.commands.items():
        named = f"{name} {part}"
        found += sass_commands(command, named) if isinstance(command, click.Group) else [(named, command)]
    return found


SASS = sass_commands(cli.group.get_command(click.Context(cli.group), "sass"), "sass")


@pytest.mark.parametrize(("name", "command"), SASS, ids=[name for name, _ in SASS])
def test_every_command_and_option_of_sass_is_described(name, command):
    assert f"| `{name} " in page("cli.md") or f"| `{name}`" in page("cli.md")
    text = "".join(page(one) for one in ("cli.md", "sass.md", "assembly-game.md", "deploy.md"))
    options = {option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts}
    assert {option for option in options if f"`{option}`" not in text and f"`{option} " not in text} == set()


def test_agents_that_play_are_the_documented_ones():
    from kernelwright.assembly.agents import AGENTS

    described = re.findall(r"^\| `--sass-agent NAME` \| (.*) \|$", page("cli.md"), re.MULTILINE)[0]
    assert {word for word in re.findall(r"`(\w+)`", described)} == set(AGENTS)
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


def test_no_option_is_described_that_does_not_exist():
    context = click.Context(cli.group)
    commands = [cli.group.get_command(context, name) for name in cli.group.commands_at if name != "sass"]
    commands += [command for _, command in SASS]
    known = {option for command in commands for parameter in command.params for option in parameter.opts}
    described = {cell for cell in first_cells(page("cli.md")) if cell.startswith("--")}
    assert described <= known


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
