"""Checks that the optional packages for training are installed."""

from __future__ import annotations

import importlib.util

from kernelwright.errors import InfrastructureError

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
