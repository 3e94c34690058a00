"""Runs the stages that fit a model to correct answers: stage 1 to teachers' (paper 2.2), stage 2 to its own (2.3, Table 1).

Stage 2 samples, judges, keeps the successes, trains on them, and repeats. The paper's REINFORCE has reward 1 for success and
0 otherwise and no baseline, because failures dominate at first; its gradient is that of the likelihood of the successes
sampled, each as often as it was sampled. Examples of stage 1 may be learnt again with them (`rehearsal`).
"""

from __future__ import annotations

import itertools
import queue
import random
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kernelwright.contrastive.context import StageContext, StageResult, claim
from kernelwright.contrastive.evaluations import Deadline, Proposal, RunEvaluations
from kernelwright.contrastive.exemplars import Exemplar, ExemplarDatabase
from kernelwright.contrastive.fitting import Example, example_of, fit, is_learnt, read_examples, save_final, write_examples
from kernelwright.contrastive.held_out import TaskSplit, shuffled
from kernelwright.contrastive.metrics import MetricsLog
from kernelwright.contrastive.prompts import Prompt, PromptMaker, fill, prompt_maker, prompt_of
from kernelwright.contrastive.samplers import sampler_named
from kernelwright.contrastive.samples import Origin, Sample
from kernelwright.contrastive.scoring import Scorer, draw_once
from kernelwright.contrastive.settings import ModelSection, RewardSection, SelfSupervisedConfig, SupervisedConfig
from kernelwright.contrastive.teachers import ChatTeacher, teacher_named
from kernelwright.contrastive.trained_model import model_name
from kernelwright.errors import ConfigError
from kernelwright.records import Evaluation, RunDirectory, Task, sha256_of
from kernelwright.records.policy import Context, Policy


def train_supervised(config: SupervisedConfig, split: TaskSplit, run: RunDirectory, context: StageContext) -> StageResult:
    """Augment, then fine-tune; `final` holds the result.

    Writes `examples.jsonl`, `evaluations.jsonl`, `metrics.jsonl`, checkpoints and TensorBoard events. Run again with the
    same directory, it goes on where it was, and does nothing more once it has finished.

    Raises:
        UsageError: the directory belongs to another run.
        ConfigError: a teacher does not exist, none of them was right, or no example fits.
        PolicyError: the model cannot be loaded.
        InfrastructureError: candidates cannot be judged, or packages are missing.
    """
    claim(run, "sft", config, context.device)
    final = run.path / "final"
    if final.is_dir():
        return StageResult(True, str(final), 1)
    examples = examples_of(config, split, run, context)
    if examples is None or context.deadline.passed():
        return StageResult(False, None, 0)
    if not examples:
        raise ConfigError(
            f"Wanted correct variations by teachers to learn from; found none. {run.evaluations_path} says what was wrong "
            "with each. Raise augmentation.attempts, or add teachers or tasks."
        )
    model, tokenizer = context.model.load(config.model, config.seed)
    context.log(f"supervised: {len(examples)} examples")
    with MetricsLog(run.path) as metrics:
        finished = fit(
            model,
            tokenizer,
            examples,
            config.optimiser,
            out=run.path,
            seed=config.seed,
            context=context,
            save_steps=config.save_steps,
            metrics=metrics,
        )
    if not finished:
        return StageResult(False, None, 0)
    save_final(model, tokenizer, final)
    return StageResult(True, str(final), 1)


def examples_of(
    config: SupervisedConfig, split: TaskSplit, run: RunDirectory, context: StageContext
) -> list[Example] | None:
    """The examples to learn, made first when they are not there yet; None when the time was up.

    Raises:
        UsageError: the directory belongs to another run.
        ConfigError: a teacher does not exist.
        InfrastructureError: candidates cannot be judged.
    """
    claim(run, "sft", config, context.device)
    return read_examples(run.path / "examples.jsonl") or augment(config, split.train, run, context)


PASS = 2
"""Variations of a task that a teacher is asked for in one pass over the tasks, so that a time limit leaves no task out."""


def augment(
    config: SupervisedConfig, tasks: Sequence[Task], run: RunDirectory, context: StageContext
) -> list[Example] | None:
    """Judge the teachers' variations and write the correct ones to `examples.jsonl`.

    Stopped at any moment, it goes on with what is not judged yet. A teacher is asked about a task until it has
    `successes` correct variations or has made `attempts`, or until `augmentation.seconds` have gone by.

    Returns:
        The examples; None when the time was up.

    Raises:
        ConfigError: there is no such teacher.
        InfrastructureError: a teacher cannot be reached, or most of a batch could not be judged.
    """
    settings = config.augmentation
    store = context.store(run, timed=settings.timed)
    teachers: list[Policy] = [
        context.teachers[name]
        if name in context.teachers
        else teacher_named(name, config.prompt.answer, settings.answer_chars, settings.attempts)
        for name in settings.teachers
    ]
    teachers += [ChatTeacher.open(section, config.prompt, run.path) for section in settings.models]
    exhausted: set[tuple[str, str]] = set()
    enough = Deadline(settings.seconds)
    while not context.deadline.passed():
        batch: list[Proposal] = []
        history = {task.sha256: store.history(task) for task in tasks}
        made = _proposals(config, tasks, teachers, history, context.device, exhausted, batch)
        judged = store.judge(_ahead(made), lambda: enough.passed() or context.deadline.passed())
        if not batch or enough.passed():
            break
        context.log(f"augmentation: {len(batch)} variations judged, {sum(e.accepted for e in judged.values())} correct")
        # A candidate that could not be judged would be proposed for ever.
        exhausted.update((item.task.sha256, item.candidate.policy) for item in batch if item.key not in judged)
    else:
        return None
    examples = _examples(config, tasks, store, run, context.device)
    write_examples(run.path / "examples.jsonl", examples)
    solved = len({example.task for example in examples})
    context.log(f"augmentation: {len(examples)} correct variations of {solved} of {len(tasks)} tasks")
    return examples


def _proposals(
    config: SupervisedConfig,
    tasks: Sequence[Task],
    teachers: Sequence[Policy],
    histories: Mapping[str, tuple[Evaluation, ...]],
    device: str,
    exhausted: set[tuple[str, str]],
    batch: list[Proposal],
) -> Iterator[Proposal]:
    """The next proposals of each teacher that is not done with a task; kept in `batch`, and in `exhausted` where none."""
    settings = config.augmentation
    for teacher, task in itertools.product(teachers, tasks):
        if (task.sha256, teacher.name) in exhausted:
            continue
        history = histories[task.sha256]
        wanted = min(PASS, _wanted(history, teacher, settings.attempts, settings.successes))
        context = Context(task=task, device=device, history=history, seed=config.seed)
        proposed = [Proposal(task, candidate) for candidate in (teacher.propose(context, wanted) if wanted else [])]
        if not proposed:
            exhausted.add((task.sha256, teacher.name))
        batch += proposed
        yield from proposed


def _ahead(proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    """The same, made in a thread while others are judged: some teachers take a second for each task."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Where torch has CUDA and the machine no GPU, the first fake mode leaves a device guard in its thread's own memory (seen
    # in torch 2.11), and training crashes once that thread has ended. So the first one belongs to the thread that trains.
    with FakeTensorMode():
        pass
    made: queue.SimpleQueue[Proposal | None] = queue.SimpleQueue()
    unwanted = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as thread:
        making = thread.submit(_make, proposals, made, unwanted)
        try:
            while (proposal := made.get()) is not None:
                yield proposal
            making.result()  # raises what making them raised
        finally:
            unwanted.set()


def _make(proposals: Iterator[Proposal], made: queue.SimpleQueue[Proposal | None], unwanted: threading.Event) -> None:
    """Put proposals into a queue until they are unwanted, and None behind the last."""
    try:
        for proposal in proposals:
            if unwanted.is_set():
                return
            made.put(proposal)
    finally:
        made.put(None)


def _wanted(history: Sequence[Evaluation], teacher: Policy, attempts: int, successes: int) -> int:
    own = [found for found in history if found.policy == teacher.name]
    return max(0, min(attempts - len(own), successes - sum(found.accepted for found in own)))


def _examples(
    config: SupervisedConfig, tasks: Sequence[Task], store: RunEvaluations, run: RunDirectory, device: str
) -> list[Example]:
    share = config.augmentation.exemplars_share
    database = ExemplarDatabase(run.path / "exemplars.sqlite") if share else None
    if database is not None:
        database.add_all(store.evaluations())
    slowest, fastest = config.augmentation.slowest, config.augmentation.fastest
    examples = []
    for task in tasks:
        for evaluation in (found for found in store.history(task) if is_learnt(found, slowest, fastest)):
            prompt = _prompt(config, task, evaluation, database, device, share)
            examples.append(example_of(task, prompt, evaluation, config.prompt.answer))
    return examples


def _prompt(
    config: SupervisedConfig,
    task: Task,
    evaluation: Evaluation,
    database: ExemplarDatabase | None,
    device: str,
    share: float,
) -> Prompt:
    """A plain prompt or, for a share of the examples, one that shows slower variations than the answer."""
    rng = random.Random(sha256_of(f"{config.seed} {evaluation.candidate_sha256}"))
    shown: list[Exemplar] = []
    if database is not None and rng.random() < share:
        slower = [
            exemplar
            for exemplar in database.exemplars(task.sha256, device=device)
            if exemplar.candidate_sha256 != evaluation.candidate_sha256
            and evaluation.speedup_low is not None
            and (exemplar.score or 0.0) < evaluation.speedup_low
        ]
        shown = rng.sample(slower, min(2, len(slower)))
    return prompt_of(config.prompt, task, shown, device)


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
