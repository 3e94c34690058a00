"""By how much is each token of an answer ahead of its best rival, for a model before training, after it, and in between?

    python benchmarks/answer_margins.py OUT --base MODEL --before ADAPTER --after ADAPTER --rollouts ROLLOUTS --step 13

The answer is the first accepted one of that step whose text holds `--holds`. It is given to the model token by token, in
float32 on a CPU; a margin is the logit of the token that stands there minus the largest other one. `between` adds a share
of what training changed to the adapter that it began with, and `parts` what training changed in some modules only. For the
token that lost most, and for others spread over the answer, the norm of the margin's gradient by the adapter's weights says
how far a step of training moves it.

Last, what pushed that token: `pushes.jsonl` has for the answers to the step's first `--prompts` prompts how much each token
of theirs, weighted as GRPO does, adds to that margin to first order. The adapter half way between stands for the model of
that step, and is moved along the margin's gradient, by a nat in each direction: the difference of a token's
log-probabilities is the product of its gradient with the margin's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from sampled_tokens import groups, log_probabilities

from kernelwright.models.chat import Message
from kernelwright.models.local import LocalModel
from kernelwright.models.pretrained import Weights, load_pretrained
from kernelwright.records import capture_environment

SHARES = (0.25, 0.5, 0.75)
PARTS: Mapping[str, tuple[str, ...]] = {
    "attention: queries and keys": ("q_proj", "k_proj"),
    "attention: values and outputs": ("v_proj", "o_proj"),
    "multilayer perceptrons": ("gate_proj", "up_proj", "down_proj"),
}
COMPARED = 6
"""Other tokens whose gradients are computed too."""

Adapter = dict[str, torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write `margins.json`, `pushes.jsonl` and `environment.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--rollouts", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--holds", default="graph.replay()")
    parser.add_argument("--prompts", type=int, default=2)
    options = parser.parse_args(arguments)
    base, tokenizer = load_pretrained(Weights(path=options.base, dtype="float32", device="cpu"))
    model = PeftModel.from_pretrained(base, str(options.before), is_trainable=True).eval()
    local = LocalModel(model, tokenizer)
    of_the_step = list(groups(options.rollouts, options.step))
    prompt, rollout = next(
        (prompt, rollout)
        for prompt, rollouts in of_the_step
        for rollout in rollouts
        if rollout["verdict"] == "accepted" and options.holds in rollout["completion"]
    )
    asked = local.prompt_ids(prompt)
    answer = tokenizer(rollout["completion"], add_special_tokens=False)["input_ids"]
    before, after = (_read(path) for path in (options.before, options.after))

    def margins(adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor]:
        set_peft_model_state_dict(model, adapter)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([asked + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
        return margins_of(logits, torch.tensor(answer))

    def mixed(share: Callable[[str], float]) -> Adapter:
        return {name: before[name] + share(name) * (after[name] - before[name]) for name in before}

    first, last = margins(before)[0], margins(after)
    lost = int((last[0] - first).argmin())
    others = [int(place) for place in torch.linspace(1, len(answer) - 1, COMPARED) if int(place) != lost]
    found: dict[str, Any] = {
        "task": rollout["task"],
        "step": options.step,
        "answer": rollout["completion"],
        "tokens": [tokenizer.decode([token]) for token in answer],
        "before": first.tolist(),
        "after": last[0].tolist(),
        "rivals_after": [tokenizer.decode([int(token)]) for token in last[1]],
        "lost_most": {"place": lost, "token": tokenizer.decode([answer[lost]])},
        "change": {
            "norm": _norm(after[name] - before[name] for name in before),
            "of_an_adapter_of_norm": _norm(before.values()),
        },
        "between": {str(share): margins(mixed(lambda _, share=share: share))[0][lost].item() for share in SHARES},
        "parts": {
            part: margins(mixed(lambda name, kept=kept: float(any(one in name for one in kept))))[0][lost].item()
            for part, kept in PARTS.items()
        },
    }
    set_peft_model_state_dict(model, mixed(lambda _: 0.5))
    found["gradient_norms_half_way"] = {
        str(place): {
            "token": tokenizer.decode([answer[place]]),
            **gradient_of(model, asked + answer[:place], answer[place]),
        }
        for place in (*others, lost)
    }
    # Of the last of them, the token that lost most.
    gradient = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    options.out.mkdir(parents=True, exist_ok=True)
    deviation = float(torch.tensor([one["smoothed"] for _, rollouts in of_the_step for one in rollouts]).std())
    with (options.out / "pushes.jsonl").open("w", encoding="utf-8") as lines:
        for each, rollouts in of_the_step[: options.prompts]:
            for row in pushes(local, model, gradient, each, rollouts, deviation):
                lines.write(json.dumps(row) + "\n")
                lines.flush()
    (options.out / "margins.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.out / "environment.json").write_text(json.dumps(capture_environment("cpu"), indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in found.items() if name in ("lost_most", "between", "parts")}))


def margins_of(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of `tokens`, shape (length,), over its best rival in `logits`, shape (length, vocabulary); and that rival."""
    logits = logits.float()
    theirs, rivals = logits.scatter(-1, tokens[:, None], float("-inf")).max(-1)
    return logits.gather(-1, tokens[:, None])[:, 0] - theirs, rivals


def gradient_of(model: Any, given: Sequence[int], token: int) -> dict[str, float]:
    """A margin after `given`, and the Euclidean norm of its gradient by what can be trained."""
    model.zero_grad()
    margin = margins_of(model(input_ids=torch.tensor([list(given)]), logits_to_keep=1).logits[0], torch.tensor([token]))[0]
    margin.sum().backward()
    gradients = (weight.grad for weight in model.parameters() if weight.grad is not None)
    return {"margin": margin.item(), "gradient_norm": _norm(gradients)}


@torch.no_grad()
def pushes(
    local: LocalModel,
    model: Any,
    gradient: Mapping[str, torch.Tensor],
    prompt: Sequence[Message],
    rollouts: Sequence[Mapping[str, Any]],
    deviation: float,
) -> Iterator[dict[str, Any]]:
    """What the tokens of a group's answers add to the margin: advantage / length * product of gradients."""
    weights = dict(model.named_parameters())
    nat = 1.0 / sum(float(one.double().square().sum()) for one in gradient.values())
    mean = sum(one["smoothed"] for one in rollouts) / len(rollouts)
    sides = []
    for far in (nat, -2 * nat):
        for name, one in gradient.items():
            weights[name].add_(one, alpha=far)
        sides.append(
            [
                (ids, logs.gather(-1, torch.tensor(ids)[:, None])[:, 0])
                for ids, logs in log_probabilities(local, prompt, rollouts)
            ]
        )
    for name, one in gradient.items():
        weights[name].add_(one, alpha=nat)
    for rollout, (ids, up), (_, down) in zip(rollouts, *sides, strict=True):
        advantage = (rollout["smoothed"] - mean) / (deviation + 1e-4)
        added = (up - down) / 2 * advantage / len(ids)
        yield {
            "task": rollout["task"],
            "sample": rollout["sample"],
            "verdict": rollout["verdict"],
            "advantage": advantage,
            "tokens": [local.tokenizer.decode([token]) for token in ids],
            "log_probabilities": ((up + down) / 2).tolist(),
            "pushes": added.tolist(),
        }


def _norm(tensors: Any) -> float:
    return float(sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5)


def _read(adapter: Path) -> Adapter:
    return {name: tensor.float() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}


if __name__ == "__main__":
    main()
