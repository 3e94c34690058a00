"""Policies: what proposes candidates for a task."""

from __future__ import annotations

from kernelwright.errors import ConfigError, PolicyError
from kernelwright.records.policy import Context, Policy

LANGUAGE_MODELS = ("api", "local")
"""Policies that are more than a name: which model, and where its answers are kept."""


def policy_named(name: str) -> Policy:
    """A policy by its name.

    Raises:
        PolicyError: it is a language model, and so cannot be had by its name alone.
        ConfigError: there is no policy of this name.
    """
    if name == "builtin":
        # Imported only now: the rules import torch and its exporter, which takes a second.
        from kernelwright.rewrites.builtin import BuiltinPolicy

        return BuiltinPolicy()
    if name in LANGUAGE_MODELS:
        raise PolicyError(
            f"Wanted a policy; '{name}' alone does not say which language model. Run `kernelwright optimize --policy {name} "
            "--model NAME`, or pass what kernelwright.contrastive.model_policy.policy_for_run returns."
        )
    raise ConfigError(f"Wanted a policy; found '{name}'. The policies are: builtin, {', '.join(LANGUAGE_MODELS)}.")


__all__ = ["Context", "Policy", "policy_named"]
