"""Loads the model that is trained: from a hub id, a folder or a GGUF file, whole or with a LoRA adapter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kernelwright.contrastive.settings import ModelSection
from kernelwright.errors import ConfigError, InfrastructureError
from kernelwright.files import go_offline_without_hub, missing_path

GPU_ATTENTION = "eager"
"""Attention while a model learns on a GPU. The memory-efficient kernel that PyTorch picks there for padded
batches can give gradients that are not numbers (pytorch/pytorch issue 178251)."""


def require_base(section: ModelSection) -> None:
    """See that there is a model to train, without loading it: what comes before that may take hours.

    Raises:
        ConfigError, PolicyError, InfrastructureError: as `load_for_training`.
    """
    require_training_packages()
    require_paths(section)
    if not Path(section.base).exists():
        go_offline_without_hub()
    from kernelwright.models.pretrained import Weights, require_pretrained

    require_pretrained(Weights(path=section.base))


def load_for_training(section: ModelSection, seed: int) -> tuple[Any, Any]:
    """The model, ready to be trained, and its tokenizer; the seed is that of a new adapter's random weights.

    Raises:
        ConfigError: a path does not exist, or an adapter was named for full tuning.
        PolicyError: it cannot be loaded.
        InfrastructureError: the packages for training are missing.
    """
    require_training_packages()
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import set_seed

    from kernelwright.models.pretrained import Weights, load_pretrained

    require_paths(section)
    set_seed(seed)
    model, tokenizer = load_pretrained(Weights(path=section.base, dtype=section.dtype))
    if model.device.type == "cuda":
        model.set_attn_implementation(GPU_ATTENTION)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if section.tuning == "lora":
        if section.adapter is not None:
            model = PeftModel.from_pretrained(model, str(section.adapter), is_trainable=True)
        else:
            targets = section.lora.targets
            model = get_peft_model(
                model,
                LoraConfig(
                    r=section.lora.rank,
                    lora_alpha=section.lora.alpha,
                    lora_dropout=section.lora.dropout,
                    target_modules=targets if isinstance(targets, str) else list(targets),
                    task_type="CAUSAL_LM",
                ),
            )
    return model, tokenizer


def require_paths(section: ModelSection) -> None:
    """Raise ConfigError for an adapter that cannot be used, and for a path without a model; a hub id is left to the hub."""
    if section.adapter is not None and section.tuning == "full":
        raise ConfigError(
            'Wanted full tuning, found an adapter to go on from; set model.tuning = "lora", or merge it first.'
        )
    if section.adapter is not None and not section.adapter.is_dir():
        raise ConfigError(f"Wanted an adapter's folder at model.adapter = {section.adapter}; there is none.")
    if missing := missing_path(section.base):
        raise ConfigError(f"Wanted a model at model.base; {missing}")


def model_name(section: ModelSection) -> str:
    """The model's name in records, such as `local:Qwen2.5-Coder-0.5B+sft`."""
    name = Path(section.base).stem if section.base.endswith(".gguf") else Path(section.base).name
    return f"local:{name}" + (f"+{section.adapter.parent.name}" if section.adapter is not None else "")


PACKAGES = ("torch", "transformers", "peft", "accelerate")


def require_training_packages() -> None:
    """See that everything training needs is installed.

    Raises:
        InfrastructureError: something is missing.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InfrastructureError(
            f"Wanted the packages for training; found no {', '.join(missing)}. Run pip install 'kernelwright[train]'."
        )
