"""Defines options that several commands share, and turns them into the judge's settings."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from kernelwright.files import has_text_name

if TYPE_CHECKING:
    from kernelwright.judge import Settings

Function = TypeVar("Function", bound=Callable[..., Any])

BASELINES = "eager,compile,reduce-overhead,max-autotune,cudagraph,cudagraph-fresh,cudnn,max-autotune-fresh,channels-last"
DEVICE_DIGITS = 3


class FiniteRange(click.FloatRange):
    """A range of numbers without NaN and infinity, which `click.FloatRange` lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; fails where there is none."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"wanted a finite number, found {value}.", param, ctx)
        return number


class NamedPath(click.Path):
    """A path as a `Path`.

    Not an empty text, as of a variable that is not set, which would be the working directory; and not a name whose bytes are
    no UTF-8, which no record can hold.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; fails where the text is empty or not UTF-8."""
        if value == "":
            self.fail("wanted a path, found an empty text.", param, ctx)
        if isinstance(value, str) and not has_text_name(value):
            self.fail("wanted a path that is UTF-8 text, found other bytes in it. Rename the file.", param, ctx)
        return super().convert(value, param, ctx)


def as_slice(context: click.Context, parameter: click.Parameter, value: str | None) -> slice | None:
    """A part K/N of a list: every N-th entry, beginning with the K-th. Refuses K that is not from 1 to N."""
    if value is None:
        return None
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value, re.ASCII)
    first, step = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= first <= step:
        raise click.BadParameter(f"wanted K/N with K from 1 to N, such as 1/5, found `{value}`.", context, parameter)
    return slice(first - 1, None, step)


def words(text: str, what: str) -> list[str]:
    """Words of a comma-separated list; refuses a list of none."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise click.UsageError(f"wanted a comma-separated list of {what}, found nothing.")
    return found


def device_option(function: Function) -> Function:
    """`--device auto|cpu|cuda|cuda:N`."""
    return click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="auto|cpu|cuda",
        callback=device_name,
        help="Where to run. auto takes a GPU when there is one. cuda:N names one of several.",
    )(function)


out_option = click.option(
    "--out", type=NamedPath(), metavar="DIR", help="Run directory; the same one resumes. Default: a new one in runs/."
)
judge_option = click.option(
    "--judge",
    "judged",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Screened candidates that the judge takes at most, the best first; those that look too good come on top.",
)
task_path_option = click.option(
    "--path",
    type=NamedPath(),
    metavar="PATH",
    help="Where TASK is, if it is an id such as kernelbench/level1/1: a checkout, or a file of CUDA-L1's release.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def judge_options(function: Function) -> Function:
    """Options that change how strict, patient or precise the judge is."""
    options = [
        click.option(
            "--settings",
            "settings_file",
            type=NamedPath(),
            metavar="FILE.toml",
            help="Settings of the judge, as in docs/cli.md. The options below win over it.",
        ),
        click.option(
            "--processes",
            type=click.IntRange(1, 64),
            metavar="N",
            help="Time in exactly N fresh process triples instead of stopping when precise enough.",
        ),
        click.option(
            "--contract",
            type=click.Choice(("drop-in", "kernelbench")),
            help="Contract that decides the verdict and the exit status; both are answered. Default: drop-in.",
        ),
        click.option("--strict-fp32", is_flag=True, help="Turn TF32 off on both sides, also where PyTorch allows it."),
        click.option(
            "--tf32-products", is_flag=True, help="Allow TF32 in matrix products on both sides, on a GPU that has it."
        ),
        click.option("--allow", multiple=True, metavar="LABEL", help="Accept candidates with this label. Repeatable."),
        click.option("--forbid", multiple=True, metavar="LABEL", help="Reject candidates with this label. Repeatable."),
        click.option(
            "--timeout",
            type=FiniteRange(0, min_open=True),
            metavar="SECONDS",
            help="Limit of one call of the candidate; the first call in each process has --build-timeout.",
        ),
        click.option(
            "--build-timeout",
            type=FiniteRange(0, min_open=True),
            metavar="SECONDS",
            help="Limit of importing and constructing the candidate, compilers included, and of its first call.",
        ),
        click.option("--check-only", is_flag=True, help="Check correctness only; do not time."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def judge_settings(
    settings_file: Path | None,
    processes: int | None,
    strict_fp32: bool,
    allow: tuple[str, ...],
    forbid: tuple[str, ...],
    timeout: float | None,
    build_timeout: float | None,
    check_only: bool,
    contract: str | None = None,
    tf32_products: bool = False,
) -> Settings:
    """The settings that the judge's options ask for.

    Raises:
        ConfigError: the file or a value cannot be used.
        UsageError: a label does not exist.
        click.UsageError: two options contradict one another.
    """
    from kernelwright import config
    from kernelwright.judge import Settings

    allowed, refused = ({_label(name) for name in names} for names in (allow, forbid))
    if both := sorted(allowed & refused):
        raise click.UsageError(f"wanted a label to be allowed or forbidden, found `{both[0]}` after --allow and --forbid.")
    if check_only and processes is not None:
        raise click.UsageError("wanted --processes without --check-only, which times nothing; found both.")
    if strict_fp32 and tf32_products:
        raise click.UsageError("wanted --strict-fp32 or --tf32-products, found both.")
    values: dict[str, Any] = config.read_toml(settings_file) if settings_file else {}
    if processes is not None:
        values |= {"processes_min": processes, "processes_max": processes}
    if contract is not None:
        values["contract"] = contract
    if strict_fp32 or tf32_products:
        values |= {"strict_fp32": strict_fp32, "tf32_products": tf32_products}
    if timeout is not None:
        values["run_limit_s"] = timeout
    if build_timeout is not None:
        values["build_limit_s"] = build_timeout
    if check_only:
        values["timed"] = False
    # The options have been checked one by one: what is wrong is the file's.
    with config.in_file(settings_file):
        settings = config.build(Settings, values)
    return settings.model_copy(update={"forbid": frozenset((settings.forbid - allowed) | refused)})


def _label(name: str) -> Any:
    import difflib

    from kernelwright.errors import UsageError
    from kernelwright.records import Label

    if name in set(Label):
        return Label(name)
    near = difflib.get_close_matches(name, list(Label), n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(Label)}."
    raise UsageError(f"Wanted a label, found `{name}`; {hint}")


def device_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    """A callback for options that name a device; raises click.BadParameter for what cannot be one."""
    index = name.removeprefix("cuda:")
    numbered = index != name and index.isascii() and index.isdigit() and len(index) <= DEVICE_DIGITS
    if name in ("auto", "cpu", "cuda") or numbered:
        return name
    raise click.BadParameter(f"wanted auto, cpu, cuda or cuda:N, found `{name}`.")


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
            option = next(parameter.opts[0] for parameter in context.command.params if parameter.name == name)
            raise click.UsageError(f"wanted {needed} beside {option}, which means nothing without it; found none.")


def resolve_device(name: str, say: Callable[[str], None]) -> str:
    """The name of a device that is there, from `--device`; `say` gets a line when `auto` finds no GPU.

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

    A new one, such as `runs/20260102-030405-evaluate-diag_matmul`, is gone again where an error, a fault or Ctrl-C left
    nothing in it that was found out.

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


def kept_in(path: Path) -> str:
    """Remains of an interrupted run, in words."""
    from kernelwright.records import RunDirectory

    if not path.is_dir() or RunDirectory(path).holds_only_what_was_asked:
        return "nothing was judged yet"
    run = RunDirectory(path)
    screened, judged = sum(1 for _ in run.screened()), sum(1 for _ in run.evaluations())
    estimates = f"{screened} estimates and " if screened else ""
    return f"{estimates}{judged} finished evaluations are in {path}; the same command with --out {path} goes on"
