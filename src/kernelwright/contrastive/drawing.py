"""Draws answers from the model in training, as text or as tokens, and keeps a drawn batch on disk before it is judged."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernelwright.contrastive.prompts import Prompt
from kernelwright.contrastive.samples import Sample, TokenizedSample, read_drawn, write_drawn
from kernelwright.contrastive.settings import SamplingSection
from kernelwright.models.chat import ChatModel, Completion
from kernelwright.records import Task

Asked = Sequence[tuple[Task, Prompt]]
"""Tasks and the prompts to answer for them."""


def draw_once(
    path: Path, model: ChatModel, asked: Asked, count: int, section: SamplingSection, *, step: int, seed: int
) -> list[Sample]:
    """`count` answers to each prompt, kept at `path`; drawn and kept first when there are none yet."""
    if not path.exists():
        write_drawn(path, draw(model, asked, count, section, step=step, seed=seed))
    return read_drawn(path)


def draw(model: ChatModel, asked: Asked, count: int, section: SamplingSection, *, step: int, seed: int) -> list[Sample]:
    """Answer each prompt `count` times."""
    samples: list[Sample] = []
    at_once = max(1, section.batch // count)
    for start in range(0, len(asked), at_once):
        part = asked[start : start + at_once]
        sampling = section.of(seed * 1_000_003 + step * 1_009 + start)
        answers = model.sample([prompt.messages for _, prompt in part], count=count, sampling=sampling)
        samples += [
            Sample(task=task, prompt=prompt, completion=completion, step=step, sample=number)
            for (task, prompt), completions in zip(part, answers, strict=True)
            for number, completion in enumerate(completions)
        ]
    free_memory()
    return samples


def free_memory() -> None:
    """Give back what sampling held, since the judges' workers need the same GPU next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class TokenSampler:
    """Samples groups of answers by the weights as they are at each call; an answer includes the token that ended it."""

    def __init__(self, model: Any, tokenizer: Any, section: SamplingSection, seed: int) -> None:
        # Imported only now: judging teachers' answers needs no transformers.
        from kernelwright.models.local import LocalModel, LocalSettings
        from kernelwright.models.pretrained import stop_ids

        settings = LocalSettings(batch_size=section.batch)
        self.ends = frozenset(stop_ids(model, tokenizer))
        self._local = LocalModel(model, tokenizer, settings=settings)
        self._model = model
        self._tokenizer = tokenizer
        self._section = section
        self._seed = seed

    def sample(self, asked: Asked, count: int, step: int) -> list[Sample]:
        """Answer each prompt `count` times; answers to one prompt follow each other."""
        prompts = [self._local.prompt_ids(prompt.messages) for _, prompt in asked]
        seed = self._seed * 1_000_003 + step
        if self._section.backend == "local":
            answers = self._sampled(prompts, count, seed)
        else:
            answers = self._generated([ids for ids in prompts for _ in range(count)], seed)
        free_memory()
        samples = []
        for number, answer in enumerate(answers):
            task, prompt = asked[number // count]
            completion = Completion(
                text=self._tokenizer.decode(answer, skip_special_tokens=True),
                prompt_tokens=0,
                completion_tokens=len(answer),
                finish_reason="stop" if answer[-1] in self.ends else "length",
            )
            tokens = TokenizedSample(prompts[number // count], answer)
            samples.append(
                Sample(task=task, prompt=prompt, completion=completion, step=step, sample=number % count, tokens=tokens)
            )
        return samples

    def _sampled(self, asked: Sequence[list[int]], count: int, seed: int) -> list[list[int]]:
        # A prompt that leaves no room has no answer; a lone end token stands for it and earns the floor.
        answers = [[int(self._tokenizer.eos_token_id)]] * (len(asked) * count)
        for group, number, found in self._local.sample_ids(asked, count=count, sampling=self._section.of(seed)):
            # A model may end turns with another token than its tokenizer's end of sequence: what was sampled is kept.
            if found is not None and found.tokens:
                answers[group * count + number] = found.tokens if found.end is None else [*found.tokens, found.end]
        return answers

    @torch.no_grad()
    def _generated(self, asked: Sequence[list[int]], seed: int) -> list[list[int]]:
        from transformers import GenerationConfig, set_seed

        set_seed(seed)
        config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True,
            temperature=self._section.temperature,
            top_p=self._section.top_p,
            top_k=0,
            max_new_tokens=self._section.max_tokens,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=sorted(self.ends),
        )
        self._model.eval()
        answers: list[list[int]] = []
        for start in range(0, len(asked), self._section.batch):
            rows = self._tokenizer.pad(
                {"input_ids": list(asked[start : start + self._section.batch])}, padding_side="left", return_tensors="pt"
            ).to(self._model.device)
            width = rows["input_ids"].shape[1]
            whole = self._model.generate(**rows, generation_config=config)
            answers += [self._ended(row) for row in whole[:, width:].tolist()]
        return answers

    def _ended(self, tokens: list[int]) -> list[int]:
        """An answer up to the token that ends it, without padding."""
        end = next((place for place, token in enumerate(tokens) if token in self.ends), len(tokens) - 1)
        return tokens[: end + 1]
