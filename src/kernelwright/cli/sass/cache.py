"""`kernelwright sass cache`: what the cache of tuned kernels holds, and taking a kernel out of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli.group import HelpfulGroup
from kernelwright.cli.options import NamedPath
from kernelwright.cli.output import emit_json, format_speedup, printable

if TYPE_CHECKING:
    from kernelwright.deploy.cache import Tuned, TunedCache

_SHOWN_DIGITS = 12

_cache_option = click.option(
    "--cache",
    "root",
    type=NamedPath(),
    metavar="DIR",
    help="Cache of tuned kernels; KERNELWRIGHT_CACHE or the user's by default.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group("cache", cls=HelpfulGroup, short_help="List and remove tuned kernels.")
def cache() -> None:
    """List the tuned kernels that `sass deploy` has put into the cache, and remove one. Needs no GPU."""


@cache.command("list")
@_cache_option
@_json_option
def list_entries(root: Path | None, as_json: bool) -> None:
    """List every tuned kernel: its key, GPU, name and confirmed speedup. Damaged ones are left out, with a warning."""
    tuned = _opened(root)
    entries = list(tuned.entries())
    if as_json:
        emit_json({"cache": str(tuned.root), "entries": [_as_json(entry) for entry in entries]})
        return
    for entry in entries:
        click.echo(_in_words(entry))
    if not entries:
        click.echo(f"no tuned kernels in {tuned.root}")


@cache.command("remove")
@click.argument("key")
@_cache_option
@_json_option
def remove(key: str, root: Path | None, as_json: bool) -> None:
    """Remove the tuned kernel whose key starts with KEY. Processes that have loaded it already keep it."""
    from kernelwright.errors import UsageError

    tuned = _opened(root)
    try:
        removed = tuned.remove(key)
    except OSError as error:
        raise UsageError(f"Wanted to remove {key} from {tuned.root}, found: {error}. Check who owns it.") from error
    if not removed:
        raise UsageError(
            f"Wanted a tuned kernel whose key starts with {key!r} in {tuned.root}, found none. "
            "`kernelwright sass cache list` shows the keys."
        )
    if as_json:
        emit_json({"cache": str(tuned.root), "removed": key})
    else:
        click.echo(f"removed {key} from {tuned.root}")


def _opened(root: Path | None) -> TunedCache:
    from kernelwright.deploy.cache import TunedCache
    from kernelwright.errors import UsageError

    tuned = TunedCache(root)
    if tuned.root.exists() and not tuned.root.is_dir():
        raise UsageError(f"Wanted a cache of tuned kernels, a directory, found the file {tuned.root}. Name another one.")
    return tuned


def _as_json(tuned: Tuned) -> dict[str, Any]:
    """One entry as `--json` prints it; its keys are a contract with scripts."""
    entry, found = tuned.entry, tuned.entry.measurement
    return {
        "key": entry.key.digest,
        "kernel": entry.entry,
        "architecture": entry.key.architecture,
        "gpu": entry.key.gpu,
        "signature": entry.key.signature,
        "moved": entry.proof.moved,
        "speedup": None if found is None else found.speedup,
        "speedup_low": None if found is None else found.speedup_low,
        "speedup_high": None if found is None else found.speedup_high,
        "driver": None if found is None else found.driver,
        "run": entry.provenance.get("run"),
    }


def _in_words(tuned: Tuned) -> str:
    entry, found = tuned.entry, tuned.entry.measurement
    speedup = "not measured" if found is None else format_speedup(found.speedup, found.speedup_low, found.speedup_high)
    key = entry.key
    return f"{key.digest[:_SHOWN_DIGITS]}  sm_{key.architecture}  {printable(key.gpu)}  {printable(entry.entry)}  {speedup}"
