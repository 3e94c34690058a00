"""How likely was each sampled token to the model that is said to have sampled it?

    python benchmarks/sampled_tokens.py OUT --base MODEL --adapter ADAPTER --rollouts RUN/rollouts.jsonl --step 0 --prompts 6

A sampler that is right draws unlikely tokens as often as the model's own distribution says. For each answer the
probabilities of its tokens are computed in float32 by one plain forward pass over prompt and answer, which shares nothing
with the sampler but the weights. Recorded is the text, not the tokens: an answer whose text comes to another number of
tokens is left out. ADAPTER must be what the model was at that step: the first step's answers are of the adapter that
training began with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kernelwright.models.chat import Message
from kernelwright.models.local import LocalModel
from kernelwright.models.pretrained import Weights, load_pretrained
from kernelwright.records import capture_environment

THRESHOLDS = (1e-2, 1e-3, 1e-4, 1e-5)
"""Probabilities below which tokens are counted."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write `answers.jsonl`, `summary.json` and `environment.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--adapter", default="")
    parser.add_argument("--rollouts", type=Path, required=True)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=6, help="the first so many of that step")
    options = parser.parse_args(arguments)
    model, tokenizer = load_pretrained(Weights(path=options.base, adapter=options.adapter, dtype="float32", device="cpu"))
    local = LocalModel(model.eval(), tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (options.out / "answers.jsonl").open("w", encoding="utf-8") as lines:
        for prompt, rollouts in islice(groups(options.rollouts, options.step), options.prompts):
            for row in measured(local, prompt, rollouts):
                rows.append(row)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
    found = summary_of(rows)
    (options.out / "summary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (options.out / "environment.json").write_text(json.dumps(capture_environment("cpu"), indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found))


def groups(path: Path, step: int) -> Iterator[tuple[list[Message], list[dict[str, Any]]]]:
    """The prompts of a step, each with its answers. A prompt stands in the first rollout that has it."""
    prompts: dict[str, list[Message]] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        rollout = json.loads(line)
        if rollout["prompt"]:
            prompts[rollout["prompt_sha256"]] = [Message(said["role"], said["content"]) for said in rollout["prompt"]]
        if rollout["step"] == step:
            answers.setdefault(rollout["prompt_sha256"], []).append(rollout)
    for digest, rollouts in answers.items():
        yield prompts[digest], rollouts


def measured(
    local: LocalModel, prompt: Sequence[Message], rollouts: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Probabilities of the tokens of several answers to one prompt."""
    for rollout, (ids, logs) in zip(rollouts, log_probabilities(local, prompt, rollouts), strict=True):
        chances = logs.exp()
        drawn = logs.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        yield {
            "task": rollout["task"],
            "sample": rollout["sample"],
            "verdict": rollout["verdict"],
            "tokens": len(ids),
            "recorded_tokens": rollout["completion_tokens"],
            "expected": {str(limit): float(chances[chances < limit].sum()) for limit in THRESHOLDS},
            "seen": {str(limit): int((drawn.exp() < limit).sum()) for limit in THRESHOLDS},
            "entropy_nats": float(-(chances * logs).sum()),
            "surprise_nats": float(-drawn.sum()),
            "least_likely_nats": float(-drawn.min()),
        }


@torch.no_grad()
def log_probabilities(
    local: LocalModel, prompt: Sequence[Message], rollouts: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Tokens of each answer, and of the whole vocabulary in front of each of them, shape (tokens, vocabulary). The prompt is
    computed once."""
    tokenizer = local.tokenizer
    asked = local.prompt_ids(prompt)
    end = tokenizer.eos_token_id
    answers = []
    for rollout in rollouts:
        ids = tokenizer(rollout["completion"], add_special_tokens=False)["input_ids"]
        answers.append([*ids, end] if rollout["finish_reason"] == "stop" else ids)
    cache = DynamicCache()
    local.model(input_ids=torch.tensor([asked[:-1]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(len(answers))
    width = max(len(ids) for ids in answers)
    # Padded at the end, which no earlier token attends to.
    given = torch.tensor([[asked[-1], *ids[:-1], *[end] * (width - len(ids))] for ids in answers])
    logits = local.model(input_ids=given, past_key_values=cache, use_cache=True).logits.float()
    for ids, each in zip(answers, torch.log_softmax(logits, -1), strict=True):
        yield ids, each[: len(ids)]


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over the answers whose text is as many tokens as were sampled."""
    whole = [row for row in rows if row["tokens"] == row["recorded_tokens"]]
    return {
        "answers": len(whole),
        "left_out": len(rows) - len(whole),
        "tokens": sum(row["tokens"] for row in whole),
        "expected": {str(limit): sum(row["expected"][str(limit)] for row in whole) for limit in THRESHOLDS},
        "seen": {str(limit): sum(row["seen"][str(limit)] for row in whole) for limit in THRESHOLDS},
        "entropy_nats": sum(row["entropy_nats"] for row in whole),
        "surprise_nats": sum(row["surprise_nats"] for row in whole),
    }


if __name__ == "__main__":
    main()
