"""Packs LoRA adapters as int8: half the size of bfloat16, so that an export or a results folder holds several of them.

Each vector of an adapter's rank (a row of A, a column of B) has one float32 scale. An arm of stage 3 is packed as its change
since stage 2, whose packed adapter is then needed to restore it. Arms differ from stage 2 by a twentieth of its norm, so
that rounding a whole adapter to int8 would change a tenth of what an arm learnt; rounding the change alone costs 1 % of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping

import torch
from safetensors.torch import load, save

from kernelwright.errors import UsageError

Weights = Mapping[str, torch.Tensor]
"""An adapter's tensors by name."""
LARGEST = 127
SCALE = ".scale"
"""Ending of the name of a tensor's scales."""
SINCE = "since"
"""Key of the metadata with the hash of the packed adapter that changes are added to."""


def packed_adapter(weights: Weights, since: bytes | None = None) -> bytes:
    """An adapter as an int8 safetensors file; `since` is stage 2's, packed, where its change is to be kept.

    An adapter of another form than stage 2's is packed whole.
    """
    base = restored_adapter(since) if since is not None else {}
    changed = {name: one.shape for name, one in base.items()} == {name: one.shape for name, one in weights.items()}
    held: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        held[name], held[name + SCALE] = _rounded(weight.float() - base[name] if changed else weight.float())
    metadata = {SINCE: hashlib.sha256(since).hexdigest()} if since is not None and changed else None
    return save(held, metadata=metadata)


def restored_adapter(packed: bytes, since: bytes | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a packed adapter in float32; `since` is stage 2's, packed, which a change is added to.

    Raises:
        UsageError: the adapter is a change since another one.
    """
    wanted = _since(packed)
    if wanted and (since is None or hashlib.sha256(since).hexdigest() != wanted):
        raise UsageError(f"Wanted the packed adapter {wanted[:12]}, since which this one changed; found another or none.")
    held = load(packed)
    base = restored_adapter(since) if wanted and since is not None else {}
    found = {}
    for name in held:
        if name + SCALE in held:
            weight = held[name].float() * held[name + SCALE]
            found[name] = base[name] + weight if wanted else weight
    return found


def error_of(found: Weights, wanted: Weights, since: Weights | None = None) -> float:
    """Norm of the difference between two adapters over that of the wanted one, or of its change since another; infinite
    where that is none."""
    difference = _norm(found[name].float() - weight.float() for name, weight in wanted.items())
    whole = _norm(weight.float() - (since[name].float() if since else 0) for name, weight in wanted.items())
    return difference / whole if whole else math.inf


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in tensors))


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers and their scales, one for each vector along the longer side."""
    along = 0 if weight.ndim == 2 and weight.shape[0] > weight.shape[1] else -1
    scale = weight.abs().amax(dim=along, keepdim=True) / LARGEST
    # A vector of zeros has the scale 0.
    whole = (weight / scale.where(scale > 0, 1)).round()
    return whole.to(torch.int8), scale


def _since(packed: bytes) -> str | None:
    """The hash of what an adapter changed since; None for a whole one."""
    size = int.from_bytes(packed[:8], "little")
    return (json.loads(packed[8 : 8 + size]).get("__metadata__") or {}).get(SINCE)
