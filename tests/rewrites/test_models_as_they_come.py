"""Models of libraries, as a user gets them: traced whole, and right in float32 and in bfloat16.

Configurations are tiny; all else is as the library has it, such as dropout, caches, masks and outputs as dataclasses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kernelwright.errors import ModelError
from kernelwright.rewrites import emit
from kernelwright.rewrites.passes import RulesPass
from kernelwright.rewrites.recipes import Recipe, TaskContext
from kernelwright.tasks import map_tensors
from kernelwright.tasks.in_memory import Inputs, candidate_of, check_model, folder_on_path, task_of, tried
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
SHORT = {"input_ids": IDS["input_ids"][:, 11:14]}
TO_TRANSLATE = IDS | {"decoder_input_ids": IDS["input_ids"]}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
MIXED = DECODER | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SEGFORMER = {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1] * 4}
SPOKEN = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
} | {key: TRANSFORMER[key] for key in list(TRANSFORMER)[1:]}
HEARD = {
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_target_positions"), 64),
    "max_source_positions": 32,
}
HEARD |= {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

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
        T5,
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
    "SegformerModel": ("SegformerConfig", SEGFORMER, LARGER),
    # Outputs that hooks of the library collect.
    "SegformerForSemanticSegmentation": ("SegformerConfig", SEGFORMER | {"decoder_hidden_size": 16}, LARGER),
    "T5ForConditionalGeneration": ("T5Config", T5 | {"decoder_start_token_id": 0}, TO_TRANSLATE),
    "WhisperModel": (
        "WhisperConfig",
        HEARD,
        {
            "input_features": torch.linspace(-1, 1, 2 * 80 * 64).sin().reshape(2, 80, 64),
            "decoder_input_ids": IDS["input_ids"],
        },
    ),
    "Wav2Vec2Model": (
        "Wav2Vec2Config",
        SPOKEN,
        {"input_values": torch.linspace(-300, 300, 3200).sin().reshape(2, 1600)},
    ),
    "DebertaV2Model": ("DebertaV2Config", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, IDS),
    "XLNetModel": ("XLNetConfig", {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, IDS),
    "ModernBertModel": (
        "ModernBertConfig",
        ENCODER | dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 1),
        IDS,
    ),
    "Gemma2ForCausalLM": ("Gemma2Config", DECODER | {"head_dim": 8, "sliding_window": 8}, IDS | {"use_cache": False}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", MIXED, IDS),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", ENCODER | {"attn_implementation": "eager"}, IDS | {"output_attentions": True}),
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8}
        | {"vocab_size": 99, "n_groups": 1, "chunk_size": 8},
        IDS,
    ),
    "RwkvForCausalLM": ("RwkvConfig", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}, SHORT),
    "LongformerModel": ("LongformerConfig", ENCODER | {"attention_window": 4}, MASKED),
    "EfficientNetModel": (
        "EfficientNetConfig",
        {"width_coefficient": 0.25, "depth_coefficient": 0.3, "image_size": 64, "hidden_dim": 320},
        LARGER,
    ),
    "MobileNetV2Model": ("MobileNetV2Config", {"depth_multiplier": 0.25, "image_size": 64}, LARGER),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": ENCODER | {"eos_token_id": 2}, "vision_config": PATCHES, "projection_dim": 16},
        IDS | IMAGE,
    ),
}
"""Classes of transformers, their configurations, and the inputs of one call."""
OTHERS: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "torchvision resnet18": ("torchvision.models", lambda library: library.resnet18()),
    "torchvision mobilenet_v3_small": ("torchvision.models", lambda library: library.mobilenet_v3_small()),
    "timm vit_tiny_patch16_224": ("timm", lambda library: library.create_model("vit_tiny_patch16_224", img_size=64)),
    "timm convnext_atto": ("timm", lambda library: library.create_model("convnext_atto")),
}
IN_PARTS = {
    "LongformerModel": r"in parts, model.encoder.layer.0 and 1 like it, .*in model.encoder.layer.0.attention.self, "
    r"a LongformerSelfAttention, GuardOnDataDependentSymNode: .*; use torch.where"
}
"""Models without an operator graph of the whole, and what is said of it."""
REFUSED = {"RwkvForCausalLM": r"writes into `rwkv\..*weight`. If it does so in the first call only, call it once before"}
"""Models that do not do as they come, and what is said."""


def model_and_inputs(name: str) -> tuple[nn.Module, dict[str, Any]]:
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


def assert_right(model: nn.Module, inputs: Inputs, tolerance: float, folder: Path) -> str:
    """See that code as traced and by all rules computes what a model does; returns the policy's remark."""
    (call,) = tried(check_model(model), [inputs], alone=True)
    task = task_of(model, call, folder)
    with folder_on_path(folder):
        context = TaskContext.open(task, "cpu")
    assert context.trace is not None, context.obstacle
    texts = [emit.module(task.source, context.trace, context.copies(), ("as traced",))]
    if (built := context.build(Recipe((RulesPass.always(),)))) is not None:
        texts.append(built.source)
    wanted = tensors_of(model(*inputs.args, **inputs.kwargs))
    for text in texts:
        candidate = candidate_of(text, model)
        outputs = candidate(*call.examples[0].tensors)
        found = tensors_of(outputs if call.whole else call.rebuild(iter(outputs)))
        assert candidate.last_path == "optimized"
        assert max(map(error, wanted, found)) < tolerance
    return context.note()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("name", exhaustive_but([*MODELS, *OTHERS], "LlamaForCausalLM"))
@torch.no_grad()
def test_a_model_is_traced_and_right(name: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = model_and_inputs(name)
    model.eval().to(dtype)
    given = Inputs(**map_tensors(inputs, lambda one: one.to(dtype) if one.is_floating_point() else one))
    if name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[name]):
            tried(model, [given])
        model(**given.kwargs)
    assert re.search(IN_PARTS.get(name, "^$"), assert_right(model, given, tolerance, tmp_path))


def test_the_page_names_the_models() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "your-model.md").read_text(encoding="utf-8")
    page = text.partition("## Models of libraries")[2].partition("\n## ")[0]
    for rows, names in (
        ("whole", MODELS.keys() - IN_PARTS.keys() - REFUSED.keys()),
        ("in parts", IN_PARTS),
        ("refused", REFUSED),
    ):
        (found,) = re.findall(rf"^- {rows}: (.*?)$", page.replace("\n  ", " "), re.MULTILINE | re.IGNORECASE)
        assert sorted(re.findall(r"`(\w+)`", found)) == sorted(names)


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)


class Net(nn.Module):
    """A model whose `forward` is given."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.first, self.last = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.call = forward
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x)


def kept(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.mean.copy_(x.mean(0))
    return net.first(x)


def accumulated(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.mean.mul_(0.9).add_(x[0])
    return net.first(x) + net.mean


def written(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.first[0].weight.mul_(0.5)
    return net.first(x)


def aliases(net: Any, x: torch.Tensor) -> Any:
    y = net.first(x)
    return {"y": y, "flat": y.view(-1), "rows": y[:2], "x": x, "weight": net.last[0].weight, "none": None, "n": 3}


def in_autocast(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.first(x)


ZEROS = {"mean": torch.zeros(8)}
SPARSE = {"rows": torch.eye(16).to_sparse()}
PADDED = Inputs(torch.randn(2, 8, 8), src_key_padding_mask=torch.arange(16).reshape(2, 8) > 13)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)


BRANCH = r"in parts, model.(first|last)\b.* data-dependent expression .*; use torch.where, or decide outside"
CASES: dict[str, tuple[nn.Module, Inputs | None, str]] = {
    "an autograd function": (Net(lambda net, x: Sigmoid.apply(net.first(x))), None, "^$"),
    "a buffer that is written": (Net(kept, **ZEROS), None, "^$"),
    "outputs that alias": (Net(aliases), None, "^$"),
    "autocast": (Net(in_autocast), None, "^$"),
    "int8 weights": (Net(lambda net, x: net.first(x) @ net.w.float(), w=torch.eye(8).char()), None, "^$"),
    "a branch": (Net(lambda net, x: net.first(x) if x.sum() > 0 else net.last(x)), None, BRANCH),
    "a selection": (
        Net(lambda net, x: net.last(x[x[:, 0] > 0]).sum(0) + net.first(x)),
        None,
        r"in parts, model.first; .* shape depends on values; keep all rows and use a mask",
    ),
    "a sparse buffer": (
        Net(lambda net, x: torch.sparse.mm(net.rows, net.first(x)), **SPARSE),
        None,
        r"in parts, model.first; .*self.model.rows has a tensor of layout torch.sparse_coo; keep it dense",
    ),
}
"""Models, their inputs, and the policy's remark."""
REFUSED_CASES: dict[str, tuple[nn.Module, Inputs | None, str]] = {
    "a state": (Net(accumulated, **ZEROS), None, "keeps a state between calls in `mean`. Have forward take the state"),
    "a weight that is written": (Net(written), None, "writes into `first.0.weight`"),
    "a scripted part": (nn.Sequential(torch.jit.script(nn.ReLU())), None, "`model.0.* is a ScriptModule"),
    "padding by its values": (encoder(), PADDED, "construct TransformerEncoder with enable_nested_tensor=False"),
}
"""Models that do not do, their inputs, and what is said."""


@pytest.mark.parametrize("case", exhaustive_but(CASES, "a branch", "a buffer that is written", "a sparse buffer"))
@torch.no_grad()
def test_an_unusual_model_is_right_or_named_with_what_to_do(case: str, tmp_path: Path) -> None:
    model, inputs, said = CASES[case]
    given = inputs or Inputs(torch.linspace(-1, 1, 128).sin().reshape(16, 8))
    assert re.search(said, assert_right(model.eval(), given, 1e-5, tmp_path))


@pytest.mark.parametrize("case", exhaustive_but(REFUSED_CASES, "a weight that is written", "padding by its values"))
@torch.no_grad()
def test_a_model_that_does_not_do_is_told_what_to_do(case: str, tmp_path: Path) -> None:
    model, inputs, said = REFUSED_CASES[case]
    given = inputs or Inputs(torch.linspace(-1, 1, 128).sin().reshape(16, 8))
    with pytest.raises((ModelError, AssertionError), match=said):
        assert_right(model.eval(), given, 1e-5, tmp_path)
