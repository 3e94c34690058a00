"""The pages' commands: every option exists, and every block of the pages for users runs on a CPU as it is pasted.

A block whose first line is `# needs SOMETHING: why` is not run, since a test has no GPU, key or network. A Python block
whose first line is `# NAME.py` is that file; any other is a script of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from kernelwright import cli

ROOT = Path(__file__).parents[2]
RUN = ("README", "start", "your-model", "triton", "models", "training", "sass", "rewards", "deploy")
"""Pages of which every block runs."""
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("*.md")])
LIMIT_S = 1800
MOST_LEFT_OUT = 15


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def needs(self) -> str | None:
        """What its first line says that it needs."""
        found = re.match(r"# needs (a GPU|a key|the network|nvcc): \S", self.text)
        return found[1] if found else None

    @property
    def runs(self) -> bool:
        return self.needs is None or bool(shutil.which(self.needs))

    @property
    def file(self) -> str | None:
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else None


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    page = path.name if path.parent in (ROOT, ROOT / "docs") else f"{path.parent.name}/{path.name}"
    return [Block(page, text[: m.start()].count("\n") + 1, m[1], m[2]) for m in found]


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
SHELL = [block for block in BLOCKS if block.language in ("sh", "console")]


def command_lines(block: Block) -> list[list[str]]:
    """The words of a block's commands, without comments, prompts, variables in front and what follows a pipe or a `&`."""
    joined = block.text.replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in joined.splitlines()]
    return [
        shlex.split(re.split(r"\s[|&>]", line)[0], comments=True)
        for line in lines
        if "kernelwright " in line or ".py " in line
    ]


def documented(program: str) -> list[tuple[str, list[str]]]:
    """Where a page runs a program, and the words behind its name."""
    return [
        (f"{block.page}:{block.line}", words[number + 1 :])
        for block in SHELL
        for words in command_lines(block)
        for number, word in enumerate(words[:2])
        if re.fullmatch(program, word)
    ]


def command_of(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    command: click.Command = cli.group
    context = click.Context(command, info_name="kernelwright")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, found, words = command.resolve_command(context, words)
        command, context = found, click.Context(found, parent=context)
    return command, context, words


@pytest.mark.parametrize(("where", "words"), documented(r"(\.venv/bin/)?kernelwright"))
def test_commands_of_the_program_parse(where, words):
    command, context, rest = command_of(words)
    command.make_context(command.name, rest, parent=context.parent)


@pytest.mark.parametrize(("where", "words"), documented(r"(\.venv/bin/)?python"))
def test_scripts_exist_and_know_their_options(where, words):
    script = words[0]
    source = (ROOT / script).read_text(encoding="utf-8")
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert {option for option in options if f'"{option}"' not in source} == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_options_of_commands_in_sentences_exist(path):
    for span in re.findall(r"`kernelwright ([^`\n]+)`", path.read_text(encoding="utf-8")):
        words = re.split(r"[\s|\[\]]+", span)
        command, _, _ = command_of([word for word in itertools.takewhile(str.islower, words) if word.isalpha()])
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known | {"--help", "--version"}, span


def test_few_blocks_need_what_a_test_does_not_have():
    left_out = [block for block in BLOCKS if block.page.removesuffix(".md") in RUN and not block.runs]
    assert len(left_out) <= MOST_LEFT_OUT
    assert [block for block in BLOCKS if block.text.startswith("# needs") and not block.needs] == []


def script_of(blocks: list[Block], folder: Path) -> str:
    """A shell script that runs blocks in order, as somebody pastes them."""
    lines = ["set -e"]
    for number, block in enumerate(blocks):
        if not block.runs:
            continue
        lines.append(f"echo '>>> {block.page}:{block.line}' $SECONDS s >&2")
        if block.language == "python":
            path = folder / (block.file or f"block_{number}.py")
            path.write_text(block.text, encoding="utf-8")
            lines += [] if block.file else [f"python {path.name}"]
        elif block.language == "sh":
            lines.append(block.text)
    return "\n".join([*lines, "echo '>>> end' $SECONDS s >&2"])


def checkout(folder: Path) -> None:
    """What `git clone` and `make setup` leave in a folder."""
    for path in ROOT.iterdir():
        if path.name in (
            "Makefile",
            "pyproject.toml",
            "benchmarks",
            "docs",
            "examples",
            "recipes",
            "results",
            "src",
            "tests",
        ):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (folder / ".venv" / ".ready").touch()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUN)
def test_every_block_runs_as_it_is_pasted(name, tmp_path):
    checkout(tmp_path)
    script = script_of([block for block in BLOCKS if block.page == f"{name}.md"], tmp_path)
    environment = os.environ | {
        "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}",
        "KERNELWRIGHT_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    with (tmp_path / "output").open("w+") as output:
        running = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = running.wait(LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGTERM)  # a service that a block has started
        output.seek(0)
        said = output.read()
    print("\n".join(line for line in said.splitlines() if line.startswith(">>> ")))
    assert status == 0, said[-4000:]
