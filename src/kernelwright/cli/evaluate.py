"""`kernelwright evaluate TASK CANDIDATE`: the judge's verdict on one candidate, or on torch.compile of the task's model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli.commands import OptionsCommand, argument, option
from kernelwright.cli.options import (
    JudgeOptions,
    device_option,
    json_option,
    resolve_device,
    run_directory,
    says_what_was_kept,
    task_path_option,
)
from kernelwright.cli.output import (
    Phases,
    emit_json,
    format_latency,
    format_speedup,
    printable,
    results_only,
)

if TYPE_CHECKING:
    from kernelwright.records import Evaluation
    from kernelwright.search.compiled import ModeVerdict

REJECTED = 1


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Judge CANDIDATE, a Python file that defines ModelNew, against TASK.

    Prints the verdict, its reason, both contracts, and the paired speedup with its 95 % interval. Ends with 0 when
    accepted and 1 when rejected; being accepted means that it keeps the contract, not that it is faster.

    With --against-compile there is no CANDIDATE: torch.compile of TASK's own model is judged in each mode. It prints a line
    for each finding, with both errors against float64, and ends with 1 where some mode is rejected.
    """

    task: str = argument()
    candidate: Path | None = argument(required=False)
    against_compile: bool = option(help="Judge torch.compile of TASK's own model in each mode, in place of a CANDIDATE.")
    path: Path | None = task_path_option()
    device: str = device_option()
    out: Path | None = option(
        metavar="DIR", help="Run directory; those of one task and equal settings may share it. Default: a new one in runs/."
    )
    as_json: bool = json_option()
    judge: JudgeOptions

    def __call__(self) -> int:
        settings = self.judge.settings()
        if (self.candidate is None) is not self.against_compile:
            found = "neither" if self.candidate is None else "both"
            raise click.UsageError(f"wanted a CANDIDATE or --against-compile, found {found}.")

        import kernelwright
        from kernelwright.errors import CandidateError
        from kernelwright.records import Candidate, RunDirectory
        from kernelwright.tasks import load_task, read_source

        candidate = None
        if self.candidate is not None:
            source = read_source(self.candidate, "a candidate that defines ModelNew", CandidateError)
            candidate = Candidate(source=source, note=self.candidate.name)
        task = load_task(self.task, self.path)
        # Only now: these import torch, which takes seconds.
        from kernelwright.judge import Judge
        from kernelwright.search.compiled import judge_modes

        device = resolve_device(self.device)
        config = {
            "kind": "evaluate",
            "task": task.id,
            "task_sha256": task.sha256,
            "task_source": task.source,
            "device": device,
            "settings": settings.model_dump(mode="json"),
            "kernelwright": kernelwright.__version__,
        }
        with run_directory(self.out, "evaluate", task.id) as target:
            run = RunDirectory(target)
            run.claim(config, same=("kind", "task_sha256", "device", "settings"), device=device)
            with (
                results_only(),
                says_what_was_kept(None, "the candidate was not judged to the end; there is no verdict on it"),
                Phases() as phases,
                Judge(device=device, settings=settings, progress=phases.begin) as judge,
            ):
                if candidate is None:
                    modes = []
                    for mode in judge_modes(judge, task):
                        run.append(mode.evaluation)
                        modes.append(mode)
                else:
                    evaluation = judge.evaluate(task, candidate)
                    run.append(evaluation)
        if candidate is None:
            return _told(modes, run.path, as_json=self.as_json)
        if self.as_json:
            emit_json(as_contract(evaluation, run.path))
        else:
            click.echo(as_text(evaluation, run.path))
        return 0 if evaluation.accepted else REJECTED


def _told(modes: list[ModeVerdict], run: Path, *, as_json: bool) -> int:
    """Print the verdicts on torch.compile's modes; returns the exit status."""
    if as_json:
        emit_json({"modes": [{"mode": one.mode, **as_contract(one.evaluation, run), "errors": one.errors} for one in modes]})
    else:
        lines = [f"{one.mode:28}{kind:11}{printable(text)}" for one in modes for kind, text in one.findings()]
        click.echo("\n".join([*lines, f"{'run':28}{run}"]))
    return 0 if all(one.evaluation.accepted for one in modes) else REJECTED


command = OptionsCommand("evaluate", EvaluateCommand, short_help="Judge one candidate against one task.")


def as_contract(evaluation: Evaluation, run: Path) -> dict[str, Any]:
    """The object that `--json` prints; its keys are a contract with scripts."""
    return {
        "verdict": evaluation.verdict.value,
        "reason": evaluation.reason.value if evaluation.reason else None,
        "detail": evaluation.detail,
        "contract": evaluation.contract.value,
        "contracts": evaluation.model_dump(mode="json")["contracts"],
        "speedup": evaluation.speedup,
        "speedup_low": evaluation.speedup_low,
        "speedup_high": evaluation.speedup_high,
        "labels": [label.value for label in evaluation.labels],
        "task": evaluation.task,
        "device": evaluation.device,
        "run": str(run),
    }


def as_text(evaluation: Evaluation, run: Path) -> str:
    """The verdict for a person, one fact a line."""
    from kernelwright.report.rows import near_miss

    lines = [f"verdict      {evaluation.verdict}"]
    if evaluation.reason:
        lines.append(f"reason       {evaluation.reason}: {evaluation.reason.meaning}")
    detail, _, change = evaluation.detail.partition("\nTo change: ")
    if detail:
        lines.append(f"detail       {printable(detail)}")
    if change:
        lines.append(f"to change    {printable(change)}")
    for contract, answer in (evaluation.contracts or {}).items():
        kept = "kept" if answer.kept else f"not kept: {', '.join(answer.missing)}"
        decides = ", which decides" if contract is evaluation.contract else ""
        lines.append(f"contract     {contract}{decides}: {kept}")
    if evaluation.accepted:
        speedup = format_speedup(evaluation.speedup, evaluation.speedup_low, evaluation.speedup_high)
        lines.append(f"speedup      {speedup}")
    if evaluation.speedup is not None:
        floor = evaluation.noise_floor
        lines.append(f"noise floor  {'not measured' if floor is None else f'{floor:.2%}'}")
        lines.append(
            f"improvement  {'yes' if evaluation.is_improvement else 'no'}, "
            "which asks that the interval's lower end exceeds 1 + the noise floor"
        )
        if evaluation.is_near_miss:
            lines.append(f"near miss    {near_miss(evaluation)}")
        lines.append(
            f"latency      {format_latency(evaluation.paired_us)} against the reference's "
            f"{format_latency(evaluation.reference_us)}: its median, and that divided by the speedup"
        )
    lines += [f"label        {label}: {label.meaning}" for label in evaluation.labels]
    lines.append(f"device       {evaluation.device}")
    lines.append(f"run          {run}")
    return "\n".join(lines)
