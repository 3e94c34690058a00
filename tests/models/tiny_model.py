"""A language model of a few thousand random weights and a tokenizer of single bytes, made on the spot."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def vocabulary() -> list[str]:
    """256 bytes as byte-level BPE spells them, then the special tokens."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = vocabulary()
    inner = Tokenizer(BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SPECIAL[0], chat_template=template)


def tiny_model(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """Four heads of size 8 in two groups, two layers. Its greedy answers neither stop nor settle into one token."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.6,
        "tie_word_embeddings": False,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**options | changes)).eval()
    model.generation_config.eos_token_id = None
    return model
