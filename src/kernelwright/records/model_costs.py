"""Adds up what a run's language model has answered and cost, over all its resumptions, from the run's transcript."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelwright.records.lines import read_objects

TRANSCRIPT = "transcript.jsonl"


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Totals of answers on record."""

    answers: int
    failed: int
    prompt_tokens: int
    """Tokens of prompts, once for each request."""
    completion_tokens: int
    untold: int
    """Answers whose tokens the server did not tell. Above 0, tokens and costs are lower bounds."""
    costs: dict[str, float]
    """Cost by currency, of the answers that have one."""
    unpriced: int
    """Answers with tokens and without a cost."""

    @property
    def price(self) -> str:
        """The costs in words, such as `0.0123 USD`; empty for a model without a price, in this process."""
        known = " + ".join(f"{cost:.4g} {currency}" for currency, cost in self.costs.items())
        if not self.unpriced:
            return known
        unknown = "unknown, since no `prices` were set"
        return f"{known}; the cost of {self.unpriced} is {unknown}" if known else f"cost {unknown}"

    @property
    def in_words(self) -> str:
        """All of it in one line."""
        failed = f" ({self.failed} of them failed)" if self.failed else ""
        answers = f"{self.answers} answer{'' if self.answers == 1 else 's'}{failed}"
        if not self.answers:
            return answers
        if self.untold == self.answers:
            return f"{answers}, none with its tokens told, so that its cost is not known"
        untold = f"; {self.untold} without their tokens told, so it may be more" if self.untold else ""
        price = f", {self.price}" if self.price else ""
        return f"{answers}, {self.prompt_tokens} prompt tokens, {self.completion_tokens} answer tokens{price}{untold}"


def answers_on_record(run: Path) -> list[dict[str, Any]]:
    """The transcript's answers, in order of writing."""
    return [line for line in read_objects(run / TRANSCRIPT) if line.get("kind") == "answer"]


def model_costs(answers: Iterable[dict[str, Any]]) -> ModelCosts:
    """Totals of these answers."""
    counts: Counter[str] = Counter()
    costs: dict[str, float] = {}
    for line in answers:
        prompt_tokens, completion_tokens = line.get("prompt_tokens") or 0, line.get("completion_tokens") or 0
        cost = line.get("cost")
        counts["answers"] += 1
        counts["failed"] += line.get("failure") is not None
        counts["prompt_tokens"] += prompt_tokens if line.get("bears_prompt", True) else 0
        counts["completion_tokens"] += completion_tokens
        counts["untold"] += not prompt_tokens
        counts["unpriced"] += bool(prompt_tokens) and cost is None and str(line.get("model", "")).startswith("api:")
        if cost is not None:
            currency = str(line.get("currency", ""))
            costs[currency] = costs.get(currency, 0.0) + cost
    names = ("answers", "failed", "prompt_tokens", "completion_tokens", "untold", "unpriced")
    return ModelCosts(costs=costs, **{name: counts[name] for name in names})
