"""Writes tables of docs/ from the code and the published records, each between marks. `--check` only says which differ."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kernelwright import cli, errors
from kernelwright.cli.commands import OptionsCommand
from kernelwright.cli.model_options import ModelOptions
from kernelwright.cli.options import JudgeOptions
from kernelwright.judge import Settings
from kernelwright.models.chat import Completion, ModelAnswer, Sampling
from kernelwright.records import Evaluation, Label, Reason

DOCS = Path(__file__).parents[1] / "docs"
MARKED = re.compile(r"(<!-- generated: begin (\S+) -->\n).*?(<!-- generated: end \2 -->)", re.DOTALL)
SASS = DOCS.parent / "results" / "sass-h200"
PAPERS = ("softmax", "rmsnorm", "gemm_leakyrelu", "batched_gemm", "fused_feed_forward", "attention_mma")
"""Kernels of CuAsmRL's paper."""
STAGES = {"sft": "SupervisedConfig", "self-supervised": "SelfSupervisedConfig", "contrastive": "ContrastiveConfig"}


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown below a line such as `a | b`; bars in cells are escaped."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {head} |", "|" + "---|" * (head.count("|") + 1), *(f"| {line} |" for line in lines)])


def one_line(text: str | None) -> str:
    """A docstring as one line."""
    return " ".join((text or "").split())


def docstrings(kind: type) -> dict[str, str]:
    """What stands below each field of a class and of its bases in the package."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("kernelwright"):
            continue
        tree = ast.parse(Path(importlib.import_module(base.__module__).__file__ or "").read_text(encoding="utf-8"))
        (body,) = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == base.__name__]
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[ast.unparse(field.target)] = one_line(below.value.value)
    return found


def default_of(field: FieldInfo) -> str:
    """The default of a setting, as JSON in a code span."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{json.dumps(sorted(value) if isinstance(value, frozenset) else value, default=str)}`"


def is_table(field: FieldInfo) -> bool:
    """True for a setting that is a table of settings."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def settings(kind: type[BaseModel]) -> str:
    """Settings that are no tables, with their defaults."""
    about = docstrings(kind)
    rows = [(name, field) for name, field in kind.model_fields.items() if not is_table(field)]
    return table("key | default | meaning", ((f"`{name}`", default_of(field), about[name]) for name, field in rows))


def sections(kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """(Name, kind) of the tables of a stage's file, those inside others included."""
    for name, field in kind.model_fields.items():
        if is_table(field):
            inner: Any = field.annotation
            yield name, inner
            yield from ((f"{name}.{deeper}", section) for deeper, section in sections(inner))


def training_settings() -> str:
    """Keys of every stage's file, and of the files beside it."""
    from kernelwright.contrastive import settings as module
    from kernelwright.contrastive.held_out import HeldOutConfig

    parts, shared = [], {}
    for stage, name in STAGES.items():
        kind = getattr(module, name)
        tables = ", ".join(f"`[{section}]`" for section, _ in sections(kind))
        parts.append(f"## {stage}\n\n{one_line(kind.__doc__)}\n\n{settings(kind)}\n\nTables: {tables}.")
        for section in sections(kind):
            shared.setdefault(section, []).append(stage)
    for (section, kind), stages in shared.items():
        where = "" if len(stages) == len(STAGES) else f" ({', '.join(stages)})"
        parts.append(f"## [{section}]{where}\n\n{settings(kind)}")
    parts.append(f"## [[augmentation.models]]\n\n{settings(module.TeacherSection)}")
    parts.append(f"## recipes/held_out.toml\n\n{settings(HeldOutConfig)}")
    return "\n\n".join(parts)


def fields(place: str) -> str:
    """Keys of a record. Keys without words mean the same as in an evaluation, a model's answer or the judge's settings."""
    module, _, name = place.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    elsewhere = (Evaluation, Settings, Sampling, Completion, ModelAnswer, kind)
    about = {name: text for one in elsewhere for name, text in docstrings(one).items()}
    names = getattr(kind, "model_fields", None) or kind.__dataclass_fields__
    return table("key | meaning", ((f"`{name}`", about[name]) for name in names))


def members(place: str) -> str:
    """Members of an enumeration, in the words that stand below them."""
    module, _, name = place.rpartition(".")
    source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    (body,) = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name]
    rows = [
        (f"`{ast.literal_eval(member.value)}`", one_line(str(ast.literal_eval(below.value))))
        for member, below in itertools.pairwise(body)
        if isinstance(member, ast.Assign) and isinstance(below, ast.Expr)
    ]
    return table("name | meaning", rows)


def codes(kind: type[Reason] | type[Label]) -> str:
    """Reasons or labels, in words."""
    if kind is Reason:
        return table("reason | meaning | to change", ((f"`{one}`", one.meaning, one.hint) for one in Reason))
    return table("label | meaning", ((f"`{one}`", one.meaning) for one in Label))


def options(parameters: Iterable[click.Parameter]) -> str:
    """Options of a command."""
    rows = []
    for one in parameters:
        if isinstance(one, click.Option):
            kind = "N" if isinstance(one.type, click.types.IntParamType) else one.type.name.upper()
            choices = "|".join(map(str, one.type.choices)) if isinstance(one.type, click.Choice) else kind
            default = f" Default: {one.default}." if one.show_default and not one.is_flag else ""
            shown = "" if one.is_flag else f" {one.metavar or choices}"
            rows.append((f"`{', '.join(one.opts)}{shown}`", one_line(one.help) + default))
    return table("option | meaning", rows)


def shared(kind: type) -> list[click.Parameter]:
    """Options that several commands share."""
    return OptionsCommand("", kind).params


def command(words: str) -> str:
    """A command's help: how it is called, what it does, and the options that are its own."""
    context = click.Context(cli.group, info_name="kernelwright")
    for word in words.split():
        assert isinstance(context.command, click.Group)
        found = context.command.get_command(context, word)
        assert found is not None, words
        context = click.Context(found, info_name=word, parent=context)
    usage = f"`{' '.join([context.command_path, *context.command.collect_usage_pieces(context)])}`"
    text = [one_line(part) for part in re.split(r"\n\s*\n", (context.command.help or "").strip())]
    elsewhere = {flag for kind in (JudgeOptions, ModelOptions) for one in shared(kind) for flag in one.opts}
    own = [one for one in context.command.params if isinstance(one, click.Option) and not elsewhere & {*one.opts}]
    return "\n\n".join([usage, *text, *([options(own)] if own else [])])


def commands(group: click.Group, path: str) -> Iterator[tuple[str, str]]:
    """(Command, first line of its help) of a group, those of groups in it included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, f"{path} {name}")
        else:
            yield f"{path} {name}", one_line((found.help or "").split("\n\n")[0])


def sass_gain() -> str:
    """Gain of the assembly game on published kernels, and the time that it took."""
    kernels = json.loads((SASS / "summary.json").read_text(encoding="utf-8"))["per_kernel"]
    times = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(SASS.glob("*/*/times.json"))]
    seconds = statistics.median(agent["seconds"] for one in times for agent in one.values())
    rows = []
    for what, chosen in (
        ("all kernels of the run", [*kernels]),
        ("those of CuAsmRL's paper", [name for name in kernels if name in PAPERS]),
        ("float32 products", [name for name in kernels if name.startswith("sgemm")]),
        ("others", [name for name in kernels if name not in PAPERS and not name.startswith("sgemm")]),
    ):
        gains = [kernels[name]["speedup"] for name in chosen]
        faster = sum(kernels[name]["deployed"] for name in chosen)
        mean = statistics.geometric_mean(gains)
        rows.append((what, f"{faster} of {len(gains)}", f"{mean:.3f}x", f"{min(gains):.2f}x to {max(gains):.2f}x"))
    said = (
        f"On {len(kernels)} kernels chosen for headroom, H200, best of six agents with 1,000 schedules each, over "
        f"`ptxas -O3` ([run](../results/sass-h200)). One agent took {seconds:.0f} s for a kernel (median), while up to "
        "twelve searches shared a GPU; confirming and deploying come on top. Six kernels without headroom were left out."
    )
    return f"{said}\n\n{table('kernels | got faster | geomean | from, to', rows)}"


def written(name: str) -> str:
    """The text between the marks of a name."""
    kind, _, what = name.partition(":")
    match kind:
        case "commands":
            group = cli.group.get_command(click.Context(cli.group), what) if what else cli.group
            assert isinstance(group, click.Group)
            listed = commands(group, f"kernelwright {what}".strip())
            return table("command | what it does", ((f"`{command}`", about) for command, about in listed))
        case "command":
            return command(what.replace("-", " "))
        case "fields":
            return fields(what)
        case "members":
            return members(what)
        case "settings":
            module, _, name = what.rpartition(".")
            return settings(getattr(importlib.import_module(module), name))
    return {
        "judge-options": lambda: options(shared(JudgeOptions)),
        "model-options": lambda: options(shared(ModelOptions)),
        "judge-settings": lambda: settings(Settings),
        "training-settings": training_settings,
        "sass-gain": sass_gain,
        "reasons": lambda: codes(Reason),
        "labels": lambda: codes(Label),
        "errors": lambda: "    KernelwrightError\n"
        + (errors.__doc__ or "").split("KernelwrightError\n")[1].split("\n\n")[0],
    }[name]()


def main() -> int:
    """Write the pages anew, or with `--check` say which of them are out of step."""
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        fresh = MARKED.sub(lambda found: f"{found[1]}\n{written(found[2])}\n\n{found[3]}", text)
        if fresh != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(fresh, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"{', '.join(stale)}: out of step with the code; run `python .ci/make_reference.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
