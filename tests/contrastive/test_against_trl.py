"""The project's own gradient steps make the same updates as TRL's trainers, on a tiny model."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch

from kernelwright.contrastive.fitting import Example, Optimiser, fit
from kernelwright.contrastive.grpo import PolicyGradient, set_advantages
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.prompts import Prompt
from kernelwright.contrastive.samples import Sample, TokenizedSample
from kernelwright.contrastive.settings import FittingSection, GrpoSection, ModelSection, OptimiserSection
from kernelwright.contrastive.trained_model import load_for_training
from kernelwright.models.chat import Completion, Message
from kernelwright.records import Task
from tests.contrastive.toys import ToyJudge, toy_context
from tests.quick import exhaustive_but

pytest.importorskip("trl")
# TRL warns of its own experimental hooks at each use.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
GROUP, GROUPS, STEPS, END = 4, 2, 2, 1
LIMIT = 12
PROMPTS = ("toy even x", "toy odd x and more of it")
COMPARED = ("loss", "grad_norm", "learning_rate", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean",
            "clip_ratio/low_min", "clip_ratio/high_max", "clip_ratio/region_mean")  # fmt: skip


def loaded(base, seed=0):
    return load_for_training(ModelSection(base=str(base), dtype="float32", tuning="full"), seed)


def answer(step, number):
    """Tokens of an answer; every third one is cut off at the limit."""
    dice = torch.Generator().manual_seed(100 * step + number)
    if number % 3 == 2:
        return torch.randint(5, 60, (LIMIT,), generator=dice).tolist()
    return [*torch.randint(5, 60, (3 + number,), generator=dice).tolist(), END]


def rewards_of(step):
    """Those of all answers of a step; None for one that could not be judged."""
    return [None if number == 5 else float((number * 7 + step * 3) % 5) for number in range(GROUP * GROUPS)]


def trl_steps(model, tokenizer, folder, grpo, optimiser):
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    told, asked, steps = [], [], itertools.count()

    def rollouts(prompts, trainer):
        step = next(steps)
        ids = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
            for prompt in prompts
        ]
        asked.append(ids)
        return {"prompt_ids": ids, "completion_ids": [answer(step, n) for n in range(len(ids))], "logprobs": None}

    def reward(*, trainer_state, **rest):
        return rewards_of(trainer_state.global_step // grpo.iterations)

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **rest):
            if "loss" in logs:
                told.append(logs)

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward],
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]),
        rollout_func=rollouts,
        callbacks=[Watch()],
        args=GRPOConfig(
            output_dir=str(folder),
            learning_rate=optimiser.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=optimiser.warmup_steps,
            weight_decay=optimiser.weight_decay,
            max_grad_norm=optimiser.max_grad_norm,
            per_device_train_batch_size=optimiser.micro_batch,
            gradient_accumulation_steps=GROUP * GROUPS // optimiser.micro_batch,
            max_steps=STEPS * grpo.iterations,
            num_generations=GROUP,
            num_iterations=grpo.iterations,
            max_completion_length=LIMIT,
            temperature=0.9,
            epsilon=grpo.epsilon,
            delta=grpo.delta,
            beta=grpo.beta,
            loss_type="grpo",
            scale_rewards=grpo.scale_rewards,
            mask_truncated_completions=grpo.mask_truncated,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            seed=0,
        ),
    )
    trainer.train()
    return told, asked


def own_steps(model, asked, grpo, settings):
    optimiser = Optimiser(model, settings, STEPS * grpo.iterations, lambda line: None)
    policy = PolicyGradient(model, optimiser, grpo, micro_batch=settings.micro_batch, temperature=0.9, seed=0)
    logs = []
    for step in range(STEPS):
        samples = [sample_of(list(prompt), answer(step, number)) for number, prompt in enumerate(asked[step])]
        for sample, reward in zip(samples, rewards_of(step), strict=True):
            sample.reward = reward
        set_advantages(samples, grpo)
        logs += policy.learn(samples)
    return logs


def sample_of(prompt, tokens):
    completion = Completion(
        text="", prompt_tokens=0, completion_tokens=len(tokens), finish_reason="stop" if tokens[-1] == END else "length"
    )
    task = Task(id="t", source="")
    return Sample(
        task=task, prompt=Prompt((), ()), completion=completion, step=0, sample=0, tokens=TokenizedSample(prompt, tokens)
    )


@pytest.mark.parametrize(
    ("scale", "delta", "beta", "masked", "micro_batch"),
    exhaustive_but(
        [("group", None, 0.1, False, 8), ("batch", 1.03, 0.1, True, 8), ("none", None, 0.0, False, 2)],
        ("batch", 1.03, 0.1, True, 8),
    ),
)
def test_grpo_makes_trl_s_updates(tiny_base, tmp_path, scale, delta, beta, masked, micro_batch):
    grpo = GrpoSection(
        group_size=GROUP,
        groups=GROUPS,
        iterations=2,
        epsilon=0.02,
        scale_rewards=scale,
        delta=delta,
        beta=beta,
        mask_truncated=masked,
    )
    settings = OptimiserSection(
        learning_rate=2e-3, micro_batch=micro_batch, schedule="linear", warmup_steps=1, weight_decay=0.1, max_grad_norm=0.5
    )
    theirs, tokenizer = loaded(tiny_base)
    ours = copy.deepcopy(theirs)
    before = [weight.detach().clone() for weight in ours.parameters()]
    wanted, asked = trl_steps(theirs, tokenizer, tmp_path, grpo, settings)
    found = own_steps(ours, asked, grpo, settings)
    assert len(found) == len(wanted) == 4
    # TRL's other metrics are means over micro-batches, which it fills in another order.
    for name in COMPARED if micro_batch == GROUP * GROUPS else COMPARED[:3]:
        if name in wanted[0]:
            told = [float(log[name]) for log in wanted]
            assert [log[name] for log in found] == pytest.approx(told, rel=1e-3, abs=1e-5), name
    assert ("kl" in found[0]) == (beta > 0)
    assert max(log["clip_ratio/region_mean"] for log in found) > 0
    for one, other, was in zip(ours.parameters(), theirs.parameters(), before, strict=True):
        moved = (other - was).norm()
        assert (one - other).norm() <= 1e-3 * moved + 1e-6


def test_likelihood_makes_trl_s_updates(tiny_base, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    theirs, tokenizer = loaded(tiny_base)
    ours = copy.deepcopy(theirs)
    examples = [
        Example(task="t", task_sha256="s", teacher="x", techniques=(), candidate_sha256="c", evaluation_sha256="e",
                speedup=None, prompt=(Message("user", PROMPTS[number % 2]),), answer="way = 1 " * (1 + number))
        for number in range(4)
    ]  # fmt: skip
    settings = FittingSection(learning_rate=1e-2, micro_batch=2, batch_size=4, epochs=3, schedule="cosine")
    rows = [
        {"prompt": [{"role": "user", "content": one.prompt[0].content}],
         "completion": [{"role": "assistant", "content": one.answer}]}
        for one in examples
    ]  # fmt: skip
    trainer = SFTTrainer(
        model=theirs,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=SFTConfig(
            output_dir=str(tmp_path / "theirs"), completion_only_loss=True, max_length=None, save_strategy="no",
            num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
            lr_scheduler_type="cosine", weight_decay=0.0, max_grad_norm=1.0, gradient_checkpointing=False, bf16=False,
            use_cpu=True, logging_steps=1, report_to=[], disable_tqdm=True, seed=0,
        ),
    )  # fmt: skip
    trainer.train()
    wanted = [log for log in trainer.state.log_history if "loss" in log]
    with MetricsLog(tmp_path) as metrics:
        assert fit(
            ours, tokenizer, examples, settings, out=tmp_path, seed=0, context=toy_context(ToyJudge()), metrics=metrics
        )
    logs = [{name.removeprefix("sft/"): value for name, value in line.items()} for line in metrics.read()]
    for name in ("loss", "grad_norm", "learning_rate", "num_tokens", "epoch"):
        assert [log[name] for log in logs] == pytest.approx([float(log[name]) for log in wanted], rel=1e-3), name
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
