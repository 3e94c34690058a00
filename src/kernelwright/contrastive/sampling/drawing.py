"""Draws a batch of answers once: they are on disk before they are judged, so that a kill costs no second draw."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import TypeAdapter

from kernelwright.contrastive.prompts import Prompt
from kernelwright.contrastive.sampling.scoring import Attempt
from kernelwright.contrastive.stages.config import SamplingSection
from kernelwright.files import replace_file
from kernelwright.models.chat import ChatModel
from kernelwright.records import Task


def draw(
    model: ChatModel, prompts: Sequence[tuple[Task, Prompt]], count: int, section: SamplingSection, *, step: int, seed: int
) -> list[Attempt]:
    """Answer each prompt `count` times."""
    attempts: list[Attempt] = []
    at_once = max(1, section.batch // count)
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        sampling = section.of(seed * 1_000_003 + step * 1_009 + start)
        answers = model.sample([prompt.messages for _, prompt in part], count=count, sampling=sampling)
        attempts += [
            Attempt(task=task, prompt=prompt, completion=completion, step=step, sample=number)
            for (task, prompt), completions in zip(part, answers, strict=True)
            for number, completion in enumerate(completions)
        ]
    free_memory()
    return attempts


def free_memory() -> None:
    """Give back what sampling held, since the judges' workers need the same GPU next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def drawn(path: Path, sample: Callable[[], list[Attempt]]) -> list[Attempt]:
    """The answers kept at `path`; drawn and kept first when there are none yet."""
    known: TypeAdapter[list[Attempt]] = TypeAdapter(list[Attempt])
    if path.exists():
        return known.validate_json(path.read_bytes())
    attempts = sample()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, known.dump_json(attempts))
    return attempts
