"""Fits a model to good answers by their likelihood: examples, and the gradient steps of the first two stages."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from kernelwright.contrastive.context import StageContext
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.optimiser import Optimiser, token_scores
from kernelwright.contrastive.prompts import AnswerForm, Prompt, answer_code
from kernelwright.contrastive.samples import TokenizedSample
from kernelwright.contrastive.settings import FittingSection
from kernelwright.errors import ConfigError, InfrastructureError
from kernelwright.files import replace_file
from kernelwright.models.chat import Message
from kernelwright.records import Evaluation, Task, sha256_of
from kernelwright.records.rewards import conservative

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
    metrics: MetricsLog | None = None,
) -> bool:
    """Train a model on examples, the loss on answers only.

    Of a model with a LoRA adapter only the adapter learns. Examples longer than `max_length` tokens are left out. A
    checkpoint in `out` is taken up; `save_steps` of None saves none. `metrics` takes those of each step. Returns True at the
    end; otherwise the time was up and a checkpoint holds what was learnt so far.

    Raises:
        ConfigError: no example is short enough.
        InfrastructureError: gradients are no longer finite.
    """
    rows = _short_enough([_tokenized(tokenizer, example) for example in examples], settings.max_length, context)
    total = math.ceil(settings.epochs * math.ceil(len(rows) / settings.batch_size))
    optimiser = Optimiser(model, settings, total, context.log)
    checkpoints = out / "checkpoints"
    tokens = optimiser.resume(checkpoints, out / "final").get("tokens", 0)
    prepare_for_training(model, settings.gradient_checkpointing)
    for number, batch in enumerate(_batches(rows, settings.batch_size, total, seed)):
        if number < optimiser.done:
            continue
        values = _update(model, optimiser, batch, settings.micro_batch)
        tokens += sum(len(row.prompt) + len(row.answer) for row in batch)
        values |= {"num_tokens": float(tokens), "epoch": optimiser.done * settings.epochs / total}
        if metrics is not None:
            metrics.write(optimiser.done, {f"sft/{name}": value for name, value in values.items()})
        late = context.deadline.passed()
        if save_steps is not None and (late or optimiser.done % save_steps == 0):
            optimiser.save(checkpoints, CHECKPOINTS_KEPT, tokens=tokens)
        if late and optimiser.done < total:
            return False
    shutil.rmtree(checkpoints, ignore_errors=True)
    return True


def _tokenized(tokenizer: Any, example: Example) -> TokenizedSample:
    """The answer is what the chat template puts after the prompt, with the token that ends a turn."""
    turns = [{"role": message.role, "content": message.content} for message in example.prompt]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": example.answer}], tokenize=False)
    prompt, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, whole))
    # The prompt's last token and the answer's first may be one token of the whole.
    shared = len(os.path.commonprefix([prompt, both]))
    return TokenizedSample(both[:shared], both[shared:])


def _short_enough(rows: Sequence[TokenizedSample], limit: int, context: StageContext) -> list[TokenizedSample]:
    short = [row for row in rows if len(row.prompt) + len(row.answer) <= limit]
    if len(short) < len(rows):
        context.log(f"{len(rows) - len(short)} of {len(rows)} examples are longer than {limit} tokens; left out")
    if not short:
        raise ConfigError(
            f"Wanted examples of at most {limit} tokens; found none among {len(rows)}. Raise optimiser.max_length."
        )
    return short


def _batches(rows: Sequence[TokenizedSample], size: int, total: int, seed: int) -> Iterator[list[TokenizedSample]]:
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


def _update(model: Any, optimiser: Optimiser, batch: Sequence[TokenizedSample], micro_batch: int) -> dict[str, float]:
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


class Example(BaseModel):
    """One line of `examples.jsonl`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    task_sha256: str
    teacher: str
    """Author: a policy, or the model itself in the self-supervised stage."""
    techniques: tuple[str, ...]
    candidate_sha256: str
    evaluation_sha256: str
    """Hash of the evaluation's line, which says why it counts as correct."""
    speedup: float | None
    """None where it was not timed; correctness is the only filter."""
    prompt: tuple[Message, ...]
    answer: str


def example_of(task: Task, prompt: Prompt, evaluation: Evaluation, form: AnswerForm) -> Example:
    """The example that an accepted evaluation gives."""
    return Example(
        task=task.id,
        task_sha256=task.sha256,
        teacher=evaluation.policy,
        techniques=evaluation.techniques,
        candidate_sha256=evaluation.candidate_sha256,
        evaluation_sha256=sha256_of(evaluation.model_dump_json()),
        speedup=evaluation.speedup,
        prompt=prompt.messages,
        answer=answer_text(task, prompt, evaluation, form),
    )


def is_learnt(evaluation: Evaluation, slowest: float | None, fastest: float | None = None) -> bool:
    """True when an evaluation is accepted and its speedup, where it was timed, within these bounds; None sets none."""
    speedup = evaluation.speedup
    return evaluation.accepted and (speedup is None or (slowest or 0.0) <= speedup <= (fastest or math.inf))


def answer_text(task: Task, prompt: Prompt, evaluation: Evaluation, form: AnswerForm) -> str:
    """An answer in the three sections that prompts ask for, as short as they can be and true."""
    if prompt.shown:
        best = prompt.shown[-1]
        analysis = f"Implementation {len(prompt.shown)} is the fastest so far (score {conservative(best.score or 0.0):.2f})."
    else:
        analysis = f"The reference: {_headline(task)}."
    done = [technique.replace("-", " ") for technique in evaluation.techniques]
    design = f"{', '.join(done).capitalize()}." if done else "The same result in fewer steps."
    code = answer_code(task, evaluation.source, form).strip()
    return (
        f"## Performance Analysis\n{analysis}\n\n## Algorithm Design\n{design}\n\n"
        f"## Code Implementation\n```python\n{code}\n```"
    )


def _headline(task: Task) -> str:
    """The first line of the task's docstring, without the class of task and the last full stop."""
    line = task.source.lstrip().removeprefix('"""').splitlines()[0].partition('"""')[0]
    said = line.partition(": ")[2] if ": " in line and len(line.partition(": ")[0]) < 20 else ""
    return said.removeprefix("generated; ").strip().rstrip(".") or "as given"


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Replace the file in one step."""
    replace_file(path, "".join(example.model_dump_json() + "\n" for example in examples).encode("utf-8"))


def read_examples(path: Path) -> list[Example]:
    """The examples of a file, in order; none when there is no file. Torn lines are skipped."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(Example.model_validate_json(line))
        except ValidationError:
            continue
    return found
