"""Makes the prompt of a task at a step, with exemplars that the sampler draws from the database."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from kernelwright.contrastive.exemplars import Exemplar, ExemplarDatabase
from kernelwright.contrastive.prompts import Prompt, contrastive_prompt
from kernelwright.contrastive.samplers import ExemplarSampler, options_of, sampler_named
from kernelwright.contrastive.stages.config import ExemplarSection, PromptSection
from kernelwright.errors import ConfigError
from kernelwright.records import RunDirectory, Task, sha256_of


def prompt_of(section: PromptSection, task: Task, exemplars: Sequence[Exemplar], device: str) -> Prompt:
    """The prompt of a task with these exemplars, in the configured form."""
    return contrastive_prompt(
        task,
        exemplars,
        device=device,
        hardware=section.hardware,
        form=section.answer,
        limit_characters=section.limit_characters,
    )


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts; a prompt follows from the task, the draw's number, the seed and what the database holds."""

    section: PromptSection
    device: str
    """Device on which candidates run: `cpu` or `cuda...`."""
    sampler: ExemplarSampler
    count: int
    """Exemplars in a prompt, at most."""
    database: ExemplarDatabase | None
    seed: int
    share: float = 1.0
    """Share of prompts that show exemplars; the others are as vanilla GRPO's."""
    baselines: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Speedup of the best baseline by the task's hash, which scores are divided by; 1 where none is given."""
    shuffled: bool = False
    """Whether exemplars swap their scores at random: an ablation."""

    def prompt(self, task: Task, draw: int) -> Prompt:
        """The prompt of a task; `draw`, a step's number, tells one draw of exemplars from another.

        Raises:
            PromptTooLongError: the task alone is too long.
        """
        known = self.database.exemplars(task.sha256, device=self.device) if self.database is not None else []
        rng = random.Random(sha256_of(f"{self.seed} {draw} {task.sha256}"))
        if self.share < 1 and rng.random() >= self.share:
            known = []
        by = self.baselines.get(task.sha256, 1.0)
        shown = self.sampler.sample(known, self.count, rng)
        scores = [exemplar.known_score() / by for exemplar in shown]
        if self.shuffled:
            rng.shuffle(scores)
        shown = [replace(exemplar, score=score) for exemplar, score in zip(shown, scores, strict=True)]
        return prompt_of(self.section, task, shown, self.device)


def fill(database: ExemplarDatabase, runs: Sequence[Path]) -> None:
    """Put the evaluations of earlier runs into a database; a run in which nothing was judged adds nothing.

    Raises:
        ConfigError: there is no such directory.
    """
    for path in runs:
        if not path.is_dir():
            raise ConfigError(
                f"Wanted a run directory to fill the database from (exemplars.seeds) at {path}; there is none."
            )
        database.add_all(RunDirectory(path).evaluations())


def prompt_maker(
    section: PromptSection,
    exemplars: ExemplarSection,
    *,
    device: str,
    database: ExemplarDatabase | None,
    seed: int,
    share: float = 1.0,
    baselines: Mapping[str, float] = MappingProxyType({}),
) -> PromptMaker:
    """The maker that a configuration asks for.

    Raises:
        ConfigError: the sampler's options are out of range, or it has none that is asked for.
    """
    options: dict[str, float | bool] = {}
    if "temperature" in options_of(exemplars.sampler):
        options["temperature"] = exemplars.temperature
    if exemplars.levels == "one":
        options["one_level"] = True
    sampler = sampler_named(exemplars.sampler, **options)
    shuffled = exemplars.scores == "shuffled"
    return PromptMaker(section, device, sampler, exemplars.count, database, seed, share, baselines, shuffled)
