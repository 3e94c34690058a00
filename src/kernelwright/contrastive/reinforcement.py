"""Runs stage 3, contrastive RL (paper 2.4), and its two special cases.

The same score is used twice: it is the reward of a GRPO step, and it stands beside the code in later prompts. Without
exemplars that is vanilla GRPO; without the step it is evolutionary search with a frozen model (paper 2.4, first paragraphs).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernelwright.contrastive.context import Deadline, StageContext, StageResult, claim
from kernelwright.contrastive.drawing import draw, drawn
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.fitting import prepare_for_training, save_final
from kernelwright.contrastive.grpo import AcceptedLines, deviation
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.optimiser import Spelled
from kernelwright.contrastive.prompts import Prompt, PromptMaker, fill, prompt_maker
from kernelwright.contrastive.samples import RolloutLog
from kernelwright.contrastive.scoring import Attempt, RewardSmoother, Scored, Scorer
from kernelwright.contrastive.settings import ContrastiveConfig
from kernelwright.contrastive.split import TaskSplit, shuffled
from kernelwright.contrastive.trained_model import model_name
from kernelwright.models.chat import Completion
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
    baselines = context.baselines(run, config.reward.baseline)
    tasks = tasks_asked(split.train, config)
    if baselines is not None and not baselines.measure(tasks, context.deadline.passed):
        return StageResult(False, None, _steps_done(run))
    ratios = baselines.speedups if baselines is not None else {}
    # Evaluations of a step that was cut off are on disk but may not be in the database yet.
    database.add_all(judged.evaluations())
    database.add_all(judged.confirmed.values())
    scorer = Scorer(
        judged,
        reward_named(config.reward.name, floor=config.reward.floor, baselines=ratios),
        form=config.prompt.answer,
        stage="contrastive",
        model=model_name(config.model),
        sampling=config.sampling.of(config.seed),
        database=database,
        copies=config.reward.copies,
        smoother=RewardSmoother() if config.reward.smoothing and config.update else None,
        verification=context.judging.verification(config.reward),
        estimator=context.judging.estimator(config.reward, judged),
        baselines=baselines,
    )
    prompts = prompt_maker(
        config.prompt,
        config.exemplars,
        device=context.device,
        database=database,
        seed=config.seed,
        share=config.exemplars_share,
        baselines=ratios,
    )
    with MetricsLog(run.path) as metrics:
        stage = _Stage(config, tasks, run, context, scorer, prompts, metrics)
        return stage.update() if config.update else stage.evolve()


def tasks_asked(tasks: Sequence[Task], config: ContrastiveConfig) -> list[Task]:
    """The training tasks that a run asks: all, or the first of the list that stage 2 shuffles with the same seed."""
    if config.task_count is None:
        return list(tasks)
    return shuffled(tasks, config.seed, 0)[: config.task_count]


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
        start = (step % turns) * count
        return shuffled(self._tasks, self._config.seed, step // turns)[start : start + count]

    def update(self) -> StageResult:
        """GRPO: ask with fresh exemplars, sample a group for each prompt, judge, and update the model."""
        from kernelwright.contrastive.drawing import TokenSampler
        from kernelwright.contrastive.grpo import PolicyGradient, group_advantages
        from kernelwright.contrastive.optimiser import Optimiser

        config, grpo = self._config, self._config.grpo
        if self._context.deadline.passed():
            return StageResult(False, None, 0)
        model, tokenizer = self._context.model.load(config.model, config.seed)
        prepare_for_training(model, config.optimiser.gradient_checkpointing)
        updates = grpo.iterations * grpo.minibatches
        optimiser = Optimiser(model, config.optimiser, config.steps * updates, self._context.say)
        policy = PolicyGradient(
            model,
            optimiser,
            grpo,
            micro_batch=config.optimiser.micro_batch,
            temperature=config.sampling.temperature,
            seed=config.seed,
        )
        sampler = TokenSampler(model, tokenizer, config.sampling, config.seed)
        checkpoints, final = self._run.path / "checkpoints", self._run.path / "final"
        state = optimiser.resume(checkpoints, final)
        if state.get("smoother"):
            self._scorer.smoother = RewardSmoother.from_state(state["smoother"])
        clock = StepClock(self._context.deadline, limit_s=config.seconds, spent_s=state.get("seconds", 0.0))
        tokens = state.get("tokens", 0)
        accepted = AcceptedLines() if grpo.spare_shared_lines else None
        if accepted is not None:
            accepted.learn_from(RolloutLog(self._run.path).rollouts())
        step = optimiser.done // updates
        started = time.monotonic()
        while step < config.steps and not clock.stopped:
            asked = [(task, self._prompts.prompt(task, step)) for task in self._tasks_of_step(step)]
            self._scorer.prepare([task for task, _ in asked])
            answers = sampler.sample([prompt for _, prompt in asked], grpo.group_size, step)
            ended = [answer.answer[-1] in sampler.ends for answer in answers]
            scored = self._scorer.score(self._attempts(asked, answers, ended, tokenizer, step))
            rewards = torch.tensor([math.nan if item.reward is None else item.reward for item in scored])
            advantages = group_advantages(rewards, grpo.group_size, grpo.scale_rewards)
            tokens += sum(len(answer.prompt) + len(answer.answer) for answer in answers)
            values = self._note(step, scored) | batch_metrics(answers, ended, rewards, grpo.group_size)
            spread = [advantage.expand(len(answer.answer)) for advantage, answer in zip(advantages, answers, strict=True)]
            if accepted is not None:
                texts = [[tokenizer.decode([token], skip_special_tokens=True) for token in one.answer] for one in answers]
                spread, spared = accepted.token_advantages([item.rollout for item in scored], texts, advantages)
                values["contrastive/spared_share"] = spared
            step += 1
            for told in policy.learn(answers, spread, [end or not grpo.mask_truncated for end in ended]):
                epoch = optimiser.done / updates * len(asked) / len(self._tasks)
                now = time.monotonic()
                told |= {"num_tokens": float(tokens), "epoch": epoch, "step_time": now - started}
                named = {name if "/" in name else f"grpo/{name}": value for name, value in (values | told).items()}
                self._metrics.write(step, named)
                values, started = {}, now
            clock.tick()
            if clock.stopped or step % config.save_steps == 0 or step == config.steps:
                smoother = self._scorer.smoother
                optimiser.save(
                    checkpoints,
                    config.checkpoints_kept,
                    smoother=smoother.state() if smoother is not None else None,
                    seconds=round(clock.spent_s, 1),
                    tokens=tokens,
                )
        if step < config.steps and not clock.spent:
            return StageResult(False, None, step)
        save_final(model, tokenizer, final)
        ended_by = {"limit_s": config.seconds} if clock.spent else {}
        self._run.write_json("state.json", {"steps": step, "seconds": round(clock.spent_s, 1)} | ended_by)
        return StageResult(True, str(final), step)

    def _attempts(
        self,
        asked: Sequence[tuple[Task, Prompt]],
        answers: Sequence[Spelled],
        ended: Sequence[bool],
        tokenizer: Any,
        step: int,
    ) -> list[Attempt]:
        size = self._config.grpo.group_size
        attempts = []
        for number, (answer, end) in enumerate(zip(answers, ended, strict=True)):
            task, prompt = asked[number // size]
            completion = Completion(
                text=tokenizer.decode(answer.answer, skip_special_tokens=True),
                prompt_tokens=0,
                completion_tokens=len(answer.answer),
                finish_reason="stop" if end else "length",
            )
            attempts.append(Attempt(task=task, prompt=prompt, completion=completion, step=step, sample=number % size))
        return attempts

    def _note(self, step: int, scored: Sequence[Scored]) -> dict[str, float]:
        """Metrics of a step, said and returned."""
        values = self._scorer.metrics(scored)
        self._context.say(
            f"contrastive: step {step}: success {values.get('success_rate', 0.0):.2f}, "
            f"reward {values.get('reward_mean', 0.0):.3f}, hack rate {values.get('hack_rate', 0.0):.3f}"
        )
        return {f"contrastive/{name}": value for name, value in values.items()}


class StepClock:
    """Decides after each step whether training stops.

    A step that would end after the deadline is not begun; the same call goes on later. After `limit_s` seconds of all steps
    together the stage has ended; `spent_s` are those of earlier processes.
    """

    def __init__(self, deadline: Deadline, *, limit_s: float | None, spent_s: float) -> None:
        self._deadline = deadline
        self._limit_s = limit_s
        self.spent_s = spent_s
        self.stopped = False
        """True once no further step may begin."""
        self.spent = False
        """True once the time for steps is used up."""
        self._step_started = time.monotonic()

    def tick(self) -> None:
        """Note the end of a step; the next one is expected to take as long."""
        now = time.monotonic()
        step_s, self._step_started = now - self._step_started, now
        self.spent_s += step_s
        self.spent = self._limit_s is not None and self.spent_s + step_s > self._limit_s
        self.stopped = self.spent or self._deadline.comes_within(step_s)


def batch_metrics(
    answers: Sequence[Spelled], ended: Sequence[bool], rewards: torch.Tensor, group_size: int
) -> dict[str, float]:
    """Metrics of a batch of answers: their lengths in tokens, and their rewards after smoothing."""
    lengths = np.array([len(answer.answer) for answer in answers], dtype=float)
    whole = lengths[np.array(ended)] if any(ended) else np.zeros(1)
    values = {"completions/clipped_ratio": 1 - sum(ended) / len(ended)}
    for name, found in (("", lengths), ("terminated_", whole)):
        values |= {f"completions/{kind}_{name}length": float(getattr(np, kind)(found)) for kind in ("mean", "min", "max")}
    known = rewards[~rewards.isnan()]
    mean, spread = float(known.mean()), float(known.std())
    flat = deviation(rewards.view(-1, group_size)).isclose(torch.zeros(1)).float().mean()
    return values | {
        "reward": mean,
        "reward_std": spread,
        "rewards/judge/mean": mean,
        "rewards/judge/std": spread,
        "frac_reward_zero_std": float(flat),
    }
