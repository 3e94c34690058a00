"""Runs stage 2, self-supervised (paper 2.3, Table 1): sample, judge, keep the successes, train on them, repeat.

The paper's REINFORCE has reward 1 for success and 0 otherwise and no baseline, because failures dominate at first; its
gradient is that of the likelihood of the successes sampled, each as often as it was sampled. Examples of stage 1 may be
learnt again beside them (`rehearsal`).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kernelwright.contrastive.context import StageContext, StageResult, claim
from kernelwright.contrastive.drawing import draw_once
from kernelwright.contrastive.evaluations import Deadline
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.fitting import Example, example_of, fit, is_learnt, read_examples, save_final, write_examples
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.prompts import PromptMaker, fill, prompt_maker
from kernelwright.contrastive.samplers import sampler_named
from kernelwright.contrastive.samples import Origin, Sample
from kernelwright.contrastive.scoring import Scorer
from kernelwright.contrastive.settings import ModelSection, RewardSection, SelfSupervisedConfig
from kernelwright.contrastive.split import TaskSplit, shuffled
from kernelwright.contrastive.trained_model import model_name
from kernelwright.errors import ConfigError
from kernelwright.records import RunDirectory, Task


def train_self_supervised(
    config: SelfSupervisedConfig, split: TaskSplit, run: RunDirectory, context: StageContext
) -> StageResult:
    """Run rounds of sampling, judging and training; `final` holds the result.

    A round's answers are on disk before they are judged, its evaluations one by one, and its adapter at its end: a
    killed run goes on in the middle of the round and judges nothing twice.

    Raises:
        UsageError: the directory belongs to another run.
        ConfigError: there is nothing to rehearse.
        PolicyError: the model cannot be loaded or sampled from.
        InfrastructureError: candidates cannot be judged, or packages are missing.
    """
    claim(run, "self-supervised", config, context.device)
    taught = _taught(config)
    final = run.path / "final"
    state = run.read_json("state.json") or {"rounds": 0}
    done = int(state["rounds"])
    if done >= config.rounds and final.is_dir():
        return StageResult(True, str(final), done)
    origin = Origin(
        stage="self-supervised",
        model=model_name(config.model),
        sampling=config.sampling.of(config.seed),
        form=config.prompt.answer,
    )
    exemplars = ExemplarDatabase(run.path / "exemplars.sqlite") if config.exemplars_share else None
    # Speed earns nothing here, so speeds are not doubted; an answer is right or not.
    reward = RewardSection(name="success", smoothing=False, reverify=False)
    scorer = Scorer(context, run, origin, reward, exemplars, timed=config.timed)
    if exemplars is not None:
        fill(exemplars, config.exemplars.seeds)
        exemplars.add_all(scorer.store.evaluations())
    shown = prompt_maker(config.prompt, config.exemplars, device=context.device, database=exemplars, seed=config.seed)
    plain = PromptMaker(config.prompt, context.device, sampler_named("none"), 0, None, config.seed)
    model, tokenizer = context.model.load(_reached(config.model, run, done), config.seed)
    chat = context.model.sampler(model, tokenizer, origin.model, config.sampling.batch)
    with MetricsLog(run.path) as metrics:
        for number in range(done, config.rounds):
            if context.deadline.passed():
                return StageResult(False, None, number)
            folder = round_folder(run, number)
            dice = random.Random(config.seed * 1_000_003 + number)
            asked = [
                (task, (shown if dice.random() < config.exemplars_share else plain).prompt(task, number))
                for task in tasks_of_round(split.train, config, number)
            ]
            samples = draw_once(
                folder / "attempts.json",
                chat,
                asked,
                config.samples_per_task,
                config.sampling,
                step=number,
                seed=config.seed,
            )
            scorer.score(samples)
            successes = examples_of_successes(samples, config)
            values = scorer.metrics(samples)
            context.log(
                f"self-supervised: round {number}: {len(successes)} of {len(samples)} answers are correct, "
                f"hack rate {values.get('hack_rate', 0.0):.3f}"
            )
            metrics.write(number, {f"self-supervised/{key}": value for key, value in values.items()})
            if successes:
                write_examples(folder / "examples.jsonl", successes)
                again = rehearsed(taught, config.rehearsal, len(successes), dice)
                # A round is the unit of its checkpoint: its short training is not cut.
                whole = replace(context, deadline=Deadline())
                seed = config.seed + number
                fit(model, tokenizer, successes + again, config.optimiser, out=folder, seed=seed, context=whole)
            save_final(model, tokenizer, folder / "model")
            run.write_json("state.json", {"rounds": number + 1})
            if number:
                shutil.rmtree(round_folder(run, number - 1) / "model", ignore_errors=True)
    save_final(model, tokenizer, final)
    return StageResult(True, str(final), config.rounds)


def round_folder(run: RunDirectory, number: int) -> Path:
    """The folder of a round's answers, examples and model."""
    return run.path / "rounds" / f"{number:03d}"


def _reached(section: ModelSection, run: RunDirectory, done: int) -> ModelSection:
    """The model as the last finished round left it."""
    if not done:
        return section
    folder = round_folder(run, done - 1) / "model"
    return section.model_copy(update={"adapter": folder} if section.tuning == "lora" else {"base": str(folder)})


def tasks_of_round(tasks: Sequence[Task], config: SelfSupervisedConfig, number: int) -> list[Task]:
    """Tasks in turn: every task comes up once before any comes up again."""
    order: list[Task] = []
    passes = 0
    while len(order) < (number + 1) * config.tasks_per_round:
        order += shuffled(tasks, config.seed, passes)
        passes += 1
    start = number * config.tasks_per_round
    # A turn may end within a round; a task still comes up once in it.
    return list({task.sha256: task for task in order[start : start + config.tasks_per_round]}.values())


def rehearsed(taught: Sequence[Example], share: float, successes: int, dice: random.Random) -> list[Example]:
    """Teachers' examples that are learnt again beside so many successes."""
    return dice.sample(taught, min(len(taught), round(share * successes)))


def _taught(config: SelfSupervisedConfig) -> list[Example]:
    """The examples that may be rehearsed.

    Raises:
        ConfigError: rehearsal is wanted and there are no examples.
    """
    if not config.rehearsal:
        return []
    examples = read_examples(config.rehearse / "examples.jsonl") if config.rehearse is not None else []
    if not examples:
        raise ConfigError(
            f"Wanted examples to rehearse in the run directory rehearse = {config.rehearse}; found none. Name one of stage "
            "1, or set rehearsal = 0."
        )
    return examples


def examples_of_successes(samples: Sequence[Sample], config: SelfSupervisedConfig) -> list[Example]:
    """The answers that are learnt: those accepted and fast enough. A copy of an exemplar would teach copying."""
    examples = []
    for sample in samples:
        if sample.evaluation is not None and is_learnt(sample.evaluation, config.slowest) and not sample.is_copy:
            example = example_of(sample.task, sample.prompt, sample.evaluation, config.prompt.answer)
            # What is reinforced is what was said, not what a teacher would have said.
            examples.append(example.model_copy(update={"answer": sample.completion.text}))
    return examples
