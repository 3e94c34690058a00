"""Runs stage 3, contrastive RL (paper 2.4), and its two special cases.

The same score is used twice: it is the reward of a GRPO step, and it stands beside the code in later prompts. Without
exemplars that is vanilla GRPO; without the step it is evolutionary search with a frozen model (paper 2.4, first paragraphs).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kernelwright.contrastive.context import StageContext, StageResult, claim
from kernelwright.contrastive.evaluations import Deadline
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.fitting import Optimiser, prepare_for_training, save_final
from kernelwright.contrastive.grpo import AcceptedLines, PolicyGradient, batch_metrics, set_advantages
from kernelwright.contrastive.held_out import TaskSplit, shuffled
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.prompts import PromptMaker, fill, prompt_maker
from kernelwright.contrastive.samples import Origin, RolloutLog, Sample
from kernelwright.contrastive.scoring import RewardSmoother, Scorer, TokenSampler, draw_once
from kernelwright.contrastive.settings import ContrastiveConfig
from kernelwright.contrastive.trained_model import model_name
from kernelwright.records import RunDirectory, Task


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
    tasks = tasks_asked(split.train, config)
    exemplars, scorer, prompts = _opened(config, run, context)
    if not scorer.measure_baselines(tasks):
        return StageResult(False, None, _steps_done(run))
    # Evaluations of a step that was cut off are on disk but may not be in the database yet.
    exemplars.add_all(scorer.store.evaluations())
    exemplars.add_all(scorer.store.confirmed.values())
    with MetricsLog(run.path) as metrics:
        if not config.update:
            return _evolve(config, tasks, run, context, scorer, prompts, metrics)
        if context.deadline.passed():
            return StageResult(False, None, 0)
        learner = Learner(config, len(tasks), run, context, scorer)
        while learner.may_go_on:
            step = learner.step
            # A prompt for each of some tasks, with earlier candidates and their scores (2.4.3).
            asked = [(task, prompts.prompt(task, step)) for task in _tasks_of_step(tasks, config, step)]
            scorer.prepare([task for task, _ in asked])
            # A group of answers to each, by the model as it is now.
            samples = learner.sampler.sample(asked, config.grpo.group_size, step)
            # The judge's verdict on each, and the reward that it earns (2.4.4, 3.2).
            scorer.score(samples)
            # GRPO: advantages relative to the group, clipped updates, KL to the reference (2.4.5).
            set_advantages(samples, config.grpo)
            values = step_metrics(step, samples, scorer, context) | batch_metrics(samples, config.grpo.group_size)
            values |= learner.spare_shared_lines(samples)
            learner.update(samples, values, metrics)
            learner.save_if_due()
        return learner.result()


def _opened(
    config: ContrastiveConfig, run: RunDirectory, context: StageContext
) -> tuple[ExemplarDatabase, Scorer, PromptMaker]:
    """The database of exemplars, what scores answers and fills it, and what makes prompts from it."""
    exemplars = ExemplarDatabase(run.path / "exemplars.sqlite")
    fill(exemplars, config.exemplars.seeds)
    origin = Origin(
        stage="contrastive",
        model=model_name(config.model),
        sampling=config.sampling.of(config.seed),
        form=config.prompt.answer,
    )
    # Without a gradient step nothing is normalised: prompts show scores.
    reward = config.reward if config.update else config.reward.model_copy(update={"smoothing": False})
    scorer = Scorer(context, run, origin, reward, exemplars)
    prompts = prompt_maker(
        config.prompt,
        config.exemplars,
        device=context.device,
        database=exemplars,
        seed=config.seed,
        share=config.exemplars_share,
        baselines=scorer.ratios,
    )
    return exemplars, scorer, prompts


def _evolve(
    config: ContrastiveConfig,
    tasks: Sequence[Task],
    run: RunDirectory,
    context: StageContext,
    scorer: Scorer,
    prompts: PromptMaker,
    metrics: MetricsLog,
) -> StageResult:
    """Sample, judge, keep, and show what was found: no gradient."""
    model, tokenizer = context.model.load(config.model, config.seed)
    chat = context.model.sampler(model, tokenizer, model_name(config.model), config.sampling.batch)
    for step in range(_steps_done(run), config.steps):
        if context.deadline.passed():
            return StageResult(False, None, step)
        asked = [(task, prompts.prompt(task, step)) for task in _tasks_of_step(tasks, config, step)]
        path = run.path / "steps" / f"{step:05d}.json"
        samples = draw_once(path, chat, asked, config.grpo.group_size, config.sampling, step=step, seed=config.seed)
        scorer.score(samples)
        metrics.write(step, step_metrics(step, samples, scorer, context))
        run.write_json("state.json", {"steps": step + 1})
    return StageResult(True, None, config.steps)


def tasks_asked(tasks: Sequence[Task], config: ContrastiveConfig) -> list[Task]:
    """The training tasks that a run asks: all, or the first of the list that stage 2 shuffles with the same seed."""
    if config.task_count is None:
        return list(tasks)
    return shuffled(tasks, config.seed, 0)[: config.task_count]


def _tasks_of_step(tasks: Sequence[Task], config: ContrastiveConfig, step: int) -> list[Task]:
    """Tasks in turn, shuffled anew each time round."""
    count = min(config.grpo.groups, len(tasks))
    turns = len(tasks) // count
    start = (step % turns) * count
    return shuffled(tasks, config.seed, step // turns)[start : start + count]


def step_metrics(step: int, samples: Sequence[Sample], scorer: Scorer, context: StageContext) -> dict[str, float]:
    """Metrics of a step, logged and returned."""
    values = scorer.metrics(samples)
    context.log(
        f"contrastive: step {step}: success {values.get('success_rate', 0.0):.2f}, "
        f"reward {values.get('reward_mean', 0.0):.3f}, hack rate {values.get('hack_rate', 0.0):.3f}"
    )
    return {f"contrastive/{name}": value for name, value in values.items()}


def _steps_done(run: RunDirectory) -> int:
    return int((run.read_json("state.json") or {"steps": 0})["steps"])


def _is_spent(run: RunDirectory, config: ContrastiveConfig) -> bool:
    """True when the stage has ended for having used up its time."""
    return config.seconds is not None and (run.read_json("state.json") or {}).get("limit_s") == config.seconds


class Learner:
    """The model that a run trains, with its sampler, optimiser, checkpoints and time."""

    def __init__(
        self, config: ContrastiveConfig, tasks: int, run: RunDirectory, context: StageContext, scorer: Scorer
    ) -> None:
        self._config, self._tasks, self._run, self._scorer = config, tasks, run, scorer
        self._model, self._tokenizer = context.model.load(config.model, config.seed)
        prepare_for_training(self._model, config.optimiser.gradient_checkpointing)
        self._updates_a_step = config.grpo.iterations * config.grpo.minibatches
        self._optimiser = Optimiser(self._model, config.optimiser, config.steps * self._updates_a_step, context.log)
        self._policy = PolicyGradient(
            self._model,
            self._optimiser,
            config.grpo,
            micro_batch=config.optimiser.micro_batch,
            temperature=config.sampling.temperature,
            seed=config.seed,
        )
        self.sampler = TokenSampler(self._model, self._tokenizer, config.sampling, config.seed)
        self._checkpoints, self._final = run.path / "checkpoints", run.path / "final"
        state = self._optimiser.resume(self._checkpoints, self._final)
        if state.get("smoother"):
            scorer.smoother = RewardSmoother.from_state(state["smoother"])
        self._clock = StepClock(context.deadline, limit_s=config.seconds, spent_s=state.get("seconds", 0.0))
        self._tokens = state.get("tokens", 0)
        self._accepted: AcceptedLines | None = None
        if config.grpo.spare_shared_lines:
            self._accepted = AcceptedLines()
            self._accepted.learn_from(RolloutLog(run.path).rollouts())
        self.step = self._optimiser.done // self._updates_a_step
        """Steps done, which is the number of the next."""
        self._update_started = time.monotonic()

    @property
    def may_go_on(self) -> bool:
        """True when another step is to be done and there is time for it."""
        return self.step < self._config.steps and not self._clock.stopped

    def spare_shared_lines(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Leave lines that accepted answers share out of what failed ones teach, where that is wanted; its metric."""
        if self._accepted is None:
            return {}
        return {"contrastive/spared_share": self._accepted.spare(samples, self._tokenizer)}

    def update(self, samples: Sequence[Sample], values: dict[str, float], metrics: MetricsLog) -> None:
        """Make a step's updates; writes metrics of each, those of the step with the first."""
        self._tokens += sum(len(sample.tokenized.prompt) + len(sample.tokenized.answer) for sample in samples)
        self.step += 1
        asked = len(samples) // self._config.grpo.group_size
        for learnt in self._policy.learn(samples):
            now = time.monotonic()
            values |= learnt
            values["num_tokens"] = float(self._tokens)
            values["epoch"] = self._optimiser.done / self._updates_a_step * asked / self._tasks
            values["step_time"] = now - self._update_started
            named = {name if "/" in name else f"grpo/{name}": value for name, value in values.items()}
            metrics.write(self.step, named)
            values, self._update_started = {}, now
        self._clock.tick()

    def save_if_due(self) -> None:
        """Write a checkpoint every `save_steps` steps, and after the last one for which there is time."""
        config, smoother = self._config, self._scorer.smoother
        if self.may_go_on and self.step % config.save_steps:
            return
        self._optimiser.save(
            self._checkpoints,
            config.checkpoints_kept,
            smoother=smoother.state() if smoother is not None else None,
            seconds=round(self._clock.spent_s, 1),
            tokens=self._tokens,
        )

    def result(self) -> StageResult:
        """Write the trained model where the stage has ended."""
        if self.step < self._config.steps and not self._clock.spent:
            return StageResult(False, None, self.step)
        save_final(self._model, self._tokenizer, self._final)
        ended_by = {"limit_s": self._config.seconds} if self._clock.spent else {}
        self._run.write_json("state.json", {"steps": self.step, "seconds": round(self._clock.spent_s, 1)} | ended_by)
        return StageResult(True, str(self._final), self.step)


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
