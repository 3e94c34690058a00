"""`kernelwright bench SUITE`: a suite's candidates and baselines judged, or its tasks searched, in one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli import model_options, options
from kernelwright.cli.optimize import evaluation_line, screened_line
from kernelwright.cli.output import emit_json, printable, progress_console, results_only, say, says_what_was_kept

if TYPE_CHECKING:
    from rich.status import Status

    from kernelwright.cli.model_options import Proposer
    from kernelwright.judge import Settings
    from kernelwright.search.bench import BenchEvent
    from kernelwright.search.bench_summary import BenchResult
    from kernelwright.search.suite import SuiteEvent
    from kernelwright.tasks.entries import Suite


@click.command("bench", short_help="Judge a suite's candidates and baselines, or search its tasks, in one run.")
@click.argument("suite")
@click.option(
    "--path",
    type=options.NamedPath(),
    metavar="PATH",
    help="Where the suite is: a checkout of KernelBench or robust-kbench, or a JSON lines file of CUDA-L1's release.",
)
@click.option("--hub", is_flag=True, help="Read kernelbench from the Hugging Face hub instead.")
@click.option("--levels", default="1,2,3", show_default=True, metavar="LIST", help="Levels of the suite to keep.")
@click.option(
    "--baselines",
    metavar="LIST",
    help=f"Of {options.BASELINES}. By default eager,compile; with --check-only eager, which is not timed then.",
)
@click.option(
    "--candidates",
    type=options.NamedPath(),
    metavar="DIR",
    help="Judge your own candidates: a folder of files named as the tasks, level1/1.py, or a file of JSON lines.",
)
@click.option("--only", multiple=True, metavar="LIST", help="Only these tasks, such as level1/1,level2/40; may be repeated.")
@click.option(
    "--slice",
    "part",
    callback=options.as_slice,
    metavar="K/N",
    help="Only every N-th task, beginning with the K-th: a suite in N runs, each a sample of the whole.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N tasks.")
@click.option("--strict-fp32-too", is_flag=True, help="Judge each candidate also with TF32 off; the table gets a column.")
@click.option(
    "--tf32-products-too",
    is_flag=True,
    help="Judge each candidate also with TF32 allowed in matrix products on both sides; the table gets a column.",
)
@click.option(
    "--policy",
    metavar="NAME",
    help="Search every task instead of judging what the suite brings. What proposes: builtin, api, local.",
)
@click.option(
    "--budget", type=click.IntRange(min=1), default=24, show_default=True, metavar="N", help="Proposals for a task."
)
@options.judge_option
@click.option(
    "--minutes",
    type=options.FiniteRange(0, min_open=True),
    metavar="M",
    help="Limit of a search's time, spent where it still pays. Run again to go on.",
)
@options.device_option
@options.out_option
@options.json_option
@model_options.model_options
@options.judge_options
def command(
    suite: str,
    path: Path | None,
    hub: bool,
    levels: str,
    baselines: str | None,
    candidates: Path | None,
    only: tuple[str, ...],
    part: slice | None,
    limit: int | None,
    strict_fp32_too: bool,
    tf32_products_too: bool,
    policy: str | None,
    budget: int,
    judged: int,
    minutes: float | None,
    device: str,
    out: Path | None,
    as_json: bool,
    **further: Any,
) -> None:
    """Judge the candidates of SUITE, or your own, and time its baselines, in one run. With --policy, search every task.

    SUITE is builtin, modules, modules-bf16, kernelbench, cuda-l1 or robust-kbench. Prints the table of CUDA-L1 against each
    baseline, and against the best of each task. With --candidates, tasks without one are left out. --device cuda uses every
    GPU. Run again with the same DIR, it goes on where it stopped.
    """
    options.require_together("--policy", policy is not None, "budget", "judged", "minutes", *model_options.NAMES)
    asked = {name: further.pop(name) for name in model_options.NAMES}
    settings = options.judge_settings(**further)
    _require_other_precisions(settings, policy is not None, strict_fp32_too, tf32_products_too)
    if policy is not None and candidates is not None:
        raise click.UsageError("wanted --candidates without --policy, which proposes candidates itself; found both.")
    by_default = "eager,compile" if settings.timed else "eager"
    wanted = options.words(by_default if baselines is None else baselines, "baselines")
    if not settings.timed and set(wanted) - {"eager"}:
        raise click.UsageError("wanted --baselines eager with --check-only, which times nothing; found others.")
    chosen_levels = [_level(word) for word in options.words(levels, "levels")]

    from kernelwright.tasks.suites import load_suite

    loaded = load_suite(suite, path=path, levels=chosen_levels, hub=hub)
    loaded = _narrowed(loaded, options.words(",".join(only), "tasks") if only else None, candidates, part, limit)
    options.resolve_device(device, say)
    with (
        results_only(),
        options.run_directory(out, "bench", loaded.name) as target,
        says_what_was_kept(lambda: options.kept_in(target)),
        progress_console().status("starting") as status,
    ):
        if policy is None:
            from kernelwright.search.bench import bench

            result = bench(
                loaded,
                baselines=wanted,
                device=device,
                out=target,
                settings=settings,
                strict_too=strict_fp32_too,
                tf32_products_too=tf32_products_too,
                on_event=lambda event: _show(status, event),
            )
        else:
            proposer = model_options.proposer(policy, device, target, **asked)
            search = {"budget": budget, "judged": judged, "minutes": minutes, "baselines": wanted, "device": device}
            result = _search(loaded, proposer, target, status, settings=settings, **search)
    for what, message in result.errors.items():
        say(f"not measured: {printable(what)}: {printable(message)}")
    if as_json:
        emit_json(as_contract(result, loaded.name))
    else:
        click.echo((result.run / "table.md").read_text(encoding="utf-8"))
        if policy is not None:
            click.echo(_end_of_search(result))
        click.echo(f"run       {result.run}")
        click.echo(f"report    {result.run / 'report.html'}")


def _require_other_precisions(settings: Settings, searches: bool, strict_too: bool, tf32_products_too: bool) -> None:
    """Refuse further judgements where there is none to add."""
    asked = {
        "--strict-fp32-too": (strict_too, settings.strict_fp32, "strict float32"),
        "--tf32-products-too": (tf32_products_too, settings.tf32_products, "TF32 products"),
    }
    for option, (too, in_all, what) in asked.items():
        if too and searches:
            raise click.UsageError(f"wanted {option} without --policy, whose winners are judged once; found both.")
        if too and in_all:
            raise click.UsageError(f"wanted {option} without {what} in the whole run; found both.")


def _narrowed(suite: Suite, only: list[str] | None, candidates: Path | None, part: slice | None, limit: int | None) -> Suite:
    """The tasks that were asked for, with the user's candidates where there are some."""
    from kernelwright.errors import listed
    from kernelwright.tasks.entries import chosen_tasks, with_candidates

    if only is not None:
        suite = chosen_tasks(suite, only)
    else:
        for task, reason in suite.left_out.items():
            say(f"left out: {printable(task)}: {printable(reason)}")
    if candidates is not None:
        attached = with_candidates(suite, candidates)
        suite = attached.suite
        if attached.unknown:
            say(f"left out, as they name no task of this run: {printable(listed(attached.unknown))}")
        if attached.without:
            say(f"left out, as they have no candidate: {listed(attached.without)}")
    if part is not None:
        suite = replace(suite, entries=suite.entries[part])
        if not suite.entries:
            raise click.UsageError("wanted a --slice with tasks, found none of so few. Choose a smaller K.")
    return replace(suite, entries=suite.entries[:limit])


def _search(suite: Suite, proposer: Proposer, out: Path, status: Status, **given: Any) -> BenchResult:
    from kernelwright.search.suite import search_suite

    with proposer.accounted(out):
        return search_suite(
            suite, policy=proposer.policy, out=out, on_event=lambda event: _show_search(status, event), **given
        )


def _end_of_search(result: BenchResult) -> str:
    """The drop-ins that were handed out, and how many tasks are owed a look, a verdict or baselines and did not fail."""
    from kernelwright.records.decisions import TaskStatus

    ahead = sum(line["ahead"] for line in result.tasks)
    kept = f": {result.run / 'optimized'}" if ahead else ", as no winner is certainly ahead of its best baseline"
    owed, failed = (TaskStatus.SCREENED, TaskStatus.UNTOUCHED), {name.rpartition(" ")[0] for name in result.errors}
    sound = [line for line in result.tasks if line["task"] not in failed]
    left = sum(line["outcome"] in owed or not line["baselines_measured"] for line in sound)
    unfinished = f"\nnot done  {left} of {len(result.tasks)} tasks; the same command goes on" if left else ""
    return f"drop-ins  {ahead or 'none'}{kept}{unfinished}"


def as_contract(result: BenchResult, suite: str) -> dict[str, Any]:
    """The object that `--json` prints: the run, and its table as `table.json` has it."""
    from kernelwright.records import RunDirectory

    table = RunDirectory(result.run).read_json("table.json") or {}
    return {"suite": suite, "run": str(result.run), "errors": result.errors, **table}


def _show(status: Status, event: BenchEvent) -> None:
    from kernelwright.records import Evaluation

    outcome = event.outcome
    line = evaluation_line(outcome) if isinstance(outcome, Evaluation) else f"not measured  {printable(str(outcome))}"
    say(f"{event.done:>5}/{event.total}  {printable(event.task)}  {printable(event.what)}: {line}")
    status.update(f"{event.done} of {event.total} done")


def _show_search(status: Status, event: SuiteEvent) -> None:
    from kernelwright.records import Evaluation
    from kernelwright.records.screened import Screened

    outcome = event.outcome
    if isinstance(outcome, Screened):
        line = screened_line(outcome)
    else:
        line = evaluation_line(outcome) if isinstance(outcome, Evaluation) else f"not measured  {printable(str(outcome))}"
    say(f"{event.settled:>4}/{event.tasks} tasks  {printable(event.task)}: {line}")
    best = f", best {event.best[1]:.2f}x {printable(event.best[0])}" if event.best else ""
    left = f", about {event.left_s / 60:.0f} min left" if event.left_s is not None else ""
    errors = f", {event.errors} errors" if event.errors else ""
    status.update(
        f"{event.settled} of {event.tasks} tasks, {event.screened} screened, {event.judged} judged{best}{errors}{left}"
    )


def _level(word: str) -> int:
    if not word.isascii() or not word.isdigit():
        raise click.UsageError(f"wanted levels such as 1,2,3, found `{word}`.")
    return int(word)
