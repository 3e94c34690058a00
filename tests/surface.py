"""What users rely on, as data: public signatures, options of commands, and the output of representative commands.

`python -m tests.surface` writes `tests/golden/surface.json`, which `tests/cli/test_surface.py` compares with the code.
A change of that file is a change for users, and its commit says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import lzma
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

import kernelwright
from kernelwright import cli
from tests.samples import diagonal

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "surface.json"

TASK = diagonal(96)
NEW = TASK.split("def get_inputs")[0].replace("class Model(", "class ModelNew(")
FILES = {
    "task.py": TASK,
    "good.py": NEW.replace("torch.diag(a) @ b", "a[:, None] * b"),
    "wrong.py": NEW.replace("torch.diag(a) @ b", "a * b"),
    "broken.py": "class ModelNew(:\n",
    "own/diag_matmul.py": NEW.replace("torch.diag(a) @ b", "a[:, None] * b"),
    "loose.toml": "processes_minimum = 3\n",
    "broken.toml": "= 3\n",
    "range.toml": "blocks = 1\n",
    "empty.jsonl": "",
}


@dataclass(frozen=True)
class Invocation:
    """A command line, run in a folder with `FILES`, a published run and two cubins."""

    line: str
    reads_run: str = ""
    """The run directory it writes, whose files belong to the answer."""


INVOCATIONS = (
    Invocation("--version"),
    Invocation("doctor --json"),
    Invocation("evaluate task.py good.py --device cpu --check-only --json --out accepted", "accepted"),
    Invocation("evaluate task.py good.py --device cpu --processes 2 --out timed", "timed"),
    Invocation("evaluate task.py wrong.py --device cpu --check-only --json --out rejected"),
    Invocation("evaluate task.py broken.py --device cpu --check-only --out rejected"),
    Invocation("evaluate task.py absent.py --device cpu"),
    Invocation("evaluate absent.py good.py --device cpu"),
    Invocation("evaluate task.py good.py --device cpu --settings loose.toml"),
    Invocation("evaluate task.py good.py --device gpu"),
    Invocation("evaluate task.py good.py --check-only --processes 3"),
    Invocation("evaluate task.py good.py --strict-fp32 --tf32-products"),
    Invocation("evaluate task.py good.py --allow fastest"),
    Invocation("evaluate task.py good.py --timeout nan"),
    Invocation("evaluate task.py good.py --proceses 3"),
    Invocation("optimize task.py --device cpu --budget 1 --judge 1 --out found --check-only --json", "found"),
    Invocation("optimize task.py --device cpu --budget 1 --judge 1 --out found --check-only"),
    Invocation("optimize task.py --device cpu --sass-budget 3"),
    Invocation("optimize task.py --device cpu --model nobody --out none"),
    Invocation("optimize task.py --device cpu --policy local --out none"),
    Invocation(
        "bench builtin --only diag_matmul --device cpu --check-only --candidates own --baselines eager --out suite --json",
        "suite",
    ),
    Invocation("bench builtin --only diag_matmul --device cpu --check-only --candidates own --baselines eager --out suite"),
    Invocation("bench builtin --slice 6/5"),
    Invocation("bench builtin --levels a"),
    Invocation("bench builtin --minutes 3"),
    Invocation("bench builtin --check-only --baselines compile"),
    Invocation("bench nothing --device cpu"),
    Invocation("train sft"),
    Invocation("train sft --config absent.toml --out none"),
    Invocation("train nothing --config absent.toml"),
    Invocation("report nowhere"),
    Invocation("report published --out page.html"),
    Invocation("rescore published"),
    Invocation("rescore published --json"),
    Invocation("rescore changed"),
    Invocation("rescore changed --json"),
    Invocation("rescore nowhere"),
    Invocation("serve --port 70000"),
    Invocation("sass compile corpus:row_sum --architecture sm_80 --out row_sum.cubin --json"),
    Invocation("sass compile corpus:nothing --out none.cubin"),
    Invocation("sass show row_sum.cubin --json"),
    Invocation("sass show row_sum.cubin --kernel nothing"),
    Invocation("sass show task.py"),
    Invocation("sass play row_sum.cubin --moves 3 --out played.cubin --json"),
    Invocation("sass play row_sum.cubin --moves 3 --out played.cubin"),
    Invocation("sass check row_sum.cubin played.cubin --json"),
    Invocation("sass check row_sum.cubin played.cubin"),
    Invocation("sass check row_sum.cubin other.cubin --json"),
    Invocation(
        "sass optimize row_sum.cubin --backend static-issue-cycles --agent greedy --budget 10 --out game --json", "game"
    ),
    Invocation("sass optimize row_sum.cubin --backend static-issue-cycles --agent greedy --budget 10 --out game"),
    Invocation("sass optimize row_sum.cubin --backend simulated-issue --agent random --budget 5 --out game-2 --json"),
    Invocation("sass optimize row_sum.cubin --agent winner --backend static-issue-cycles --out none"),
    Invocation("sass optimize row_sum.cubin --out none"),
    Invocation("report game --out game.html"),
    Invocation("rescore game"),
    Invocation("sass deploy game"),
    Invocation("sass deploy nowhere"),
    Invocation("sass cache list --cache cache --json"),
    Invocation("sass cache list --cache cache"),
    Invocation("sass cache remove abc --cache cache"),
)
VARIES = {"checks", "timing_blocks", "spent_s"}
"""Keys below which a record holds what depends on the machine and the time."""
REFUSED = tuple(
    Invocation(line.strip())
    for line in """
        evalute
        zzzz
        --nonsense
        evaluate
        evaluate task.py
        evaluate task.py good.py more.py
        evaluate task.py good.py --against-compile
        evaluate task.py good.py --processes 0
        evaluate task.py good.py --processes four
        evaluate task.py good.py --timeout 0
        evaluate task.py good.py --timeout ten
        evaluate task.py good.py --timeout
        evaluate task.py good.py --check-only --timeout 1e300 --device cpu
        evaluate task.py good.py --contract kernelbnch
        evaluate task.py good.py --jsn
        evaluate task.py good.py --budget 3
        evaluate task.py good.py --forbid wraper-only
        evaluate task.py good.py --settings absent.toml
        evaluate task.py good.py --settings broken.toml
        evaluate task.py good.py --settings range.toml
        evaluate task.py good.py --settings range.toml --check-only
        evaluate task.py good.py --device cpu --out task.py
        evaluate diag_matmull good.py --device cpu
        optimize task.py --budget 4.5
        optimize task.py --budget 0
        optimize task.py --exemplars 99
        optimize task.py --device cpu --policy nonsense --out none
        optimize task.py --sass-agent ppo
        train
        train sfft
        bench nonsense --device cpu --out none
        bench builtin --levels , --device cpu --out none
        bench builtin --levels 9 --device cpu --out none
        bench builtin --baselines compil --limit 1 --device cpu --out none
        bench kernelbench --device cpu --out none
        bench kernelbench --path nowhere --device cpu --out none
        bench cuda-l1 --path empty.jsonl --device cpu --out none
        bench builtin --limit 0 --out none
        bench builtin --slice 0/5
        bench builtin --slice 1/٥
        bench builtin --slice 5
        bench builtin --only diag_matmul --slice 2/2 --device cpu --out none
    """.strip().splitlines()
)
"""Command lines that are refused with one line, and leave nothing."""
PUBLISHED = "2026-11-27-strict-convolutions-h200"


def surface() -> dict[str, Any]:
    """Signatures, options and answers, as `surface.json` holds them."""
    return {"functions": functions(), "commands": commands(), "invocations": answers()}


def functions() -> dict[str, Any]:
    """Signatures of what the package exports, and of what the pages, examples and recipes import from it."""
    exported = {name: getattr(kernelwright, name) for name in kernelwright.__all__}
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]):
        for module, names in re.findall(
            r"^ *from (kernelwright[\w.]*) import ([\w, ]+)$", path.read_text(encoding="utf-8"), re.M
        ):
            for name in names.split(", "):
                exported[name] = getattr(importlib.import_module(module), name)
    return {name: _described(value) for name, value in sorted(exported.items()) if callable(value)}


def _described(value: Any) -> Any:
    if not inspect.isclass(value):
        return _signature(value)
    if issubclass(value, BaseModel):
        fields = {
            name: "required" if field.is_required() else _value(field.get_default())
            for name, field in value.model_fields.items()
        }
        return {"fields": fields}
    methods = {
        name: _signature(method)
        for name, method in inspect.getmembers(value, inspect.isfunction)
        if not name.startswith("_") and method.__module__.startswith("kernelwright")
    }
    return {"made by": _signature(value), **methods}


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except ValueError:
        return "none"
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"\b(?:kernelwright|pathlib)\.(?:\w+\.)+", "", text)


def _value(value: Any) -> str:
    return str(sorted(map(str, value))) if isinstance(value, set | frozenset) else str(value)


def commands() -> dict[str, Any]:
    """Every command's help and options."""
    return {
        path: {"help": _digest(command.help or ""), "short": command.get_short_help_str(200), "options": _options(command)}
        for path, command in _commands_below(cli.group, click.Context(cli.group), "kernelwright")
    }


def _commands_below(command: click.Command, context: click.Context, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands_below(below, context, f"{path} {name}")


def _options(command: click.Command) -> list[dict[str, Any]]:
    described = []
    for parameter in command.params:
        about = parameter.to_info_dict()
        kept = {key: about.get(key) for key in ("opts", "type", "required", "nargs", "multiple", "is_flag")}
        kept["default"] = _value(parameter.default)
        kept["help"] = _digest(about.get("help") or "")
        kept["metavar"] = parameter.metavar
        described.append(kept)
    return described


def answers() -> dict[str, Any]:
    """Exit status, keys of the JSON, lines of the text and errors of each invocation, in order, in one new folder."""
    found = {}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _fill(Path(folder))
            for invocation in (*INVOCATIONS, *REFUSED):
                found[invocation.line] = _answer(invocation)
            assert not Path("none").exists(), "a refused command leaves nothing"
        finally:
            os.chdir(here)
    return found


def _fill(folder: Path) -> None:
    """Write the files that the invocations name."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in ("published", "changed"):
        (folder / name).mkdir()
        for file in (ROOT / "results" / PUBLISHED).iterdir():
            if file.is_file():
                (folder / name / file.name).write_bytes(file.read_bytes())
    records = folder / "changed" / "evaluations.jsonl.xz"
    text = lzma.decompress(records.read_bytes()).decode()
    records.write_bytes(lzma.compress(re.sub(r'"speedup":(\d)', r'"speedup":9\1', text).encode()))
    _call("sass compile corpus:softmax --architecture 80 --out other.cubin")


def _answer(invocation: Invocation) -> dict[str, Any]:
    status, out, error = _call(invocation.line)
    answer: dict[str, Any] = {"status": status}
    if "--json" in invocation.line and out:
        answer["json"] = _shape(json.loads(out))
    elif out:
        answer["lines"] = sorted({_first_word(line) for line in out.splitlines() if not line.startswith("near miss")})
    if status >= 2:
        assert (out, error.count("\n")) == ("", 1), f"{invocation.line} says more than one line: {out}{error}"
        answer["error"] = re.sub(r"/\S*/", "/", error.strip().splitlines()[-1])
    if invocation.reads_run:
        answer["files"] = _files(Path(invocation.reads_run))
    return answer


def _first_word(line: str) -> str:
    return re.sub(r"\d[\d.,]*", "N", next(iter(line.split()), ""))


def _call(line: str) -> tuple[int, str, str]:
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = cli.main(line.split())
    return status, out.getvalue(), error.getvalue()


def _files(run: Path) -> dict[str, Any]:
    """Names of a run's files, with the shape of what is JSON in them."""
    shapes: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = re.sub(r"[0-9a-f]{12,}", "HASH", str(path.relative_to(run)))
        if path.name == "environment.json" or not path.is_file() or path.name.startswith("."):
            continue
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            shapes[name] = _shape([json.loads(line) for line in lines])
        elif path.suffix == ".json":
            shapes[name] = _shape(json.loads(path.read_text(encoding="utf-8")))
        else:
            shapes[name] = "file"
    return shapes


def _shape(value: Any) -> Any:
    """Keys and types of a JSON value; objects of a list are merged into one."""
    if isinstance(value, dict):
        return {key: type(part).__name__ if key in VARIES else _shape(part) for key, part in value.items()}
    if isinstance(value, list):
        shapes = [_shape(part) for part in value]
        if shapes and all(isinstance(shape, dict) for shape in shapes):
            return [{key: next(shape[key] for shape in shapes if key in shape) for shape in shapes for key in shape}]
        return sorted({str(shape) for shape in shapes})
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def _digest(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:12]


def written(value: dict[str, dict[str, Any]]) -> str:
    """The golden file's text: an entry a line."""
    sections = []
    for name, entries in value.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items()]
        sections.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(sections) + "}\n"


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(written(surface()))
