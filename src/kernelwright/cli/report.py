"""`kernelwright report RUN_DIR`: a run as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

import click

RUN_FILES = ("evaluations.jsonl", "config.json", "environment.json")


@click.command("report", short_help="Write a run directory as one HTML page.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Default: RUN_DIR/report.html.")
def command(run_dir: Path, out: Path | None) -> None:
    """Write RUN_DIR as one HTML page that needs no network, and print its path."""
    from kernelwright.errors import UsageError

    if not run_dir.is_dir():
        found = "a file" if run_dir.exists() else "nothing"
        raise UsageError(f"Wanted a run directory, found {found} at {run_dir}. Name one that a run wrote.")
    if not any((run_dir / name).exists() for name in RUN_FILES):
        raise UsageError(
            f"Wanted a run directory, found none of {', '.join(RUN_FILES)} in {run_dir}. "
            "Name one that a run wrote."
        )

    from kernelwright.records import RunDirectory
    from kernelwright.report.moves import KIND, write_moves_report
    from kernelwright.report.page import write_report

    run = RunDirectory(run_dir)
    config = run.read_json("config.json")
    of_moves = isinstance(config, dict) and config.get("kind") == KIND
    write = write_moves_report if of_moves else write_report
    click.echo(write(run, out or run_dir / "report.html"))
