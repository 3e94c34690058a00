"""`kernelwright optimize TASK`: search for a verified faster drop-in."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli.commands import OptionsCommand, argument, option
from kernelwright.cli.model_options import ModelOptions, proposer
from kernelwright.cli.options import (
    AT_LEAST_ONE,
    BASELINES,
    JudgeOptions,
    baseline_names,
    device_option,
    json_option,
    judged_option,
    out_option,
    require_together,
    resolve_device,
    run_directory,
    says_what_was_kept,
    task_path_option,
)
from kernelwright.cli.output import (
    Phases,
    emit_json,
    format_noise_floor,
    format_speedup,
    printable,
    results_only,
    say,
)

if TYPE_CHECKING:
    from kernelwright.execution.fork_servers import ForkServers
    from kernelwright.records import Evaluation
    from kernelwright.records.decisions import BaselineComparison
    from kernelwright.records.screened import Screened
    from kernelwright.search.optimize import OptimizeResult, SearchEvent
    from kernelwright.search.then_sass import KernelTuner


@dataclass(frozen=True, kw_only=True)
class OptimizeCommand:
    """Search for a faster drop-in for TASK, and write what was confirmed.

    Proposals of the policy builtin are screened: a quick look estimates each. The judge then takes the best few, and the
    winner is measured once more. Those of a language model are judged one by one.

    Writes optimized.py (where an improvement was confirmed: the fastest of what was judged, stock configurations included),
    report.html, evaluations.jsonl, screened.jsonl, config.json and environment.json into DIR. Interrupt it at any moment:
    the same command resumes.
    """

    task: str = argument()
    path: Path | None = task_path_option()
    device: str = device_option()
    policy: str = option(
        "builtin", metavar="NAME", help="What proposes candidates: builtin, or a language model: api, local."
    )
    budget: int = option(24, type=AT_LEAST_ONE, metavar="N", help="Proposals to look at, those already in DIR included.")
    judged: int = judged_option()
    baselines: str | None = option(
        metavar="LIST",
        help=f"To measure beside, of {BASELINES}; by default those of the manual on a GPU, eager alone on a CPU.",
    )
    out: Path | None = out_option()
    then_sass: bool = option(False, help="Hand the winner's Triton kernels to the assembly game. Needs a GPU.")
    sass_agent: str = option(
        "greedy", metavar="NAME", help="Agent of that game: ppo, anneal, greedy, guided, random, sweeps."
    )
    sass_budget: int = option(1000, type=AT_LEAST_ONE, metavar="N", help="Schedules to measure for each kernel.")
    as_json: bool = json_option()
    model: ModelOptions
    judge: JudgeOptions

    def __call__(self) -> None:
        require_together("--then-sass", self.then_sass, "sass_agent", "sass_budget")
        settings = self.judge.settings()
        baselines = baseline_names(self.baselines)
        self.model.settings(self.policy)

        from kernelwright.tasks import load_task

        task = load_task(self.task, self.path)
        with contextlib.ExitStack() as stack:
            servers = None
            if self.policy == "builtin" and settings.timed:
                servers = stack.enter_context(contextlib.closing(_fork_servers(self.device)))
            # Only now: these import torch, which takes seconds, and the fork servers do so at the same time.
            from kernelwright.search.optimize import optimize

            device = resolve_device(self.device)
            target = stack.enter_context(run_directory(self.out, "optimize", task.id))
            proposing = proposer(self.policy, device, target, self.model)
            with (
                results_only(),
                says_what_was_kept(target),
                Phases() as phases,
                proposing.accounted(target),
            ):
                result = optimize(
                    task,
                    policy=proposing.policy,
                    device=device,
                    budget=self.budget,
                    judged=self.judged,
                    out=target,
                    settings=settings,
                    on_event=_SearchProgress(phases, self.budget),
                    composer=self._composer(target),
                    servers=servers,
                    baselines=baselines,
                )
        if self.as_json:
            emit_json(as_contract(result, task.id, device))
        else:
            click.echo(as_text(result))
            if result.near_miss is not None:
                click.echo(near_miss_text(result.near_miss, _settling_command(self, device, result.run)))

    def _composer(self, out: Path) -> KernelTuner | None:
        """Player of the assembly game on the winner's kernels, where that was asked for."""
        if not self.then_sass:
            return None
        from kernelwright.assembly.search import GameSettings
        from kernelwright.search.then_sass import KernelTuner

        return KernelTuner(out, GameSettings((self.sass_agent,), self.sass_budget, seed=0))


command = OptionsCommand("optimize", OptimizeCommand, short_help="Search for a verified faster drop-in for a task.")


def _settling_command(options: OptimizeCommand, device: str, run: Path) -> list[str]:
    """The command that judges a search's near miss again, without the number of processes."""
    from kernelwright.search.optimize import NEAR_MISS

    given = {"--path": options.path, "--device": device, "--settings": options.judge.settings_file}
    typed = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return ["kernelwright", "evaluate", options.task, str(run / NEAR_MISS), *typed]


def _fork_servers(device: str) -> ForkServers:
    """Processes that screening forks from. Guesses the device, because torch is not imported yet."""
    from kernelwright.execution.fork_servers import ForkServers

    return ForkServers("cuda" if device != "cpu" and Path("/dev/nvidiactl").exists() else "cpu")


class _SearchProgress:
    """Shows a search on stderr: a line for each finished evaluation, and what is going on now."""

    def __init__(self, phases: Phases, budget: int) -> None:
        self._phases = phases
        self._budget = budget

    def __call__(self, event: SearchEvent) -> None:
        if event.evaluation is not None:
            say(f"{event.number:>4}/{self._budget}  {evaluation_line(event.evaluation)}")
        elif event.screened is not None:
            say(f"{event.number:>4}/{self._budget}  {screened_line(event.screened)}")
        elif event.lasting:
            say(printable(event.message))
        else:
            self._phases.begin(event.message)


def evaluation_line(evaluation: Evaluation) -> str:
    """An evaluation in one line, such as `improvement  1.62x [1.59, 1.65], noise floor 1.20%  diag-to-einsum`."""
    what = printable(", ".join(evaluation.techniques) or evaluation.policy)
    if not evaluation.accepted:
        return f"rejected     {evaluation.reason}  {what}"
    state = "improvement" if evaluation.is_improvement else "near miss  " if evaluation.is_near_miss else "accepted   "
    speedup = format_speedup(evaluation.speedup, evaluation.speedup_low, evaluation.speedup_high)
    floor = "" if evaluation.speedup is None else f", {format_noise_floor(evaluation.noise_floor)}"
    return f"{state}  {speedup}{floor}  {what}"


def screened_line(estimate: Screened) -> str:
    """An estimate in one line, such as `screened     about 1.6x  diag-to-einsum`."""
    what = printable(", ".join(estimate.techniques) or estimate.policy)
    if not estimate.correct:
        return f"screened     {estimate.reason}  {what}"
    return f"screened     {'right' if estimate.estimate is None else f'about {estimate.estimate:.2f}x'}  {what}"


def as_contract(result: OptimizeResult, task: str, device: str) -> dict[str, Any]:
    """The object that `--json` prints; its keys are a contract with scripts."""
    best, comparison = result.best, result.beside
    return {
        "task": task,
        "device": device,
        "run": str(result.run),
        "evaluations": result.evaluations,
        "screened": result.screened,
        "best": None if best is None else {"speedup": best.speedup, "speedup_low": best.speedup_low, "source": best.source},
        "beside": None if comparison is None else asdict(comparison),
        "drop_in": None if result.drop_in is None else str(result.drop_in),
    }


def as_text(result: OptimizeResult) -> str:
    """Result of a search, for a person."""

    lines = []
    if result.best is None:
        lines.append(f"best         none: no improvement was confirmed{f'; {result.why}' if result.why else ''}")
    else:
        lines.append(f"best         {evaluation_line(result.best)}")
        lines.append(f"             {printable(str(result))}")
        lines += [f"label        {label}: {label.meaning}" for label in result.best.labels]
        if result.beside is not None:
            lines.append(f"baselines    {comparison_text(result.beside)}")
        lines.append(f"drop-in      {result.drop_in}")
    if result.screened:
        lines.append(f"screened     {result.screened}")
    lines.append(f"evaluations  {result.evaluations}")
    lines.append(f"report       {result.run / 'report.html'}")
    return "\n".join(lines)


def comparison_text(comparison: BaselineComparison) -> str:
    """How a winner stands against the baselines, in one line."""
    others = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in comparison.baselines.items())
    how = "ahead" if comparison.is_ahead else "not certainly ahead"
    over_best = format_speedup(comparison.speedup, comparison.low, comparison.high)
    return f"{others}; {how} of the fastest, {comparison.best}: {over_best}"


def near_miss_text(evaluation: Evaluation, command: list[str]) -> str:
    """Two lines on a near miss: how far it falls short, and the command, completed here, that would settle it."""
    from kernelwright.report.rows import near_miss

    if evaluation.processes_to_settle is not None:
        command = [*command, "--processes", str(evaluation.processes_to_settle)]
    return f"{evaluation_line(evaluation)}\n             {near_miss(evaluation)}\nto settle it {shlex.join(command)}"
