"""The judge: decides whether a candidate is right and faster. Its threat model is `docs/threat-model.md`."""

from __future__ import annotations

from kernelwright.judge.judge import Judge, devices_of, resolve_device
from kernelwright.judge.settings import Settings

__all__ = ["Judge", "Settings", "devices_of", "resolve_device"]
