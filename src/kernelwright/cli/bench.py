"""`kernelwright bench SUITE`: a suite's candidates and baselines judged, or its tasks searched, in one run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli.commands import OptionsCommand, argument, option
from kernelwright.cli.model_options import ModelOptions, proposer
from kernelwright.cli.optimize import evaluation_line, screened_line
from kernelwright.cli.options import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    BASELINES,
    JudgeOptions,
    as_slice,
    baseline_names,
    device_option,
    json_option,
    judged_option,
    listed_words,
    out_option,
    require_together,
    resolve_device,
    run_directory,
    says_what_was_kept,
)
from kernelwright.cli.output import Phases, emit_json, printable, results_only, say

if TYPE_CHECKING:
    from kernelwright.judge import Settings
    from kernelwright.records import Evaluation
    from kernelwright.records.screened import Screened
    from kernelwright.search.bench import BenchEvent, BenchResult
    from kernelwright.search.suite import SuiteEvent
    from kernelwright.tasks.entries import Suite


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Judge the candidates of SUITE, or your own, and time its baselines, in one run. With --policy, search every task.

    SUITE is builtin, modules, modules-bf16, kernelbench, cuda-l1 or robust-kbench. Prints the table of CUDA-L1 against each
    baseline, and against the best of each task. With --candidates, tasks without one are left out. --device cuda uses every
    GPU. Run again with the same DIR, it goes on where it stopped.
    """

    suite: str = argument()
    path: Path | None = option(
        metavar="PATH",
        help="Where the suite is: a checkout of KernelBench or robust-kbench, or a JSON lines file of CUDA-L1's release.",
    )
    hub: bool = option(False, help="Read kernelbench from the Hugging Face hub instead.")
    levels: str = option("1,2,3", metavar="LIST", help="Levels of the suite to keep.")
    baselines: str | None = option(
        metavar="LIST",
        help=f"Of {BASELINES}. By default those of the manual on a GPU, eager,compile on a CPU; with --check-only eager, "
        "which is not timed then.",
    )
    candidates: Path | None = option(
        metavar="DIR",
        help="Judge your own candidates: a folder of files named as the tasks, level1/1.py, or a file of JSON lines.",
    )
    only: tuple[str, ...] = option((), metavar="LIST", help="Only these tasks, such as level1/1,level2/40; may be repeated.")
    part: slice | None = option(
        flag="--slice",
        callback=as_slice,
        metavar="K/N",
        help="Only every N-th task, beginning with the K-th: a suite in N runs, each a sample of the whole.",
    )
    lists: bool = option(flag="--list", help="Print the ids of the tasks, one a line, and end.")
    limit: int | None = option(type=AT_LEAST_ONE, metavar="N", help="Only the first N tasks.")
    strict_fp32_too: bool = option(False, help="Judge each candidate also with TF32 off; the table gets a column.")
    tf32_products_too: bool = option(
        False, help="Judge each candidate also with TF32 allowed in matrix products on both sides; the table gets a column."
    )
    policy: str | None = option(
        metavar="NAME",
        help="Search every task instead of judging what the suite brings. What proposes: builtin, api, local.",
    )
    budget: int = option(24, type=AT_LEAST_ONE, metavar="N", help="Proposals for a task.")
    judged: int = judged_option()
    minutes: float | None = option(
        type=ABOVE_ZERO, metavar="M", help="Limit of a search's time, spent where it still pays. Run again to go on."
    )
    device: str = device_option()
    out: Path | None = out_option()
    as_json: bool = json_option()
    model: ModelOptions
    judge: JudgeOptions

    def __call__(self) -> None:
        searches = self.policy is not None
        model_names = (part.name for part in fields(ModelOptions))
        require_together("--policy", searches, "budget", "judged", "minutes", *model_names)
        settings = self.judge.settings()
        _require_other_precisions(self)
        if searches and self.candidates is not None:
            raise click.UsageError("wanted --candidates without --policy, which proposes candidates itself; found both.")
        baselines = baseline_names(self.baselines)
        if self.policy is not None:
            self.model.settings(self.policy)
        if not settings.timed and set(baselines or ()) - {"eager"}:
            raise click.UsageError("wanted --baselines eager with --check-only, which times nothing; found others.")
        levels = [_level(word) for word in listed_words(self.levels, "levels")]

        from kernelwright.tasks.suites import load_suite

        suite = _narrowed(load_suite(self.suite, path=self.path, levels=levels, hub=self.hub), self)
        if self.lists:
            ids = [entry.task.id for entry in suite.entries]
            emit_json({"suite": suite.name, "tasks": ids}) if self.as_json else click.echo("\n".join(ids))
            return
        device = resolve_device(self.device)
        if baselines is None:
            from kernelwright.rewrites.wrappers import BY_DEFAULT

            compiled = BY_DEFAULT if device.startswith("cuda") else ("compile",)
            baselines = ["eager", *(compiled if settings.timed else ())]
        with (
            results_only(),
            run_directory(self.out, "bench", suite.name) as target,
            says_what_was_kept(target),
            Phases() as phases,
        ):
            work = _search if searches else _judge
            result = work(suite, self, settings, baselines, target, phases)
        for what, message in result.errors.items():
            say(f"not measured: {printable(what)}: {printable(message)}")
        if self.as_json:
            emit_json(as_contract(result, suite.name))
        else:
            click.echo((result.run / "table.md").read_text(encoding="utf-8"))
            if searches:
                click.echo(_end_of_search(result))
            click.echo(f"run       {result.run}")
            click.echo(f"report    {result.run / 'report.html'}")


command = OptionsCommand(
    "bench", BenchCommand, short_help="Judge a suite's candidates and baselines, or search its tasks, in one run."
)


def _require_other_precisions(options: BenchCommand) -> None:
    """Refuse further judgements where there is none to add."""
    settings = options.judge.settings()
    asked = {
        "--strict-fp32-too": (options.strict_fp32_too, settings.strict_fp32, "strict float32"),
        "--tf32-products-too": (options.tf32_products_too, settings.tf32_products, "TF32 products"),
    }
    for flag, (too, in_all, what) in asked.items():
        if too and options.policy is not None:
            raise click.UsageError(f"wanted {flag} without --policy, whose winners are judged once; found both.")
        if too and in_all:
            raise click.UsageError(f"wanted {flag} without {what} in the whole run; found both.")


def _narrowed(suite: Suite, options: BenchCommand) -> Suite:
    """The tasks that were asked for, with the user's candidates where there are some."""
    from kernelwright.errors import listed
    from kernelwright.tasks.entries import chosen_tasks, with_candidates

    if options.only:
        suite = chosen_tasks(suite, listed_words(",".join(options.only), "tasks"))
    else:
        for task, reason in suite.left_out.items():
            say(f"left out: {printable(task)}: {printable(reason)}")
    if options.candidates is not None:
        attached = with_candidates(suite, options.candidates)
        suite = attached.suite
        if attached.unknown:
            say(f"left out, as they name no task of this run: {printable(listed(attached.unknown))}")
        if attached.without:
            say(f"left out, as they have no candidate: {listed(attached.without)}")
    if options.part is not None:
        suite = replace(suite, entries=suite.entries[options.part])
        if not suite.entries:
            raise click.UsageError("wanted a --slice with tasks, found none of so few. Choose a smaller K.")
    return replace(suite, entries=suite.entries[: options.limit])


def _judge(
    suite: Suite, options: BenchCommand, settings: Settings, baselines: list[str], out: Path, phases: Phases
) -> BenchResult:
    from kernelwright.search.bench import bench

    return bench(
        suite,
        baselines=baselines,
        device=options.device,
        out=out,
        settings=settings,
        strict_too=options.strict_fp32_too,
        tf32_products_too=options.tf32_products_too,
        on_event=_BenchProgress(phases).show,
    )


def _search(
    suite: Suite, options: BenchCommand, settings: Settings, baselines: list[str], out: Path, phases: Phases
) -> BenchResult:
    assert options.policy is not None
    from kernelwright.search.suite import search_suite

    proposing = proposer(options.policy, options.device, out, options.model)
    with proposing.accounted(out):
        return search_suite(
            suite,
            policy=proposing.policy,
            budget=options.budget,
            judged=options.judged,
            minutes=options.minutes,
            baselines=baselines,
            device=options.device,
            out=out,
            settings=settings,
            on_event=_BenchProgress(phases).show_search,
        )


def _end_of_search(result: BenchResult) -> str:
    """The drop-ins that were handed out, and how many tasks wait for a first look, a verdict or baselines."""
    from kernelwright.records.decisions import TaskStatus

    ahead = sum(line["ahead"] for line in result.tasks)
    kept = f": {result.run / 'optimized'}" if ahead else ", as no winner is certainly ahead of its best baseline"
    pending, failed = (TaskStatus.SCREENED, TaskStatus.UNTOUCHED), {name.rpartition(" ")[0] for name in result.errors}
    sound = [line for line in result.tasks if line["task"] not in failed]
    left = sum(line["outcome"] in pending or not line["baselines_measured"] for line in sound)
    unfinished = f"\nnot done  {left} of {len(result.tasks)} tasks; the same command goes on" if left else ""
    return f"drop-ins  {ahead or 'none'}{kept}{unfinished}"


def as_contract(result: BenchResult, suite: str) -> dict[str, Any]:
    """The object that `--json` prints: the run, and its table as `table.json` has it."""
    from kernelwright.records import RunDirectory

    table = RunDirectory(result.run).read_json("table.json") or {}
    return {"suite": suite, "run": str(result.run), "errors": result.errors, **table}


@dataclass(frozen=True, slots=True)
class _BenchProgress:
    """Shows a run on stderr: a line for each job that ended, and how much is done."""

    phases: Phases

    def show(self, event: BenchEvent) -> None:
        """Tell of a judged candidate or a baseline."""
        say(f"{event.done:>5}/{event.total}  {printable(event.task)}  {printable(event.what)}: {_line(event.outcome)}")
        self.phases.count(f"{event.done} of {event.total} done")

    def show_search(self, event: SuiteEvent) -> None:
        """Tell of an estimate or a verdict of a search."""
        say(f"{event.settled:>4}/{event.tasks} tasks  {printable(event.task)}: {_line(event.outcome)}")
        best = f", best {event.best[1]:.2f}x {printable(event.best[0])}" if event.best else ""
        left = f", about {event.left_s / 60:.0f} min left" if event.left_s is not None else ""
        errors = f", {event.errors} errors" if event.errors else ""
        self.phases.count(
            f"{event.settled} of {event.tasks} tasks, {event.screened} screened, {event.judged} judged{best}{errors}{left}"
        )


def _line(outcome: Evaluation | Screened | Exception) -> str:
    """The outcome of a job in one line."""
    from kernelwright.records import Evaluation
    from kernelwright.records.screened import Screened

    if isinstance(outcome, Screened):
        return screened_line(outcome)
    return evaluation_line(outcome) if isinstance(outcome, Evaluation) else f"not measured  {printable(str(outcome))}"


def _level(word: str) -> int:
    if not word.isascii() or not word.isdigit():
        raise click.UsageError(f"wanted levels such as 1,2,3, found `{word}`.")
    return int(word)
