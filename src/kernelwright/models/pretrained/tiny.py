"""Makes a tiny language model with random weights on the spot, to try commands and stages without a download.

It knows nothing: until it is trained its answers hold no candidate.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TINY = "tiny-random"
"""The name that stands for this model where others have a path."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'][:400] if message['role'] == 'user' else message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows only the beginning of a question, so that answering and learning take little time."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_vocabulary() -> list[str]:
    """256 bytes as byte-level BPE spells them, then the special tokens."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]


def tiny_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A tokenizer whose tokens are single bytes."""
    inner = Tokenizer(BPE(vocab={word: index for index, word in enumerate(tiny_vocabulary())}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=inner, eos_token=SPECIAL[0], chat_template=template)


def tiny_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Qwen2 of two layers with 330,000 weights, the same every time; `changes` are fields of its configuration."""
    words = tiny_vocabulary()
    options = {
        "vocab_size": len(words),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "eos_token_id": words.index(SPECIAL[2]),
        "pad_token_id": words.index(SPECIAL[0]),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(Qwen2Config(**options | changes))
    return model.to(dtype).eval()
