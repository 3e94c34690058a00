"""CUDA-L1 (arXiv 2507.14111) from the first example to the table, on tasks and a model of your own.

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelwright import config as settings
from kernelwright.contrastive.exemplars import ExemplarDatabase
from kernelwright.contrastive.samplers import CONTRASTIVE
from kernelwright.contrastive.sampling.hacks_found import write_hacks
from kernelwright.contrastive.sampling.metrics import hack_reasons, run_metrics
from kernelwright.contrastive.stages.config import (
    CheckerSection,
    ContrastiveConfig,
    HeldOutConfig,
    JudgeSection,
    SelfSupervisedConfig,
    StageConfig,
    SupervisedConfig,
    stage_from,
)
from kernelwright.contrastive.stages.context import StageContext, stage_context
from kernelwright.contrastive.stages.held_out import HeldOutResult, evaluate_held_out, geomean, read_result, summary
from kernelwright.contrastive.stages.run import train_with
from kernelwright.contrastive.stages.split import TaskSplit, split_of
from kernelwright.contrastive.stages.supervised import examples_of
from kernelwright.contrastive.updates.models import require_base
from kernelwright.errors import ConfigError, KernelwrightError, UsageError
from kernelwright.records import RunDirectory

HERE = Path(__file__).parent
FILES = {
    "sft": "sft.toml",
    "self-supervised": "self_supervised.toml",
    "contrastive": "contrastive.toml",
    "held-out": "held_out.toml",
}
TRAINED = ("sft", "self-supervised", "vanilla-grpo", *(f"contrastive-{name}" for name in CONTRASTIVE))
SUMMARY = "summary"
MEASURED = ("zero-shot", *TRAINED[:2], "evolutionary", *TRAINED[2:])
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

Equip = Callable[[JudgeSection, CheckerSection], AbstractContextManager[StageContext]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One reproduction: where it lies, what it trains, and its settings as tables."""

    base: str
    out: Path
    tables: dict[str, dict[str, Any]]
    equip: Equip
    tasks: TaskSplit | None = None
    """Instead of those that the settings name."""

    def require_base(self) -> None:
        """See that the model to begin with is there, before hours of augmentation."""
        require_base(self._stage("sft").model)

    def require_settings(self) -> None:
        """See that every stage's settings exist and agree, before the first one takes hours."""
        for stage in ("sft", "self-supervised", "contrastive"):
            self._stage(stage)
        settings.build(HeldOutConfig, self.tables["held-out"])

    # ---- 2.2: data augmentation and supervised fine-tuning

    def augmented(self) -> bool:
        """Teachers write and the judge filters: what `supervised` begins with, without a model."""
        config = self._stage("sft")
        assert isinstance(config, SupervisedConfig)
        with self.equip(config.judge, config.checker) as context:
            return examples_of(config, self._split(), RunDirectory(self.out / "sft"), context) is not None

    def supervised(self) -> bool:
        """Teachers write, the judge filters, the model learns what is correct. Speed does not count yet."""
        return self._train("sft", self._stage("sft"))

    # ---- 2.3: self-supervised learning

    def self_supervised(self) -> bool:
        """The model writes, the judge filters, the model learns from its own successes."""
        config = self._stage("self-supervised", adapter=self._final("sft"))
        assert isinstance(config, SelfSupervisedConfig)
        if config.exemplars_share:
            exemplars = config.exemplars.model_copy(update={"seeds": (self.out / "sft",)})
            config = config.model_copy(update={"exemplars": exemplars})
        if config.rehearsal:
            config = config.model_copy(update={"rehearse": self.out / "sft"})
        return self._train("self-supervised", config)

    # ---- 2.4: contrastive RL; its special case without exemplars is vanilla GRPO

    def reinforced(self, arm: str) -> bool:
        """`contrastive-random`, `contrastive-bucket`, `contrastive-island` or `vanilla-grpo`."""
        config = self._stage("contrastive", adapter=self._final("self-supervised"))
        assert isinstance(config, ContrastiveConfig)
        sampler = arm.removeprefix("contrastive-") if arm != "vanilla-grpo" else "none"
        seeds = (self.out / "self-supervised",) if sampler != "none" else ()
        exemplars = config.exemplars.model_copy(update={"sampler": sampler, "seeds": seeds})
        return self._train(arm, config.model_copy(update={"exemplars": exemplars}))

    # ---- the evaluation: best of 8 on held-out tasks, each best measured again

    def measure(self, arm: str) -> HeldOutResult | None:
        """A model's results; None when the time was up. Evolutionary search is the stage 2 model, shown exemplars."""
        trained = {"zero-shot": None, "evolutionary": "self-supervised"}.get(arm, arm)
        config = settings.build(HeldOutConfig, self.tables["held-out"])
        sampler = "bucket" if arm == "evolutionary" else arm.removeprefix("contrastive-")
        if sampler in CONTRASTIVE:
            shown = self._contrastive().exemplars.model_copy(update={"sampler": sampler, "seeds": ()})
            config = config.model_copy(update={"exemplars": shown, "rounds": math.gcd(config.samples, CONTRAST_ROUNDS)})
        # Judges as of the stage that went before, so that one process uses the same ones for both.
        stage = self._stage("contrastive", adapter=self._final(trained) if trained is not None else None)
        run = RunDirectory(self.out / "held-out")
        if (kept := read_result(run, arm)) is not None:
            return kept
        with self.equip(stage.judge, stage.checker) as context:
            model, tokenizer = context.model.load(stage.model, stage.seed)
            chat = context.model.sampler(model, tokenizer, f"{Path(self.base).name}:{arm}", config.sampling.batch)
            return evaluate_held_out(arm, chat, self._split().held_out, config, stage.prompt, run, context)

    # ---- table 5

    def summarise(self) -> dict[str, object]:
        """Write `summary.json` and `table.md` from what is finished; returns the summary."""
        run = RunDirectory(self.out / "held-out")
        results = {arm: found for arm in MEASURED if (found := read_result(run, arm)) is not None}
        told = summary(
            results, {name: self._training_speedup(name) for name in CONTRASTIVE if self._is_done(f"contrastive-{name}")}
        )
        trained = [name for name in TRAINED if name != "sft" and self._is_done(name)]
        told["hack_rate_in_training"] = {name: run_metrics(self.out / name).get("hack_rate", 0.0) for name in trained}
        told["hack_reasons_in_training"] = {
            name: hack_reasons(RunDirectory(self.out / name).evaluations()) for name in trained
        }
        told["stage_3"] = {
            name: RunDirectory(self.out / name).read_json("state.json")
            for name in trained
            if name not in ("sft", "self-supervised")
        }
        directory = RunDirectory(self.out)
        directory.write_json("summary.json", told)
        directory.write_text("table.md", table(results))
        write_hacks(self.out / "hacks", {name: self.out / name for name in (*trained, "held-out")})
        return told

    def _training_speedup(self, sampler: str) -> float:
        """Geometric mean over all training tasks of the best lower bound found, 1.0 where none: what chooses a sampler."""
        database = ExemplarDatabase(self.out / f"contrastive-{sampler}" / "exemplars.sqlite")
        found = [
            database.best(task.sha256, device="cuda") or database.best(task.sha256, device="cpu")
            for task in self._split().train
        ]
        return geomean([max(1.0, best.score or 1.0) if best is not None else 1.0 for best in found]).estimate

    # ---- plumbing

    def _split(self) -> TaskSplit:
        return self.tasks or split_of(self._stage("sft").tasks)

    def _stage(self, stage: str, adapter: Path | None = None) -> StageConfig:
        table = self.tables[stage] | {}
        # One file for all parts: arms that are compared see the same measurement of the same program.
        table["judge"] = {"shared": str(self.out / "judged.sqlite")} | table.get("judge", {})
        table["model"] = {key: value for key, value in table.get("model", {}).items() if key != "adapter"} | {
            "base": self.base
        }
        config = stage_from(stage, table, FILES[stage])
        if adapter is None:
            return config
        trained = {"adapter": adapter} if config.model.tuning == "lora" else {"base": str(adapter)}
        return config.model_copy(update={"model": config.model.model_copy(update=trained)})

    def _contrastive(self) -> ContrastiveConfig:
        config = self._stage("contrastive")
        assert isinstance(config, ContrastiveConfig)
        return config

    def _final(self, stage: str) -> Path:
        return self.out / stage / "final"

    def _is_done(self, stage: str) -> bool:
        return self._final(stage).is_dir()

    def _train(self, name: str, config: StageConfig) -> bool:
        """Whether the stage is finished."""
        with self.equip(config.judge, config.checker) as context:
            return train_with(config, self._split(), RunDirectory(self.out / name), context).finished


def table(results: dict[str, HeldOutResult]) -> str:
    """Our numbers beside the paper's, as Markdown. The two were not measured alike: read the columns' heads."""
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


def parts_of(only: Sequence[str]) -> list[str]:
    """The parts to do, in the paper's order: `augment:sft`, `train:NAME`, `measure:NAME` and `summary`."""
    every = ["augment:sft"] + [f"train:{name}" for name in TRAINED] + [f"measure:{name}" for name in MEASURED] + [SUMMARY]
    wanted = [part for part in every if not only or part in only]
    unknown = set(only) - set(every)
    if unknown:
        raise UsageError(f"Wanted parts among {', '.join(every)}; found {', '.join(sorted(unknown))}. Correct --only.")
    return wanted


def run_recipe(recipe: Recipe, only: Sequence[str] = ()) -> bool:
    """Do the parts in order; False when the time was up before the end."""
    for part in parts_of(only):
        kind, _, name = part.partition(":")
        print(part, file=sys.stderr)
        if kind == "measure":
            done = recipe.measure(name) is not None
        elif kind == SUMMARY:
            done = bool(recipe.summarise())
        elif kind == "augment":
            done = recipe.augmented()
        elif name == "sft":
            done = recipe.supervised()
        elif name == "self-supervised":
            done = recipe.self_supervised()
        else:
            done = recipe.reinforced(name)
        if not done:
            print(f"{part}: the time was up; start again to go on", file=sys.stderr)
            return False
    return True


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
    parser.add_argument("--out", type=Path, required=True, help="directory of the whole reproduction; the same one goes on")
    parser.add_argument("--recipes", type=Path, default=HERE, help="folder with the four TOML files")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="PART", help="such as train:sft or measure:contrastive-bucket"
    )
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="STAGE.KEY=VALUE", help="change a setting"
    )
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="save and end after so long")
    given = parser.parse_args(arguments)
    deadline = None if given.time_limit is None else time.monotonic() + given.time_limit

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    opened = ExitStack()
    known: dict[str, StageContext] = {}

    def equip(judge: JudgeSection, checker: CheckerSection) -> AbstractContextManager[StageContext]:
        """Judges take seconds to start: parts with the same settings share them."""
        key = judge.model_dump_json() + checker.model_dump_json()
        if key not in known:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            known[key] = opened.enter_context(stage_context(judge, checker, say=say, limit_s=left))
        return nullcontext(known[key])

    try:
        with opened:
            recipe = Recipe(given.base, given.out, tables_of(given.recipes, given.changes), equip)
            recipe.require_settings()
            if any(part.startswith(("train:", "measure:")) for part in parts_of(given.only)):
                recipe.require_base()
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
