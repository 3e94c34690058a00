"""`kernelwright train STAGE`: CUDA-L1's three stages."""

from __future__ import annotations

from pathlib import Path

import click

from kernelwright.cli import options
from kernelwright.cli.output import emit_json, results_only, say, says_what_was_kept

STAGES = ("sft", "self-supervised", "contrastive")


@click.command("train", short_help="Train a model: supervised, self-supervised, contrastive.")
@click.argument("stage", type=click.Choice(STAGES))
@click.option(
    "--config",
    "config_file",
    type=options.NamedPath(),
    required=True,
    metavar="FILE.toml",
    help="What to train, on what and how: docs/training.md, and recipes/ for examples.",
)
@click.option(
    "--model",
    metavar="PATH",
    help="The model to train, in place of the file's model.base: a folder, a GGUF file, a hub name or tiny-random.",
)
@options.out_option
@click.option(
    "--time-limit",
    "limit_s",
    type=options.FiniteRange(0, min_open=True),
    metavar="SECONDS",
    help="Save and end after this time; the same command resumes.",
)
@options.json_option
def command(
    stage: str, config_file: Path, model: str | None, out: Path | None, limit_s: float | None, as_json: bool
) -> None:
    """Train one of the three stages after CUDA-L1, under the judge.

    Writes evaluations.jsonl, rollouts.jsonl, metrics.jsonl, TensorBoard events, checkpoints and, when finished, the trained
    adapter or model in DIR/final. Interrupt or kill it at any moment: the same command resumes, and judges nothing twice.
    """
    from kernelwright.config import in_file
    from kernelwright.contrastive.settings import read_stage
    from kernelwright.contrastive.stages import train

    config = read_stage(stage, config_file, model)
    with (
        results_only(),
        options.run_directory(out, "train", stage) as path,
        says_what_was_kept(lambda: options.kept_in(path)),
        in_file(config_file, "--model" if model else ""),
    ):
        say(f"run directory {path}")
        result = train(config, path, say=say, limit_s=limit_s)
    if as_json:
        emit_json(
            {"stage": stage, "run": str(path), "finished": result.finished, "steps": result.steps, "final": result.final}
        )
        return
    click.echo(f"run       {path}")
    click.echo(f"finished  {'yes' if result.finished else 'no: the time was up; the same command with this --out goes on'}")
    if result.final is not None:
        click.echo(f"model     {result.final}")
