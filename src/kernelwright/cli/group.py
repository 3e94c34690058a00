"""A group of commands that imports a command only when it is run."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click


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
