"""Looks up the policies that a name alone describes."""

from __future__ import annotations

from kernelwright.errors import ConfigError, PolicyError
from kernelwright.records.policy import Policy

LANGUAGE_MODELS = ("api", "local")
"""Policies that need more than a name: which model, and where to keep its answers."""


def policy_named(name: str) -> Policy:
    """The policy of a name.

    Raises:
        PolicyError: it is a language model, which a name alone does not describe.
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
