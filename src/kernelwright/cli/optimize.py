"""`kernelwright optimize TASK`: search for a verified faster drop-in."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli import model_options, options
from kernelwright.cli.output import (
    emit_json,
    format_noise_floor,
    format_speedup,
    printable,
    progress_console,
    results_only,
    say,
    says_what_was_kept,
)

if TYPE_CHECKING:
    from rich.status import Status

    from kernelwright.execution.zygotes import Zygotes
    from kernelwright.records import Evaluation
    from kernelwright.records.decisions import BaselineComparison
    from kernelwright.records.screened import Screened
    from kernelwright.search.optimize import OptimizeResult, SearchEvent


@click.command("optimize", short_help="Search for a verified faster drop-in for a task.")
@click.argument("task")
@options.task_path_option
@options.device_option
@click.option(
    "--policy",
    default="builtin",
    show_default=True,
    metavar="NAME",
    help="What proposes candidates: builtin, or a language model: api, local.",
)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    metavar="N",
    help="Proposals to look at, those already in DIR included.",
)
@options.judge_option
@click.option(
    "--baselines",
    metavar="LIST",
    help=f"To measure beside, of {options.BASELINES}; by default compile,cudagraph-fresh on a GPU, eager alone on a CPU.",
)
@options.out_option
@click.option("--then-sass", is_flag=True, help="Hand the winner's Triton kernels to the assembly game. Needs a GPU.")
@click.option(
    "--sass-agent",
    default="greedy",
    show_default=True,
    metavar="NAME",
    help="Agent of that game: ppo, anneal, greedy, guided, random, sweeps.",
)
@click.option(
    "--sass-budget",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="N",
    help="Schedules to measure for each kernel.",
)
@options.json_option
@model_options.model_options
@options.judge_options
def command(
    task: str,
    path: Path | None,
    device: str,
    policy: str,
    budget: int,
    judged: int,
    baselines: str | None,
    out: Path | None,
    then_sass: bool,
    sass_agent: str,
    sass_budget: int,
    as_json: bool,
    **further: Any,
) -> None:
    """Search for a faster drop-in for TASK, and write what was confirmed.

    Proposals of the policy builtin are screened: a quick look estimates each. The judge then takes the best few, and the
    winner is measured once more. Those of a language model are judged one by one.

    Writes optimized.py (where an improvement was confirmed that is certainly ahead of the best baseline measured),
    report.html, evaluations.jsonl, screened.jsonl, config.json and environment.json into DIR. Interrupt it at any moment:
    the same command resumes.
    """
    options.require_together("--then-sass", then_sass, "sass_agent", "sass_budget")
    asked = {name: further.pop(name) for name in model_options.NAMES}
    settings = options.judge_settings(**further)
    wanted = None if baselines is None else options.words(baselines, "baselines")

    with contextlib.ExitStack() as stack:
        zygotes = None
        if policy not in model_options.MODEL_POLICIES and settings.timed:
            zygotes = stack.enter_context(contextlib.closing(_zygotes(device)))
        # Only now: these import torch, which takes seconds, and the zygotes do so at the same time.
        from kernelwright.search.optimize import NEAR_MISS, optimize
        from kernelwright.search.then_sass import play_with
        from kernelwright.tasks import load_task

        loaded = load_task(task, path)
        chosen = options.resolve_device(device, say)
        target = stack.enter_context(options.run_directory(out, "optimize", loaded.id))
        proposer = model_options.proposer(policy, chosen, target, **asked)
        with (
            results_only(),
            says_what_was_kept(lambda: options.kept_in(target)),
            progress_console().status("starting") as status,
            proposer.accounted(target),
        ):
            result = optimize(
                loaded,
                policy=proposer.policy,
                device=chosen,
                budget=budget,
                judged=judged,
                out=target,
                settings=settings,
                on_event=_Progress(status, budget),
                tune=play_with(sass_agent, sass_budget, seed=0) if then_sass else None,
                zygotes=zygotes,
                baselines=wanted,
            )
    if as_json:
        emit_json(as_contract(result, loaded.id, chosen))
    else:
        click.echo(in_words(result))
        if result.near_miss is not None:
            given = {"--path": path, "--device": chosen, "--settings": further["settings_file"]}
            typed = [word for name, value in given.items() if value is not None for word in (name, str(value))]
            click.echo(
                near_miss_in_words(result.near_miss, ["kernelwright", "evaluate", task, str(result.run / NEAR_MISS), *typed])
            )


def _zygotes(device: str) -> Zygotes:
    """What screening will fork from, by what the device seems to be: torch, which knows, is not imported yet."""
    from kernelwright.execution.zygotes import Zygotes

    return Zygotes("cuda" if device != "cpu" and Path("/dev/nvidiactl").exists() else "cpu")


class _Progress:
    """Shows a search on stderr: a line for each finished evaluation, and what is going on now."""

    def __init__(self, status: Status, budget: int) -> None:
        self._status = status
        self._budget = budget

    def __call__(self, event: SearchEvent) -> None:
        if event.evaluation is not None:
            say(f"{event.number:>4}/{self._budget}  {evaluation_line(event.evaluation)}")
        elif event.screened is not None:
            say(f"{event.number:>4}/{self._budget}  {screened_line(event.screened)}")
        elif event.lasting:
            say(printable(event.message))
        self._status.update(printable(event.message))


def evaluation_line(evaluation: Evaluation) -> str:
    """An evaluation in one line, such as `improvement  1.62x [1.59, 1.65], noise floor 1.20%  diag-to-einsum`."""
    what = printable(", ".join(evaluation.techniques) or evaluation.policy)
    if not evaluation.accepted:
        return f"rejected     {evaluation.reason}  {what}"
    state = "improvement" if evaluation.is_improvement else "near miss  " if evaluation.is_near_miss else "accepted   "
    speedup = format_speedup(evaluation.speedup, evaluation.speedup_low, evaluation.speedup_high)
    floor = "" if evaluation.speedup is None else f", {format_noise_floor(evaluation.noise_floor)}"
    return f"{state}  {speedup}{floor}  {what}"


def screened_line(found: Screened) -> str:
    """An estimate in one line, such as `screened     about 1.6x  diag-to-einsum`."""
    what = printable(", ".join(found.techniques) or found.policy)
    if not found.correct:
        return f"screened     {found.reason}  {what}"
    return f"screened     {'right' if found.estimate is None else f'about {found.estimate:.2f}x'}  {what}"


def as_contract(result: OptimizeResult, task: str, device: str) -> dict[str, Any]:
    """The object that `--json` prints; its keys are a contract with scripts."""
    best, beside = result.best, result.beside
    return {
        "task": task,
        "device": device,
        "run": str(result.run),
        "evaluations": result.evaluations,
        "screened": result.screened,
        "best": None if best is None else {"speedup": best.speedup, "speedup_low": best.speedup_low, "source": best.source},
        "beside": None if beside is None else asdict(beside),
        "drop_in": None if result.drop_in is None else str(result.drop_in),
    }


def in_words(result: OptimizeResult) -> str:
    """Result of a search, for a person."""

    lines = []
    if result.best is None:
        lines.append("best         none: no improvement was confirmed")
    else:
        lines.append(f"best         {evaluation_line(result.best)}")
        lines += [f"label        {label}: {label.meaning}" for label in result.best.labels]
        if result.beside is not None:
            lines.append(f"baselines    {beside_in_words(result.beside)}")
        lines.append(f"{'drop-in      ' if result.is_handed_out else 'not ahead    '}{result.drop_in}")
    if result.screened:
        lines.append(f"screened     {result.screened}")
    lines.append(f"evaluations  {result.evaluations}")
    lines.append(f"report       {result.run / 'report.html'}")
    return "\n".join(lines)


def beside_in_words(beside: BaselineComparison) -> str:
    """How a winner stands against the baselines, in one line."""
    others = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in beside.baselines.items())
    how = "ahead" if beside.is_ahead else "not certainly ahead"
    return f"{others}; {how} of the fastest, {beside.best}: {format_speedup(beside.speedup, beside.low, beside.high)}"


def near_miss_in_words(found: Evaluation, command: list[str]) -> str:
    """Two lines on a near miss: how far it falls short, and the command, completed here, that would settle it."""
    from kernelwright.report.words import near_miss

    if found.processes_to_settle is not None:
        command = [*command, "--processes", str(found.processes_to_settle)]
    return f"{evaluation_line(found)}\n             {near_miss(found)}\nto settle it {shlex.join(command)}"
