"""Makes the suite `modules`: modules of torchvision and transformers at two sizes each, as the user has them installed.

`modules-bf16` has the same with weights and inputs of bfloat16, in which networks are mostly run.

None was written for this program or for a benchmark. A task constructs a library's own module, in eval mode, with weights as
its constructor draws them and without dropout: the judge compares outputs in training mode too. Nothing is downloaded, and
nothing is executed here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernelwright.errors import TaskError
from kernelwright.records import Task
from kernelwright.tasks.entries import SuiteEntry

LEVEL = 3
"""Level of every task: parts of networks."""

_IMAGES, _LAST, _TOKENS = "{batch}, {width}, {side}, {side}", "{batch}, {side}, {side}, {width}", "{batch}, {side}, {width}"
"""Shapes of inputs. The side of a sequence is its number of tokens."""
_CALL = "self.block(x)"
_Size = tuple[int, int, int]
"""Batch, width and side."""

_TEXT = '''\
"""{names} of {library}, in eval mode."""

import torch
from {origin} import {names}
{further}

class Model(torch.nn.Module):
    def __init__(self, width, side):
        super().__init__()
        {build}
        self{cast}.eval()

    def forward(self, x):
        return {call}


def get_inputs():
    return [torch.randn({shape}){cast}]


def get_init_inputs():
    return [{width}, {side}]
'''
_ROTARY = """rotary = {0}RotaryEmbedding(config)
        cos, sin = rotary(torch.empty(0), torch.arange(side)[None])
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)"""


@dataclass(frozen=True, slots=True)
class _Module:
    """A library's module, and how a task constructs and calls it."""

    name: str
    origin: str
    """The Python module that it comes from."""
    names: str
    """Names that are imported from there: the class first."""
    small: _Size
    """Size of one task."""
    large: _Size
    """Size of the other."""
    arguments: str
    """Arguments of the class's constructor."""
    shape: str = _IMAGES
    call: str = _CALL
    config: str = ""
    """The configuration of a module of transformers, made first."""
    further: str = ""
    """Another import."""

    def source(self, size: _Size, cast: str = "") -> str:
        """A task in KernelBench's format, its module and its input made of another type by `cast`."""
        batch, width, side = size
        build = [f"self.block = {self.names.partition(',')[0]}({self.arguments})"]
        if self.config:
            build.insert(0, f"config = {self.config}")
        if "RotaryEmbedding" in self.names:
            build.append(_ROTARY.format(self.names.rpartition(" ")[2].removesuffix("RotaryEmbedding")))
        return _TEXT.format(
            names=self.names,
            library=self.library,
            origin=self.origin,
            further=f"{self.further}\n" if self.further else "",
            build="\n        ".join(build),
            call=self.call,
            shape=self.shape.format(batch=batch, width=width, side=side),
            width=width,
            side=side,
            cast=cast,
        )

    @property
    def library(self) -> str:
        """The package to install."""
        return self.origin.partition(".")[0]


def _vision(name: str, file: str, *given: Any) -> _Module:
    return _Module(name, f"torchvision.{file}", *given)


def _text(
    name: str, family: str, names: str, small: _Size, large: _Size, config: str, arguments: str = "config", call: str = _CALL
) -> _Module:
    kind, _, settings = config.partition(":")
    made = f'{kind}({settings}, attn_implementation="sdpa")'
    origin, further = f"transformers.models.{family}.modeling_{family}", f"from transformers import {kind}"
    return _Module(name, origin, names, small, large, arguments, _TOKENS, call, made, further)


_GROUPED = "hidden_size=width, num_attention_heads=width // 128, num_key_value_heads=width // 512"
_ROTATED = "self.block(x, position_embeddings=(self.cos, self.sin), attention_mask=None)"

# fmt: off
MODULES = (
    _vision("resnet-basic", "models.resnet", "BasicBlock", (8, 64, 56), (64, 128, 28), "width, width"),
    _vision("resnet-bottleneck", "models.resnet", "Bottleneck", (8, 256, 56), (64, 1024, 14), "width, width // 4"),
    _vision("mobilenet-residual", "models.mobilenetv2", "InvertedResidual", (8, 24, 56), (128, 96, 14),
            "width, width, 1, 6"),
    _vision("efficientnet-mbconv", "models.efficientnet", "MBConv, MBConvConfig", (8, 40, 28), (128, 112, 14),
            "MBConvConfig(6, 5, 1, width, width, 1), 0.0, torch.nn.BatchNorm2d"),
    _vision("convnext-block", "models.convnext", "CNBlock", (8, 96, 56), (64, 384, 14), "width, 1e-6, 0.0"),
    _vision("squeeze-excitation", "ops.misc", "SqueezeExcitation", (8, 96, 56), (128, 480, 14), "width, width // 4"),
    _vision("vit-block", "models.vision_transformer", "EncoderBlock", (1, 768, 197), (32, 768, 197),
            "width // 64, width, 4 * width, 0.0, 0.0", _TOKENS),
    _vision("swin-block", "models.swin_transformer", "SwinTransformerBlock", (8, 96, 56), (32, 384, 14),
            "width, width // 32, [7, 7], [3, 3]", _LAST),
    _vision("densenet-layer", "models.densenet", "_DenseLayer", (8, 256, 28), (64, 512, 14), "width, 32, 4, 0.0"),
    _vision("inception-a", "models.inception", "InceptionA", (8, 192, 35), (64, 288, 35), "width, 64"),
    _text("bert-attention", "bert", "BertAttention", (8, 768, 128), (16, 1024, 512),
          "BertConfig:hidden_size=width, num_attention_heads=width // 64, attention_probs_dropout_prob=0, "
          "hidden_dropout_prob=0", call="self.block(x)[0]"),
    _text("gpt2-mlp", "gpt2", "GPT2MLP", (1, 768, 128), (8, 1024, 1024), "GPT2Config:n_embd=width, resid_pdrop=0.0",
          "4 * width, config"),
    _text("llama-attention", "llama", "LlamaAttention, LlamaRotaryEmbedding", (1, 2048, 256), (2, 4096, 1024),
          f"LlamaConfig:{_GROUPED}", "config, 0", f"{_ROTATED}[0]"),
    _text("llama-mlp", "llama", "LlamaMLP", (1, 2048, 64), (4, 4096, 512),
          "LlamaConfig:hidden_size=width, intermediate_size=7 * width // 2"),
    _text("llama-norm", "llama", "LlamaRMSNorm", (1, 4096, 512), (16, 4096, 1024), "LlamaConfig:hidden_size=width", "width"),
    _text("qwen2-layer", "qwen2", "Qwen2DecoderLayer, Qwen2RotaryEmbedding", (4, 1024, 128), (2, 1536, 1024),
          f"Qwen2Config:{_GROUPED}, intermediate_size=4 * width", "config, 0", _ROTATED),
    _text("t5-feed-forward", "t5", "T5LayerFF", (8, 512, 128), (16, 768, 512),
          "T5Config:d_model=width, d_ff=4 * width, dropout_rate=0.0"),
    _text("mistral-attention", "mistral", "MistralAttention, MistralRotaryEmbedding", (1, 2048, 128), (2, 4096, 2048),
          f"MistralConfig:{_GROUPED}, head_dim=128", "config, 0", f"{_ROTATED}[0]"),
    _text("whisper-layer", "whisper", "WhisperEncoderLayer", (1, 384, 1500), (4, 768, 1500),
          "WhisperConfig:d_model=width, encoder_attention_heads=width // 64, encoder_ffn_dim=4 * width",
          call="self.block(x, None)"),
    _text("clip-attention", "clip", "CLIPAttention", (1, 768, 50), (32, 1024, 257),
          "CLIPVisionConfig:hidden_size=width, num_attention_heads=width // 64", call="self.block(x)[0]"),
)
# fmt: on


CASTS = {"modules": "", "modules-bf16": ".bfloat16()"}
"""Text that makes a module and its inputs of each suite's type."""


def entries_from_libraries(levels: Sequence[int], suite: str = "modules") -> tuple[list[SuiteEntry], dict[str, str]]:
    """The tasks of the libraries that are installed, and by id why others are left out.

    Args:
        levels: Levels to keep; all tasks are of one.
        suite: One of `CASTS`.

    Raises:
        TaskError: neither library is installed.
    """
    libraries = {module.library for module in MODULES}
    missing = {library for library in libraries if importlib.util.find_spec(library) is None}
    if missing == libraries:
        raise TaskError(
            "Wanted modules of torchvision and transformers; neither is installed. Run pip install 'kernelwright[modules]'."
        )
    entries: list[SuiteEntry] = []
    left_out: dict[str, str] = {}
    for module in MODULES if LEVEL in levels else ():
        for name, size in (("small", module.small), ("large", module.large)):
            task_id = f"{suite}/level{LEVEL}/{module.name}-{name}"
            if module.library in missing:
                left_out[task_id] = f"{module.library} is not installed; run pip install 'kernelwright[modules]'"
                continue
            task = Task(id=task_id, source=module.source(size, CASTS[suite]), origin=f"{suite}:{module.name}-{name}")
            entries.append(SuiteEntry(task, level=LEVEL))
    return entries, left_out
