"""Computes how likely a model holds answers, token by token: what every loss of training is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Spelled:
    """A prompt and its answer as tokens."""

    prompt: list[int]
    answer: list[int]


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


def token_scores(model: Any, rows: Sequence[Spelled], temperature: float = 1.0) -> TokenScores:
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
    half = next(model.parameters()).dtype is torch.bfloat16
    with torch.autocast(model.device.type, torch.bfloat16, enabled=half):
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
