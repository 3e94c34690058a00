"""Options that several commands share, and what they ask for: a device, a run directory, the judge's settings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kernelwright.cli.commands import FiniteRange, option
from kernelwright.cli.output import INTERRUPTED, say
from kernelwright.rewrites.wrappers import ALL_BASELINES

if TYPE_CHECKING:
    from kernelwright.judge import Settings

BASELINES = ",".join(ALL_BASELINES)
DEVICE_DIGITS = 3
AT_LEAST_ONE = click.IntRange(min=1)
ABOVE_ZERO = FiniteRange(0, min_open=True)


def as_slice(context: click.Context, parameter: click.Parameter, value: str | None) -> slice | None:
    """A part K/N of a list: every N-th entry, beginning with the K-th. Refuses K that is not from 1 to N."""
    if value is None:
        return None
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value, re.ASCII)
    first, step = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= first <= step:
        raise click.BadParameter(f"wanted K/N with K from 1 to N, such as 1/5, found `{value}`.", context, parameter)
    return slice(first - 1, None, step)


def listed_words(text: str, what: str) -> list[str]:
    """Words of a comma-separated list; refuses a list of none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise click.UsageError(f"wanted a comma-separated list of {what}, found nothing.")
    return words


def baseline_names(text: str | None) -> list[str] | None:
    """Baselines of a comma-separated list; refuses what is none. None without a list."""
    from kernelwright.search.policies import require_baselines

    if text is not None:
        require_baselines(names := listed_words(text, "baselines"), [])
    return None if text is None else names


def device_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    """A callback for options that name a device; raises click.BadParameter for what cannot be one."""
    index = name.removeprefix("cuda:")
    numbered = index != name and index.isascii() and index.isdigit() and len(index) <= DEVICE_DIGITS
    if name in ("auto", "cpu", "cuda") or numbered:
        return name
    raise click.BadParameter(f"wanted auto, cpu, cuda or cuda:N, found `{name}`.")


def device_option() -> Any:
    """`--device auto|cpu|cuda|cuda:N`."""
    return option(
        "auto",
        metavar="auto|cpu|cuda",
        callback=device_name,
        help="Where to run. auto takes a GPU when there is one. cuda:N names one of several.",
    )


def out_option() -> Any:
    """`--out DIR`."""
    return option(metavar="DIR", help="Run directory; the same one resumes. Default: a new one in runs/.")


def judged_option() -> Any:
    """`--judge N`."""
    return option(
        3,
        "--judge",
        type=AT_LEAST_ONE,
        metavar="N",
        help="Screened candidates that the judge takes at most, the best first; those that look too good come on top.",
    )


def task_path_option() -> Any:
    """`--path PATH`."""
    return option(
        metavar="PATH",
        help="Where TASK is, if it is an id such as kernelbench/level1/1: a checkout, or a file of CUDA-L1's release.",
    )


def json_option(text: str = "Print one JSON object on stdout.") -> Any:
    """`--json`."""
    return option(flag="--json", help=text)


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """How strict, patient or precise the judge is."""

    settings_file: Path | None = option(
        flag="--settings",
        metavar="FILE.toml",
        help="Settings of the judge, as in docs/cli.md. The options below win over it.",
    )
    processes: int | None = option(
        type=click.IntRange(1, 64),
        metavar="N",
        help="Time in exactly N fresh process triples instead of stopping when precise enough.",
    )
    contract: str | None = option(
        type=click.Choice(("drop-in", "kernelbench")),
        help="Contract that decides the verdict and the exit status; both are answered. Default: drop-in.",
    )
    strict_fp32: bool = option(False, help="Turn TF32 off on both sides, also where PyTorch allows it.")
    tf32_products: bool = option(False, help="Allow TF32 in matrix products on both sides, on a GPU that has it.")
    allow: tuple[str, ...] = option((), metavar="LABEL", help="Accept candidates with this label. Repeatable.")
    forbid: tuple[str, ...] = option((), metavar="LABEL", help="Reject candidates with this label. Repeatable.")
    timeout: float | None = option(
        type=ABOVE_ZERO,
        metavar="SECONDS",
        help="Limit of one call of the candidate; the first call in each process has --build-timeout.",
    )
    build_timeout: float | None = option(
        type=ABOVE_ZERO,
        metavar="SECONDS",
        help="Limit of importing and constructing the candidate, compilers included, and of its first call.",
    )
    check_only: bool = option(False, help="Check correctness only; do not time.")

    def settings(self) -> Settings:
        """The settings that these options ask for.

        Raises:
            ConfigError: the file or a value cannot be used.
            UsageError: a label does not exist.
            click.UsageError: two options contradict one another.
        """
        from kernelwright import config
        from kernelwright.judge import Settings

        allowed, refused = ({_label(name) for name in names} for names in (self.allow, self.forbid))
        if both := sorted(allowed & refused):
            raise click.UsageError(
                f"wanted a label to be allowed or forbidden, found `{both[0]}` after --allow and --forbid."
            )
        if self.check_only and self.processes is not None:
            raise click.UsageError("wanted --processes without --check-only, which times nothing; found both.")
        if self.strict_fp32 and self.tf32_products:
            raise click.UsageError("wanted --strict-fp32 or --tf32-products, found both.")
        values: dict[str, Any] = config.read_toml(self.settings_file) if self.settings_file else {}
        # The options have been checked one by one: what is wrong is the file's.
        with config.in_file(self.settings_file):
            settings = config.build(Settings, values | self._asked())
        return settings.model_copy(update={"forbid": frozenset((settings.forbid - allowed) | refused)})

    def _asked(self) -> dict[str, Any]:
        """Fields of the settings that were given as options."""
        values = {
            "processes_min": self.processes,
            "processes_max": self.processes,
            "contract": self.contract,
            "run_limit_s": self.timeout,
            "build_limit_s": self.build_timeout,
            "timed": False if self.check_only else None,
        }
        if self.strict_fp32 or self.tf32_products:
            values |= {"strict_fp32": self.strict_fp32, "tf32_products": self.tf32_products}
        return {name: value for name, value in values.items() if value is not None}


def _label(name: str) -> Any:
    import difflib

    from kernelwright.errors import UsageError
    from kernelwright.records import Label

    if name in set(Label):
        return Label(name)
    near = difflib.get_close_matches(name, list(Label), n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(Label)}."
    raise UsageError(f"Wanted a label, found `{name}`; {hint}")


def require_together(needed: str, given: bool, *names: str) -> None:
    """Refuse options that were typed for the command at work but mean nothing without another one.

    `needed` is the other option, `given` tells that it was typed, `names` are the parameters that need it. Raises
    click.UsageError.
    """
    if given:
        return
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = next(parameter.opts[0] for parameter in context.command.params if parameter.name == name)
            raise click.UsageError(f"wanted {needed} beside {flag}, which means nothing without it; found none.")


def resolve_device(name: str) -> str:
    """The name of a device that is there, from `--device`; says so when `auto` finds no GPU.

    Raises:
        DeviceError: a GPU was asked for and there is none of that number.
    """
    from kernelwright.judge import resolve_device

    device = str(resolve_device(name))
    if name == "auto" and device == "cpu":
        say("no GPU here: working on the CPU, whose times say nothing about a GPU")
    return device


@contextmanager
def run_directory(out: Path | None, verb: str, name: str) -> Iterator[Path]:
    """The directory of a run: the one that was asked for, or a new one below `runs/`.

    A new one, such as `runs/20260102-030405-evaluate-diag_matmul`, is removed where an error, a fault or Ctrl-C left no
    results in it.

    Raises:
        UsageError: no directory can be made there.
    """
    from kernelwright.records import RunDirectory, require_possible

    if out is not None:
        require_possible(out)
        yield out
        return
    path = _fresh_run_path(verb, name)
    try:
        yield path
    except BaseException:
        RunDirectory(path).remove_if_nothing_was_found_out()
        raise


def _fresh_run_path(verb: str, name: str) -> Path:
    from datetime import UTC, datetime

    from kernelwright.errors import UsageError

    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    safe = "".join(character if character.isalnum() or character in "-_" else "-" for character in name)[-40:]
    first = Path("runs") / f"{stamp}-{verb}-{safe}"
    path = first
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = first.with_name(f"{first.name}-{number}")
        except OSError as error:
            raise UsageError(f"Wanted a new run directory at {path}; {error.strerror}. Name one with --out.") from error
    return path


@contextmanager
def says_what_was_kept(run: Path | None, nothing: str = "nothing was judged yet") -> Iterator[None]:
    """Turn Ctrl-C into exit status 130 and one line on stderr, such as `3 finished evaluations are in runs/x`.

    Args:
        run: The run directory; None for work that leaves nothing half done.
        nothing: Line where the run directory holds no results.
    """
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {nothing if run is None else kept_in(run, nothing)}")
        raise click.exceptions.Exit(INTERRUPTED) from None


def kept_in(path: Path, nothing: str = "nothing was judged yet") -> str:
    """Remains of an interrupted run, in words."""
    from kernelwright.records import RunDirectory

    if (path / "schedules.jsonl").exists():
        return f"every schedule measured is in {path}; the same command with --out {path} goes on"
    is_game = (path / "original.cubin").exists()
    if not path.is_dir() or is_game or RunDirectory(path).holds_only_what_was_asked:
        return nothing
    run = RunDirectory(path)
    screened, judged = sum(1 for _ in run.screened()), sum(1 for _ in run.evaluations())
    estimates = f"{screened} estimates and " if screened else ""
    return f"{estimates}{judged} finished evaluations are in {path}; the same command with --out {path} goes on"
