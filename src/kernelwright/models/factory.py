"""Opens a model from its kind and options, as a configuration file gives them."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from kernelwright.config import first_problem
from kernelwright.errors import ConfigError, PolicyError
from kernelwright.files import go_offline_without_hub, missing_path
from kernelwright.models.chat import ChatModel

KINDS = ("api", "local")


def chat_model(kind: str, **options: Any) -> ChatModel:
    """Open a model of a kind: `api` or `local`, with the options that `docs/models.md` describes.

    Raises:
        ConfigError: there is no such kind or option, or a value is out of range.
        PolicyError: a package is missing, or the model cannot be reached or loaded.
    """
    if kind not in KINDS:
        raise ConfigError(f"Wanted a kind of model; found {kind!r}. The kinds are: {', '.join(KINDS)}.")
    if kind == "api":
        api = _imported("api", "openai")
        return cast(ChatModel, api.ApiModel(*_parsed(options, api.ApiSettings)))
    if missing := missing_path(path := str(options.get("path", ""))):
        raise PolicyError(f"Wanted a model's folder or GGUF file; {missing}")
    if not Path(path).exists():
        go_offline_without_hub()
    local = _imported("local", "transformers")
    return cast(ChatModel, local.LocalModel.load(*_parsed(options, local.Weights, local.LocalSettings)))


def _imported(module: str, package: str) -> Any:
    """A module of this folder that needs an optional package."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise PolicyError(
            f"Wanted the package {package}; {error}. Install it with pip install 'kernelwright[{module}]'."
        ) from error
    return importlib.import_module(f"kernelwright.models.{module}")


def _parsed(options: dict[str, Any], *kinds: type[BaseModel]) -> list[Any]:
    """Options as settings, each option in the one that has it."""
    known = {name for kind in kinds for name in kind.model_fields}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"The options are: {', '.join(sorted(known))}."
            raise ConfigError(f"Wanted an option of the model; found {name!r}. {hint}")
    try:
        return [
            kind.model_validate({name: options[name] for name in kind.model_fields if name in options}) for kind in kinds
        ]
    except ValidationError as error:
        first = first_problem(error)
        where = ".".join(map(str, first["loc"]))
        found = "it does not exist" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"Wanted a valid value for the model's option {where!r}; {found}. Correct it.") from error
