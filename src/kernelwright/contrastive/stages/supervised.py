"""Runs stage 1, supervised (paper 2.2): collects teachers' correct code and fine-tunes a model on it."""

from __future__ import annotations

from kernelwright.contrastive.sampling.metrics import MetricsLog
from kernelwright.contrastive.stages.config import SupervisedConfig
from kernelwright.contrastive.stages.context import StageContext, StageResult, claim
from kernelwright.contrastive.stages.split import TaskSplit
from kernelwright.contrastive.teaching.augmentation import augment
from kernelwright.contrastive.teaching.examples import Example, read_examples
from kernelwright.contrastive.updates.fitting import fit, save_final
from kernelwright.errors import ConfigError
from kernelwright.records import RunDirectory


def train_supervised(config: SupervisedConfig, split: TaskSplit, run: RunDirectory, context: StageContext) -> StageResult:
    """Augment, then fine-tune; `final` holds the result.

    Writes `examples.jsonl`, `evaluations.jsonl`, `metrics.jsonl`, checkpoints and TensorBoard events. Run again with the
    same directory, it goes on where it was, and does nothing more once it has finished.

    Raises:
        UsageError: the directory belongs to another run.
        ConfigError: a teacher does not exist, none of them was right, or no example fits.
        PolicyError: the model cannot be loaded.
        InfrastructureError: candidates cannot be judged, or packages are missing.
    """
    claim(run, "sft", config, context.device)
    final = run.path / "final"
    if final.is_dir():
        return StageResult(True, str(final), 1)
    examples = examples_of(config, split, run, context)
    if examples is None or context.deadline.passed():
        return StageResult(False, None, 0)
    if not examples:
        raise ConfigError(
            f"Wanted correct variations by teachers to learn from; found none. {run.evaluations_path} says what was wrong "
            "with each. Raise augmentation.attempts, or add teachers or tasks."
        )
    model, tokenizer = context.model.load(config.model, config.seed)
    context.say(f"supervised: {len(examples)} examples")
    with MetricsLog(run.path) as metrics:
        finished = fit(
            model,
            tokenizer,
            examples,
            config.optimiser,
            out=run.path,
            seed=config.seed,
            context=context,
            save_steps=config.save_steps,
            on_log=lambda step, values: metrics.write(step, {f"sft/{name}": value for name, value in values.items()}),
        )
    if not finished:
        return StageResult(False, None, 0)
    save_final(model, tokenizer, final)
    return StageResult(True, str(final), 1)


def examples_of(
    config: SupervisedConfig, split: TaskSplit, run: RunDirectory, context: StageContext
) -> list[Example] | None:
    """The examples to learn, made first when they are not there yet; None when the time was up.

    Raises:
        UsageError: the directory belongs to another run.
        ConfigError: a teacher does not exist.
        InfrastructureError: candidates cannot be judged.
    """
    claim(run, "sft", config, context.device)
    return read_examples(run.path / "examples.jsonl") or augment(config, split.train, run, context)
