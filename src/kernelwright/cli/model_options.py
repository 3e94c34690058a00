"""Options of `optimize` and `bench` for what proposes candidates: the built-in policy or a language model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright import config
from kernelwright.cli.commands import FiniteRange, option
from kernelwright.cli.options import AT_LEAST_ONE
from kernelwright.cli.output import say
from kernelwright.contrastive.samplers import SAMPLERS
from kernelwright.errors import PolicyError, UsageError
from kernelwright.files import missing_path
from kernelwright.records.model_costs import answers_on_record, model_costs
from kernelwright.search.policies import LANGUAGE_MODELS, policy_named, require_policy

if TYPE_CHECKING:
    from kernelwright.contrastive.model_policy import ContrastivePolicy
    from kernelwright.records.policy import Policy

_FOR_MODEL = ("model", "base_url", "key_variable", "adapter")
"""Options passed to the model under the same names."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for the policies `api` and `local`; each is None where it was not given."""

    model: str | None = option(
        metavar="NAME",
        help="Language model: an endpoint's name for it; or a folder, a GGUF file, a hub name or tiny-random.",
    )
    base_url: str | None = option(metavar="URL", help="OpenAI-compatible endpoint, up to and with /v1.")
    key_variable: str | None = option(metavar="NAME", help="Environment variable with the endpoint's key.")
    adapter: Path | None = option(metavar="DIR", help="LoRA adapter of a local model.")
    model_settings: Path | None = option(
        metavar="FILE.toml", help="Any settings of the model, as in docs/models.md. The options above win over it."
    )
    sampler: str | None = option(
        type=click.Choice(list(SAMPLERS)), help="How earlier candidates are chosen for a prompt.  [default: bucket]"
    )
    exemplars: int | None = option(
        type=click.IntRange(0, 16), metavar="N", help="Earlier candidates in a prompt.  [default: 2]"
    )
    exemplar_database: Path | None = option(
        metavar="FILE", help="Where candidates are kept; several searches may share one. Default: in DIR."
    )
    temperature: float | None = option(type=FiniteRange(0, 5), metavar="X", help="Sampling temperature.  [default: 1]")
    max_tokens: int | None = option(type=AT_LEAST_ONE, metavar="N", help="Most tokens of an answer.  [default: 4096]")
    samples: int | None = option(type=AT_LEAST_ONE, metavar="N", help="Answers to one prompt.  [default: 1]")
    patience: int | None = option(
        type=AT_LEAST_ONE, metavar="N", help="Answers in a row without a new candidate after which to end.  [default: 16]"
    )

    def typed(self) -> dict[str, Any]:
        """The options that were given."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def settings(self, policy: str) -> dict[str, Any]:
        """The model's settings, checked without its packages; empty for the built-in policy.

        Raises:
            UsageError: there is no such policy, or an option does not go with it.
            PolicyError: no model was named, or there is none at its path.
        """
        require_policy(policy)
        typed = self.typed()
        if typed and policy not in LANGUAGE_MODELS:
            flag = _flag(next(iter(typed)))
            raise UsageError(f"Wanted {flag} with a language model; the policy is {policy}. Add --policy api or local.")
        for key in _FOR_MODEL:
            if key in typed and not str(typed[key]):
                raise UsageError(f"Wanted a value for {_flag(key)}; found an empty one. Give one, or leave the option out.")
        settings = config.read_toml(self.model_settings) if self.model_settings else {}
        settings |= {key: str(typed[key]) for key in _FOR_MODEL if key in typed}
        if policy == "local":
            settings |= {"path": settings.pop("model")} if "model" in settings else {}
            if not settings.get("path"):
                raise PolicyError(
                    "Wanted a language model; none was named. Give a folder, a GGUF file or a hub name as --model."
                )
            if missing := missing_path(str(settings["path"])):
                raise PolicyError(f"Wanted a model's folder or GGUF file; {missing}")
        return settings


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Proposer:
    """A policy, also as what it is where a language model proposes."""

    policy: Policy
    contrastive: ContrastivePolicy | None = None

    @contextmanager
    def accounted(self, run: Path) -> Iterator[None]:
        """Say at the end, whatever ends the search, what its model has cost; keep what was confirmed as exemplars."""
        before = len(answers_on_record(run))
        try:
            yield
            if self.contrastive is not None:
                self.contrastive.database.import_run(run)
        finally:
            answers = answers_on_record(run)
            if answers:
                latest = f" (this time {model_costs(answers[before:]).in_words})" if before else ""
                say(f"the language model: {model_costs(answers).in_words}{latest}")


def proposer(name: str, device: str, directory: Path, given: ModelOptions) -> Proposer:
    """The policy `builtin`, `api` or `local`, with the options of its language model.

    Raises:
        UsageError: an option does not go with the policy.
        PolicyError: the model cannot be reached or loaded, or a package is missing.
    """
    settings = given.settings(name)
    if name not in LANGUAGE_MODELS:
        return Proposer(policy_named(name))

    from kernelwright.contrastive.model_policy import policy_for_run
    from kernelwright.models.chat import Sampling
    from kernelwright.models.factory import chat_model

    options = {key: value for key, value in given.typed().items() if key not in ("model_settings", *_FOR_MODEL)}
    with config.in_file(given.model_settings, elsewhere="the options" if {*_FOR_MODEL} & {*given.typed()} else ""):
        model = chat_model(name, **settings)
    sampling = Sampling(**{key: options.pop(key) for key in ("temperature", "max_tokens") if key in options})
    database = options.pop("exemplar_database", None)
    policy = policy_for_run(model, directory, database=database, sampling=sampling, hardware=_hardware(device), **options)
    return Proposer(policy, policy)


def _hardware(device: str) -> str:
    """The GPU's name, for prompts; empty for a CPU, or where it cannot be asked."""
    from kernelwright.records import capture_environment

    kind, _, index = device.partition(":")
    gpus = capture_environment(device).get("gpu") or [] if kind == "cuda" else []
    number = int(index or 0)
    return str(gpus[number]["name"]) if number < len(gpus) else ""
