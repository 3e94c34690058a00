"""`kernelwright evaluate TASK CANDIDATE`: the judge's verdict on one candidate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli import options
from kernelwright.cli.output import (
    emit_json,
    format_latency,
    format_speedup,
    printable,
    progress_console,
    results_only,
    say,
    says_what_was_kept,
)

if TYPE_CHECKING:
    from kernelwright.records import Evaluation

REJECTED = 1


@click.command("evaluate", short_help="Judge one candidate against one task.")
@click.argument("task")
@click.argument("candidate", type=options.NamedPath())
@options.task_path_option
@options.device_option
@click.option(
    "--out",
    type=options.NamedPath(),
    metavar="DIR",
    help="Run directory; those of one task and equal settings may share it. Default: a new one in runs/.",
)
@options.json_option
@options.judge_options
def command(
    task: str, candidate: Path, path: Path | None, device: str, out: Path | None, as_json: bool, **judge: Any
) -> int:
    """Judge CANDIDATE, a Python file that defines ModelNew, against TASK.

    Prints the verdict, its reason, both contracts, and the paired speedup with its 95 % interval. Ends with 0 when
    accepted and 1 when rejected; being accepted means that it keeps the contract, not that it is faster.
    """
    settings = options.judge_settings(**judge)

    from kernelwright.errors import CandidateError
    from kernelwright.execution.generated import without_advice_on_generated
    from kernelwright.judge import Judge
    from kernelwright.records import Candidate, RunDirectory
    from kernelwright.tasks import load_task, read_source
    from kernelwright.version import __version__

    source = read_source(candidate, "a candidate that defines ModelNew", CandidateError)
    loaded = load_task(task, path)
    chosen = options.resolve_device(device, say)
    config = {
        "kind": "evaluate",
        "task": loaded.id,
        "task_sha256": loaded.sha256,
        "task_source": loaded.source,
        "device": chosen,
        "settings": settings.model_dump(mode="json"),
        "kernelwright": __version__,
    }
    with options.run_directory(out, "evaluate", loaded.id) as target:
        run = RunDirectory(target)
        run.claim(config, same=("kind", "task_sha256", "device", "settings"), device=chosen)
        with (
            results_only(),
            says_what_was_kept(lambda: "the candidate was not judged to the end; there is no verdict on it"),
            progress_console().status("starting") as status,
            Judge(device=chosen, settings=settings, progress=status.update) as judge_,
        ):
            evaluation = judge_.evaluate(loaded, Candidate(source=source, note=candidate.name))
        evaluation = without_advice_on_generated(evaluation, loaded)
        run.append(evaluation)
    if as_json:
        emit_json(as_contract(evaluation, run.path))
    else:
        click.echo(in_words(evaluation, run.path))
    return 0 if evaluation.accepted else REJECTED


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


def in_words(evaluation: Evaluation, run: Path) -> str:
    """The verdict for a person, one fact a line."""
    from kernelwright.report.words import near_miss

    lines = [f"verdict      {evaluation.verdict}"]
    if evaluation.reason:
        lines.append(f"reason       {evaluation.reason}: {evaluation.reason.meaning}")
    detail, _, change = evaluation.detail.partition("\nTo change: ")
    if detail:
        lines.append(f"detail       {printable(detail)}")
    if change:
        lines.append(f"to change    {printable(change)}")
    for contract, found in (evaluation.contracts or {}).items():
        kept = "kept" if found.kept else f"not kept: {', '.join(found.missing)}"
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
