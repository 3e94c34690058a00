"""Tells a model's path on this machine from a name on the Hugging Face hub, so that a mistyped path asks no hub."""

from __future__ import annotations

import re
from pathlib import Path

FOLDERS = ("models", "runs")
"""First parts of names that are folders by custom; on the hub nobody is called so."""
_HUB_NAME = re.compile(r"(?:([\w][\w.-]*)/)?[\w][\w.-]*")


def missing_path(name: str) -> str | None:
    """Say what to do where `name` can only be a path and nothing is there; None for what exists and for the hub's names.

    `name` and `owner/name` are names on the hub, unless the owner is a folder here or one of `FOLDERS`.
    """
    if not name or Path(name).exists():
        return None
    named = _HUB_NAME.fullmatch(name)
    owner = named[1] if named else None
    if named and not name.endswith(".gguf") and not (owner and (owner in FOLDERS or Path(owner).is_dir())):
        return None
    return (
        f"there is nothing at {name}, and as a path it is not looked up on the hub. Check the path; docs/models.md, "
        '"Getting a model", says where models come from.'
    )
