"""Defines every setting of a training run, read from TOML.

A constant of the paper names its section, by way of the digest in docs/training.md; where the paper is silent it says "our
choice", or whose choice it was. An unknown key is a `ConfigError` that names the nearest known one.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kernelwright import config
from kernelwright.contrastive.samplers import SAMPLERS
from kernelwright.errors import ConfigError
from kernelwright.judge import Settings
from kernelwright.models.chat import Sampling


class _SettingsTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _bounds_are_of_what_is_measured(self) -> Self:
        given = [name for name in ("slowest", "fastest") if getattr(self, name, None) is not None]
        if given and not getattr(self, "timed", True):
            raise ValueError(f"{' and '.join(given)} bound speedups, which are not measured; set timed = true")
        return self


class LoraSection(_SettingsTable):
    """A low-rank adapter: what is trained when `tuning = "lora"`."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapter. Our choice; KernelBench-RLVR-120b uses 16 too."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapter. Our choice: twice the rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter."""


class ModelSection(_SettingsTable):
    """The model to train and where it comes from."""

    base: str = Field(min_length=1)
    """A hub id, a folder of a Hugging Face model, a GGUF file, or `tiny-random`."""
    adapter: Path | None = None
    """LoRA adapter to start from: the previous stage's `final` folder."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights; an adapter is kept in float32."""
    tuning: Literal["lora", "full"] = "lora"
    """Weights that are trained. The paper trains DeepSeek-V3 in full; LoRA is our choice, so that an adapter can be
    published beside a result."""
    lora: LoraSection = LoraSection()


class TasksSection(_SettingsTable):
    """Tasks to train on, and the split from those held out."""

    suites: tuple[Literal["builtin", "families", "device-bound"], ...] = ("builtin",)
    """Suites of tasks: `builtin`, the suite of 100; `families`, generated tasks; or `device-bound`, which stands alone. Its
    tasks take 0.3 to 3 ms on an H200, and half of those held out have a part that no training task has."""
    directory: Path | None = None
    """Folder with more tasks: every `*.py` in KernelBench's format."""
    exclude: tuple[str, ...] = ()
    """Ids of tasks to leave out."""
    families_count: int = Field(default=140, ge=1)
    """Number of tasks in the suite `families` or `device-bound`, those held out included. Our choice."""
    families_seed: int = 0
    """Seed of the tasks drawn from `families` or `device-bound`, and of their sizes."""
    miniature: bool = False
    """Draw the tasks of `device-bound` in sizes for a CPU: for a trial of a recipe, and for no number."""
    held_out: int = Field(default=30, ge=0)
    """Fewest tasks set aside for the evaluation. The paper trains and evaluates on the same 250 tasks (2.4);
    holding tasks out is our choice."""
    split_seed: int = 0
    """Seed of the split."""
    similarity: float = Field(default=0.8, gt=0, le=1)
    """Share of common token 4-grams from which two tasks are near-duplicates and stay on one side. Our choice."""

    @model_validator(mode="after")
    def _device_bound_alone(self) -> Self:
        if "device-bound" in self.suites and (len(self.suites) > 1 or self.directory is not None):
            raise ValueError("the suite device-bound brings its own split and stands alone")
        return self


class JudgeSection(_SettingsTable):
    """The judge: its devices, processes and settings."""

    device: str = "auto"
    """Device of the judges: `auto`, `cpu`, `cuda` (every visible GPU) or `cuda:N`."""
    per_device: int = Field(default=2, ge=1)
    """Judges for each GPU: building and checking overlap with another's timing. A CPU gets one."""
    shared: Path | None = None
    """File of evaluations that runs on one machine share, so that no candidate is judged twice. Its folder is created."""
    quick: bool = True
    """Start from `Settings.quick()`: rewards may be noisy, since reported results are confirmed with the full settings."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Changes to the judge's settings for rewards, as in docs/cli.md."""
    confirm_settings: dict[str, Any] = Field(default_factory=dict)
    """Changes to the judge's defaults for measuring reported results again."""

    def judge_settings(self) -> Settings:
        """The settings for rewards.

        Raises:
            ConfigError: a setting is unknown or out of range.
        """
        base = Settings.quick().model_dump(exclude_unset=True) if self.quick else {}
        return config.build(Settings, base | self.settings)

    def confirming_settings(self) -> Settings:
        """The settings for measuring reported results again.

        Raises:
            ConfigError: a setting is unknown or out of range.
        """
        return config.build(Settings, self.confirm_settings)


class PromptSection(_SettingsTable):
    """The form of a prompt."""

    answer: Literal["module", "subclass"] = "subclass"
    """Form of an answer. `module`: a whole module, as in the paper (Table 3). `subclass`: the reference's text stands above
    the answer, which is `class ModelNew(Model)` alone. Short answers are our choice for small models."""
    limit_characters: int = Field(default=12_000, ge=500)
    """Limit of a whole prompt; exemplars that do not fit are left out. Our choice, about 3,000 tokens."""
    hardware: str = ""
    """The device's name for people, such as `NVIDIA H200`."""


class SamplingSection(_SettingsTable):
    """The sampling of completions."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; at 1 the sampled distribution is the trained one. Not in the paper; field practice."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Share of the probability mass that is sampled from."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens of an answer. Our choice; the built-in teacher's subclass answers have 60 to 500."""
    batch: int = Field(default=128, ge=1)
    """Completions sampled at once."""

    def of(self, seed: int) -> Sampling:
        """The same for a chat model."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens, seed=seed)


class OptimiserSection(_SettingsTable):
    """The gradient step."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate; not in the paper. 1e-6 for full tuning, 1e-5 for LoRA of large models (Dr.Kernel,
    KernelBench-RLVR-120b); 1e-4 for LoRA of models of a billion parameters and below is our choice."""
    micro_batch: int = Field(default=4, ge=1)
    """Examples on the device at once; must divide those of a step."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which longer gradients are scaled down."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. Only under `constant` can a finished run be extended unchanged."""
    gradient_checkpointing: bool = False
    """True trades time for memory."""


class FittingSection(OptimiserSection):
    """Gradient steps on a set of examples."""

    batch_size: int = Field(default=16, ge=1)
    """Examples in one step. Our choice."""
    epochs: float = Field(default=2.0, gt=0)
    """Passes over the examples. Our choice."""
    max_length: int = Field(default=3072, ge=16)
    """Tokens of prompt and answer together. A longer example is left out and counted, never cut."""

    @model_validator(mode="after")
    def _micro_batch_divides(self) -> Self:
        if self.batch_size % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide batch_size {self.batch_size}")
        return self


class CheckerSection(_SettingsTable):
    """A second opinion on suspicious speedups (the paper's adversarial checker). Its vote leads to deeper checks, which
    decide."""

    kind: Literal["none", "structural", "api", "local"] = "none"
    """Kind of the checker. `structural` compares with known hacks; the others also ask a model of that kind."""
    confirmed: str = ""
    """File of hacks found before, such as an earlier run's `hacks.jsonl`, which are known besides the packaged ones."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the model, as in docs/models.md."""
    samples: int = Field(default=1, ge=1)
    """Answers of the model to each question, of which more than half must agree. Our choice."""


class TeacherSection(_SettingsTable):
    """A language model as a teacher."""

    kind: Literal["api", "local"]
    """Kind of the model, as in docs/models.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the model, as in docs/models.md."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of its answers."""
    max_tokens: int = Field(default=4096, ge=1)
    """Most tokens of one answer."""


class AugmentationSection(_SettingsTable):
    """Stage 1's data: many correct variations of each task, from teachers."""

    teachers: tuple[str, ...] = ("builtin", "templates")
    """Teachers besides language models: `builtin`, the package's own policy, and `templates`, the generated families' own
    variations. Every answer is judged."""
    models: tuple[TeacherSection, ...] = ()
    """Language models as teachers. Paper 2.2: six of them."""
    attempts: int = Field(default=20, ge=1)
    """Attempts for each task and teacher. Paper 2.2: up to 20."""
    successes: int = Field(default=2, ge=1)
    """Correct answers after which a teacher stops on a task. Paper 2.2: 2."""
    seconds: float | None = Field(default=None, gt=0)
    """Time limit of the augmentation, which keeps all evaluations made by that time. None: until every teacher is done with
    every task."""
    timed: bool = False
    """Measure speed as well. Correctness is the only filter (paper 2.2), so timing may be left out."""
    answer_chars: int = Field(default=2400, ge=50)
    """Longest answer that is tried. Our choice, about 600 tokens."""
    fastest: float | None = Field(default=None, gt=0)
    """Largest speedup of a variation that is learnt; None: any. The paper's teachers mostly wrote what was right and no
    faster (table 5), so that stage 3 had something left to find. Our choice."""
    slowest: float | None = Field(default=None, gt=0)
    """Smallest speedup of a variation that is learnt; None: any, as in the paper. Needs `timed`, as `fastest` does. A small
    model that has learnt copies of the reference writes nothing else once failures cost more than copies (docs/log.md)."""
    exemplars_share: float = Field(default=0.0, ge=0, le=1)
    """Share of examples whose prompt shows other correct variations with scores, in stage 3's form; needs `timed`. The
    paper's stage 1 has none (Table 2); a small model must have seen the form."""


class _StageSettings(_SettingsTable):
    seed: int = 0
    """Seed of everything random in the stage."""
    model: ModelSection
    tasks: TasksSection = TasksSection()
    judge: JudgeSection = JudgeSection()
    checker: CheckerSection = CheckerSection()
    prompt: PromptSection = PromptSection()


class SupervisedConfig(_StageSettings):
    """Stage 1 (paper 2.2): fine-tune on correct code made by teachers."""

    augmentation: AugmentationSection = AugmentationSection()
    optimiser: FittingSection = FittingSection()
    save_steps: int = Field(default=20, ge=1)
    """Optimiser steps between checkpoints."""


def _sampler(name: str) -> str:
    if name not in SAMPLERS:
        raise ValueError(f"known samplers are {', '.join(SAMPLERS)}")
    return name


class ExemplarSection(_SettingsTable):
    """The exemplar database's sampler (paper 2.4.3, Eq. 1)."""

    sampler: Annotated[str, AfterValidator(_sampler)] = "bucket"
    """Sampler of exemplars; `none` gives vanilla GRPO."""
    count: int = Field(default=2, ge=1)
    """Distinct buckets, and so exemplars, in a prompt. Paper: N = 2."""
    temperature: float = Field(default=0.5, gt=0)
    """tau of Eq. 1, in units of speedup. Not in the paper; our choice."""
    levels: Literal["distinct", "one"] = "distinct"
    """Buckets that a prompt's exemplars come from, for `bucket`: distinct ones, or all from one, which shows no contrast. An
    ablation."""
    scores: Literal["measured", "shuffled"] = "measured"
    """Scores that a prompt shows: those of its exemplars, or these in a random order, so that they say nothing."""
    seeds: tuple[Path, ...] = ()
    """Run directories whose timed evaluations fill the database before the first step."""


class SelfSupervisedConfig(_StageSettings):
    """Stage 2 (paper 2.3, Table 1): sample, judge, keep the successes, train on them, repeat.

    REINFORCE with reward 1 for success, 0 otherwise and no baseline is the negative log-likelihood of the successes.
    """

    sampling: SamplingSection = SamplingSection()
    optimiser: FittingSection = FittingSection()
    rounds: int = Field(default=4, ge=1)
    """Rounds of sampling and training. Not in the paper; our choice."""
    tasks_per_round: int = Field(default=32, ge=1)
    """Tasks of a round. Our choice; every task is drawn once before any is drawn again."""
    samples_per_task: int = Field(default=8, ge=1)
    """Answers to each task of a round. Our choice."""
    timed: bool = False
    """Measure speed as well. Without `slowest` the stage ignores it (paper 2.3)."""
    slowest: float | None = Field(default=None, gt=0)
    """Smallest speedup of an answer that is trained on; None: any, as in the paper. Needs `timed`. Our choice."""
    exemplars: ExemplarSection = ExemplarSection(sampler="none")
    exemplars_share: float = Field(default=0.0, ge=0, le=1)
    """Share of prompts that show exemplars, from `exemplars.seeds` and this stage's own answers. Answers that repeat an
    exemplar are not trained on. The paper's stage 2 shows none. A small model that sees plain prompts only forgets the other
    form before stage 3 asks for it. Our choice."""
    rehearsal: float = Field(default=0.0, ge=0)
    """Teachers' examples that are trained on again beside each success. From its own successes alone a small model forgets
    what it seldom gets right, such as CUDA graphs. The paper's stage 2 has none. Our choice."""
    rehearse: Path | None = None
    """Run directory of stage 1, which holds those examples."""


class RewardSection(_SettingsTable):
    """The reward that an evaluation earns (paper 2.4.4 and 3.2)."""

    name: str = "speedup"
    """Name of the reward: `speedup` (the paper's), `lower-bound`, `log`, `clamped`, `milestone` or `success`. For
    `milestone` the stage measures torch.compile once on each task."""
    smoothing: bool = True
    """Rolling normalisation and clip (Eq. 6)."""
    copies: Literal["score", "floor"] = "score"
    """Reward of an answer that repeats an exemplar of its own prompt, comments aside: its score, as in the paper, or the
    floor. Kernel-Smith (arXiv 2603.28342) found that models learn to copy the best exemplar; on a new task there is none."""
    floor: float | None = None
    """Reward of a failure and lowest reward of all, instead of the reward's own floor. With `log`, at -5 (the default) most
    of an advantage says whether an answer was right. So it did at -1, where a model learnt to repeat the reference, a copy
    of which earns 0 (`docs/log.md`)."""
    screened_share: float = Field(default=0.0, ge=0, le=0.9)
    """Share of answers whose reward may be screening's estimate, which costs a fraction of a verdict and which a cheat can
    forge. The judge takes the rest and every suspicious estimate; `screen_disagreement` among the metrics says on what share
    of those both disagree. Our choice."""
    reverify: bool = True
    """Measure suspicious speedups once more. Paper 2.4.4."""
    suspicious_speedup: float = Field(default=3.0, gt=1)
    """Speedup above which one is suspicious. Paper 2.4.4. Tasks on which honest work wins more need a higher one."""
    baseline: Literal["eager", "best"] = "eager"
    """Baseline of an answer: the reference (paper 2.4.4), or the faster of it and its CUDA graph, measured once a
    task, so that a graph around the reference earns nothing. A CPU has no graphs. Prompts show the same ratio."""
    suspicious_leap: float = Field(default=2.0, gt=1)
    """Multiple of the task's best speedup so far above which one is suspicious as well. Paper 2.4.4."""


class GrpoSection(_SettingsTable):
    """Group-relative policy optimisation (paper 2.4.5, Eq. 4-5); its numbers are not in the paper."""

    group_size: int = Field(default=8, ge=2)
    """Answers to one prompt: G. Third-party re-implementation: 8; Dr.Kernel: 16."""
    groups: int = Field(default=4, ge=1)
    """Prompts in one step. Our choice."""
    epsilon: float = Field(default=0.2, gt=0)
    """PPO's clip (PPO, arXiv 1707.06347)."""
    delta: float | None = Field(default=None, gt=1)
    """Bound of the ratio of probabilities where the clip has none: where a bad answer has become likelier since it was
    sampled. Without it one token can dominate an update's gradient. INTELLECT-2 (arXiv 2505.07291): 4; the paper: None."""
    beta: float = Field(default=1e-3, ge=0)
    """Weight of the KL to the model that the stage started with. The paper has the term; the value is our choice."""
    iterations: int = Field(default=1, ge=1)
    """Passes over each batch of rollouts."""
    minibatches: int = Field(default=1, ge=1)
    """Updates in each pass. Several learn more from the same answers where judging takes most of the time; the clip bounds
    their steps. PPO (arXiv 1707.06347) takes 32 minibatches a pass on Atari; 1 is on-policy."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of advantages: the deviation within the group, as in the paper, or of the whole batch, or nothing. Under
    `group`, a group whose rewards differ by noise alone gets as large advantages as any other."""
    mask_truncated: bool = False
    """Leave answers that reached `max_tokens` out of the loss."""
    spare_shared_lines: bool = False
    """Lower the probability of a failed answer's tokens only in lines that no accepted answer shares (`grpo.py`). Paper:
    False."""


class ContrastiveConfig(_StageSettings):
    """Stage 3 (paper 2.4): contrastive RL.

    `exemplars.sampler = "none"` is vanilla GRPO; `update = false` is the evolutionary loop: the same prompts, judge and
    database with a frozen model.
    """

    sampling: SamplingSection = SamplingSection()
    exemplars: ExemplarSection = ExemplarSection()
    exemplars_share: float = Field(default=1.0, ge=0, le=1)
    """Share of prompts that show exemplars. The paper's is 1. At 1 a small model learns to copy the form from the prompt,
    and its weights forget it. New tasks, which have no exemplar to copy, show it. Our choice."""
    reward: RewardSection = RewardSection()
    grpo: GrpoSection = GrpoSection()
    optimiser: OptimiserSection = OptimiserSection()
    update: bool = True
    """False leaves the gradient step out: evolutionary search with a frozen model."""
    task_count: int | None = Field(default=None, ge=1)
    """Training tasks that are asked. Few come again soon, and prompts then show answers of this stage. None: all."""
    steps: int = Field(default=40, ge=1)
    """Batches of rollouts, one for each step. Our choice."""
    seconds: float | None = Field(default=None, gt=0)
    """Time limit of training, restarts included: the stage ends before a step that would exceed it. Arms that are compared
    get the same limit. None: no limit."""
    save_steps: int = Field(default=1, ge=1)
    """Steps between checkpoints; 1 loses the least when killed."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """Number of newest checkpoints that stay."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        rollouts = self.grpo.group_size * self.grpo.groups
        if rollouts % self.optimiser.micro_batch:
            raise ValueError(
                f"optimiser.micro_batch {self.optimiser.micro_batch} does not divide {rollouts} rollouts a step"
            )
        micro_batches = rollouts // self.optimiser.micro_batch
        if micro_batches % self.grpo.minibatches:
            raise ValueError(f"grpo.minibatches {self.grpo.minibatches} does not divide {micro_batches} micro-batches")
        return self


class HeldOutConfig(_SettingsTable):
    """The measurement of a model on tasks that training never saw."""

    seed: int = 1000
    """Seed of the sampling, apart from training's."""
    samples: int = Field(default=8, ge=1)
    """Judged candidates for each task; the best of them counts."""
    rounds: int = Field(default=1, ge=1)
    """Rounds in which `samples` are drawn, with exemplars; later rounds see the scores of earlier ones. Must divide it."""
    exemplars: ExemplarSection = ExemplarSection(sampler="none")
    sampling: SamplingSection = SamplingSection(temperature=0.8)
    baseline: Literal["eager", "best"] = "eager"
    """Baseline of a speedup, as in `[reward]`."""
    confirm: bool = True
    """Measure the best candidate of each task again, independently; only one that this confirms counts as faster."""
    confirm_above: float = Field(default=0.0, ge=0)
    """Smallest first measurement, as a multiple of the baseline, that is measured again. A task whose best is below counts
    1.0, which is what a user has who keeps the reference."""
    confirm_tries: int = Field(default=2, ge=1)
    """Candidates of a task that are measured again, best first, until one is confirmed."""

    @model_validator(mode="after")
    def _rounds_divide(self) -> Self:
        if self.samples % self.rounds:
            raise ValueError(f"rounds {self.rounds} does not divide samples {self.samples}")
        return self


StageConfig = SupervisedConfig | SelfSupervisedConfig | ContrastiveConfig

STAGES: dict[str, type[SupervisedConfig] | type[SelfSupervisedConfig] | type[ContrastiveConfig]] = {
    "sft": SupervisedConfig,
    "self-supervised": SelfSupervisedConfig,
    "contrastive": ContrastiveConfig,
}
"""The stages by the names that the command line gives them."""


def read_stage(stage: str, path: Path, model: str | None = None) -> StageConfig:
    """A stage's configuration from a TOML file; `model` takes the place of its `model.base`.

    Raises:
        ConfigError: no such file or stage, not TOML, an unknown key, or a value out of range.
    """
    with config.in_file(path):
        values = config.read_toml(path)
        if model is not None and isinstance(values.setdefault("model", {}), dict):
            values["model"]["base"] = model
        return stage_from(stage, values, str(path))


def stage_from(stage: str, values: dict[str, Any], where: str = "the configuration") -> StageConfig:
    """A stage's configuration from a table of values.

    Raises:
        ConfigError: an unknown stage or key, no model, or a value out of range.
    """
    if stage not in STAGES:
        raise ConfigError(f"Wanted a stage, one of {', '.join(STAGES)}; found {stage!r}.")
    _check_names(STAGES[stage], values, "")
    if not isinstance(values.get("model"), dict) or not values["model"].get("base"):
        raise ConfigError(
            f"Wanted a model to train in {where}; found none. Set `base` in its [model] table, or give --model: a hub id, "
            "a folder or a GGUF file."
        )
    return config.build(STAGES[stage], values)


def _check_names(section: type[BaseModel], values: dict[str, Any], where: str) -> None:
    """Raises ConfigError for a key that its table does not have, with the nearest of that table."""
    for key, value in values.items():
        if key not in section.model_fields:
            near = difflib.get_close_matches(key, section.model_fields, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(section.model_fields)}."
            raise ConfigError(f"Wanted a setting that exists, found `{where}{key}`; {hint}")
        inner = section.model_fields[key].annotation
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, BaseModel):
            _check_names(inner, value, f"{where}{key}.")
