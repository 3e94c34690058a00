"""Models of libraries, as a user gets them: traced whole, and right in float32 and in bfloat16.

Configurations are tiny; all else is as the library has it, such as dropout, caches, masks and outputs as dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kernelwright.rewrites import emit
from kernelwright.rewrites.passes import RulesPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from kernelwright.tasks.in_memory import Inputs, candidate_of, folder_on_path, task_of, tried
from kernelwright.tasks.in_memory.inputs import leaves_of
from tests.quick import exhaustive_but

TRANSFORMER: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
ENCODER = TRANSFORMER | {"max_position_embeddings": 64}
DECODER = ENCODER | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
PATCHES = {"image_size": 32, "patch_size": 8} | {key: TRANSFORMER[key] for key in list(TRANSFORMER)[1:]}
GPT = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
IDS = {"input_ids": torch.arange(32).reshape(2, 16) * 7 % 90 + 3}
MASKED = IDS | {"attention_mask": (torch.arange(32).reshape(2, 16) < 28).long()}
IMAGE = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).sin().reshape(2, 3, 32, 32)}
LARGER = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64 * 64).sin().reshape(2, 3, 64, 64)}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "BertModel": ("BertConfig", ENCODER, MASKED),
    "BertForMaskedLM": ("BertConfig", ENCODER | {"attn_implementation": "eager"}, IDS),
    "DistilBertModel": (
        "DistilBertConfig",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        IDS,
    ),
    "RobertaModel": ("RobertaConfig", ENCODER, IDS),
    "ElectraModel": ("ElectraConfig", ENCODER | {"embedding_size": 16}, IDS),
    "AlbertModel": ("AlbertConfig", ENCODER | {"embedding_size": 16}, IDS),
    "GPT2LMHeadModel": ("GPT2Config", GPT | {"n_embd": 32, "n_layer": 2, "n_head": 4}, IDS),
    "LlamaForCausalLM": ("LlamaConfig", DECODER, IDS),
    "MistralForCausalLM": ("MistralConfig", DECODER | {"sliding_window": 8}, MASKED),
    "MixtralForCausalLM": ("MixtralConfig", DECODER | {"num_local_experts": 4}, IDS),
    "Qwen2ForCausalLM": ("Qwen2Config", DECODER, IDS),
    "PhiForCausalLM": ("PhiConfig", ENCODER | {"bos_token_id": 1, "eos_token_id": 2}, IDS),
    "OPTForCausalLM": ("OPTConfig", ENCODER | {"ffn_dim": 64, "word_embed_proj_dim": 32}, IDS),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}, IDS),
    "T5EncoderModel": (
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        IDS,
    ),
    "MambaForCausalLM": ("MambaConfig", {"vocab_size": 99, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}, IDS),
    "ViTForImageClassification": ("ViTConfig", PATCHES, IMAGE),
    "DeiTModel": ("DeiTConfig", PATCHES, IMAGE),
    "SwinModel": (
        "SwinConfig",
        {"image_size": 32, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
        IMAGE,
    ),
    "ConvNextModel": ("ConvNextConfig", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}, LARGER),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        LARGER,
    ),
    "CLIPTextModel": ("CLIPTextConfig", ENCODER | {"bos_token_id": 1, "eos_token_id": 2}, IDS),
    "CLIPVisionModel": ("CLIPVisionConfig", PATCHES, IMAGE),
    "SegformerModel": (
        "SegformerConfig",
        {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1] * 4},
        LARGER,
    ),
}
"""Classes of transformers, their configurations, and the inputs of one call."""
OTHERS: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "torchvision resnet18": ("torchvision.models", lambda library: library.resnet18()),
    "torchvision mobilenet_v3_small": ("torchvision.models", lambda library: library.mobilenet_v3_small()),
    "timm vit_tiny_patch16_224": ("timm", lambda library: library.create_model("vit_tiny_patch16_224", img_size=64)),
    "timm convnext_atto": ("timm", lambda library: library.create_model("convnext_atto")),
}


def model_and_inputs(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if name in OTHERS:
        library, make = OTHERS[name]
        return make(pytest.importorskip(library)), {"x": LARGER["pixel_values"]}
    transformers = pytest.importorskip("transformers")
    config, settings, inputs = MODELS[name]
    return getattr(transformers, name)(getattr(transformers, config)(**settings)), inputs


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]


def error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    first, second = wanted.double().nan_to_num(0.0, 1.0, -1.0), found.double().nan_to_num(0.0, 1.0, -1.0)
    return float((first - second).norm() / (first.norm() + 1e-12))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("name", exhaustive_but([*MODELS, *OTHERS], "LlamaForCausalLM"))
@torch.no_grad()
def test_a_model_is_traced_and_right(name: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = model_and_inputs(name)
    model.eval().to(dtype)
    inputs = {key: given.to(dtype) if given.is_floating_point() else given for key, given in inputs.items()}
    (call,) = tried(model, [Inputs(**inputs)])
    task = task_of(model, call, tmp_path)
    with folder_on_path(tmp_path):
        context = TaskContext.open(task, "cpu")
    assert context.trace is not None, context.obstacle
    texts = [emit.module(task.source, context.trace, context.copies(), ("as traced",))]
    if (built := context.build(Recipe((RulesPass.always(),)))) is not None:
        texts.append(built.source)
    wanted = tensors_of(model(**inputs))
    for text in texts:
        candidate = candidate_of(text, model)
        outputs = candidate(*call.examples[0].tensors)
        found = tensors_of(outputs if call.whole else call.rebuild(iter(outputs)))
        assert candidate.last_path == "optimized"
        assert max(map(error, wanted, found)) < tolerance
