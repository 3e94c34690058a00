"""`kernelwright train STAGE`: CUDA-L1's three stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from kernelwright.cli.commands import OptionsCommand, argument, option
from kernelwright.cli.options import ABOVE_ZERO, json_option, out_option, run_directory, says_what_was_kept
from kernelwright.cli.output import emit_json, results_only, say

STAGES = ("sft", "self-supervised", "contrastive")


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train one of the three stages after CUDA-L1, under the judge.

    Writes evaluations.jsonl, rollouts.jsonl, metrics.jsonl, TensorBoard events, checkpoints and, when finished, the trained
    adapter or model in DIR/final. Interrupt or kill it at any moment: the same command resumes, and judges nothing twice.
    """

    stage: str = argument(type=click.Choice(STAGES))
    config_file: Path = option(
        flag="--config",
        required=True,
        metavar="FILE.toml",
        help="What to train, on what and how: docs/training.md, and recipes/ for examples.",
    )
    model: str | None = option(
        metavar="PATH",
        help="The model to train, in place of the file's model.base: a folder, a GGUF file, a hub name or tiny-random.",
    )
    out: Path | None = out_option()
    limit_s: float | None = option(
        flag="--time-limit",
        type=ABOVE_ZERO,
        metavar="SECONDS",
        help="Save and end after this time; the same command resumes.",
    )
    as_json: bool = json_option()

    def __call__(self) -> None:
        from kernelwright.config import in_file
        from kernelwright.contrastive.settings import read_stage
        from kernelwright.contrastive.trained_model import require_paths

        config = read_stage(self.stage, self.config_file, self.model)
        with (
            results_only(),
            run_directory(self.out, "train", self.stage) as path,
            says_what_was_kept(path),
            in_file(self.config_file, "--model" if self.model else ""),
        ):
            if not (path / "final").is_dir():
                require_paths(config.model)
            # Only now: it imports torch, which takes seconds.
            from kernelwright.contrastive.stages import train

            say(f"run directory {path}")
            result = train(config, path, log=say, limit_s=self.limit_s)
        if self.as_json:
            told = {"finished": result.finished, "steps": result.steps, "final": result.final}
            emit_json({"stage": self.stage, "run": str(path), **told})
            return
        click.echo(f"run       {path}")
        click.echo(
            f"finished  {'yes' if result.finished else 'no: the time was up; the same command with this --out goes on'}"
        )
        if result.final is not None:
            click.echo(f"model     {result.final}")


command = OptionsCommand("train", TrainCommand, short_help="Train a model: supervised, self-supervised, contrastive.")
