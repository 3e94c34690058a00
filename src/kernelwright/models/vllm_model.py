"""Runs a model in this process under vLLM: not run by us. The tests run a stand-in with its interface (0.24 to 0.26)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kernelwright.errors import PolicyError
from kernelwright.models.chat import ChatModel, Completion, CompletionFailure, Message, Meter, Sampling, Usage


class VllmSettings(BaseModel):
    """A model and vLLM's own arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """A folder or a name on the hub."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `vllm.LLM`, such as `gpu_memory_utilization`, `max_model_len`, `tensor_parallel_size`."""


class VllmModel(ChatModel):
    """A `ChatModel` in vLLM's offline engine; raises PolicyError where vLLM cannot load the model."""

    def __init__(self, settings: VllmSettings, vllm: Any = None) -> None:
        from kernelwright.models.pretrained import missing_path

        if missing := missing_path(settings.path):
            raise PolicyError(f"Wanted a model's folder; {missing}")
        self._vllm = vllm or importlib.import_module("vllm")
        self.name = f"vllm:{settings.path}"
        self._meter = Meter()
        try:
            self._engine = self._vllm.LLM(model=settings.path, **settings.engine)
        except (OSError, ValueError, RuntimeError, TypeError) as error:
            raise PolicyError(
                f"Wanted vLLM to load {settings.path}; {error}. See that the model is there and fits the GPU, and that "
                "`engine` holds arguments of vllm.LLM."
            ) from error

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._meter.total

    def sample(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> list[list[Completion]]:
        """Implements `ChatModel.sample`; vLLM finds the batches."""
        parameters = self._vllm.SamplingParams(n=count, **asdict(sampling))
        conversations = [[asdict(turn) for turn in prompt] for prompt in prompts]
        results = self._engine.chat(conversations, parameters, use_tqdm=False)
        return [self._completions(result) for result in results]

    def _completions(self, result: Any) -> list[Completion]:
        prompt_tokens = len(result.prompt_token_ids)
        found = [
            Completion(
                text=output.text,
                prompt_tokens=prompt_tokens,
                completion_tokens=len(output.token_ids),
                finish_reason=output.finish_reason or "error",
                failure=None if output.text.strip() else CompletionFailure.EMPTY_ANSWER,
            )
            for output in result.outputs
        ]
        self._meter.add(
            Usage(
                requests=len(found),
                failures=sum(completion.failure is not None for completion in found),
                prompt_tokens=prompt_tokens,
                completion_tokens=sum(completion.completion_tokens for completion in found),
            )
        )
        return found
