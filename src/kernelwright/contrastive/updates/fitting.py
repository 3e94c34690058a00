"""Fits a model to good answers by their likelihood: the gradient steps of the supervised and the self-supervised stage."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernelwright.contrastive.stages.config import FittingSection
from kernelwright.contrastive.stages.context import StageContext
from kernelwright.contrastive.teaching.examples import Example
from kernelwright.contrastive.updates.likelihood import Spelled, token_scores
from kernelwright.contrastive.updates.optimiser import Optimiser
from kernelwright.errors import ConfigError, InfrastructureError

CHECKPOINTS_KEPT = 2


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

    Of a model with a LoRA adapter only the adapter learns. Examples longer than `max_length` tokens are left out. A
    checkpoint in `out` is taken up; `save_steps` of None saves none. Returns whether it came to the end; otherwise the time
    was up and a checkpoint holds what was learnt so far.

    Raises:
        ConfigError: no example is short enough.
        InfrastructureError: gradients are no longer finite.
    """
    rows = _short_enough([_spelled(tokenizer, example) for example in examples], settings.max_length, context)
    total = math.ceil(settings.epochs * math.ceil(len(rows) / settings.batch_size))
    optimiser = Optimiser(model, settings, total, context.say)
    checkpoints = out / "checkpoints"
    tokens = optimiser.resume(checkpoints, out / "final").get("tokens", 0)
    prepare_for_training(model, settings.gradient_checkpointing)
    for number, batch in enumerate(_batches(rows, settings.batch_size, total, seed)):
        if number < optimiser.done:
            continue
        values = _update(model, optimiser, batch, settings.micro_batch)
        tokens += sum(len(row.prompt) + len(row.answer) for row in batch)
        on_log(optimiser.done, values | {"num_tokens": float(tokens), "epoch": optimiser.done * settings.epochs / total})
        late = context.deadline.passed()
        if save_steps is not None and (late or optimiser.done % save_steps == 0):
            optimiser.save(checkpoints, CHECKPOINTS_KEPT, tokens=tokens)
        if late and optimiser.done < total:
            return False
    shutil.rmtree(checkpoints, ignore_errors=True)
    return True


def _spelled(tokenizer: Any, example: Example) -> Spelled:
    """The answer is what the chat template puts after the prompt, with the token that ends a turn."""
    turns = [{"role": message.role, "content": message.content} for message in example.prompt]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": example.answer}], tokenize=False)
    prompt, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, whole))
    # The prompt's last token and the answer's first may be one token of the whole.
    shared = len(os.path.commonprefix([prompt, both]))
    return Spelled(both[:shared], both[shared:])


def _short_enough(rows: Sequence[Spelled], limit: int, context: StageContext) -> list[Spelled]:
    short = [row for row in rows if len(row.prompt) + len(row.answer) <= limit]
    if len(short) < len(rows):
        context.say(f"{len(rows) - len(short)} of {len(rows)} examples are longer than {limit} tokens; left out")
    if not short:
        raise ConfigError(
            f"Wanted examples of at most {limit} tokens; found none among {len(rows)}. Raise optimiser.max_length."
        )
    return short


def _batches(rows: Sequence[Spelled], size: int, total: int, seed: int) -> Iterator[list[Spelled]]:
    """`total` batches; every example once in each pass, in another order each time."""
    made = 0
    for turn in range(total):
        shuffled = list(rows)
        random.Random(seed * 1_000_003 + turn).shuffle(shuffled)
        for start in range(0, len(shuffled), size):
            if made == total:
                return
            made += 1
            yield shuffled[start : start + size]


def _update(model: Any, optimiser: Optimiser, batch: Sequence[Spelled], micro_batch: int) -> dict[str, float]:
    """One gradient step: the mean over all tokens of the batch's answers."""
    tokens = sum(len(row.answer) for row in batch)
    sums = np.zeros(3)
    for start in range(0, len(batch), micro_batch):
        scores = token_scores(model, batch[start : start + micro_batch])
        loss = -(scores.logps * scores.mask).sum() / tokens
        torch.autograd.backward(loss)
        told = ((found.detach() * scores.mask).sum().item() / tokens for found in (scores.entropy, scores.hits))
        sums += [loss.item(), *told]
    return dict(zip(("loss", "entropy", "mean_token_accuracy"), sums.tolist(), strict=True)) | optimiser.step()


def prepare_for_training(model: Any, gradient_checkpointing: bool) -> None:
    """Put a model into training mode, with less memory for more time where that is asked for."""
    model.train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


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
    model.save_pretrained(str(temporary))
    if not hasattr(model, "peft_config"):
        tokenizer.save_pretrained(str(temporary))
    (temporary / "README.md").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
