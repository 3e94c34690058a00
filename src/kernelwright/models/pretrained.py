"""Loads a causal language model and its tokenizer: a folder, a name on the Hugging Face hub, a GGUF file, or a tiny one.

A mistyped path asks no hub. The tiny model has random weights and is made on the spot, to try commands and stages without a
download: until it is trained its answers hold no candidate.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kernelwright.errors import PolicyError
from kernelwright.files import missing_path

log = logging.getLogger(__name__)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n\\n' }}{% endfor %}"
    "{{ 'assistant:\\n' if add_generation_prompt else '' }}"
)
"""For tokenizers that have none, such as those of base models. Our choice; training and sampling must share it."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<｜end▁of▁sentence｜>")
"""Ends of an assistant's turn in known templates; not every file names its own as end-of-sequence token."""


class Weights(BaseModel):
    """A model and its form in memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """A folder, a GGUF file, a name on the hub, or `tiny-random`."""
    gguf_file: str = ""
    """A GGUF file within `path`, when that is a folder or a name on the hub."""
    adapter: str = ""
    """A LoRA adapter, folder or hub name, merged into the weights."""
    device: str = "auto"
    """`auto`: the first GPU, else the CPU."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on a CPU."""

    @property
    def label(self) -> str:
        """Name in records: the last part of the path."""
        name = self.gguf_file or (Path(self.path).name if Path(self.path).exists() else self.path)
        return f"{name}+{Path(self.adapter).name}" if self.adapter else name


def require_pretrained(weights: Weights) -> None:
    """Check that there is a model to load, by its configuration alone; a GGUF file need only exist.

    Raises:
        PolicyError: it is not there, or not a model.
    """
    if weights.path == TINY:
        return
    where, options = _location(weights)
    if options:
        return
    try:
        AutoConfig.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise _no_model(weights, error) from error


def load_pretrained(weights: Weights) -> tuple[Any, Any]:
    """Model and tokenizer. A GGUF's weights are unpacked, so that it can be trained and sampled like any model.

    Raises:
        PolicyError: the model is not there or of another kind, or a package that it needs is missing.
    """
    where, options = _location(weights)
    device = weights.device if weights.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = weights.dtype if weights.dtype != "auto" else ("bfloat16" if device.startswith("cuda") else "float32")
    unpacked = {"quantization_config": GgufConfig(dequantize=True)} if options else {}
    try:
        model: Any
        tokenizer: Any
        if weights.path == TINY:
            model, tokenizer = tiny_model(dtype=getattr(torch, dtype)), tiny_tokenizer()
        else:
            tokenizer = AutoTokenizer.from_pretrained(where, **options)
            model = AutoModelForCausalLM.from_pretrained(
                where, dtype=getattr(torch, dtype), attn_implementation="sdpa", **options, **unpacked
            )
        if weights.adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, weights.adapter).merge_and_unload()
        model = model.to(device)
    except ImportError as error:
        raise PolicyError(
            f"Wanted to load {weights.path}; {_first_line(error)} Install it with pip install 'kernelwright[local]'."
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _no_model(weights, error) from error
    if options:
        _forget_packing(model)
    return model.eval(), prepare_tokenizer(tokenizer)


def prepare_tokenizer(tokenizer: Any) -> Any:
    """Give a tokenizer without a chat template `CHAT_TEMPLATE`, so that training and sampling write prompts alike."""
    if not tokenizer.chat_template:
        log.info("the tokenizer has no chat template; a plain one is used")
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    found = set(configured if isinstance(configured, list | tuple) else [configured])
    found.add(tokenizer.eos_token_id)
    known = tokenizer.get_vocab()
    found |= {known[end] for end in TURN_ENDS if end in known and end in tokenizer.chat_template}
    return tuple(sorted(found - {None}))


def _location(weights: Weights) -> tuple[str, dict[str, str]]:
    """The arguments of `from_pretrained`; raises PolicyError for a path where there is nothing."""
    for wanted, name in (("a model's folder or GGUF file", weights.path), ("an adapter's folder", weights.adapter)):
        if missing := missing_path(name):
            raise PolicyError(f"Wanted {wanted}; {missing}")
    path = Path(weights.path)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return weights.path, {"gguf_file": weights.gguf_file} if weights.gguf_file else {}


def _forget_packing(model: Any) -> None:
    """Remove the marks of quantisation, which training and saving would trust."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def _no_model(weights: Weights, error: Exception) -> PolicyError:
    return PolicyError(
        f"Wanted a causal language model from {weights.path}; {_first_line(error)} Give a folder with config.json, "
        'weights and tokenizer, a GGUF file, or a name on the hub that this machine can reach; docs/models.md, "Getting a '
        'model", says where models come from.'
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no reason given'}".rstrip(".") + "."


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
    """256 bytes as byte-level BPE writes them, then the special tokens."""
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
