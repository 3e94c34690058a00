"""The optional packages that training needs."""

from __future__ import annotations

import importlib.util

from kernelwright.errors import InfrastructureError

PACKAGES = ("torch", "transformers", "peft", "trl", "datasets", "accelerate")
TRL_SERIES = "1."
"""The contrastive trainer overrides a private method of TRL's GRPOTrainer, which another series may rename."""


def require_training_packages() -> None:
    """See that everything training needs is installed.

    Raises:
        InfrastructureError: something is missing, or TRL is of another series.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InfrastructureError(
            f"Wanted the packages for training; found no {', '.join(missing)}. Run pip install 'kernelwright[train]'."
        )
    from importlib.metadata import version

    found = version("trl")
    if not found.startswith(TRL_SERIES):
        raise InfrastructureError(
            f"Wanted TRL {TRL_SERIES}x; found {found}. Run pip install 'kernelwright[train]' in a fresh environment."
        )
