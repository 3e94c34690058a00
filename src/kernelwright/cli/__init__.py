"""The command line: a thin skin over the functions of the same names.

Each command lives in a module of its own that is imported only when it runs, so `--help` loads neither
torch nor pydantic. Exit status: 0 accepted or done, 1 rejected or not legal, 2 wrong usage or unreadable
input, 3 infrastructure, 130 interrupted. stdout carries data, stderr carries progress and errors.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import click

from kernelwright.cli.commands import LazyGroup, explained
from kernelwright.errors import InternalError, KernelwrightError
from kernelwright.version import __version__

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
READER_GONE = 141
"""128 + SIGPIPE, as shells report it. 1 would read as `rejected`."""
FAULT = 3
_EXIT = os._exit
"""As it is before `_hard_exit_raises`."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a full disk, a full quota and a read-only disk, also for temporary files: no faults of this program."""


@click.group(
    cls=LazyGroup,
    commands_at={
        "doctor": ("kernelwright.cli.doctor", "Say what this machine can do."),
        "evaluate": ("kernelwright.cli.evaluate", "Judge one candidate against one task."),
        "optimize": ("kernelwright.cli.optimize", "Search for a verified faster drop-in for a task."),
        "bench": ("kernelwright.cli.bench", "Judge a suite's candidates and baselines in one run."),
        "train": ("kernelwright.cli.train", "Train a model: supervised, self-supervised, contrastive."),
        "report": ("kernelwright.cli.report", "Write a run directory as one HTML page."),
        "rescore": ("kernelwright.cli.rescore", "Compute every published number of a run again."),
        "sass": ("kernelwright.cli.sass", "Show, play, check and optimize machine-code schedules."),
        "serve": ("kernelwright.cli.serve", "The judge as an HTTP reward service."),
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="%(version)s")
@click.option("--traceback", is_flag=True, hidden=True, help="Show where an error was raised.")
def group(traceback: bool) -> None:
    """Make GPU code faster, and believe only what an independent measurement confirms.

    A TASK is a Python file in KernelBench's format (Model, get_inputs, get_init_inputs) or the id of a
    built-in task such as diag_matmul. A CANDIDATE is a Python file that defines ModelNew.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Without arguments it is the program itself, with those of `sys.argv`: Ctrl-C then ends the process at once.
    """
    if arguments is not None:
        return _status_of(list(arguments))
    atexit.register(gc.freeze)  # the interpreter's last collection would look through all of torch, for half a second
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    if (status := _status_of(sys.argv[1:])) == INTERRUPTED:
        # Threads that wait for a silent endpoint would keep the process for a minute.
        atexit._run_exitfuncs()
        _EXIT(status)
    return status


def _interrupted(_number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end the process in an import: a half imported library may swallow it or abort."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"interrupted: nothing was judged yet\n")
            _EXIT(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _status_of(given: list[str]) -> int:
    show_traceback = bool(given) and given[0] == "--traceback"
    try:
        with _hard_exit_raises():
            return _flushed(_run(given))
    except click.exceptions.Exit as done:
        return _flushed(done.exit_code)
    except BrokenPipeError:
        return _reader_gone()
    except click.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return _say("interrupted: nothing was written", INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        return _say(error.format_message(), error.exit_code)
    except click.UsageError as error:
        return _say(f"error: {_one_line(explained(error))}", error.exit_code)
    except click.ClickException as error:
        return _say(f"error: {_one_line(error.format_message())}", 2)
    except KernelwrightError as error:
        if show_traceback:
            traceback.print_exc()
        if isinstance(error, InternalError):
            return _fault(error)
        return _say(f"error: {_one_line(str(error))}", error.exit_status)
    except SystemExit:
        # Raised by a file that was run, such as a kernel's; passing its status on could read as `accepted`.
        return _say("error: code that was run as an input ended the program (sys.exit, os._exit). Take that call out.", 2)
    except Exception as error:  # noqa: BLE001 - Python would exit with 1 here, which means `rejected`.
        if show_traceback:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _say(f"error: Wanted a path; {_one_line(str(error.filename))[:40]}... is too long a name.", 2)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            where = f" at {_one_line(str(error.filename))}" if error.filename else ""
            return _say(f"error: Wanted to write{where}; {error.strerror}. Make room, or work in another directory.", FAULT)
        return _fault(error)


@contextmanager
def _hard_exit_raises() -> Iterator[None]:
    """Let `os._exit` raise SystemExit in this process: a task that calls it would choose the command's exit status.

    Processes that were forked from it leave as always.
    """
    here, leave = os.getpid(), os._exit

    def raise_instead(status: int) -> NoReturn:
        if os.getpid() != here:
            leave(status)
        raise SystemExit(status)

    os._exit = raise_instead
    try:
        yield
    finally:
        os._exit = leave


def _fault(error: Exception) -> int:
    what = f"{type(error).__name__}: {_one_line(str(error))}"
    return _say(f"error: fault in kernelwright: {what}. `kernelwright --traceback ...` shows where.", FAULT)


def _run(arguments: list[str]) -> int:
    with group.make_context("kernelwright", arguments) as context:
        result = group.invoke(context)
    return result if isinstance(result, int) else 0


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


def _say(line: str, status: int) -> int:
    try:
        click.echo(line, err=True)
    except BrokenPipeError:
        return _reader_gone()
    except OSError:
        _hush()  # as where a log's disk is full: nobody can be told, but the status still says it
    return _flushed(status)


def _flushed(status: int) -> int:
    if sys.stdout is None:  # closed by who started us: what it would say is not wanted
        return status
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_gone()
    except OSError as error:
        _hush()
        return _say(f"error: Wanted to write the result to standard output; {error.strerror}.", FAULT)
    return status


def _reader_gone() -> int:
    _hush()
    return READER_GONE


def _hush() -> None:
    """Give up streams that cannot be written: the interpreter flushes again when it ends, and would complain and choose its
    own exit status."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(silent, stream.fileno())
    os.close(silent)
