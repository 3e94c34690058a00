"""Samples a language model in this process: loaded from disk or the hub, or a trainer's own as it is at that moment."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from kernelwright.errors import GraphError, PolicyError
from kernelwright.models.chat import ChatModel, Completion, CompletionFailure, Message, Meter, ModelAnswer, Sampling, Usage
from kernelwright.models.pretrained import Weights, load_pretrained, prepare_tokenizer, stop_ids
from kernelwright.models.sampler import Draw, Request, Sampled, SlotSampler, attention_of

log = logging.getLogger(__name__)

CPU_BATCH = 16
"""Answers sampled at once on a CPU. Our choice."""
GPU_BATCH = 512
"""Most answers at once on a GPU: more hardly raises a small model's rate, and delays its first answer. Our choice."""
LOGIT_BYTES = 16
"""Bytes for each slot and word of the vocabulary while a token is drawn: logits, chances, waiting times, quotients."""


class LocalSettings(BaseModel):
    """Sampling settings of a model in this process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int | None = Field(default=None, ge=1)
    """Answers sampled at once; None: 16 on a CPU, what fits on a GPU, at most 512."""
    memory_share: float = Field(default=0.8, gt=0, le=1)
    """Share of the free GPU memory for keys, values and logits. They are freed before a trainer on the same GPU goes on."""
    cuda_graphs: bool = True
    """Record a step once and replay it; several times slower when off. A model that cannot be recorded is sampled without,
    after a warning."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Type to compute in although the weights have another, as in a trainer with float32 weights and `bf16`."""


class LocalModel(ChatModel):
    """A `ChatModel` on this machine. Answers depend on the seed, the prompts and the batch size; on a CPU on nothing else.

    Somebody else may hold the model and be training it: weights are read as they are at each call, with a peft LoRA in
    effect; mode and attention are put back when a call ends. Give it unwrapped (no DDP, FSDP or compile). One thread at a
    time samples: a second caller waits.

    Raises:
        PolicyError: the model is of a kind that cannot be sampled here.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str = "local:live", settings: LocalSettings | None = None
    ) -> None:
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        _check_kind(self.model)
        self.tokenizer = prepare_tokenizer(tokenizer)
        self.name = name
        self.settings = settings = settings or LocalSettings()
        self.stop_ids = stop_ids(self.model, self.tokenizer)
        """Tokens that end an answer."""
        self._largest_batch = settings.batch_size
        self._graphs = settings.cuda_graphs
        self._meter = Meter()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, weights: Weights, settings: LocalSettings | None = None) -> LocalModel:
        """Load a model; raises PolicyError where it cannot be loaded or sampled here."""
        model, tokenizer = load_pretrained(weights)
        return cls(model, tokenizer, name=f"local:{weights.label}", settings=settings)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._meter.total

    def answers(self, prompts: Sequence[Sequence[Message]], *, count: int, sampling: Sampling) -> Iterator[ModelAnswer]:
        """Implements `ChatModel.answers`. Take all of them before the model is used for anything else."""
        spelled = [self.prompt_ids(prompt) for prompt in prompts]
        for prompt, number, found in self.sample_ids(spelled, count=count, sampling=sampling):
            completion = self._completion(spelled[prompt], found)
            self._meter.add(
                Usage(
                    requests=1,
                    failures=completion.failure is not None,
                    prompt_tokens=completion.prompt_tokens if number == 0 else 0,
                    completion_tokens=completion.completion_tokens,
                )
            )
            yield ModelAnswer(prompt=prompt, number=number, completion=completion)

    def prompt_ids(self, prompt: Sequence[Message]) -> list[int]:
        """A conversation as tokens, up to where the answer begins."""
        turns = [asdict(message) for message in prompt]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def sample_ids(
        self, prompts: Sequence[Sequence[int]], *, count: int, sampling: Sampling
    ) -> Iterator[tuple[int, int, Sampled | None]]:
        """Sample `count` answers after each prompt, all as tokens; yields each answer as it ends.

        Yields index of the prompt, number of the answer, and the answer: None when the prompt leaves no room in the window.
        """
        window = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        requests = []
        for place, ids in enumerate(prompts):
            room = sampling.max_tokens if window is None else min(sampling.max_tokens, window - len(ids))
            for number in range(count):
                if room > 0 and ids:
                    requests.append(Request(place * count + number, tuple(ids), room))
                else:
                    yield place, number, None
        # Prompts of like length side by side are computed together with little padding.
        requests.sort(key=lambda request: -len(request.prompt))
        for found in self._sampled(requests, sampling):
            yield *divmod(found.index, count), found

    def _sampled(self, requests: list[Request], sampling: Sampling) -> Iterator[Sampled]:
        """Sample requests, half as many at once each time the memory does not suffice."""
        pending = {request.index: request for request in requests}
        draw = Draw(sampling.temperature, sampling.top_p, self.stop_ids, sampling.seed)
        with self._lock, _evaluating(self.model), attention_of(self.model):
            while pending:
                batch = self._batch(list(pending.values()))
                out_of_memory = False
                sampler = SlotSampler(
                    self.model,
                    slots=batch,
                    columns=max(len(request.prompt) + request.max_tokens for request in pending.values()),
                    draw=draw,
                    autocast=None if self.settings.autocast == "none" else getattr(torch, self.settings.autocast),
                    graphs=self._graphs,
                )
                try:
                    for found in sampler.run(list(pending.values())):
                        del pending[found.index]
                        yield found
                except torch.OutOfMemoryError:
                    out_of_memory = True
                except GraphError as error:
                    if not self._graphs:
                        raise
                    self._graphs = False
                    log.warning("%s: sampling without CUDA graphs, several times slower: %s", self.name, error)
                # Here and not in the handler: there the error still holds the tensors of every frame it went through.
                del sampler
                if out_of_memory:
                    self._halve(batch, len(pending))

    def _halve(self, batch: int, pending: int) -> None:
        _free_memory()
        if batch == 1:
            raise PolicyError(
                f"Wanted to sample {self.name}; the memory does not suffice for one answer. Use shorter prompts, a smaller "
                "`max_tokens` or a smaller model."
            )
        self._largest_batch = batch // 2
        log.warning(
            "%s: out of memory with %d answers at once; going on with %d, %d answers still to sample",
            self.name,
            batch,
            self._largest_batch,
            pending,
        )

    def _batch(self, requests: list[Request]) -> int:
        """Number of answers to sample at once."""
        if self._largest_batch is not None:
            fitting = self._largest_batch
        elif self.model.device.type == "cuda":
            fitting = self._fitting(max(len(request.prompt) + request.max_tokens for request in requests))
        else:
            fitting = CPU_BATCH
        return min(fitting, len(requests))

    def _fitting(self, columns: int) -> int:
        """Number of sequences of so many tokens that the free memory holds."""
        _free_memory()
        config = self.model.config.get_text_config()
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        element_bytes: int = 2 if self.settings.autocast != "none" else self.model.dtype.itemsize
        token_bytes: int = 2 * config.num_hidden_layers * heads * head_size * element_bytes
        free_bytes, _ = torch.cuda.mem_get_info(self.model.device)
        slot_bytes: int = columns * token_bytes + config.vocab_size * LOGIT_BYTES
        return max(1, min(int(free_bytes * self.settings.memory_share) // slot_bytes, GPU_BATCH))

    def _completion(self, prompt: list[int], found: Sampled | None) -> Completion:
        if found is None:
            return Completion(
                text="",
                prompt_tokens=len(prompt),
                completion_tokens=0,
                finish_reason="error",
                failure=CompletionFailure.PROMPT_TOO_LONG,
            )
        text = self.tokenizer.decode(found.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Completion(
            text=text,
            prompt_tokens=len(prompt),
            completion_tokens=found.steps,
            finish_reason="length" if found.end is None else "stop",
            failure=None if text.strip() else CompletionFailure.EMPTY_ANSWER,
        )


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Keep evaluation mode in here; restore each part's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_kind(model: Any) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if kinds == {"full_attention"} and not sliding and getattr(model, "_supports_attention_backend", False):
        return
    raise PolicyError(
        f"Wanted a decoder with full attention in every layer; {type(model).__name__} has another kind. Serve it with vLLM, "
        "llama.cpp or `transformers serve`, and use the policy `api` with that address."
    )
