"""Negative log-likelihood of good answers: the gradient step of the supervised and the self-supervised stage, by TRL."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernelwright.contrastive.stages.config import FittingSection, OptimiserSection
from kernelwright.contrastive.stages.context import StageContext
from kernelwright.contrastive.teaching.examples import Example, conversations
from kernelwright.errors import ConfigError, InfrastructureError


def fit(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    settings: FittingSection,
    *,
    out: Path,
    seed: int,
    context: StageContext,
    save_steps: int | None = None,
    on_log: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> bool:
    """Train a model on examples, the loss on answers only.

    Args:
        model: Trained in place: a model, or one with a LoRA adapter, of which only the adapter learns.
        tokenizer: Of the model, with a chat template.
        examples: What to learn; those longer than `max_length` tokens are left out.
        settings: The gradient step.
        out: Where checkpoints go. One that is there is taken up.
        seed: Order of the examples.
        context: For its clock.
        save_steps: Steps between checkpoints; None saves none.
        on_log: Told the loss and its like.

    Returns:
        Whether it came to the end; otherwise the time was up and a checkpoint holds what was learnt so far.

    Raises:
        ConfigError: no example is short enough.
        InfrastructureError: gradients are no longer finite.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from kernelwright.contrastive.updates.finite import FiniteUpdates

    rows = conversations(examples)
    short = [row for row in rows if _tokens(tokenizer, row) <= settings.max_length]
    if len(short) < len(rows):
        context.say(
            f"{len(rows) - len(short)} of {len(rows)} examples are longer than {settings.max_length} tokens; left out"
        )
    if not short:
        raise ConfigError(
            f"Wanted examples of at most {settings.max_length} tokens; found none among {len(rows)}. Raise "
            "optimiser.max_length."
        )

    class Watch(TrainerCallback):
        """Ends training when the time is up, and passes metrics on."""

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if context.deadline.passed():
                control.should_save = save_steps is not None
                control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            on_log(
                state.global_step, {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
            )

    finite = FiniteUpdates(model, context.say)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(short),
        args=on_one_gpu(
            SFTConfig(
                output_dir=str(out / "checkpoints"),
                completion_only_loss=True,
                max_length=None,
                seed=seed,
                data_seed=seed,
                save_strategy="steps" if save_steps is not None else "no",
                save_steps=save_steps or 500,
                save_total_limit=2,
                num_train_epochs=settings.epochs,
                gradient_accumulation_steps=settings.batch_size // settings.micro_batch,
                **trainer_arguments(model, settings),
            )
        ),
        callbacks=[finite, Watch()],
    )
    finite.listen(trainer)
    quiet(trainer)
    trainer.train(resume_from_checkpoint=last_checkpoint(out / "checkpoints"))
    finished = trainer.state.global_step >= trainer.state.max_steps
    if finished:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return finished


def last_checkpoint(folder: Path, written_last: str = "trainer_state.json") -> str | None:
    """The newest whole checkpoint in a folder; None when there is none.

    Args:
        folder: Where checkpoints are.
        written_last: The file that is there once a checkpoint is whole: one that a kill left unfinished is passed over.
    """
    found = sorted(
        (int(path.name.removeprefix("checkpoint-")), path)
        for path in folder.glob("checkpoint-*")
        if (path / written_last).is_file()
    )
    return str(found[-1][1]) if found else None


def quiet(trainer: Any) -> None:
    """Keep a trainer from printing its logs: standard output is for results."""
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def trainer_arguments(model: Any, settings: OptimiserSection) -> dict[str, Any]:
    """Arguments that transformers' trainers share, from the configuration."""
    import torch

    on_gpu = torch.cuda.is_available()
    half = next(model.parameters()).dtype is torch.bfloat16
    return {
        "learning_rate": settings.learning_rate,
        # The one called `constant` passes a warm-up over.
        "lr_scheduler_type": "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "per_device_train_batch_size": settings.micro_batch,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "bf16": half,
        "use_cpu": not on_gpu,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu,
    }


def on_one_gpu(arguments: Any) -> Any:
    """A trainer's arguments, for one GPU however many there are: the others are the judges'. By itself transformers would
    spread each batch over all of them with `nn.DataParallel`, which TRL refuses."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


def save_final(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what was trained (an adapter alone, where there is one) into a folder, in one step.

    Raises:
        InfrastructureError: a weight is not a number.
    """
    broken = [name for name, weight in model.named_parameters() if weight.requires_grad and not weight.isfinite().all()]
    if broken:
        raise InfrastructureError(
            f"Wanted a trained model; found weights that are not finite, {broken[0]} first. Train it again from the "
            "checkpoint before, or with a lower optimiser.learning_rate."
        )
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    adapters = getattr(model, "peft_config", None)
    # The copy that the KL was measured against is of no use to anyone else.
    chosen = {"selected_adapters": ["default"]} if adapters else {}
    model.save_pretrained(str(temporary), **chosen)
    if not adapters:
        tokenizer.save_pretrained(str(temporary))
    (temporary / "README.md").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _tokens(tokenizer: Any, row: dict[str, list[dict[str, str]]]) -> int:
    text = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])
