"""Reproduces CUDA-L1 (arXiv 2507.14111), from the first example to the table, on tasks and a model of your own.

    python recipes/cuda_l1.py --base models/Qwen2.5-Coder-0.5B-Instruct --out runs/cuda-l1

Reads top to bottom like the paper: teachers' correct code (2.2), supervised fine-tuning (2.2), self-supervised rounds (2.3),
contrastive RL with three ways to choose exemplars (2.4), vanilla GRPO and evolutionary search beside it (table 5), and the
evaluation of all of them on tasks that no stage has seen. The stages' settings are the TOML files beside this one.

Kill it at any moment, or give it `--time-limit`, and start it again: everything finished is kept, nothing is judged twice.
`--only` does a part, so that several processes can train several models at once, each on its GPU.

Not covered: more than one process for one model; the judge on other machines.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kernelwright import config as settings
from kernelwright.contrastive.context import StageContext, stage_context
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.held_out import (
    HeldOutResult,
    TaskSplit,
    compared,
    evaluate_held_out,
    geomean,
    read_result,
    split_of,
    summary,
    techniques_used,
)
from kernelwright.contrastive.metrics import hack_reasons, run_metrics, write_hacks
from kernelwright.contrastive.reinforcement import train_contrastive
from kernelwright.contrastive.samplers import CONTRASTIVE
from kernelwright.contrastive.settings import (
    STAGES,
    CheckerSection,
    ContrastiveConfig,
    HeldOutConfig,
    JudgeSection,
    SelfSupervisedConfig,
    SupervisedConfig,
    stage_from,
)
from kernelwright.contrastive.supervised import examples_of, train_self_supervised, train_supervised
from kernelwright.contrastive.trained_model import require_base
from kernelwright.errors import ConfigError, KernelwrightError, UsageError
from kernelwright.records import RunDirectory

HERE = Path(__file__).parent
FILES = {
    "sft": "sft.toml",
    "self-supervised": "self_supervised.toml",
    "contrastive": "contrastive.toml",
    "held-out": "held_out.toml",
}
REINFORCED = {"vanilla-grpo": "none"} | {f"contrastive-{name}": name for name in CONTRASTIVE}
"""Arms of stage 3, and the sampler of exemplars of each."""
ABLATIONS: dict[str, dict[str, Any]] = {"shuffled": {"scores": "shuffled"}, "one-level": {"levels": "one"}}
"""Changes to the prompts that the arm of buckets is measured with once more: does it use the scores, or the code alone?"""
MEASURED = ("zero-shot", "sft", "self-supervised", "evolutionary", *REINFORCED)
CONTRAST_ROUNDS = 4
"""Models that are shown exemplars draw their 8 answers in 4 rounds of 2, each round seeing the scores of those before. The
paper measures on the tasks it trained on; our choice."""

PAPER = {
    "sft": "1.14",
    "self-supervised": "1.36",
    "evolutionary": "1.18-1.41",
    "vanilla-grpo": "2.41",
    "contrastive-random": "2.14",
    "contrastive-bucket": "3.12",
    "contrastive-island": "3.21",
}
"""CUDA-L1, table 5: mean speedup over eager on an A100, 250 tasks of KernelBench that were trained on, a 671B model."""

Config = TypeVar("Config", SupervisedConfig, SelfSupervisedConfig, ContrastiveConfig)
Step = Callable[[], bool]
"""Step of the paper; returns False when the time was up before its end."""


class Contexts(ExitStack):
    """Judges of all parts. They take seconds to start: parts with the same settings share them."""

    def __init__(self, limit_s: float | None = None) -> None:
        super().__init__()
        self._end_s = None if limit_s is None else time.monotonic() + limit_s
        self._known: dict[str, StageContext] = {}

    def of(self, judge: JudgeSection, checker: CheckerSection) -> StageContext:
        """Judges with these settings; parts save and end when the time is up."""
        key = judge.model_dump_json() + checker.model_dump_json()
        if key not in self._known:
            left_s = None if self._end_s is None else max(0.0, self._end_s - time.monotonic())
            self._known[key] = self.enter_context(stage_context(judge, checker, log=log, limit_s=left_s))
        return self._known[key]


def log(line: str) -> None:
    """Print a line about progress, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One reproduction: its folder, the model it trains, and its settings as tables."""

    base: str
    out: Path
    tables: dict[str, dict[str, Any]]
    contexts: Contexts
    tasks: TaskSplit | None = None
    """Tasks in place of those that the settings name."""
    seeds: int = 1
    """Times that each arm of stage 3 is trained, each with a seed of its own."""
    ablations: bool = False
    """True when the arm of buckets is measured with changed prompts as well."""

    def arms(self) -> dict[str, tuple[str, int]]:
        """Sampler and number of the seed of each arm of stage 3, by name; a name without a seed has the first."""
        return {
            f"{arm}-seed-{seed}" if seed else arm: (sampler, seed)
            for seed in range(self.seeds)
            for arm, sampler in REINFORCED.items()
        }

    def measured(self) -> tuple[str, ...]:
        """Names of all models that are measured."""
        buckets = [arm for arm, (sampler, _) in self.arms().items() if sampler == "bucket"]
        ablated = [f"{arm}-{name}" for arm in buckets for name in ABLATIONS] if self.ablations else []
        return tuple(dict.fromkeys((*MEASURED, *self.arms(), *ablated)))

    def steps(self) -> dict[str, Step]:
        """Steps of the paper in its order, by name."""
        return {
            # 2.2: teachers write variations of every task, and the judge keeps the correct ones.
            "augment:sft": self.augment,
            # 2.2: the model learns them by their likelihood.
            "train:sft": self.fine_tune,
            # 2.3: rounds in which it writes, the judge filters, and it learns its own successes.
            "train:self-supervised": self.self_supervise,
            # 2.4: contrastive RL; without exemplars it is vanilla GRPO.
            **{f"train:{arm}": partial(self.reinforce, arm, *how) for arm, how in self.arms().items()},
            # Table 5, on tasks that no stage has seen: best of 8 answers, each best measured again.
            **{f"measure:{arm}": partial(self.measure, arm) for arm in self.measured()},
            "summary": lambda: bool(self.summarise()),
        }

    # ---- Stage 1 (2.2): data augmentation and supervised fine-tuning. Speed does not count yet.

    def augment(self) -> bool:
        """Judge the teachers' variations; needs no model."""
        config = self.settings(SupervisedConfig)
        context = self.contexts.of(config.judge, config.checker)
        return examples_of(config, self.split(), self.run("sft"), context) is not None

    def fine_tune(self) -> bool:
        """Fine-tune on the correct variations."""
        config = self.settings(SupervisedConfig)
        context = self.contexts.of(config.judge, config.checker)
        return train_supervised(config, self.split(), self.run("sft"), context).finished

    # ---- Stage 2 (2.3): self-supervised. Reward 1 for success, else 0, no baseline: the likelihood of its successes.

    def self_supervise(self) -> bool:
        """Run the rounds; each samples answers, judges them, and trains on the accepted ones."""
        config = self.settings(SelfSupervisedConfig, start="sft")
        if config.exemplars_share:
            shown = config.exemplars.model_copy(update={"seeds": (self.out / "sft",)})
            config = config.model_copy(update={"exemplars": shown})
        if config.rehearsal:
            config = config.model_copy(update={"rehearse": self.out / "sft"})
        context = self.contexts.of(config.judge, config.checker)
        return train_self_supervised(config, self.split(), self.run("self-supervised"), context).finished

    # ---- Stage 3 (2.4): contrastive RL

    def reinforce(self, arm: str, sampler: str, seed: int = 0) -> bool:
        """The loop is `train_contrastive` in `contrastive/reinforcement.py`. Each step:

        1. a prompt for each of some tasks, with earlier candidates and their scores (2.4.3, Eq. 1: `samplers.py`);
        2. a group of answers to each, judged: the reward is the speedup (2.4.4: `records/rewards.py`), suspicious ones are
           measured again (`evaluations.py`), and rewards are smoothed (3.2, Eq. 6: `scoring.py`);
        3. GRPO: group-relative advantages, clipped updates, KL to the reference (2.4.5, Eq. 4-5: `grpo.py`);
        4. what was judged goes into the database that the next prompts draw from (`exemplars.py`).
        """
        config = self.settings(ContrastiveConfig, start="self-supervised")
        seeds = (self.out / "self-supervised",) if sampler in CONTRASTIVE else ()
        exemplars = config.exemplars.model_copy(update={"sampler": sampler, "seeds": seeds})
        config = config.model_copy(update={"exemplars": exemplars, "seed": config.seed + seed})
        context = self.contexts.of(config.judge, config.checker)
        return train_contrastive(config, self.split(), self.run(arm), context).finished

    # ---- Table 5: the evaluation, and what differs from the paper's

    def measure(self, arm: str) -> bool:
        """Measure a model on the held-out tasks. Evolutionary search is the stage 2 model, shown exemplars."""
        ablation = next((name for name in ABLATIONS if arm.endswith(f"-{name}")), None)
        whole = arm.removesuffix(f"-{ablation}")
        trained = {"zero-shot": None, "evolutionary": "self-supervised"}.get(arm, whole)
        config = settings.build(HeldOutConfig, self.tables["held-out"])
        # Judges as of the stage that went before, so that one process uses the same ones for both.
        stage = self.settings(ContrastiveConfig, start=trained)
        named, seed = self.arms().get(whole, ("none", 0))
        sampler = "bucket" if arm == "evolutionary" else named
        config = config.model_copy(update={"seed": config.seed + seed})
        if sampler in CONTRASTIVE:
            changed = ABLATIONS[ablation] if ablation is not None else {}
            shown = stage.exemplars.model_copy(update={"sampler": sampler, "seeds": ()} | changed)
            config = config.model_copy(update={"exemplars": shown, "rounds": math.gcd(config.samples, CONTRAST_ROUNDS)})
        if read_result(self.run("held-out"), arm) is not None:
            return True
        context = self.contexts.of(stage.judge, stage.checker)
        model, tokenizer = context.model.load(stage.model, stage.seed)
        chat = context.model.sampler(model, tokenizer, f"{Path(self.base).name}:{arm}", config.sampling.batch)
        tasks = self.split().held_out
        return evaluate_held_out(arm, chat, tasks, config, stage.prompt, self.run("held-out"), context) is not None

    def summarise(self) -> dict[str, object]:
        """Write `summary.json` and `table.md` from the finished parts; return the summary."""
        run = self.run("held-out")
        results = {arm: found for arm in self.measured() if (found := read_result(run, arm)) is not None}
        done = [arm for arm in ("self-supervised", *self.arms()) if self.final(arm).is_dir()]
        chosen_by = {name: self._training_speedup(name) for name in CONTRASTIVE if f"contrastive-{name}" in done}
        told = summary(results, chosen_by)
        told["hack_rate_in_training"] = {arm: run_metrics(self.out / arm).get("hack_rate", 0.0) for arm in done}
        told["hack_reasons_in_training"] = {arm: hack_reasons(self.run(arm).evaluations()) for arm in done}
        told["stage_3"] = {arm: self.run(arm).read_json("state.json") for arm in done if arm in self.arms()}
        if self.seeds > 1:
            told |= self._compared(results)
        directory = RunDirectory(self.out)
        directory.write_json("summary.json", told)
        directory.write_text("table.md", table(results))
        write_hacks(self.out / "hacks", {name: self.out / name for name in (*done, "held-out")})
        return told

    def _compared(self, results: Mapping[str, HeldOutResult]) -> dict[str, object]:
        """Buckets and vanilla GRPO over all seeds that are measured, and what each model's right answers use."""
        found: dict[str, object] = {"techniques": techniques_used(self.run("held-out"))}
        vanilla, buckets = (
            [results[arm] for arm, (named, _) in self.arms().items() if named == sampler and arm in results]
            for sampler in ("none", "bucket")
        )
        if vanilla and buckets:
            found |= compared(vanilla, buckets)
        stage_1 = RunDirectory(self.out / "sft").evaluations()
        best: dict[str, float] = {}
        for one in stage_1:
            if one.accepted and one.speedup:
                best[one.task_sha256] = max(best.get(one.task_sha256, 1.0), one.speedup)
        if best:
            found["teachers_best_over_eager"] = geomean([best.get(task.sha256, 1.0) for task in self.split().train]).estimate
        return found

    def _training_speedup(self, sampler: str) -> float:
        """Geometric mean over all training tasks of the best lower bound found, 1.0 where none; it chooses a sampler."""
        database = ExemplarDatabase(self.out / f"contrastive-{sampler}" / "exemplars.sqlite")
        found = [
            database.best(task.sha256, device="cuda") or database.best(task.sha256, device="cpu")
            for task in self.split().train
        ]
        return geomean([max(1.0, best.score or 1.0) if best is not None else 1.0 for best in found]).estimate

    # ---- Settings and places

    def settings(self, kind: type[Config], start: str | None = None) -> Config:
        """A stage's settings, with the model that another stage trained, or the base, to start from.

        Raises:
            ConfigError: a setting does not exist or is out of range.
        """
        stage = next(name for name, known in STAGES.items() if known is kind)
        values = self.tables[stage] | {}
        # One file for all parts: arms that are compared see the same measurement of the same program.
        values["judge"] = {"shared": str(self.out / "judged.sqlite")} | values.get("judge", {})
        values["model"] = {key: value for key, value in values.get("model", {}).items() if key != "adapter"} | {
            "base": self.base
        }
        config = stage_from(stage, values, FILES[stage])
        assert isinstance(config, kind)
        if start is None:
            return config
        final = self.final(start)
        trained: dict[str, Any] = {"adapter": final} if config.model.tuning == "lora" else {"base": str(final)}
        return config.model_copy(update={"model": config.model.model_copy(update=trained)})

    def require(self, steps: Sequence[str]) -> None:
        """Check that all settings and the model are there, before the first step takes hours."""
        first = self.settings(SupervisedConfig)
        self.settings(SelfSupervisedConfig)
        self.settings(ContrastiveConfig)
        settings.build(HeldOutConfig, self.tables["held-out"])
        if any(step.startswith(("train:", "measure:")) for step in steps):
            require_base(first.model)

    def split(self) -> TaskSplit:
        """The tasks to train on, and those held out."""
        return self.tasks or split_of(self.settings(SupervisedConfig).tasks)

    def run(self, name: str) -> RunDirectory:
        """Run directory of a stage or arm."""
        return RunDirectory(self.out / name)

    def final(self, name: str) -> Path:
        """Folder of the model that a stage or arm trained."""
        return self.out / name / "final"


def table(results: dict[str, HeldOutResult]) -> str:
    """Our numbers beside the paper's, as Markdown. The two were not measured alike, as the columns' heads say."""
    lines = [
        "| model | correct | geomean of verified speedup, held out | 95 % interval | tasks | paper: mean, trained on |",
        "|---|---|---|---|---|---|",
    ]
    for arm, result in results.items():
        mean = geomean(result.speedups())
        lines.append(
            f"| {arm} | {result.correct():.2f} | {mean.estimate:.3f} | {mean.low:.3f} to {mean.high:.3f} | {mean.tasks} | "
            f"{PAPER.get(arm, '')} |"
        )
    return "\n".join(lines) + "\n"


def run_recipe(recipe: Recipe, only: Sequence[str] = ()) -> bool:
    """Do the steps in order; False when the time was up before the end.

    Raises:
        UsageError: a step in `only` does not exist.
    """
    for name, step in chosen_steps(recipe, only).items():
        print(name, file=sys.stderr)
        if not step():
            print(f"{name}: the time was up; start again to go on", file=sys.stderr)
            return False
    return True


def chosen_steps(recipe: Recipe, only: Sequence[str]) -> dict[str, Step]:
    """The steps to do, in the paper's order; all of them where none is named."""
    every = recipe.steps()
    if unknown := set(only) - set(every):
        raise UsageError(f"Wanted parts among {', '.join(every)}; found {', '.join(sorted(unknown))}. Correct --only.")
    return {name: step for name, step in every.items() if not only or name in only}


def tables_of(folder: Path, changes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of all stages, with changes such as `contrastive.grpo.groups=4`."""
    tables = {stage: settings.read_toml(folder / name) for stage, name in FILES.items()}
    for change in changes:
        path, _, value = change.partition("=")
        *names, last = path.split(".")
        place: Any = tables
        for name in names:
            place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if not names or names[0] not in FILES or not isinstance(place, dict):
            raise ConfigError(f"Wanted --set STAGE.KEY=VALUE with a stage of {', '.join(FILES)}; found {change}.")
        try:
            place[last] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"Wanted a TOML value in --set {change}; found none: {error}. Texts need quotes.") from error
    return tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe; 0 when everything asked for is done, 4 when the time was up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="hub id, folder or GGUF file of the model to begin with")
    parser.add_argument("--out", type=Path, required=True, help="directory of the whole reproduction; the same one resumes")
    parser.add_argument("--recipes", type=Path, default=HERE, help="folder with the four TOML files")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="PART", help="such as train:sft or measure:contrastive-bucket"
    )
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="STAGE.KEY=VALUE", help="change a setting"
    )
    parser.add_argument("--seeds", type=int, default=1, help="times that each arm of stage 3 is trained")
    parser.add_argument("--ablations", action="store_true", help="measure the arm of buckets with changed prompts too")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="save and end after this time")
    given = parser.parse_args(arguments)
    try:
        with Contexts(given.time_limit) as contexts:
            recipe = Recipe(
                given.base,
                given.out,
                tables_of(given.recipes, given.changes),
                contexts,
                seeds=given.seeds,
                ablations=given.ablations,
            )
            recipe.require(list(chosen_steps(recipe, given.only)))
            finished = run_recipe(recipe, given.only)
            if not finished and not given.only:
                recipe.summarise()
    except KernelwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    if (given.out / "table.md").exists():
        print((given.out / "table.md").read_text(), end="")
    return 0 if finished else 4


if __name__ == "__main__":
    sys.exit(main())
