"""Stage 3, contrastive RL (paper 2.4), and its two special cases.

The same score is used twice: it is the reward of a GRPO step, and it stands beside the code in later prompts. Without
exemplars that is vanilla GRPO; without the step it is evolutionary search with a frozen model (paper 2.4, first paragraphs).
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.rollouts import RolloutLog
from kernelwright.contrastive.sampling.drawing import draw, drawn
from kernelwright.contrastive.sampling.metrics import MetricsLog, rollout_metrics
from kernelwright.contrastive.sampling.prompting import PromptMaker, fill, prompt_maker
from kernelwright.contrastive.sampling.scoring import Scored, Scorer
from kernelwright.contrastive.smoothing import RewardSmoother
from kernelwright.contrastive.stages.config import ContrastiveConfig
from kernelwright.contrastive.stages.context import StageContext, StageResult, claim
from kernelwright.contrastive.stages.split import TaskSplit
from kernelwright.contrastive.updates.credit import AcceptedLines
from kernelwright.contrastive.updates.fitting import last_checkpoint, on_one_gpu, quiet, save_final, trainer_arguments
from kernelwright.contrastive.updates.models import model_name
from kernelwright.records import RunDirectory, Task
from kernelwright.records.rewards import reward_named


def train_contrastive(config: ContrastiveConfig, split: TaskSplit, run: RunDirectory, context: StageContext) -> StageResult:
    """Run the stage that the configuration describes; `final` holds the trained adapter or model, if one was trained.

    Raises:
        UsageError: the directory belongs to another run, or a run to seed the database from is missing.
        ConfigError: a sampler or reward does not exist.
        PolicyError: the model cannot be loaded or sampled from.
        InfrastructureError: candidates cannot be judged, or packages are missing.
    """
    claim(run, "contrastive", config, context.device)
    if (run.path / "final").is_dir() and (_steps_done(run) >= config.steps or _is_spent(run, config)):
        return StageResult(True, str(run.path / "final"), _steps_done(run))
    database = ExemplarDatabase(run.path / "exemplars.sqlite")
    fill(database, config.exemplars.seeds)
    judged = context.judged(run)
    # Evaluations of a step that was cut off are on disk but may not be in the database yet.
    database.add_all(judged.evaluations())
    database.add_all(judged.confirmed.values())
    scorer = Scorer(
        judged,
        reward_named(config.reward.name, floor=config.reward.floor),
        form=config.prompt.answer,
        stage="contrastive",
        model=model_name(config.model),
        sampling=config.sampling.of(config.seed),
        database=database,
        copies=config.reward.copies,
        smoother=RewardSmoother() if config.reward.smoothing and config.update else None,
        verification=context.judging.verification(config.reward),
    )
    prompts = prompt_maker(
        config.prompt,
        config.exemplars,
        device=context.device,
        database=database,
        seed=config.seed,
        share=config.exemplars_share,
    )
    with MetricsLog(run.path) as metrics:
        stage = _Stage(config, split.train, run, context, scorer, prompts, metrics)
        return stage.update() if config.update else stage.evolve()


def _complete(checkpoint: Path, final: Path) -> None:
    """Give a finished run's last checkpoint its weights back, where they were kept in `final` alone to save space."""
    weights = final / "adapter_model.safetensors"
    if weights.is_file() and not (checkpoint / weights.name).exists():
        shutil.copyfile(weights, checkpoint / weights.name)


def _steps_done(run: RunDirectory) -> int:
    return int((run.read_json("state.json") or {"steps": 0})["steps"])


def _is_spent(run: RunDirectory, config: ContrastiveConfig) -> bool:
    """Whether the stage has ended for having used up its time."""
    return config.seconds is not None and (run.read_json("state.json") or {}).get("limit_s") == config.seconds


class _Stage:
    """One run of the stage; the two ways to run it share prompts, judging and metrics."""

    def __init__(
        self,
        config: ContrastiveConfig,
        tasks: Sequence[Task],
        run: RunDirectory,
        context: StageContext,
        scorer: Scorer,
        prompts: PromptMaker,
        metrics: MetricsLog,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._run = run
        self._context = context
        self._scorer = scorer
        self._prompts = prompts
        self._metrics = metrics

    def evolve(self) -> StageResult:
        """Sample, judge, keep, and show what was found: no gradient."""
        config = self._config
        model, tokenizer = self._context.model.load(config.model, config.seed)
        chat = self._context.model.sampler(model, tokenizer, model_name(config.model), config.sampling.batch)
        for step in range(_steps_done(self._run), config.steps):
            if self._context.deadline.passed():
                return StageResult(False, None, step)
            asked = [(task, self._prompts.prompt(task, step)) for task in self._tasks_of_step(step)]
            attempts = drawn(
                self._run.path / "steps" / f"{step:05d}.json",
                lambda asked=asked, step=step: draw(  # type: ignore[misc]
                    chat, asked, config.grpo.group_size, config.sampling, step=step, seed=config.seed
                ),
            )
            self._metrics.write(step, self._note(step, self._scorer.score(attempts)))
            self._run.write_json("state.json", {"steps": step + 1})
        return StageResult(True, None, config.steps)

    def _tasks_of_step(self, step: int) -> list[Task]:
        """Tasks in turn, shuffled anew each time round."""
        count = min(self._config.grpo.groups, len(self._tasks))
        turns = len(self._tasks) // count
        shuffled = list(self._tasks)
        random.Random(self._config.seed * 1_000_003 + step // turns).shuffle(shuffled)
        start = (step % turns) * count
        return shuffled[start : start + count]

    def update(self) -> StageResult:
        """GRPO by TRL, with prompts rebuilt at each step."""
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig

        from kernelwright.contrastive.updates.finite import FiniteUpdates
        from kernelwright.contrastive.updates.grpo import STATE_NAME, ContrastiveTrainer, GroupReward, Keeper, LocalRollouts
        from kernelwright.models.local import LocalModel, LocalSettings
        from kernelwright.models.pretrained import stop_ids

        config = self._config
        if self._context.deadline.passed():
            return StageResult(False, None, 0)
        model, tokenizer = self._context.model.load(config.model, config.seed)
        ends = frozenset(stop_ids(model, tokenizer))
        checkpoints = self._run.path / "checkpoints"
        checkpoint = last_checkpoint(checkpoints, STATE_NAME)
        spent_s = 0.0
        if checkpoint is not None:
            held = json.loads((Path(checkpoint) / STATE_NAME).read_text())
            spent_s = held.get("seconds", 0.0)
            if held["smoother"]:
                self._scorer.smoother = RewardSmoother.from_state(held["smoother"])
            _complete(Path(checkpoint), self._run.path / "final")
        rollouts = None
        if config.sampling.backend == "local":
            settings = LocalSettings(batch_size=config.sampling.batch)
            local = LocalModel.from_module(model, tokenizer, name=model_name(config.model), settings=settings)
            rollouts = LocalRollouts(local, int(tokenizer.eos_token_id), config.sampling, config.seed)
        updates = config.grpo.iterations * config.grpo.minibatches
        keeper = Keeper(self._scorer, self._context, self._logged, updates=updates, limit_s=config.seconds, spent_s=spent_s)
        finite = FiniteUpdates(model, self._context.say)
        trainer = ContrastiveTrainer(
            updates=updates,
            tasks=self._tasks,
            prompts=self._prompts,
            model=model,
            processing_class=tokenizer,
            reward=GroupReward(self._scorer, self._tasks, ends, self._note, updates),
            shared=self._shared_lines() if config.grpo.spare_shared_lines else None,
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": ""}], "task": number} for number in range(len(self._tasks))]
            ),
            rollout_func=rollouts,
            args=on_one_gpu(GRPOConfig(**self._arguments(model, checkpoints))),
            callbacks=[finite, keeper],
        )
        finite.listen(trainer)
        quiet(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        steps = int(trainer.state.global_step) // updates
        if steps < config.steps and not keeper.spent:
            return StageResult(False, None, steps)
        save_final(trainer.accelerator.unwrap_model(trainer.model), tokenizer, self._run.path / "final")
        ended = {"steps": steps, "seconds": round(keeper.spent_s, 1)}
        self._run.write_json("state.json", ended | ({"limit_s": config.seconds} if keeper.spent else {}))
        return StageResult(True, str(self._run.path / "final"), steps)

    def _shared_lines(self) -> AcceptedLines:
        """Those of the right answers so far, for a run that goes on."""
        shared = AcceptedLines()
        shared.learn_from(RolloutLog(self._run.path).rollouts())
        return shared

    def _arguments(self, model: Any, checkpoints: Path) -> dict[str, Any]:
        config = self._config
        rollouts = config.grpo.group_size * config.grpo.groups
        updates = config.grpo.iterations * config.grpo.minibatches
        shared = trainer_arguments(model, config.optimiser)
        return shared | {
            "output_dir": str(checkpoints),
            "gradient_accumulation_steps": rollouts // config.optimiser.micro_batch // config.grpo.minibatches,
            "max_steps": config.steps * updates,
            "num_generations": config.grpo.group_size,
            "generation_batch_size": rollouts,
            "num_iterations": config.grpo.iterations,
            "max_completion_length": config.sampling.max_tokens,
            "temperature": config.sampling.temperature,
            "top_p": config.sampling.top_p,
            "epsilon": config.grpo.epsilon,
            "delta": config.grpo.delta,
            "beta": config.grpo.beta,
            # Eq. 4: the mean over tokens of each answer, then over answers.
            "loss_type": "grpo",
            "scale_rewards": config.grpo.scale_rewards,
            "mask_truncated_completions": config.grpo.mask_truncated,
            "use_transformers_continuous_batching": config.sampling.backend == "continuous",
            "seed": config.seed,
            "data_seed": config.seed,
            "save_strategy": "steps",
            "save_steps": config.save_steps * updates,
            "save_total_limit": config.checkpoints_kept,
        }

    def _note(self, step: int, scored: Sequence[Scored]) -> dict[str, float]:
        """Metrics of a step, said and returned."""
        found = {(e.task_sha256, e.candidate_sha256): e for e in self._scorer.judged.evaluations()}
        values = rollout_metrics([item.rollout for item in scored], found)
        self._context.say(
            f"contrastive: step {step}: success {values.get('success_rate', 0.0):.2f}, "
            f"reward {values.get('reward_mean', 0.0):.3f}, hack rate {values.get('hack_rate', 0.0):.3f}"
        )
        return {f"contrastive/{name}": value for name, value in values.items()}

    def _logged(self, step: int, values: Mapping[str, float]) -> None:
        kept = {name if "/" in name else f"grpo/{name}": value for name, value in values.items()}
        updates = self._config.grpo.iterations * self._config.grpo.minibatches
        self._metrics.write(-(-step // updates), kept)
