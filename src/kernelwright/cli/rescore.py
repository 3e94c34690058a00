"""`kernelwright rescore RUN_DIR`: every published number of a run, computed again from its raw timings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from kernelwright.cli.commands import OptionsCommand, argument
from kernelwright.cli.options import json_option
from kernelwright.cli.output import emit_json, printable

DIFFERS, TOO_OLD = 1, 2
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class RescoreCommand:
    """Compute the numbers of RUN_DIR again from its raw timings: evaluations, confirmed schedules, table and summary.

    Exit status: 0 all follow from the records, 1 one differs, 2 RUN_DIR is no run, or was written before records held
    what their numbers need.
    """

    run_dir: Path = argument()
    as_json: bool = json_option()

    def __call__(self) -> int:
        from kernelwright.errors import UsageError
        from kernelwright.records import RunDirectory, files_of
        from kernelwright.records.rescore import CONFIRMATIONS, RescoreState, rescore

        run_dir = self.run_dir
        names = ("evaluations.jsonl", CONFIRMATIONS, "table.json")
        if not run_dir.is_dir() or not any(files_of(run_dir / name) for name in names):
            raise UsageError(
                f"Wanted a run directory, found none of {', '.join(names)} in `{run_dir}`. Name one that a run wrote."
            )
        result = rescore(RunDirectory(run_dir))
        if self.as_json:
            emit_json({"run": str(run_dir), **result.to_json()})
        else:
            for difference in result.differences[:_SHOWN]:
                numbers = f"{difference.name} is recorded as {difference.recorded}, computed as {difference.computed}"
                click.echo(printable(f"{difference.where}: {numbers}"))
            for text in result.too_old[:_SHOWN]:
                click.echo(printable(f"cannot be scored again: {text}"))
            hidden = max(0, len(result.differences) - _SHOWN) + max(0, len(result.too_old) - _SHOWN)
            more = f" {hidden} lines are not shown." if hidden else ""
            click.echo(
                f"{result.scored} numbers were computed again; {len(result.differences)} differ, "
                f"{len(result.too_old)} records cannot be scored again.{more}"
            )
        return {RescoreState.SAME: 0, RescoreState.DIFFERS: DIFFERS, RescoreState.TOO_OLD: TOO_OLD}[result.state]


command = OptionsCommand("rescore", RescoreCommand, short_help="Compute every published number of a run again.")
