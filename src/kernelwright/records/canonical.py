"""Spells every value in one way, so that equal records have equal hashes on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces and no NaN; `value` is anything `json` accepts.

    Raises:
        ValueError: a float is NaN or infinite. Such a number has no JSON spelling; store `None` and say why.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def sha256_of(value: Any) -> str:
    """Hex SHA-256 of text as it is, or of the canonical JSON of anything else."""
    text = value if isinstance(value, str) else canonical_json(value)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
