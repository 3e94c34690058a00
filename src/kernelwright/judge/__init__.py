"""The judge: decides whether a candidate is right and faster. Its threat model is `docs/threat-model.md`.

Names are imported when first used: the process that runs machine-code schedules must start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelwright.gpu.devices import devices_of, resolve_device
    from kernelwright.judge.judge import Judge
    from kernelwright.judge.settings import Settings

__all__ = ["Judge", "Settings", "devices_of", "resolve_device"]
_PLACES = {"Judge": "kernelwright.judge.judge", "Settings": "kernelwright.judge.settings"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kernelwright.judge' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES.get(name, "kernelwright.gpu.devices")), name)
