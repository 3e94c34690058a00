"""`kernelwright rescore RUN_DIR`: every published number of a run, computed again from its raw timings."""

from __future__ import annotations

from pathlib import Path

import click

from kernelwright.cli.options import NamedPath, json_option
from kernelwright.cli.output import emit_json, printable

DIFFERS, TOO_OLD = 1, 2
_SHOWN = 20


@click.command("rescore", short_help="Compute every published number of a run again.")
@click.argument("run_dir", type=NamedPath())
@json_option
@click.pass_context
def command(context: click.Context, run_dir: Path, as_json: bool) -> None:
    """Compute the numbers of RUN_DIR again from its raw timings: evaluations, confirmed schedules, table and summary.

    Exit status: 0 all follow from the records, 1 one differs, 2 RUN_DIR is no run, or was written before records held
    what their numbers need.
    """
    from kernelwright.errors import UsageError
    from kernelwright.records import RunDirectory, files_of
    from kernelwright.report.rescore import CONFIRMATIONS, RescoreState, rescore

    names = ("evaluations.jsonl", CONFIRMATIONS, "table.json")
    if not run_dir.is_dir() or not any(files_of(run_dir / name) for name in names):
        raise UsageError(
            f"Wanted a run directory, found none of {', '.join(names)} in `{run_dir}`. Name one that a run wrote."
        )
    result = rescore(RunDirectory(run_dir))
    if as_json:
        emit_json({"run": str(run_dir), **result.to_json()})
    else:
        for one in result.differences[:_SHOWN]:
            click.echo(printable(f"{one.where}: {one.name} is recorded as {one.recorded}, computed as {one.computed}"))
        for text in result.too_old[:_SHOWN]:
            click.echo(printable(f"cannot be scored again: {text}"))
        hidden = max(0, len(result.differences) - _SHOWN) + max(0, len(result.too_old) - _SHOWN)
        more = f" {hidden} lines are not shown." if hidden else ""
        click.echo(
            f"{result.scored} numbers were computed again; {len(result.differences)} differ, "
            f"{len(result.too_old)} records cannot be scored again.{more}"
        )
    context.exit({RescoreState.SAME: 0, RescoreState.DIFFERS: DIFFERS, RescoreState.TOO_OLD: TOO_OLD}[result.state])
