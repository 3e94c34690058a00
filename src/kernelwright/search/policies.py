"""Looks up policies and baselines by name, and refuses unknown names before anything slow is imported."""

from __future__ import annotations

from collections.abc import Sequence

from kernelwright.errors import ConfigError, DeviceError, PolicyError, UsageError
from kernelwright.records.policy import Policy
from kernelwright.rewrites.wrappers import ALL_BASELINES

LANGUAGE_MODELS = ("api", "local")
"""Policies that need more than a name: which model, and where to keep its answers."""
_GPU_ALONE = ("cudagraph", "cudagraph-fresh", "cudnn")


def policy_named(name: str) -> Policy:
    """The policy of a name.

    Raises:
        PolicyError: it is a language model, which a name alone does not describe.
        ConfigError: there is no policy of this name.
    """
    require_policy(name)
    if name == "builtin":
        # Imported only now: the rules import torch and its exporter, which takes a second.
        from kernelwright.rewrites.builtin import BuiltinPolicy

        return BuiltinPolicy()
    raise PolicyError(
        f"Wanted a policy; '{name}' alone does not say which language model. Run `kernelwright optimize --policy {name} "
        "--model NAME`, or pass what kernelwright.contrastive.model_policy.policy_for_run returns."
    )


def require_policy(name: str) -> None:
    """Raise ConfigError where there is no policy of a name."""
    if name not in ("builtin", *LANGUAGE_MODELS):
        raise ConfigError(f"Wanted a policy; found '{name}'. The policies are: builtin, {', '.join(LANGUAGE_MODELS)}.")


def require_baselines(baselines: Sequence[str], devices: Sequence[str]) -> None:
    """Refuse baselines that there are not, and those that mean nothing on these devices.

    Raises:
        UsageError: there is no such baseline.
        DeviceError: one needs a GPU.
    """
    unknown = [name for name in baselines if name not in ALL_BASELINES]
    if unknown:
        raise UsageError(
            f"Wanted baselines from {', '.join(ALL_BASELINES)}; found {', '.join(unknown)}. Correct --baselines."
        )
    for name in _GPU_ALONE:
        if name in baselines and list(devices) == ["cpu"]:
            # Without a GPU their wrappers change nothing: eager would stand under another name.
            raise DeviceError(f"Wanted a GPU for the baseline {name}; found the CPU alone. Leave that baseline out.")
