"""Writes the prompt of a model: the task, what was tried before with its scores, how to answer, and the judge's rules.

The parts and their order are CUDA-L1's (table 3); the words are our own, and the rules are those of the judge
(docs/verdicts.md), so that a model is not punished for what nobody told it. `PromptMaker` draws the exemplars of a step.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from kernelwright.contrastive.exemplars import Exemplar, ExemplarDatabase
from kernelwright.contrastive.samplers import ExemplarSampler, options_of, sampler_named
from kernelwright.contrastive.settings import ExemplarSection, PromptSection
from kernelwright.errors import ConfigError, PromptTooLongError
from kernelwright.models.chat import Message
from kernelwright.records import RunDirectory, Task, canonical_json, sha256_of
from kernelwright.records.rewards import conservative

PROMPT_LIMIT_CHARACTERS = 40_000
"""Limit of all messages together; about 10,000 tokens of code. Our choice."""

AnswerForm = Literal["module", "subclass"]
"""`module`: the answer's code is a whole module, as in CUDA-L1. `subclass`: it follows the reference's text, so that
`class ModelNew(Model)` may stand alone. Short answers are our choice for small models."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to be answered."""

    messages: tuple[Message, ...]
    shown: tuple[Exemplar, ...]
    """The exemplars in it, worst first; fewer than were given where they did not fit."""

    @property
    def sha256(self) -> str:
        """Identity of the conversation: the hash of its messages."""
        return sha256_of(canonical_json([[message.role, message.content] for message in self.messages]))


def contrastive_prompt(
    task: Task,
    exemplars: Sequence[Exemplar],
    *,
    device: str,
    hardware: str = "",
    form: AnswerForm = "module",
    limit_characters: int = PROMPT_LIMIT_CHARACTERS,
) -> Prompt:
    """Ask for a better implementation, given earlier ones with their scores.

    Exemplars, each with a score, appear worst first, so that the best stands nearest to the answer. Where not all fit, each
    is taken in the order of its score, best first, if it still fits. `hardware` is the device's name for people.

    Raises:
        PromptTooLongError: it does not fit even without exemplars.
    """
    shown: list[Exemplar] = []
    messages = _messages(task, shown, device, hardware, form)
    if _length(messages) > limit_characters:
        raise PromptTooLongError(
            f"Wanted a prompt of at most {limit_characters} characters for the task {task.id}; found {_length(messages)} "
            "without any exemplar. Raise the limit or leave the task out."
        )
    for exemplar in sorted(exemplars, key=Exemplar.known_score, reverse=True):
        more = [exemplar, *shown]
        tried = _messages(task, more, device, hardware, form)
        if _length(tried) <= limit_characters:
            shown, messages = more, tried
    return Prompt(messages, tuple(shown))


def whole_source(task: Task, code: str, form: AnswerForm) -> str:
    """The module that an answer's code stands for."""
    if form == "module" or _defines_model(code):
        return code
    return f"{task.source.rstrip()}\n\n\n{code.lstrip()}"


def answer_code(task: Task, source: str, form: AnswerForm) -> str:
    """The code by which an answer of that form gives a module: the inverse of `whole_source`, where there is one."""
    head = task.source.rstrip() + "\n\n\n"
    return source.removeprefix(head) if form == "subclass" else source


def _defines_model(code: str) -> bool:
    return re.search(r"^class Model\b", code, re.MULTILINE) is not None


def _length(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)


def _messages(task: Task, shown: Sequence[Exemplar], device: str, hardware: str, form: AnswerForm) -> tuple[Message, ...]:
    gpu = device.startswith("cuda")
    where = hardware or ("an NVIDIA GPU" if gpu else "a CPU")
    parts = [
        f"# Task\n\nMake this PyTorch module faster on {where}. What counts is the time of one call of `forward`, with "
        f"the inputs and constructor arguments below.\n\n# Reference implementation\n\n{_fenced(task.source)}"
    ]
    if shown:
        parts.append(_earlier(task, shown, form))
    parts.append(_protocol(bool(shown), form))
    parts.append(_requirements(gpu))
    return (Message("system", _SYSTEM), Message("user", "\n\n".join(parts)))


_SYSTEM = (
    "You are an expert in the performance of numerical code. You write drop-in replacements for PyTorch modules that "
    "compute exactly the same in less time. An independent judge runs what you write."
)


def _earlier(task: Task, shown: Sequence[Exemplar], form: AnswerForm) -> str:
    parts = [
        "# Earlier implementations with scores\n\nEach was measured against the reference. The score is the speedup: 1 is "
        "the reference's own speed, and higher is better."
    ]
    for number, exemplar in enumerate(shown, start=1):
        code = answer_code(task, exemplar.source, form)
        parts.append(f"Implementation {number} (score {conservative(exemplar.known_score()):.2f})\n\n{_fenced(code)}")
    return "\n\n".join(parts)


def _protocol(contrast: bool, form: AnswerForm) -> str:
    questions: tuple[str, ...]
    if contrast:
        questions = (
            "Which of the implementations above are better than the others, and what makes them so?",
            "Which of their ideas can be taken furthest?",
            "What limits the best of them now?",
            "Which techniques has none of them tried?",
            "Where is the most time still to be gained?",
        )
    else:
        questions = (
            "What does the reference spend its time on: arithmetic, memory traffic, or the launching of many small steps?",
            "Which of its work is not needed for the result?",
            "Which techniques apply?",
            "Where is the most time to be gained?",
        )
    asked = "\n".join(f"- {question}" for question in questions)
    whole = (
        "one fenced block with a whole Python module, imports included, that defines `class ModelNew(torch.nn.Module)`."
        if form == "module"
        else "one fenced block with `class ModelNew(Model)`, and with whatever else it needs. The code is appended to the "
        "reference module: its imports and its class `Model` are there already, so do not repeat them."
    )
    return (
        "# How to answer\n\nIn three sections, in this order, each under a heading with exactly two `#`:\n\n"
        f"`## Performance Analysis`: answer briefly:\n{asked}\n\n"
        "`## Algorithm Design`: describe the implementation that you will write, and why it will be faster"
        f"{' than every one above' if contrast else ''}.\n\n`## Code Implementation`: {whole}"
    )


def _requirements(gpu: bool) -> str:
    means = (
        "PyTorch operators, Triton kernels, or CUDA C++ compiled with `torch.utils.cpp_extension.load_inline`"
        if gpu
        else "PyTorch operators, or C++ compiled with `torch.utils.cpp_extension.load_inline`; there is no GPU"
    )
    rules = (
        "`ModelNew` takes the same constructor and `forward` arguments as `Model`, and returns outputs of the same "
        "values, shapes, dtypes, devices and memory layout. What computes anything else scores 0, however fast it is.",
        "It has the same `state_dict` as `Model`: the same keys and shapes. New weights may be loaded at any time, so "
        "nothing may be computed from weights ahead of a call.",
        "Keep the precision: no half precision or TF32 where the reference has none. Keep every size and hyper-parameter.",
        "Do all of the work in each call. Do not keep results, inputs or outputs from one call for another, and return "
        "memory that no later call will overwrite.",
        "Leave inputs, global settings of PyTorch and the train/eval mode as they are. Work on other streams or threads "
        "must be finished when `forward` returns.",
        f"Use {means}. No files, no network, no other packages. It must compile and run as it stands.",
    )
    return "# Requirements and restrictions\n\n" + "\n".join(f"- {rule}" for rule in rules)


def _fenced(code: str) -> str:
    """Code in a fence that is longer than any within it."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}python\n{code.strip()}\n{fence}"


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
    """True when exemplars swap their scores at random: an ablation."""

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
        ConfigError: the sampler has no option that is asked for.
    """
    options: dict[str, float | bool] = {}
    if "temperature" in options_of(exemplars.sampler):
        options["temperature"] = exemplars.temperature
    if exemplars.levels == "one":
        options["one_level"] = True
    sampler = sampler_named(exemplars.sampler, **options)
    shuffled = exemplars.scores == "shuffled"
    return PromptMaker(section, device, sampler, exemplars.count, database, seed, share, baselines, shuffled)
