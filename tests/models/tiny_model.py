"""The package's tiny model, smaller still, and with answers that neither stop nor settle into one token."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from kernelwright.models import pretrained

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    return pretrained.tiny_tokenizer(template)


def tiny_model(**changes: Any) -> Qwen2ForCausalLM:
    options = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "initializer_range": 0.6,
        "tie_word_embeddings": False,
    }
    model = pretrained.tiny_model(**options | changes)
    model.generation_config.eos_token_id = None
    return model
