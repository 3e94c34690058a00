"""Copies and packs files, for the scripts that publish a campaign's folder."""

from __future__ import annotations

import argparse
import lzma
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from kernelwright.errors import UsageError


def from_command_line(described: str | None, publish: Callable[[Path, Path], None]) -> None:
    """Publish the campaign that the command line names into the folder that it names."""
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    publish(options.campaign, options.target)


def require_new(directory: Path) -> None:
    """Raises UsageError where there is something already."""
    if directory.exists():
        raise UsageError(f"Wanted a new directory; {directory} is there. Name another.")


def copy_plain(run: Path, target: Path, names: Iterable[str]) -> None:
    """Copy those of the files that there are."""
    for name in names:
        if (run / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / name, target / name)


def write_packed(target: Path, name: str, data: bytes) -> None:
    """Pack what a file holds with xz, which takes half of gzip's bytes; an empty one is not written."""
    if data:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / f"{name}.xz").write_bytes(lzma.compress(data, preset=9))
