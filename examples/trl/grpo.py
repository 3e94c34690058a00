"""Trains a model with TRL's `GRPOTrainer`, rewarded by the judge.

python examples/trl/grpo.py MODEL diag_matmul rms_norm_composite my_task.py --device cuda

The judge runs in this process, or in `kernelwright serve` at KERNELWRIGHT_URL.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

from kernelwright.contrastive.grader import Grader, chat_prompt, task_text
from kernelwright.tasks import load_task


@functools.cache
def grader() -> Grader:
    """The judge. It starts with the first rollout."""
    return Grader(os.environ.get("KERNELWRIGHT_URL", ""), reward="lower-bound")


def kernel_reward(
    completions: list[Any], task: list[str], log_metric: Any = None, log_extra: Any = None, **_: Any
) -> list[float]:
    """The reward of each rollout; `task` is a column of the data set."""
    grades = grader().grade(task, [completion[-1]["content"] for completion in completions])
    for part in ("form", "right", "speedup", "honest"):
        log_metric(part, sum(getattr(grade, part) for grade in grades) / len(grades))
    log_extra("why", [grade.why for grade in grades])
    return [grade.reward for grade in grades]


def main(arguments: list[str] | None = None) -> None:
    """Read tasks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or folder of the model")
    parser.add_argument("tasks", nargs="+", help="ids of built-in tasks, or files")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="what the prompts say that judges")
    parser.add_argument("--out", default="trl-run", help="folder of the trained model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--group", type=int, default=8, help="rollouts of one prompt")
    parser.add_argument("--tokens", type=int, default=4096, help="longest answer")
    chosen = parser.parse_args(arguments)

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": chat_prompt(task, chosen.device), "task": task_text(task)} for task in map(load_task, chosen.tasks)]
    config = GRPOConfig(
        output_dir=chosen.out,
        max_steps=chosen.steps,
        num_generations=chosen.group,
        per_device_train_batch_size=chosen.group,
        max_completion_length=chosen.tokens,
        logging_steps=1,
        report_to=[],
        use_cpu=chosen.device == "cpu",
        bf16=chosen.device == "cuda",
    )
    trainer = GRPOTrainer(chosen.model, [kernel_reward], config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
