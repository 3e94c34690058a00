"""Policies: what proposes candidates for a task."""

from __future__ import annotations

from kernelwright.errors import ConfigError, PolicyError
from kernelwright.policies.protocol import Context, Policy

PLANNED = ("api", "local")
"""Names that the command line knows and that have no implementation in this version."""


def policy_named(name: str) -> Policy:
    """A policy by its name.

    Raises:
        PolicyError: it is a known one that this version does not have yet.
        ConfigError: there is no policy of this name.
    """
    if name == "builtin":
        # Imported only now: the rules import torch and its exporter, which takes a second.
        from kernelwright.policies.builtin import BuiltinPolicy

        return BuiltinPolicy()
    if name in PLANNED:
        raise PolicyError(
            f"Wanted the policy '{name}'; this version has no language-model policies yet. Use 'builtin'."
        )
    raise ConfigError(f"Wanted a policy; found '{name}'. The policies are: builtin.")


__all__ = ["Context", "Policy", "policy_named"]
