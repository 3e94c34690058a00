"""Clocks, temperature and load of the device, recorded before and after timing. Nothing is ever set."""

from __future__ import annotations

import os
import subprocess

import torch

_FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "utilization.gpu",
    "clocks_event_reasons.active",
)


def device_state(device: torch.device) -> dict[str, str]:
    """What the driver says of the GPU, or the load average of the processor; empty where nothing can be read."""
    if device.type != "cuda":
        return {"load_average": " ".join(f"{value:.2f}" for value in os.getloadavg())}
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--id={device.index or 0}", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_FIELDS, map(str.strip, text.strip().split(",")), strict=False))
