"""`kernelwright report RUN_DIR`: a run as one self-contained HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from kernelwright.cli.commands import OptionsCommand, argument, option

RUN_FILES = ("evaluations.jsonl", "screened.jsonl", "schedules.jsonl", "table.json", "errors.json")
"""Files of which a page is made, each maybe packed: a directory without any of them has nothing to show."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write RUN_DIR as one HTML page that needs no network, and print its path."""

    run_dir: Path = argument()
    out: Path | None = option(metavar="FILE", help="Default: RUN_DIR/report.html.")

    def __call__(self) -> None:
        from kernelwright.errors import UsageError

        run_dir = self.run_dir
        if not run_dir.is_dir():
            found = "a file" if run_dir.exists() else "nothing"
            raise UsageError(f"Wanted a run directory, found {found} at {run_dir}. Name one that a run wrote.")
        from kernelwright.records import RunDirectory, files_of
        from kernelwright.report.moves import write_moves_report
        from kernelwright.report.page import write_report

        if not _is_run(run_dir):
            below = next(filter(_is_run, (*sorted(run_dir.glob("*/")), *sorted(run_dir.glob("*/*/")))), None)
            advice = f"Name one of the runs in it, such as {below}."
            if below is None:
                advice = "Name one in which something was judged or measured."
            raise UsageError(f"Wanted a run directory, found none of {', '.join(RUN_FILES)} in `{run_dir}`. {advice}")
        files = [path for name in RUN_FILES for path in files_of(run_dir / name)]
        if all(path.name.startswith("evaluations.jsonl") for path in files) and not any(RunDirectory(run_dir).evaluations()):
            raise UsageError(
                f"Wanted a run's records in {files[-1]}; found none that is whole. Judge something there first."
            )
        # What the assembly game measures is schedules; every other verb judges candidates.
        write = write_moves_report if files_of(run_dir / "schedules.jsonl") else write_report
        click.echo(write(RunDirectory(run_dir), self.out or run_dir / "report.html"))


command = OptionsCommand("report", ReportCommand, short_help="Write a run directory as one HTML page.")


def _is_run(path: Path) -> bool:
    from kernelwright.records import files_of

    return any(files_of(path / name) for name in RUN_FILES)
