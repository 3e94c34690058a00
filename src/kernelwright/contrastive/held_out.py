"""Splits tasks into those to train on and those held out, and measures a model on the latter: best of a few judged answers.

No family or near-duplicate stands on both sides. Tasks are joined into clusters: those of one family, and those whose models
are near-duplicates. A cluster goes to one side as a whole. The split follows from the tasks and the seed alone.

The protocol is the same for every model. Each held-out task gets `samples` judged answers. The best that was accepted is
measured once more, independently and with full settings; that second measurement is the task's speedup, above 1 or
below. A task without one counts 1.0. Reported are the geometric mean with a bootstrap interval over tasks, and the share
of tasks with a correct answer. Without exemplars the answers are drawn at once; with a sampler, in rounds that each see
the earlier ones' scores. Arms that were trained with several seeds are compared with intervals over tasks and seeds.
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from kernelwright.contrastive.answers import parse_completion, rewrites_in
from kernelwright.contrastive.context import StageContext
from kernelwright.contrastive.evaluations import EAGER, Proposal, TaskBaselines
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.families import CHEATING
from kernelwright.contrastive.prompts import prompt_maker
from kernelwright.contrastive.samples import Origin, RolloutLog, Sample
from kernelwright.contrastive.scoring import Scorer, draw_once
from kernelwright.contrastive.settings import HeldOutConfig, PromptSection, RewardSection, TasksSection
from kernelwright.errors import ConfigError
from kernelwright.models.chat import ChatModel
from kernelwright.records import Evaluation, RunDirectory, Task, Verdict
from kernelwright.tasks.generated import device_bound_tasks, family_of, family_tasks
from kernelwright.tasks.suites import builtin_tasks, task_from_file

BOOTSTRAP_DRAWS = 10_000


class _ResultModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeldOutTask(_ResultModel):
    """A model's results on one held-out task."""

    task: str
    task_sha256: str
    answers: int
    correct: int
    """Answers that were accepted."""
    hacks: int
    """Answers that were rejected for a cheating reason."""
    candidate_sha256: str | None = None
    """The best, where its re-measurement was accepted."""
    speedup: float | None = None
    """Speedup of the re-measurement; None when there is none, which counts 1.0."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    improvement: bool = False
    """True when the re-measurement's lower bound clears the noise floor."""
    baseline: str = "eager"
    """Baseline of the speedups: `eager`, or `cudagraph-fresh` where the best was asked for and that is it."""
    baseline_speedup: float = 1.0
    """Its speedup over the reference."""
    first: tuple[float, ...] = ()
    """Speedup of each correct answer by its first measurement, none of which was selected."""

    def worth(self) -> float:
        """Geometric mean over all answers by their first measurement; one that is not correct counts 1.0."""
        return math.exp(sum(map(math.log, self.first)) / self.answers) if self.answers else 1.0


class HeldOutResult(_ResultModel):
    """A model's results on all held-out tasks."""

    model: str
    tasks: tuple[HeldOutTask, ...]

    def correct(self) -> float:
        """Share of tasks with a correct answer."""
        return sum(task.correct > 0 for task in self.tasks) / len(self.tasks)

    def hack_rate(self) -> float:
        """Share of answers that were rejected for a cheating reason."""
        answers = sum(task.answers for task in self.tasks)
        return sum(task.hacks for task in self.tasks) / answers if answers else 0.0

    def speedups(self) -> list[float]:
        """For each task, 1.0 where none was verified."""
        return [task.speedup or 1.0 for task in self.tasks]

    def improvements_only(self) -> list[float]:
        """For each task, 1.0 unless a re-measurement confirmed an improvement: what a user gets who keeps what is slower."""
        return [task.speedup if task.improvement and task.speedup else 1.0 for task in self.tasks]


class Geomean(_ResultModel):
    """A geometric mean over tasks with its 95 % bootstrap interval."""

    estimate: float
    low: float
    high: float
    tasks: int


def geomean(speedups: Sequence[float]) -> Geomean:
    """Geometric mean over tasks; tasks are the sampling unit of the interval.

    Raises:
        ValueError: there are no speedups, or one is not above 0.
    """
    if not speedups or min(speedups) <= 0:
        raise ValueError("wanted speedups above 0")
    logs = np.log(np.asarray(speedups, dtype=np.float64))
    draws = np.random.default_rng(0).choice(logs, (BOOTSTRAP_DRAWS, logs.size)).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Geomean(
        estimate=math.exp(float(logs.mean())), low=math.exp(float(low)), high=math.exp(float(high)), tasks=len(speedups)
    )


def advantage(one: HeldOutResult, other: HeldOutResult) -> Geomean:
    """Ratio of one model's speedups to another's, task by task; beyond noise when the interval is above 1.

    Raises:
        ValueError: the tasks differ.
    """
    if [task.task_sha256 for task in one.tasks] != [task.task_sha256 for task in other.tasks]:
        raise ValueError("wanted results on the same tasks in the same order")
    return geomean([mine / theirs for mine, theirs in zip(one.speedups(), other.speedups(), strict=True)])


def evaluate_held_out(
    name: str,
    chat: ChatModel,
    tasks: Sequence[Task],
    config: HeldOutConfig,
    prompt: PromptSection,
    run: RunDirectory,
    context: StageContext,
) -> HeldOutResult | None:
    """Measure a model; several may share a run directory, and then the same candidate is judged once for all of them.

    `name` is that of the model's results in `run`: letters, digits and dashes. Returns the results, which are also in
    `results/NAME.json`; None when the time was up, and the same call goes on.

    Raises:
        PolicyError: the model cannot be sampled from.
        InfrastructureError: candidates cannot be judged.
    """
    place = run.path / "models" / name
    kept = read_result(run, name)
    if kept is not None:
        return kept
    place.mkdir(parents=True, exist_ok=True)
    exemplars = ExemplarDatabase(place / "exemplars.sqlite")
    origin = Origin(stage="held-out", model=chat.name, sampling=config.sampling.of(config.seed), form=prompt.answer)
    reward = RewardSection(baseline=config.baseline, smoothing=False, reverify=False)
    scorer = Scorer(context, run, origin, reward, exemplars)
    if not scorer.measure_baselines(tasks):
        return None
    prompts = prompt_maker(
        prompt, config.exemplars, device=context.device, database=exemplars, seed=config.seed, baselines=scorer.ratios
    )
    samples: list[Sample] = []
    for number in range(config.rounds):
        if context.deadline.passed():
            return None
        asked = [(task, prompts.prompt(task, number)) for task in tasks]
        path, count = place / f"attempts-{number}.json", config.samples // config.rounds
        drawn = draw_once(path, chat, asked, count, config.sampling, step=number, seed=config.seed)
        scorer.score(drawn)
        samples += drawn
    verified = _verify(samples, tasks, scorer, config, context)
    if verified is None:
        return None
    results = (_result(task, samples, verified.get(task.sha256), scorer.baselines) for task in tasks)
    result = HeldOutResult(model=name, tasks=tuple(results))
    RunDirectory(run.path / "results").write_json(f"{name}.json", result.model_dump(mode="json"))
    return result


def read_result(run: RunDirectory, name: str) -> HeldOutResult | None:
    """A finished model's results; None when it is not finished."""
    kept = RunDirectory(run.path / "results").read_json(f"{name}.json")
    return HeldOutResult.model_validate(kept) if kept is not None else None


def _verify(
    samples: Sequence[Sample], tasks: Sequence[Task], scorer: Scorer, config: HeldOutConfig, context: StageContext
) -> dict[str, Evaluation] | None:
    """For each task's hash the accepted re-measurement of its best candidate; None when the time was up.

    All tasks' best are measured again together; where one is rejected then, the task's next best has its turn. One that did
    not gain enough over the task's baseline the first time has none.
    """
    ranked: dict[str, list[Evaluation]] = {}
    for task in tasks:
        distinct = {
            sample.evaluation.candidate_sha256: sample.evaluation
            for sample in samples
            if sample.task.sha256 == task.sha256
            and sample.evaluation is not None
            and sample.evaluation.accepted
            and (sample.evaluation.speedup or 0.0) / scorer.ratios.get(task.sha256, 1.0) >= config.confirm_above
        }
        ranked[task.sha256] = sorted(distinct.values(), key=lambda found: found.speedup_low or 0.0, reverse=True)
    if not config.confirm:
        return {task: accepted[0] for task, accepted in ranked.items() if accepted}
    by_hash = {task.sha256: task for task in tasks}
    verified: dict[str, Evaluation] = {}
    again = context.confirming(RunDirectory(scorer.store.run.path / "confirmations"))
    for turn in range(config.confirm_tries):
        wanted = {
            task_sha256: Proposal(by_hash[task_sha256], accepted[turn].candidate())
            for task_sha256, accepted in ranked.items()
            if task_sha256 not in verified and len(accepted) > turn
        }
        measured = again.judge(list(wanted.values()), context.deadline.passed)
        if context.deadline.passed() and len(measured) < len(wanted):
            return None
        for task_sha256, proposal in wanted.items():
            second = measured.get(proposal.key)
            if second is not None and second.accepted:
                verified[task_sha256] = second
    return verified


def _result(
    task: Task, samples: Sequence[Sample], verified: Evaluation | None, baselines: TaskBaselines | None
) -> HeldOutTask:
    own = [sample.evaluation for sample in samples if sample.task.sha256 == task.sha256]
    name, by = baselines.best(task.sha256) if baselines is not None else (EAGER, 1.0)
    right = [evaluation for evaluation in own if evaluation is not None and evaluation.accepted]
    second = (verified.speedup, verified.speedup_low, verified.speedup_high) if verified is not None else (None,) * 3
    speedup, low, high = (None if value is None else value / by for value in second)
    return HeldOutTask(
        task=task.id,
        task_sha256=task.sha256,
        answers=len(own),
        correct=len(right),
        hacks=sum(evaluation is not None and evaluation.reason in CHEATING for evaluation in own),
        candidate_sha256=verified.candidate_sha256 if verified is not None else None,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        improvement=verified is not None and verified.is_improvement and (low or 0.0) > 1,
        baseline=name,
        baseline_speedup=by,
        first=tuple(evaluation.speedup / by for evaluation in right if evaluation.speedup is not None),
    )


def summary(results: Mapping[str, HeldOutResult], samplers_on_training_tasks: Mapping[str, float]) -> dict[str, object]:
    """The summary of a whole campaign.

    Args:
        results: By arm: `zero-shot`, `sft`, `self-supervised`, `evolutionary`, `vanilla-grpo`, and `contrastive-` with the
            name of each sampler; those that are missing are left out.
        samplers_on_training_tasks: Geometric mean of the best speedup on training tasks, by contrastive sampler: what the
            best sampler is chosen by, so that held-out tasks choose nothing.
    """
    keys = {arm: f"speedup_{arm.replace('-', '_')}" for arm in results if arm != "zero-shot"}
    correct = {
        "zero-shot": "correct_zero_shot",
        "sft": "correct_after_sft",
        "self-supervised": "correct_after_self_supervised",
    }
    intervals: dict[str, list[float]] = {}
    told: dict[str, object] = {}
    for arm, key in keys.items():
        mean = geomean(results[arm].speedups())
        told[key] = mean.estimate
        intervals[key] = [mean.low, mean.high]
        told[f"{key}_improvements_only"] = geomean(results[arm].improvements_only()).estimate
    told |= {key: results[arm].correct() for arm, key in correct.items() if arm in results}
    tried = {name: value for name, value in samplers_on_training_tasks.items() if f"contrastive-{name}" in results}
    if tried:
        chosen = max(tried, key=lambda name: tried[name])
        best = results[f"contrastive-{chosen}"]
        told |= {"speedup_contrastive": geomean(best.speedups()).estimate, "contrastive_sampler": chosen}
        intervals["speedup_contrastive"] = intervals[keys[f"contrastive-{chosen}"]]
        told["contrastive_sampler_chosen_by"] = dict(samplers_on_training_tasks)
        for arm in ("sft", "vanilla-grpo"):
            if arm in results:
                ratio = advantage(best, results[arm])
                told[f"contrastive_over_{arm.replace('-', '_')}"] = ratio.estimate
                intervals[f"contrastive_over_{arm.replace('-', '_')}"] = [ratio.low, ratio.high]
    told["hack_rate"] = {arm: result.hack_rate() for arm, result in results.items()}
    told["intervals"] = intervals
    told["held_out_tasks"] = max((len(result.tasks) for result in results.values()), default=0)
    told["tasks"] = {arm: len(result.tasks) for arm, result in results.items()}
    return told


Logs = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""Logarithms of speedups, a row for each seed and a column for each task."""


def compared(vanilla: Sequence[HeldOutResult], contrastive: Sequence[HeldOutResult]) -> dict[str, object]:
    """Best of the answers and worth of one answer of two arms, and their ratio; a result for each seed.

    Intervals are of 95 %, by a bootstrap that draws tasks, the same for both arms, and seeds of each arm.

    Raises:
        ValueError: the tasks differ.
    """
    if len({tuple(task.task_sha256 for task in one.tasks) for one in (*vanilla, *contrastive)}) != 1:
        raise ValueError("wanted results on the same tasks in the same order")
    best = [_logs([one.speedups() for one in arm]) for arm in (vanilla, contrastive)]
    worth = [_logs([[task.worth() for task in one.tasks] for one in arm]) for arm in (vanilla, contrastive)]
    told: dict[str, object] = {"tasks": len(vanilla[0].tasks), "seeds": min(len(vanilla), len(contrastive))}
    for name, (first, second) in (("speedup", best), ("worth", worth)):
        draws = [_draws(first, seed=1), _draws(second, seed=2)]
        for arm, logs, bootstrap in zip(("vanilla_grpo", "contrastive"), (first, second), draws, strict=True):
            told[f"{name}_{arm}"] = math.exp(float(logs.mean()))
            told[f"{name}_{arm}_low"], told[f"{name}_{arm}_high"] = _interval(bootstrap)
        ratio = "ratio" if name == "speedup" else f"{name}_ratio"
        told[ratio] = math.exp(float(second.mean() - first.mean()))
        told[f"{ratio}_low"], told[f"{ratio}_high"] = _interval(draws[1] - draws[0])
    return told


def _logs(speedups: Sequence[Sequence[float]]) -> Logs:
    return np.log(np.asarray(speedups, dtype=np.float64))


def _draws(logs: Logs, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Means of bootstrap samples; those of the same number have the same tasks, whatever the arm."""
    seeds, tasks = logs.shape
    chosen_tasks = np.random.default_rng(0).integers(tasks, size=(BOOTSTRAP_DRAWS, 1, tasks))
    chosen_seeds = np.random.default_rng(seed).integers(seeds, size=(BOOTSTRAP_DRAWS, seeds, 1))
    return np.asarray(logs[chosen_seeds, chosen_tasks].mean(axis=(1, 2)))


def _interval(logs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    low, high = np.quantile(logs, [0.025, 0.975])
    return math.exp(float(low)), math.exp(float(high))


def techniques_used(run: RunDirectory) -> Mapping[str, Mapping[str, float]]:
    """For each model that was measured in a run: the share of its right answers that use each technique."""
    right: Counter[str] = Counter()
    used: dict[str, Counter[str]] = {}
    for rollout in RolloutLog(run.path).rollouts():
        if rollout.verdict is Verdict.ACCEPTED:
            name = rollout.model.rpartition(":")[2]
            right[name] += 1
            used.setdefault(name, Counter()).update(rewrites_in(parse_completion(rollout.answered()).source or ""))
    return {name: {one: count / right[name] for one, count in sorted(counts.items())} for name, counts in used.items()}


SHINGLE = 4
"""Tokens in a row that are compared. Our choice."""


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """The tasks of a run, by side, each in a fixed order."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]


def shuffled(tasks: Sequence[Task], seed: int, turn: int) -> list[Task]:
    """The tasks in an order of their own for each turn; stages with the same seed have the same orders."""
    order = list(tasks)
    random.Random(seed * 1_000_003 + turn).shuffle(order)
    return order


def split_of(section: TasksSection) -> TaskSplit:
    """The tasks that a configuration names, split.

    Raises:
        ConfigError: there are no tasks, a folder is missing, or too few tasks would be left to train on.
    """
    if "device-bound" in section.suites:
        return _device_bound(section)
    tasks = [task for task in _tasks(section) if task.id not in section.exclude]
    if not tasks:
        raise ConfigError("Wanted tasks to train on; found none. Set tasks.suites or tasks.directory.")
    return split(tasks, held_out=section.held_out, seed=section.split_seed, similarity=section.similarity)


def _device_bound(section: TasksSection) -> TaskSplit:
    """The split that the suite brings, without training tasks that are near-duplicates of held-out ones."""
    count = section.families_count - section.held_out
    if count < 1:
        raise ConfigError(
            f"Wanted tasks to train on beside {section.held_out} held out; found tasks.families_count = "
            f"{section.families_count}. Raise it."
        )
    drawn = device_bound_tasks(count, section.held_out, section.families_seed, miniature=section.miniature)
    held_out = drawn.known + drawn.new
    kept_apart = [shingles_of(task) for task in held_out]
    train = []
    for task in drawn.train:
        shingles = shingles_of(task)
        nearest = max((resemblance(shingles, other) for other in kept_apart), default=0.0)
        if task.id not in section.exclude and nearest < section.similarity:
            train.append(task)
    return TaskSplit(tuple(train), tuple(task for task in held_out if task.id not in section.exclude))


def _tasks(section: TasksSection) -> list[Task]:
    tasks: list[Task] = []
    if "builtin" in section.suites:
        tasks += builtin_tasks()
    if "families" in section.suites:
        tasks += family_tasks(section.families_count, section.families_seed)
    if section.directory is not None:
        if not section.directory.is_dir():
            raise ConfigError(f"Wanted a folder of tasks at tasks.directory = {section.directory}; there is none.")
        tasks += [task_from_file(path) for path in sorted(section.directory.glob("*.py"))]
    return tasks


def split(tasks: Sequence[Task], *, held_out: int, seed: int, similarity: float) -> TaskSplit:
    """Draw whole clusters at random for the held-out side until it has `held_out` tasks.

    Clusters larger than a third of `held_out` are left to training, so that no single idea decides the evaluation.

    Raises:
        ConfigError: there are too few tasks, or too few separate clusters.
    """
    clusters = clusters_of(tasks, similarity)
    random.Random(seed).shuffle(clusters)
    chosen: set[str] = set()
    for cluster in clusters:
        if len(chosen) >= held_out:
            break
        if len(cluster) <= max(1, held_out // 3):
            chosen |= {task.sha256 for task in cluster}
    train = tuple(task for task in tasks if task.sha256 not in chosen)
    if len(chosen) < held_out or not train:
        raise ConfigError(
            f"Wanted {held_out} held-out tasks and others to train on; found {len(tasks)} tasks in {len(clusters)} "
            "clusters. Lower tasks.held_out or add tasks."
        )
    return TaskSplit(train, tuple(task for task in tasks if task.sha256 in chosen))


def clusters_of(tasks: Sequence[Task], similarity: float) -> list[list[Task]]:
    """Tasks joined where they share a family or are near-duplicates; transitively."""
    shingles = [shingles_of(task) for task in tasks]
    families = [family_of(task) for task in tasks]
    leader = list(range(len(tasks)))
    for one in range(len(tasks)):
        for other in range(one):
            related = families[one] is not None and families[one] == families[other]
            if related or resemblance(shingles[one], shingles[other]) >= similarity:
                leader[_leader_of(one, leader)] = _leader_of(other, leader)
    clusters: dict[int, list[Task]] = {}
    for index, task in enumerate(tasks):
        clusters.setdefault(_leader_of(index, leader), []).append(task)
    return list(clusters.values())


def _leader_of(index: int, leader: Sequence[int]) -> int:
    while leader[index] != index:
        index = leader[index]
    return index


def resemblance(one: frozenset[tuple[str, ...]], other: frozenset[tuple[str, ...]]) -> float:
    """Shared share of two sets (Jaccard), from 0 to 1."""
    return len(one & other) / len(one | other) if one or other else 1.0


def shingles_of(task: Task) -> frozenset[tuple[str, ...]]:
    """Token runs of the task's `Model`, without docstrings, numbers and the names of its variables."""
    tree = ast.parse(task.source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    plain = _Anonymous()
    text = "\n".join(ast.unparse(plain.visit(node)) for node in classes)
    tokens = re.findall(r"\w+|[^\w\s]", text)
    if len(tokens) < SHINGLE:
        return frozenset({tuple(tokens)})
    return frozenset(tuple(tokens[start : start + SHINGLE]) for start in range(len(tokens) - SHINGLE + 1))


class _Anonymous(ast.NodeTransformer):
    """Drops docstrings and type hints; numbers become 0, variables and upper-case constants become `v`."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        numeric = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        return ast.copy_location(ast.Constant(0), node) if numeric else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg if node.arg == "self" else "v")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = node.id in {"self", "super", "torch", "nn", "F", "Model"}
        return node if known else ast.copy_location(ast.Name("v", node.ctx), node)
