"""Scores answers token by token, and applies gradient updates: AdamW, a schedule, clipping, and a guard.

A gradient that is not finite makes every weight not a number, so its update is left out and counted.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kernelwright.contrastive.evaluations import Log
from kernelwright.contrastive.samples import TokenizedSample
from kernelwright.contrastive.settings import OptimiserSection
from kernelwright.errors import ConfigError, InfrastructureError

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
