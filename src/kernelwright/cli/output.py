"""Writes the output of commands: data on stdout, progress on stderr."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

INTERRUPTED = 130


class Phases:
    """Tells on stderr what a command is at, and for how long: beside a spinner on a terminal, in lines elsewhere."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        console = Console(stderr=True, highlight=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=None)

    def begin(self, phase: str) -> None:
        """Begin a phase, from which a terminal counts its seconds; a line has those since the command began."""
        self._bar.reset(self._task, description=printable(phase))
        if self._bar.disable:
            say(f"{time.monotonic() - self._began_s:.0f} s: {printable(phase)}")

    def count(self, done: str) -> None:
        """Show how much is done, on a terminal alone."""
        self._bar.update(self._task, description=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def say(line: str) -> None:
    """One line on stderr."""
    click.echo(line, err=True)


def emit_json(value: Any) -> None:
    """Print exactly one JSON object on stdout."""
    click.echo(json.dumps(value, allow_nan=False, ensure_ascii=True))


@contextmanager
def results_only() -> Iterator[None]:
    """Send to stderr what a task or a file of kernel specs prints, so that stdout carries this program's results alone.

    That includes what its subprocesses, a compiler and its exit handlers print.
    """
    try:
        stdout = os.dup(1)
    except OSError:  # closed by who started us: nobody reads it
        yield
        return
    _flush_then_move_stdout()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            with suppress(OSError, ValueError):
                sys.__stdout__.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        # Exit handlers run in reverse order, so this one comes before those of the files that were run.
        atexit.register(_flush_then_move_stdout)


def _flush_then_move_stdout() -> None:
    """Let descriptor 1 be stderr."""
    with suppress(OSError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()
        os.dup2(2, 1)


def printable(text: str) -> str:
    """One line without control characters: a candidate's message must not drive the terminal."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


def format_speedup(speedup: float | None, low: float | None, high: float | None) -> str:
    """Such as `1.84x [1.79, 1.90]`, or `not timed`."""
    if speedup is None:
        return "not timed"
    if low is None or high is None:
        return f"{speedup:.3g}x"
    return f"{speedup:.4g}x [{low:.4g}, {high:.4g}]"


def format_noise_floor(noise_floor: float | None) -> str:
    """Such as `noise floor 1.20%`."""
    return "no noise floor" if noise_floor is None else f"noise floor {noise_floor:.2%}"


def format_latency(latency_us: float | None) -> str:
    """A latency in the unit in which it is easiest to read."""
    if latency_us is None:
        return "-"
    if latency_us < 1_000:
        return f"{latency_us:.4g} us"
    if latency_us < 1_000_000:
        return f"{latency_us / 1_000:.4g} ms"
    return f"{latency_us / 1_000_000:.4g} s"
