"""Commands whose options are the fields of a dataclass, groups of them, and wrong usage explained in one line.

A command is a dataclass whose docstring is its help:

    @dataclass(frozen=True, kw_only=True)
    class ServeCommand:
        port: int = option(8730, type=click.IntRange(0, 65535), metavar="N", help="0 takes any free one.")
        judge: JudgeOptions

        def __call__(self) -> None: ...

    command = OptionsCommand("serve", ServeCommand)
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from kernelwright.files import has_text_name

_NO_NUMBER = re.compile(r"'(?P<found>.*)' is not a valid (?:integer|float)(?: range)?\.", re.DOTALL)
_OUTSIDE = re.compile(r"(?P<found>\S+) is not in the range .*")
_NEAR = 0.75
"""Likeness from which an option is a likely slip of the one that was typed. Our choice."""


class FiniteRange(click.FloatRange):
    """A range of numbers without NaN and infinity, which `click.FloatRange` lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; fails where there is none."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"wanted a finite number, found {value}.", param, ctx)
        return number


class NamedPath(click.Path):
    """A path as a `Path`.

    Refuses an empty text, as of a variable that is not set, which would be the working directory; and a name whose bytes are
    not UTF-8, which no record can hold.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails where the text is empty or not UTF-8."""
        if value == "":
            self.fail("wanted a path, found an empty text.", param, ctx)
        if isinstance(value, str) and not has_text_name(value):
            self.fail("wanted a path that is UTF-8 text, found other bytes in it. Rename the file.", param, ctx)
        return super().convert(value, param, ctx)


def option(default: Any = None, flag: str = "", **about: Any) -> Any:
    """A field of a dataclass that is an option of a command.

    Args:
        default: Value where the option is not given; shown in the help where it is a number or a text.
        flag: The option, where it is not the field's name.
        **about: Arguments of `click.Option`. The type follows from the field's where none is given.
    """
    return field(default=default, metadata={"flag": flag, "about": about})


def argument(**about: Any) -> Any:
    """A field of a dataclass that is an argument of a command, with arguments of `click.Argument`."""
    return field(metadata={"flag": None, "about": about})


class OptionsCommand(click.Command):
    """A command whose arguments and options are the fields of a dataclass, and whose work is done by calling it.

    A call may return the exit status.

    Args:
        name: Name of the command.
        made: The dataclass. A field that is a dataclass itself stands for the fields of that.
        short_help: Line in the list of commands.
    """

    def __init__(self, name: str, made: type, *, short_help: str | None = None) -> None:
        super().__init__(name, params=list(_parameters(made)), help=made.__doc__, short_help=short_help)
        self.made = made

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with the values that were given."""
        return ctx.invoke(_filled(self.made, ctx.params))


def _parameters(model: type) -> Iterator[click.Parameter]:
    hints = get_type_hints(model)
    for part in fields(model):
        hint = hints[part.name]
        if not part.metadata:
            yield from _parameters(hint)
        elif part.metadata["flag"] is None:
            yield click.Argument([part.name], **(_type(hint) | part.metadata["about"]))
        else:
            flag = part.metadata["flag"] or f"--{part.name.replace('_', '-')}"
            is_shown = isinstance(part.default, int | float | str | Path) and hint is not bool
            shown = {"default": part.default, "show_default": True} if is_shown else {}
            yield click.Option([flag, part.name], **(_type(hint) | shown | part.metadata["about"]))


def _type(hint: Any) -> dict[str, Any]:
    """The type of a parameter, from a field's; `tuple[str, ...]` may be given several times."""
    if hint == tuple[str, ...]:
        return {"multiple": True}
    if hint is bool:
        return {"is_flag": True}
    kinds = {kind for kind in get_args(hint) if kind is not type(None)} or {hint}
    return {"type": NamedPath()} if kinds == {Path} else {"type": kinds.pop()} if kinds <= {int, str} else {}


def _filled(model: type, values: Mapping[str, Any]) -> Any:
    """The dataclass with the values of its options."""
    hints = get_type_hints(model)
    given = {}
    for part in fields(model):
        hint = hints[part.name]
        given[part.name] = values[part.name] if part.metadata else _filled(hint, values)
    return model(**given)


class HelpfulGroup(click.Group):
    """A click group that names the nearest command where there is none of a name."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that `args` starts with.

        Raises:
            click.UsageError: there is none; the message names the nearest ones.
        """
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}."
            raise click.UsageError(f"wanted a command, found `{name}`; {hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(HelpfulGroup):
    """A group whose commands are named by module.

    Args:
        commands_at: Command name to (module, one-line help), in the order of the listing. The module defines
            `command`.
    """

    def __init__(self, *args: Any, commands_at: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands_at = dict(commands_at)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order they were given."""
        return list(self.commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or None when there is none of that name."""
        if cmd_name not in self.commands_at:
            return None
        command: click.Command = importlib.import_module(self.commands_at[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self.commands_at.items()])


def explained(error: click.UsageError) -> str:
    """The message of a usage error, without the word `error`."""
    where = error.ctx.command_path if error.ctx else "kernelwright"
    message = _message(error)
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{where} --help`."


def _message(error: click.UsageError) -> str:
    if isinstance(error, click.MissingParameter):
        return _missing(error)
    if isinstance(error, click.NoSuchOption):
        return _unknown_option(error)
    if isinstance(error, click.BadParameter):
        name = error.param.opts[0] if isinstance(error.param, click.Option) else _argument(error)
        return f"{name}: {_bad_value(error)}" if name else _bad_value(error)
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in error.message:
        return f"wanted a value after {error.option_name}, found none"
    extra = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message, re.DOTALL)
    if extra and error.ctx is not None:
        return f"wanted `{_synopsis(error.ctx)}`, found more: {extra[1]}"
    return error.format_message()


def _missing(error: click.MissingParameter) -> str:
    names = _argument(error) if isinstance(error.param, click.Argument) else _option(error)
    given = f"; the command is `{_synopsis(error.ctx)}`" if error.ctx is not None else ""
    return f"wanted {names}, found none{given}"


def _argument(error: click.BadParameter) -> str:
    if not isinstance(error.param, click.Argument):
        return ""
    if isinstance(error.param.type, click.Choice):
        return f"one of {', '.join(error.param.type.choices)}" if isinstance(error, click.MissingParameter) else ""
    return error.param.make_metavar(error.ctx) if error.ctx is not None else str(error.param.name).upper()


def _option(error: click.BadParameter) -> str:
    if not isinstance(error.param, click.Option):
        return "another argument"
    return f"{error.param.opts[0]} {error.param.metavar or ''}".strip()


def _synopsis(ctx: click.Context) -> str:
    return " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])


def _unknown_option(error: click.NoSuchOption) -> str:
    known = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx is not None else []
    near = difflib.get_close_matches(error.option_name, [name for name in known if name.startswith("--")], n=1, cutoff=_NEAR)
    return f"wanted an option that exists, found {error.option_name}" + (f"; did you mean {near[0]}?" if near else "")


def _bad_value(error: click.BadParameter) -> str:
    """Wanted and found value of an option or argument."""
    kind = error.param.type if error.param is not None else None
    if isinstance(kind, click.Choice) and (match := re.match(r"'(.*?)' is not one of", error.message, re.DOTALL)):
        near = difflib.get_close_matches(match[1], kind.choices, n=1)
        return f"wanted one of {', '.join(kind.choices)}, found `{match[1]}`" + (
            f"; did you mean {near[0]}?" if near else ""
        )
    match = _NO_NUMBER.fullmatch(error.message) or _OUTSIDE.fullmatch(error.message)
    if kind is None or match is None:
        return error.message
    whole = isinstance(kind, click.types.IntParamType)
    return f"wanted a {'whole ' if whole else ''}number{_range(kind)}, found `{match['found']}`"


def _range(kind: object) -> str:
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    low = f"{'above' if kind.min_open else 'of at least'} {kind.min}"
    if kind.max is None:
        return f" {low}" if kind.min is not None else ""
    if kind.min is None:
        return f" {'below' if kind.max_open else 'of at most'} {kind.max}"
    return f" from {kind.min} to {kind.max}" if not kind.min_open else f" {low} and at most {kind.max}"
