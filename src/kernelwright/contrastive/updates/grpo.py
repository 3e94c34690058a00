"""TRL's GRPO with prompts that are rebuilt from the exemplar database at each step. Needs TRL; imported on demand.

TRL takes prompts from a data set that is fixed before training; here a prompt must show what the judge found a step ago. So
`_generate_and_score_completions`, which is handed a batch of examples, replaces their prompts first. It is a private method:
`extra.TRL_SERIES` pins the series and a test guards that it is called with the examples.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from kernelwright.contrastive.prompts import Prompt
from kernelwright.contrastive.sampling.drawing import free_memory
from kernelwright.contrastive.sampling.prompting import PromptMaker
from kernelwright.contrastive.sampling.scoring import Attempt, Scored, Scorer
from kernelwright.contrastive.stages.config import SamplingSection
from kernelwright.contrastive.stages.context import StageContext
from kernelwright.contrastive.updates.credit import AcceptedLines
from kernelwright.errors import ConfigError
from kernelwright.models.chat import Completion, Message
from kernelwright.models.local import LocalModel
from kernelwright.records import Task, Verdict

STATE_NAME = "contrastive.json"
"""In each checkpoint: what TRL does not know of."""


class ContrastiveTrainer(GRPOTrainer):
    """GRPO whose groups each get a fresh prompt.

    Args:
        tasks: What the column `task` of the data set counts.
        prompts: Makes a task's prompt.
        updates: Optimiser steps on each batch of rollouts.
        reward: The only reward function.
        shared: Lines of right answers, for which failed ones are not blamed; None: all of a failed answer is.
        rest: As of `GRPOTrainer`.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        prompts: PromptMaker,
        updates: int,
        reward: GroupReward,
        shared: AcceptedLines | None,
        **rest: Any,
    ) -> None:
        super().__init__(reward_funcs=[reward], **rest)
        self._tasks = tasks
        self._maker = prompts
        self._updates = updates
        self._reward = reward
        self._shared = shared

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Give each group of `num_generations` examples one new prompt, then go on as usual."""
        training = bool(getattr(self.model, "training", True))
        size = int((self.num_generations if training else self.num_generations_eval) or 1)
        if len(inputs) % size:
            raise ConfigError(f"Wanted whole groups of {size} rollouts in a process; found {len(inputs)}. Use one process.")
        fresh: list[dict[str, Any]] = []
        for start in range(0, len(inputs), size):
            group = inputs[start : start + size]
            number = group[0]["task"]
            if any(item["task"] != number for item in group):
                raise ConfigError("Wanted groups of one task each; TRL hands out another order than it used to.")
            prompt = self._maker.prompt(self._tasks[number], self.state.global_step // self._updates)
            said = [{"role": message.role, "content": message.content} for message in prompt.messages]
            fresh += [item | {"prompt": said, "made": prompt, "sample": index} for index, item in enumerate(group)]
        result: dict[str, Any] = super()._generate_and_score_completions(fresh)
        if self._shared is not None and training:
            result["advantages"] = self._blamed(self._shared, result["completion_ids"], result["advantages"])
        return result

    def _blamed(self, shared: AcceptedLines, ids: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Advantages of each token, shape (answers, tokens), from those of answers: none where a failed answer, which would
        be pushed away from all of its tokens, holds what right ones hold."""
        scored = self._reward.latest
        shared.learn_from(item.rollout for item in scored)
        tokenizer: Any = self.processing_class
        spread = advantages[:, None].repeat(1, ids.shape[1])
        failed = spared = 0
        for item, row, advantage, answer in zip(scored, spread, advantages.tolist(), ids.tolist(), strict=True):
            if item.rollout.verdict is Verdict.ACCEPTED or advantage >= 0:
                continue
            # Ends of answers and padding become nothing.
            tokens: list[str] = [tokenizer.decode([token], skip_special_tokens=True) for token in answer]
            blamed = shared.penalised(item.rollout.task_sha256, tokens)
            row *= torch.tensor(blamed, device=row.device)
            failed += sum(map(bool, tokens))
            spared += sum(bool(token) and not blame for token, blame in zip(tokens, blamed, strict=True))
        self._metrics["train"]["contrastive/spared_share"].append(spared / failed if failed else 0.0)
        return spread

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Bring the trained adapter back: with TRL's reference copy beside it, transformers 5.17 passes it over."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        weights = Path(resume_from_checkpoint) / "adapter_model.safetensors"
        held = self.accelerator.unwrap_model(model if model is not None else self.model)
        if weights.is_file() and hasattr(held, "peft_config"):
            found: Any = set_peft_model_state_dict(held, load_file(str(weights)), adapter_name="default")
            if found.unexpected_keys:
                raise ConfigError(
                    f"Wanted the adapter of {resume_from_checkpoint}; the model has no place for {found.unexpected_keys[0]}."
                    " Is model.lora what it was?"
                )


class GroupReward:
    """The reward function that TRL calls: scores a whole batch of answers at once."""

    __name__ = "judge"

    def __init__(
        self,
        scorer: Scorer,
        tasks: Sequence[Task],
        eos_ids: frozenset[int],
        on_scored: Callable[[int, list[Scored]], Mapping[str, float]],
        updates: int,
    ) -> None:
        self._scorer = scorer
        self._tasks = tasks
        self._eos_ids = eos_ids
        self._on_scored = on_scored
        self._updates = updates
        self.latest: list[Scored] = []
        """What became of the answers that it was asked about last, in their order."""

    def __call__(
        self,
        *,
        completions: Sequence[Sequence[Mapping[str, str]]],
        completion_ids: Sequence[Sequence[int]],
        task: Sequence[int],
        made: Sequence[Prompt],
        sample: Sequence[int],
        trainer_state: Any,
        log_metric: Callable[[str, float], None],
        **rest: Any,
    ) -> list[float | None]:
        """A reward for each answer; None for one that could not be judged."""
        step = int(trainer_state.global_step) // self._updates
        attempts = [
            Attempt(
                task=self._tasks[number],
                prompt=prompt,
                completion=Completion(
                    text=completion[0]["content"],
                    prompt_tokens=0,
                    completion_tokens=len(ids),
                    finish_reason="stop" if ids and ids[-1] in self._eos_ids else "length",
                ),
                step=step,
                sample=index,
            )
            for number, prompt, completion, ids, index in zip(task, made, completions, completion_ids, sample, strict=True)
        ]
        self.latest = self._scorer.score(attempts)
        for name, value in self._on_scored(step, self.latest).items():
            log_metric(name, value)
        return [item.reward for item in self.latest]


class LocalRollouts:
    """TRL's `rollout_func`: answers come from the package's own sampler, which keeps a GPU busier than `generate`.

    TRL hands it every prompt `num_generations` times; a group is sampled as one prompt.
    """

    def __init__(self, local: LocalModel, eos_id: int, sampling: SamplingSection, seed: int) -> None:
        self._local = local
        self._eos_id = eos_id
        self._sampling = sampling
        self._seed = seed

    def __call__(self, prompts: Sequence[Sequence[Mapping[str, Any]]], trainer: Any) -> dict[str, Any]:
        """Tokens of prompts and answers; TRL computes the log-probabilities itself."""
        size = trainer.num_generations
        asked = [
            self._local.prompt_ids([Message(item["role"], item["content"]) for item in prompt]) for prompt in prompts[::size]
        ]
        sampling = self._sampling.of(self._seed * 1_000_003 + int(trainer.state.global_step))
        answers = [[self._eos_id]] * len(prompts)
        for group, number, found in self._local.sample_ids(asked, count=size, sampling=sampling):
            # A prompt that leaves no room has no answer; a lone end token stands for it and earns the floor. What ends an
            # answer is what was sampled: a model may end turns with another token than its tokenizer's end of sequence.
            if found is not None and found.tokens:
                answers[group * size + number] = found.tokens if found.end is None else [*found.tokens, found.end]
        free_memory()
        return {
            "prompt_ids": [ids for ids in asked for _ in range(size)],
            "completion_ids": answers,
            "logprobs": None,
        }


class Keeper(TrainerCallback):
    """Keeps what TRL does not know of with each checkpoint, passes metrics on, and ends training when the time is up.

    Args:
        scorer: Whose smoother is kept.
        context: For its clock, which ends a run that is to go on later.
        on_log: Told the metrics.
        updates: Optimiser steps on each batch of rollouts: training ends between batches only.
        limit_s: Of time for all steps together, after which the stage has ended; None for none.
        spent_s: Time that earlier processes put into steps.
    """

    def __init__(
        self,
        scorer: Scorer,
        context: StageContext,
        on_log: Callable[[int, Mapping[str, float]], None],
        *,
        updates: int,
        limit_s: float | None,
        spent_s: float,
    ) -> None:
        self._scorer = scorer
        self._context = context
        self._on_log = on_log
        self._updates = updates
        self._limit_s = limit_s
        self._before_s = spent_s
        self._started = self._step_started = time.monotonic()
        self.spent = False
        """Whether the time for steps is used up."""

    @property
    def spent_s(self) -> float:
        """Time that has gone into steps."""
        return self._before_s + time.monotonic() - self._started

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Start the clock: loading is not a step."""
        self._started = self._step_started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Ask for a last checkpoint when the time is up, or would be before the next batch's end."""
        if state.global_step % self._updates:
            return
        now = time.monotonic()
        step_s, self._step_started = now - self._step_started, now
        self.spent = self._limit_s is not None and self.spent_s + step_s > self._limit_s
        # A step that the deadline cuts off is lost.
        if self.spent or self._context.deadline.comes_within(step_s):
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Add our own state to the checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        smoother = self._scorer.smoother
        held = {"smoother": smoother.state() if smoother is not None else None, "seconds": round(self.spent_s, 1)}
        (folder / STATE_NAME).write_text(json.dumps(held), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        """Pass numbers on."""
        self._on_log(
            state.global_step, {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        )
