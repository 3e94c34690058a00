"""Fits a model to good answers by their likelihood, and applies gradient updates: AdamW, a schedule, clipping, and a guard.

A gradient that is not finite makes every weight not a number, so its update is left out and counted.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch.utils.checkpoint import checkpoint

from kernelwright.contrastive.context import StageContext
from kernelwright.contrastive.evaluations import Log
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.prompts import AnswerForm, Prompt, answer_code
from kernelwright.contrastive.samples import TokenizedSample
from kernelwright.contrastive.settings import FittingSection, OptimiserSection
from kernelwright.errors import ConfigError, InfrastructureError
from kernelwright.files import replace_file
from kernelwright.models.chat import Message
from kernelwright.records import Evaluation, Task, read_records, sha256_of
from kernelwright.records.rewards import conservative

PATIENCE = 5
"""Updates in succession that may be left out before training ends. Our choice: one is bad luck, more are a fault."""
STATE_NAME = "contrastive.json"
"""File of a checkpoint that is written last: without it a checkpoint is not whole."""


class Optimiser:
    """Updates the trainable weights of a model; the schedule runs over `total` updates."""

    def __init__(self, model: Any, settings: OptimiserSection, total: int, log: Log) -> None:
        self.model = model
        self.done = 0
        """Updates so far, those left out included."""
        self.skipped = 0
        """Updates left out so far."""
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._settings = settings
        self._total = total
        self._log = log
        self._in_succession = 0
        # Biases and the scales of norms do not decay. The order of the groups is that of transformers' checkpoints.
        matrices = [weight for weight in self.weights if weight.ndim > 1]
        vectors = [weight for weight in self.weights if weight.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.learning_rate,
        )

    def step(self) -> dict[str, float]:
        """Apply the gradients that have been accumulated, unless they are not finite; returns metrics of the update.

        Raises:
            InfrastructureError: `PATIENCE` updates in succession would have been left out.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights, self._settings.max_grad_norm))
        rate = self._settings.learning_rate * schedule(self._settings, self.done, self._total)
        self.done += 1
        if math.isfinite(norm):
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self._in_succession = 0
        else:
            self._skip()
        self._adam.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "learning_rate": rate, "skipped_updates": float(self.skipped)}

    def _skip(self) -> None:
        self.skipped += 1
        self._in_succession += 1
        if self._in_succession >= PATIENCE:
            raise InfrastructureError(
                f"Wanted finite gradients; found none in {PATIENCE} updates in succession, the last of them update "
                f'{self.done}. Lower optimiser.learning_rate, or set model.dtype = "float32".'
            )
        self._log(f"update {self.done} is left out: its gradient is not finite")

    def save(self, folder: Path, kept: int, **state: Any) -> None:
        """Write a checkpoint, with the state that the caller needs, into `folder`, and remove all but the `kept` newest."""
        target, temporary = folder / f"checkpoint-{self.done}", folder / f".checkpoint-{self.done}"
        shutil.rmtree(temporary, ignore_errors=True)
        self.model.save_pretrained(str(temporary))
        torch.save(self._adam.state_dict(), temporary / "optimizer.pt")
        (temporary / STATE_NAME).write_text(json.dumps(state | {"skipped": self.skipped}), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        for stale in checkpoints_in(folder)[:-kept]:
            shutil.rmtree(stale)

    def resume(self, folder: Path, final: Path) -> dict[str, Any]:
        """Go on from the newest checkpoint in `folder`; returns its state, which is empty where there is none.

        An adapter that was removed from the checkpoint to save space comes from `final`, the folder of the finished one.

        Raises:
            ConfigError: the adapter has other layers than the checkpoint's.
        """
        found = checkpoints_in(folder)
        if not found:
            return {}
        checkpoint = found[-1]
        self._load_weights(checkpoint, final)
        # A checkpoint that was moved to another machine may come without; Adam then begins anew.
        if (checkpoint / "optimizer.pt").is_file():
            self._adam.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True))
        self.done = _number(checkpoint)
        state: dict[str, Any] = json.loads((checkpoint / STATE_NAME).read_text(encoding="utf-8"))
        self.skipped = state.get("skipped", 0)
        return state

    def _load_weights(self, checkpoint: Path, final: Path) -> None:
        if not hasattr(self.model, "peft_config"):
            loaded = type(self.model).from_pretrained(str(checkpoint), dtype=self.model.dtype)
            self.model.load_state_dict(loaded.state_dict())
            return
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        adapter = checkpoint / "adapter_model.safetensors"
        found: Any = set_peft_model_state_dict(self.model, load_file(adapter if adapter.is_file() else final / adapter.name))
        if found.unexpected_keys:
            raise ConfigError(
                f"Wanted the adapter of {checkpoint}; the model has no place for {found.unexpected_keys[0]}. "
                "Is model.lora what it was?"
            )


def schedule(settings: OptimiserSection, done: int, total: int) -> float:
    """Share of the learning rate in effect after `done` of `total` updates."""
    if done < settings.warmup_steps:
        return done / settings.warmup_steps
    share = min(1.0, (done - settings.warmup_steps) / max(1, total - settings.warmup_steps))
    match settings.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - share
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * share))


def checkpoints_in(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    return sorted((path.parent for path in folder.glob(f"checkpoint-*/{STATE_NAME}")), key=_number)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


@dataclass(frozen=True, slots=True)
class TokenScores:
    """A model's scores of the tokens of some answers; each tensor has the shape (answers, tokens)."""

    logps: torch.Tensor
    """Natural logarithm of each token's probability."""
    entropy: torch.Tensor
    """Entropy of the distribution that each token was drawn from, nats."""
    hits: torch.Tensor
    """1 where the token is the likeliest one."""
    mask: torch.Tensor
    """1 for tokens of answers, 0 for padding."""

    def mean(self, values: torch.Tensor) -> float:
        """Mean over tokens."""
        return float((values.detach() * self.mask).sum() / self.mask.sum().clamp(min=1))


def token_scores(model: Any, rows: Sequence[TokenizedSample], temperature: float = 1.0) -> TokenScores:
    """Run a model over prompts with their answers; gradients flow unless they are switched off.

    Logits are divided by the temperature, as when the answers were sampled.
    """
    before, after = max(len(row.prompt) for row in rows), max(len(row.answer) for row in rows)
    ids = torch.zeros((len(rows), before + after), dtype=torch.long)
    seen = torch.zeros_like(ids)
    for line, row in enumerate(rows):
        held = slice(before - len(row.prompt), before + len(row.answer))
        ids[line, held] = torch.tensor([*row.prompt, *row.answer])
        seen[line, held] = 1
    ids, seen = ids.to(model.device), seen.to(model.device)
    is_bfloat16 = next(model.parameters()).dtype is torch.bfloat16
    with torch.autocast(model.device.type, torch.bfloat16, enabled=is_bfloat16):
        logits = model(input_ids=ids, attention_mask=seen, logits_to_keep=after + 1, use_cache=False).logits[:, :-1]
    # A row at a time, computed again in the backward pass: float32 over a whole vocabulary is larger than all else.
    scored = [
        checkpoint(_scored, *pair, temperature, use_reentrant=False) for pair in zip(logits, ids[:, before:], strict=True)
    ]
    logps, entropy, hits = (torch.stack(column) for column in zip(*scored, strict=True))
    return TokenScores(logps, entropy, hits, seen[:, before:].float())


def _scored(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    every = (logits.float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(every.exp() * every).sum(-1)
        hits = (every.argmax(-1) == ids).float()
    return every.gather(-1, ids[:, None])[:, 0], entropy, hits


@contextmanager
def weights_swapped(weights: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let a model compute with other values of its weights for a while."""
    held = [weight.data for weight in weights]
    try:
        for weight, value in zip(weights, values, strict=True):
            weight.data = value
        yield
    finally:
        for weight, value in zip(weights, held, strict=True):
            weight.data = value


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
    """The examples of a file, in order; none when there is no file."""
    return list(read_records(path, Example))
